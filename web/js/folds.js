// Which folds the reader has opened: reasoning, tool calls, attached files. A paragraph is rendered again when it grows or changes, and
// its folds stay as they are.

import { $ } from "./dom.js";
import { state } from "./state.js";

const opened = new Set();

const keyOf = (chunk, at) => `${state.name}/${chunk}/${at}`;

const foldsOf = (node) => /** @type {HTMLDetailsElement[]} */ ([...node.querySelectorAll("details.fold")]);

export function init() {
  // The event of a fold does not bubble.
  $("log").addEventListener(
    "toggle",
    (event) => {
      const fold = /** @type {HTMLDetailsElement} */ (event.target);
      const chunk = /** @type {HTMLElement | null} */ (fold.closest?.(".chunk"));
      if (!chunk) return;
      const key = keyOf(chunk.dataset.chunk, foldsOf(chunk).indexOf(fold));
      if (fold.open) opened.add(key);
      else opened.delete(key);
    },
    true,
  );
}

/** Opens the folds of a paragraph that was rendered again, as they were. */
export function restoreFolds(chunk, fragment) {
  if (opened.size === 0) return fragment;
  foldsOf(fragment).forEach((fold, at) => {
    fold.open = opened.has(keyOf(chunk, at));
  });
  return fragment;
}

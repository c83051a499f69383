// Which folds the reader has opened: reasoning, tool calls, attached files. A paragraph is rendered again when it grows or changes, and
// its folds stay as they are.

import { $ } from "./dom.js";
import { state } from "./state.js";

const opened = new Set();

const keyOf = (chunk, at) => `${state.name}/${chunk}/${at}`;

const foldsOf = (node) => /** @type {HTMLDetailsElement[]} */ ([...node.querySelectorAll("details.fold")]);

function remember(fold, isOpen) {
  const chunk = /** @type {HTMLElement | null} */ (fold.closest?.(".chunk"));
  if (!chunk) return;
  const key = keyOf(chunk.dataset.chunk, foldsOf(chunk).indexOf(fold));
  if (isOpen) opened.add(key);
  else opened.delete(key);
}

export function init() {
  // The event “toggle” comes in a later task, and the paragraph may have been rendered again by then.
  $("log").addEventListener("click", (event) => {
    const summary = /** @type {Element} */ (event.target).closest("details.fold > summary");
    if (!summary || event.defaultPrevented) return;
    const fold = /** @type {HTMLDetailsElement} */ (summary.parentElement);
    remember(fold, !fold.open);
  });
  // A search on the page opens folds without a click. This event does not bubble.
  $("log").addEventListener("toggle", ({ target }) => remember(target, /** @type {any} */ (target).open), true);
}

/** Opens the folds of a paragraph that was rendered again, as they were. */
export function restoreFolds(chunk, fragment) {
  if (opened.size === 0) return fragment;
  foldsOf(fragment).forEach((fold, at) => {
    fold.open = opened.has(keyOf(chunk, at));
  });
  return fragment;
}

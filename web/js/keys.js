// The keyboard in the transcript: one paragraph is in the tab order, the arrow keys move from paragraph to paragraph.

import * as actions from "./actions.js";
import { emit, on } from "./bus.js";
import { $ } from "./dom.js";
import { openMenu } from "./menu.js";
import { chunkItems, messageItems } from "./message.js";
import { findMessage, lastMessages } from "./reducers.js";
import { state } from "./state.js";

export function init() {
  const log = $("log");
  log.addEventListener("focusin", (event) => {
    const node = /** @type {Element} */ (event.target).closest?.(".chunk");
    if (node) setTabStop(node);
  });
  on("drawn", () => {
    if (!log.querySelector('.chunk[tabindex="0"]')) setTabStop([...log.querySelectorAll(".chunk")].at(-1));
  });
  log.addEventListener("keydown", onKey);
  log.addEventListener("click", (event) => {
    const button = /** @type {Element} */ (event.target).closest?.(".copy-code");
    if (button)
      actions.copyText(
        button.closest(".code-box").querySelector("code").textContent.replace(/\n$/, ""),
        "Code copied.",
      );
  });
}

function setTabStop(node) {
  if (!node || node.tabIndex === 0) return;
  for (const other of $("log").querySelectorAll('.chunk[tabindex="0"]')) other.tabIndex = -1;
  node.tabIndex = 0;
}

function onKey(event) {
  const node = event.target.closest(".chunk");
  if (!node || event.target !== node || event.ctrlKey || event.metaKey || event.altKey) return;
  const id = node.dataset.chunk;
  const live = state.chunks.get(id);
  const message = findMessage(state, Number(node.closest(".turn").dataset.turn));
  if (!message) return;
  const all = [...$("log").querySelectorAll(".chunk")];
  const step = (by) => all[all.indexOf(node) + by]?.focus();
  const text = message.chunks.find((chunk) => chunk.id === id)?.text ?? "";
  const edit = (name) => actions.editChunks(name, [id], text);
  const isLast = lastMessages(state, 1)[0]?.turn === message.turn;
  const menu = () => {
    const items = message.chunks.length > 1 ? chunkItems(id) : messageItems(message, isLast && !state.running);
    openMenu(node, items, "Paragraph");
  };
  const command = {
    p: () => live && edit(live.pinned ? "unpin" : "pin"),
    m: () => live && edit("merge"),
    x: () => edit(live ? "prune" : "resurrect"),
    Delete: () => edit("delete"),
    Enter: () => actions.showDetails(id),
    c: () => actions.copyText(text),
    e: () => message.role === "user" && emit("edit", message),
    b: () => actions.branch(message.turn),
    r: () => isLast && actions.regenerate(),
    ".": menu,
    ContextMenu: menu,
    j: () => step(1),
    ArrowDown: () => step(1),
    k: () => step(-1),
    ArrowUp: () => step(-1),
    Escape: () => $("message").focus(),
  }[event.key];
  if (!command) return;
  event.preventDefault();
  command();
}

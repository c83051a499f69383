// A menu at a button. One is open at a time; arrow keys move in it, Escape closes it and returns the focus.

import { $, el } from "./dom.js";

/** @typedef {{ label: string, key?: string, danger?: boolean, run: () => any }} MenuItem */

let open = null; // the open menu: its element and the element that gets the focus back

export function closeMenu(focus = true) {
  if (!open) return;
  const { node, anchor } = open;
  open = null;
  node.remove();
  anchor.setAttribute("aria-expanded", "false");
  if (focus && anchor.isConnected) anchor.focus();
}

/**
 * Opens a menu. An item without a label is a line.
 * @param {HTMLElement} anchor
 * @param {(MenuItem | null | false)[]} items
 */
export function openMenu(anchor, items, label = "Menu") {
  const again = open?.anchor === anchor;
  closeMenu(again);
  if (again) return;
  const node = el(
    "div",
    { class: "menu", role: "menu", "aria-label": label },
    .../** @type {MenuItem[]} */ (items.filter(Boolean)).map((item) =>
      el(
        "button",
        {
          type: "button",
          role: "menuitem",
          tabindex: "-1",
          class: item.danger ? "danger" : "",
          onclick: () => {
            closeMenu();
            item.run();
          },
        },
        item.label,
        item.key ? [" ", el("kbd", {}, item.key)] : null,
      ),
    ),
  );
  $("main").append(node);
  const box = anchor.getBoundingClientRect();
  const { offsetWidth, offsetHeight } = node;
  const below = box.bottom + offsetHeight + 8 < innerHeight;
  node.style.left = `${Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
  node.style.top = `${Math.max(8, below ? box.bottom + 4 : box.top - offsetHeight - 4)}px`;
  anchor.setAttribute("aria-expanded", "true");
  open = { node, anchor };
  node.querySelector("button")?.focus();
}

export function init() {
  document.addEventListener("pointerdown", (event) => {
    if (open && !open.node.contains(/** @type {Node} */ (event.target)) && !open.anchor.contains(event.target))
      closeMenu(false);
  });
  document.addEventListener(
    "keydown",
    (event) => {
      if (!open) return;
      const items = [...open.node.querySelectorAll("button")];
      const at = items.indexOf(/** @type {HTMLButtonElement} */ (document.activeElement));
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
      if (to !== undefined) items[(to + items.length) % items.length].focus();
      else if (event.key === "Escape" || event.key === "Tab") closeMenu();
      else return;
      event.preventDefault();
      event.stopPropagation();
    },
    true,
  );
}

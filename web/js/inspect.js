// The inspector beside the chat: one view at a time. The views of the chat are tabs; settings and help have buttons of their own.
// Opening a view is a step of the browser's history, so that “back” closes it, also on a phone.

import { on } from "./bus.js";
import { captures } from "./captures.js";
import { chunkDetails } from "./details.js";
import { $, el, number } from "./dom.js";
import { graveyard } from "./graveyard.js";
import { help } from "./help.js";
import { memories } from "./memories.js";
import { notes } from "./notes.js";
import { contextAtTurn } from "./past.js";
import { search } from "./search.js";
import { settings } from "./settings.js";
import { state } from "./state.js";
import { stats } from "./stats.js";

/** @type {Record<string, { title: string, tab?: string, build: (box: HTMLElement, options: any) => any }>} */
const VIEWS = {
  graveyard: { title: "Out of context", tab: "Out of context", build: graveyard },
  search: { title: "Search in this chat", tab: "Search", build: search },
  stats: { title: "Statistics", tab: "Statistics", build: stats },
  past: { title: "What the model saw then", tab: "Time travel", build: contextAtTurn },
  notes: { title: "The model's notes", tab: "Notes", build: notes },
  captures: { title: "Attention recordings", tab: "Recordings", build: captures },
  memories: { title: "Memories", tab: "Memories", build: memories },
  settings: { title: "Settings", build: settings },
  help: { title: "Help", build: help },
  chunk: { title: "Paragraph", build: chunkDetails },
};

let open = null; // the open view: its name, its options and its event handlers
let opener = null; // the element that gets the focus back

export function init() {
  on("panel", (target) => (typeof target === "string" ? show(target) : show(target.panel, target)));
  on("event", (event) => {
    open?.handlers?.event?.(event);
    drawCount();
  });
  on("state", () => {
    open?.handlers?.state?.();
    drawCount();
  });
  on("settings", () => open?.handlers?.settings?.());
  on("conversation", () => {
    if (open) draw(open.name === "chunk" ? "graveyard" : open.name);
  });
  $("inspect").addEventListener("click", () => (open && VIEWS[open.name].tab ? close() : show(lastTab())));
  for (const button of document.querySelectorAll("#sidebar [data-panel]"))
    button.addEventListener("click", () => {
      const name = /** @type {HTMLElement} */ (button).dataset.panel;
      if (open?.name === name) close();
      else show(name);
    });
  addEventListener("popstate", (event) => {
    if (event.state?.panel) draw(event.state.panel, event.state.options ?? {}, true);
    else hide();
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey && /^[0-9]$/.test(event.key)) {
      event.preventDefault();
      show(Object.keys(VIEWS)[(Number(event.key) + 9) % 10]);
    }
    if (event.key === "Escape" && open && $("panel").contains(document.activeElement)) close();
  });
}

const lastTab = () => localStorage.getItem("tab") ?? "graveyard";

function show(name, options = {}) {
  if (!VIEWS[name]) return;
  if (!open) opener = document.activeElement;
  const entry = { panel: name, options: { ...options, panel: undefined } };
  history.pushState(entry, "");
  draw(name, options, true);
}

/** Closes the inspector as “back” does. */
function close() {
  if (history.state?.panel) history.replaceState(null, "");
  hide();
}

function hide() {
  if (!open) return;
  open = null;
  $("panel").hidden = true;
  $("panel").replaceChildren();
  markButtons();
  if (opener?.isConnected && opener !== document.body) opener.focus();
  else $("message").focus();
}

function markButtons() {
  $("inspect").setAttribute("aria-pressed", String(!!open && !!VIEWS[open.name].tab));
  for (const button of document.querySelectorAll("#sidebar [data-panel]"))
    button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.panel === open?.name));
}

function draw(name, options = {}, focus = false) {
  const { title, tab, build } = VIEWS[name];
  if (tab) localStorage.setItem("tab", name);
  const closeButton = el("button", { type: "button", "aria-label": "Close the panel", onclick: close }, "×");
  const body = el("div", { id: "panel-body" });
  const inTabs = tab || name === "chunk";
  $("panel").replaceChildren(
    el("header", {}, el("div", {}, el("h2", {}, title), closeButton), inTabs ? tabs(name) : null),
    body,
  );
  // It scrolls, so the keyboard must reach it.
  body.tabIndex = 0;
  if (tab) {
    body.setAttribute("role", "tabpanel");
  } else body.setAttribute("role", "group");
  body.setAttribute("aria-label", title);
  $("panel").hidden = false;
  open = { name, options };
  open.handlers = build(body, options) ?? {};
  markButtons();
  drawCount();
  if (focus) (body.querySelector("input, select") ?? closeButton).focus();
}

function tabs(current) {
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name].tab);
  const list = el(
    "div",
    { role: "tablist", "aria-label": "Views of the chat" },
    ...names.map((name) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          "aria-selected": String(name === current),
          tabindex: name === current || (current === "chunk" && name === "graveyard") ? "0" : "-1",
          data: { panel: name },
          onclick: () => show(name),
        },
        VIEWS[name].tab,
        name === "graveyard" ? el("span", { id: "pruned-count" }) : null,
      ),
    ),
  );
  list.addEventListener("keydown", (event) => {
    const at = names.indexOf(/** @type {HTMLElement} */ (document.activeElement).dataset.panel);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(names[(to + names.length) % names.length]);
    $("panel").querySelector('[aria-selected="true"]').focus();
  });
  return list;
}

function drawCount() {
  const label = $("pruned-count");
  if (label) label.textContent = ` (${number(state.snapshot?.pruned ?? 0)})`;
}

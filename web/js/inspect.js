// The inspector beside the chat: one view at a time. The views of the chat are tabs; settings and help have buttons of their own.
// Opening a view is a step of the browser's history, so that “back” closes it, also on a phone.

import { on } from "./bus.js";
import { $, el, number } from "./dom.js";
import { state } from "./state.js";

// A view is loaded when it is opened first.
/** @type {Record<string, { title: string, tab?: string, load: () => Promise<(box: HTMLElement, options: any) => any> }>} */
const VIEWS = {
  graveyard: {
    title: "Out of context",
    tab: "Out of context",
    load: async () => (await import("./graveyard.js")).graveyard,
  },
  search: { title: "Search in this chat", tab: "Search", load: async () => (await import("./search.js")).search },
  stats: { title: "Statistics", tab: "Statistics", load: async () => (await import("./stats.js")).stats },
  past: {
    title: "What the model saw then",
    tab: "Time travel",
    load: async () => (await import("./past.js")).contextAtTurn,
  },
  notes: { title: "The model's notes", tab: "Notes", load: async () => (await import("./notes.js")).notes },
  captures: {
    title: "Attention recordings",
    tab: "Recordings",
    load: async () => (await import("./captures.js")).captures,
  },
  memories: { title: "Memories", tab: "Memories", load: async () => (await import("./memories.js")).memories },
  settings: { title: "Settings", load: async () => (await import("./settings.js")).settings },
  help: { title: "Help", load: async () => (await import("./help.js")).help },
  chunk: { title: "Paragraph", load: async () => (await import("./details.js")).chunkDetails },
  models: { title: "Model", load: async () => (await import("./models.js")).models },
  options: { title: "This chat", load: async () => (await import("./chat_options.js")).chatOptions },
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
    if (open?.isWaiting) draw(open.name, open.options, open.focus);
    else open?.handlers?.state?.();
    drawCount();
  });
  on("download", (event) => open?.handlers?.download?.(event));
  on("settings", () => open?.handlers?.settings?.());
  // The panel covers the chat on small screens, so it makes room for what is to be shown there.
  on("jump", () => {
    if (covers.matches) close(false);
  });
  on("conversation", () => {
    if (!open) return;
    draw(open.name === "chunk" ? "graveyard" : open.name, {}, open.isWaiting && open.focus);
    // The view stays open beside the next chat, and is a part of this step.
    history.replaceState(stepOf(open), "");
  });
  $("inspect").addEventListener("click", () => (open && VIEWS[open.name].tab ? close() : show(lastTab())));
  for (const button of document.querySelectorAll("#sidebar [data-panel], #model, #chat-options"))
    button.addEventListener("click", () => {
      const name = /** @type {HTMLElement} */ (button).dataset.panel;
      if (open?.name === name) close();
      else show(name);
    });
  addEventListener("popstate", (event) => {
    if (event.state?.panel) draw(event.state.panel, event.state.options ?? {}, true);
    // A link that was just followed is a step without a state: the view stays open.
    else if (event.state !== null) hide();
  });
  // A page that is loaded again has no view open.
  if (history.state?.panel) history.replaceState({}, "");
  document.addEventListener("keydown", (event) => {
    if (event.altKey && /^[0-9]$/.test(event.key)) {
      event.preventDefault();
      show(Object.keys(VIEWS)[(Number(event.key) + 9) % 10]);
    }
    const writes = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select, dialog");
    if (event.key === "?" && !writes && !event.ctrlKey && !event.metaKey) show("help");
    if (event.key === "Escape" && open && $("panel").contains(document.activeElement)) close();
  });
}

const covers = matchMedia("(max-width: 900px)");

const lastTab = () => localStorage.getItem("tab") ?? "graveyard";

const stepOf = ({ name, options }) => ({ panel: name, options: { ...options, panel: undefined } });

function show(name, options = {}) {
  if (!VIEWS[name]) return;
  if (!open) opener = document.activeElement;
  history.pushState(stepOf({ name, options }), "");
  draw(name, options, true);
}

/** Closes the inspector as “back” does. */
function close(focus = true) {
  if (history.state?.panel) history.replaceState({}, "");
  hide(focus);
}

function hide(focus = true) {
  if (!open) return;
  open = null;
  $("panel").hidden = true;
  $("panel").replaceChildren();
  markButtons();
  if (!focus) return;
  if (opener?.isConnected && opener !== document.body) opener.focus();
  else $("message").focus();
}

function markButtons() {
  $("inspect").setAttribute("aria-pressed", String(!!open && !!VIEWS[open.name].tab));
  for (const button of document.querySelectorAll("#sidebar [data-panel], #model, #chat-options"))
    button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.panel === open?.name));
}

function draw(name, options = {}, focus = false) {
  const { title, tab, load } = VIEWS[name];
  if (tab) localStorage.setItem("tab", name);
  const closeButton = el("button", { type: "button", "aria-label": "Close the panel", onclick: () => close() }, "×");
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
  const view = { name, options, focus, handlers: {}, isWaiting: false };
  open = view;
  markButtons();
  drawCount();
  if (focus) closeButton.focus();
  load().then(
    async (build) => {
      if (open !== view) return;
      // The page was opened a moment ago, and which chat it shows is not known yet.
      if (!state.name) {
        view.isWaiting = true;
        return;
      }
      // The server has nothing of a chat that is not stored: its views would be errors.
      if (inTabs && (!state.snapshot || state.snapshot.fresh)) {
        view.isWaiting = true;
        if (state.snapshot) body.append(el("p", { class: "quiet" }, "Nothing has been said in this chat yet."));
        return;
      }
      view.handlers = (await build(body, options)) ?? {};
      const first = /** @type {HTMLElement | null} */ (body.querySelector("input, select, textarea"));
      if (focus && document.activeElement === closeButton) first?.focus();
    },
    () => body.append(el("p", { class: "error" }, "This view cannot be loaded: the server is unreachable.")),
  );
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

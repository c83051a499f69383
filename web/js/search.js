// The view “Search”: words or meaning, in and out of context.

import { editChunks, showDetails, speakerOf } from "./actions.js";
import { api } from "./api.js";
import { emit } from "./bus.js";
import { el } from "./dom.js";
import { marked } from "./sidebar.js";
import { state } from "./state.js";

let last = { name: null, q: "" }; // the query is kept when another view was open in between

export function search(panel) {
  const list = el("div", { role: "status" });
  const box = el("input", { id: "search-q", type: "search", placeholder: "words or meaning" });
  if (last.name === state.name) box.value = last.q;
  const run = async () => {
    const q = box.value;
    last = { name: state.name, q };
    if (!q.trim()) {
      list.replaceChildren();
      return;
    }
    try {
      const found = await api.search(state.name, q);
      if (last.q !== q) return;
      const relevant = found.filter((hit) => !hit.below_floor);
      const rows = relevant.length ? relevant : found;
      list.replaceChildren(...rows.map((hit) => row(hit, q)));
      if (!rows.length) list.replaceChildren(el("p", { class: "quiet" }, "No matches."));
    } catch (error) {
      list.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  panel.append(
    el(
      "form",
      {
        class: "bar",
        onsubmit: (event) => {
          event.preventDefault();
          run();
        },
      },
      el("label", { class: "hidden", for: "search-q" }, "Search for"),
      box,
      el("button", { type: "submit", class: "outlined" }, "Find"),
    ),
    list,
  );
  if (box.value) run();
}

function row({ chunk, reason }, q) {
  return el(
    "div",
    { class: "row" },
    el(
      "p",
      { class: "quiet" },
      `message ${chunk.turn + 1}, ${speakerOf(chunk)} · ${chunk.live ? "in the context" : "out of context"}`,
    ),
    el("p", { class: "text", tabindex: "0", title: reason }, ...marked(chunk.text.trim(), q)),
    el(
      "div",
      { class: "bar" },
      el(
        "button",
        { type: "button", onclick: () => emit("jump", { turn: chunk.turn, chunk: chunk.id }) },
        "Show in the chat",
      ),
      chunk.live
        ? null
        : el(
            "button",
            { type: "button", onclick: () => editChunks("resurrect", [chunk.id], chunk.text) },
            "Bring back",
          ),
      el("button", { type: "button", onclick: () => showDetails(chunk.id) }, "Why"),
    ),
  );
}

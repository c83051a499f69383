// Pruned paragraphs, searched and sorted, to be brought back; and deleted ones, to be restored.

import { api } from "./api.js";
import { signal } from "./chat.js";
import { count, el, number } from "./dom.js";
import { look, place } from "./shade.js";
import { state } from "./state.js";

const wanted = { q: "", sort: "newest" };
const PAGE = 50;

export function graveyard(panel) {
  const list = el("div", {});
  const gone = el("section", { "aria-label": "Deleted" });
  const about = el("p", { class: "quiet", role: "status" });
  let asked = 0;
  const load = async (from = 0) => {
    const mine = ++asked;
    try {
      const found = await api.graveyard(state.name, { ...wanted, from, most: PAGE });
      if (mine !== asked) return;
      if (from === 0) list.replaceChildren();
      list.querySelector(".more")?.remove();
      about.textContent =
        found.of === 0
          ? wanted.q
            ? "Nothing that has left fits that."
            : "Nothing has left the window yet."
          : `${count(found.of, "paragraph")}${wanted.q ? ", what fits best first" : ""}. A click calls one back to its own place and pins it; what it belongs to comes with it.`;
      const peaks = found.chunks.map((chunk) => chunk.peak);
      const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
      list.append(...found.chunks.map((chunk) => row(chunk, place(chunk.peak, least, most))));
      if (from + PAGE < found.of) {
        list.append(el("button", { class: "more", type: "button", onclick: () => load(from + PAGE) }, "More"));
      }
    } catch (error) {
      about.textContent = error.message;
    }
  };
  let typing = null;
  panel.append(
    el(
      "div",
      { class: "bar" },
      el("label", { class: "hidden", for: "dead-q" }, "Search what has left"),
      el("input", {
        id: "dead-q",
        type: "search",
        placeholder: "words, or what is meant",
        value: wanted.q,
        oninput: (event) => {
          wanted.q = event.target.value;
          clearTimeout(typing);
          typing = setTimeout(load, 250);
        },
      }),
      el("label", { class: "hidden", for: "dead-sort" }, "Order"),
      el(
        "select",
        {
          id: "dead-sort",
          onchange: (event) => {
            wanted.sort = event.target.value;
            load();
          },
        },
        ...["newest", "oldest", "brightest", "dimmest", "longest"].map((sort) =>
          el("option", { value: sort, selected: sort === wanted.sort }, sort),
        ),
      ),
    ),
    about,
    list,
    gone,
  );
  load();
  deleted(gone);
  const both = () => {
    load();
    deleted(gone);
  };
  return {
    event: (event) => {
      if (["done", "changed", "returned"].includes(event.type)) both();
    },
    state: both,
  };
}

// What was deleted, by hand or because another version stands in its place: it stays here until it is forgotten on purpose.
async function deleted(box, from = 0) {
  const { name } = state;
  let found;
  try {
    found = await api.deleted(name, { from, most: PAGE });
  } catch {
    return;
  }
  if (name !== state.name) return;
  const rows = found.chunks.map((chunk) =>
    el(
      "div",
      { class: "row", data: { deleted: chunk.chunk } },
      el("p", { class: "quiet" }, `turn ${chunk.turn}, ${chunk.role} · ${chunk.why ?? "deleted"}`),
      el("p", { class: "text", tabindex: "0" }, chunk.text.trim()),
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => signal("restore", [chunk.chunk]) }, "Restore"),
      ),
    ),
  );
  if (from === 0) box.replaceChildren(...(found.of ? [el("h3", {}, `Deleted (${number(found.of)})`)] : []));
  box.querySelector(".more")?.remove();
  box.append(...rows);
  if (from + PAGE < found.of)
    box.append(el("button", { class: "more", type: "button", onclick: () => deleted(box, from + PAGE) }, "More"));
}

function row(chunk, light) {
  const node = el(
    "div",
    { class: "row", data: { chunk: chunk.chunk } },
    el(
      "p",
      { class: "quiet" },
      `turn ${chunk.turn}, ${chunk.role}, paragraph ${chunk.sentence} · ${count(chunk.tokens, "token")} · peak ${number(chunk.peak)}`,
    ),
    el("p", { class: "text", tabindex: "0" }, chunk.text.trim()),
    chunk.why ? el("p", { class: "quiet" }, `left: ${chunk.why}`) : null,
    el(
      "div",
      { class: "bar" },
      el("button", { type: "button", onclick: () => signal("resurrect", [chunk.chunk]) }, "Call back"),
      el("button", { type: "button", onclick: () => signal("delete", [chunk.chunk]) }, "Delete"),
    ),
  );
  node.style.borderLeft = `3px solid ${look(light).bar}`;
  node.style.paddingLeft = ".6rem";
  return node;
}

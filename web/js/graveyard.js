// The panel “Out of context”: pruned paragraphs, which can be brought back, and deleted ones, which can be restored.

import { editChunks, showDetails, speakerOf } from "./actions.js";
import { api } from "./api.js";
import { emit } from "./bus.js";
import { ask, count, el, number, time, toast } from "./dom.js";
import { explainHistory } from "./reasons.js";
import { normalize, shadeStyle } from "./shade.js";
import { state } from "./state.js";

const options = { q: "", sort: "newest" };
const PAGE = 50;

export function graveyard(panel) {
  const list = el("div", {});
  const deletedList = el("section", { "aria-label": "Deleted" });
  const pendingList = el("section", { "aria-label": "To be forgotten" });
  const about = el("p", { class: "quiet", role: "status" });
  let requests = 0;
  const load = async (offset = 0) => {
    const request = ++requests;
    try {
      const found = await api.graveyard(state.name, { ...options, offset, limit: PAGE });
      if (request !== requests) return;
      if (offset === 0) list.replaceChildren();
      list.querySelector(".more")?.remove();
      about.textContent =
        found.total === 0
          ? options.q
            ? "No paragraph out of context matches."
            : "All paragraphs are in the context."
          : `${count(found.total, "paragraph")}${options.q ? ", best match first" : ""}. “Bring back” puts one at its own position in the context and pins it; the paragraphs it depends on are brought back with it.`;
      const peaks = found.chunks.map((chunk) => chunk.peak);
      const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
      list.append(...found.chunks.map((chunk) => prunedRow(chunk, normalize(chunk.peak, least, most))));
      if (offset + PAGE < found.total) {
        list.append(el("button", { class: "more", type: "button", onclick: () => load(offset + PAGE) }, "More"));
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
      el("label", { class: "hidden", for: "graveyard-q" }, "Search paragraphs out of context"),
      el("input", {
        id: "graveyard-q",
        type: "search",
        placeholder: "words or meaning",
        value: options.q,
        oninput: (event) => {
          options.q = event.target.value;
          clearTimeout(typing);
          typing = setTimeout(load, 250);
        },
      }),
      el("label", { class: "hidden", for: "graveyard-sort" }, "Order"),
      el(
        "select",
        {
          id: "graveyard-sort",
          onchange: (event) => {
            options.sort = event.target.value;
            load();
          },
        },
        ...["newest", "oldest", "brightest", "dimmest", "longest"].map((sort) =>
          el("option", { value: sort, selected: sort === options.sort }, sort),
        ),
      ),
    ),
    about,
    list,
    deletedList,
    pendingList,
  );
  const loadBoth = () => {
    load();
    loadDeleted(deletedList);
    loadPending(pendingList);
  };
  loadBoth();
  return {
    event: (event) => {
      if (["done", "changed", "resurrected"].includes(event.type)) loadBoth();
    },
    state: loadBoth,
  };
}

// Deleted paragraphs, and variants that are not the current one. They are listed until they are forgotten for good.
async function loadDeleted(box, offset = 0) {
  const { name } = state;
  let found;
  try {
    found = await api.deleted(name, { offset, limit: PAGE });
  } catch {
    return;
  }
  if (name !== state.name) return;
  const rows = found.chunks.map((chunk) =>
    el(
      "div",
      { class: "row", data: { deleted: chunk.id } },
      el("p", { class: "quiet" }, `message ${chunk.turn + 1}, ${speakerOf(chunk)} · ${chunk.reason ?? "deleted"}`),
      el("p", { class: "text", tabindex: "0" }, chunk.text.trim()),
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => editChunks("undelete", [chunk.id], chunk.text) }, "Restore"),
        el(
          "button",
          { type: "button", class: "danger", onclick: () => forget(chunk, () => loadDeleted(box)) },
          "Forget for good…",
        ),
      ),
    ),
  );
  if (offset === 0) box.replaceChildren(...(found.total ? [el("h3", {}, `Deleted (${number(found.total)})`)] : []));
  box.querySelector(".more")?.remove();
  box.append(...rows);
  if (offset + PAGE < found.total)
    box.append(el("button", { class: "more", type: "button", onclick: () => loadDeleted(box, offset + PAGE) }, "More"));
}

// Erases a deleted paragraph after the days in which that can be undone.
async function forget(chunk, done) {
  const sure = await ask("Forget this paragraph for good?", {
    confirm: "Forget for good",
    about:
      "It is erased from the disk, with the memories and notes that contain it, after a few days. Until then it is listed " +
      "under “To be forgotten” and can be kept.",
  });
  if (!sure) return;
  try {
    const { due, warnings } = await api.forget(state.name, { chunks: [chunk.id] });
    const when = due ? `It is erased on ${time(due)}.` : "It is erased.";
    toast([when, ...warnings].join(" "), { stay: warnings.length ? null : undefined });
    done();
  } catch (error) {
    toast(error.message, { error: true });
  }
}

// What is hidden and waits for its erasure.
async function loadPending(box) {
  const { name } = state;
  const pending = state.snapshot?.fresh ? [] : await api.pendingForgets(name).catch(() => []);
  if (name !== state.name) return;
  const keep = (entry) =>
    api.cancelForget(name, { chunks: entry.chunks }).then(
      () => {
        toast("It is kept.");
        loadPending(box);
      },
      (error) => toast(error.message, { error: true }),
    );
  box.replaceChildren(
    ...(pending.length ? [el("h3", {}, `To be forgotten (${number(pending.length)})`)] : []),
    ...pending.map((entry) =>
      el(
        "div",
        { class: "row", data: { pending: entry.chunks.join(" ") } },
        el("p", {}, `${count(entry.chunks.length, "paragraph")}, erased on ${time(entry.due)}`),
        el("div", { class: "bar" }, el("button", { type: "button", onclick: () => keep(entry) }, "Keep after all")),
      ),
    ),
  );
}

function prunedRow(chunk, brightness) {
  const node = el(
    "div",
    { class: "row", data: { chunk: chunk.id } },
    el(
      "p",
      { class: "quiet" },
      `message ${chunk.turn + 1}, ${speakerOf(chunk)}, paragraph ${chunk.index + 1} · ${count(chunk.tokens, "token")}`,
    ),
    el("p", { class: "text", tabindex: "0" }, chunk.text.trim()),
    chunk.reason
      ? el(
          "p",
          { class: "quiet", title: chunk.reason },
          explainHistory({ action: "pruned", reason_kind: chunk.reason_kind, reason: chunk.reason }),
        )
      : null,
    el(
      "div",
      { class: "bar" },
      el("button", { type: "button", onclick: () => editChunks("resurrect", [chunk.id], chunk.text) }, "Bring back"),
      el(
        "button",
        { type: "button", onclick: () => emit("jump", { turn: chunk.turn, chunk: chunk.id }) },
        "Show in the chat",
      ),
      el("button", { type: "button", onclick: () => showDetails(chunk.id) }, "Why"),
      el("button", { type: "button", onclick: () => editChunks("delete", [chunk.id], chunk.text) }, "Delete"),
    ),
  );
  node.style.borderLeft = `3px solid ${shadeStyle(brightness).bar}`;
  node.style.paddingLeft = ".6rem";
  return node;
}

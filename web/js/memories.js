// Memories: what the model keeps, in its own words, of what has left the window; and the user's hand on them.

import { api } from "./api.js";
import { el, time, toast } from "./dom.js";
import { state } from "./state.js";

export function memories(panel) {
  const about = el("p", { class: "quiet", role: "status" });
  const list = el("div", {});
  const box = el("input", {
    id: "memory-q",
    type: "search",
    placeholder: "Find a memory",
    "aria-label": "Find a memory",
    oninput: () => load(),
  });
  let asked = 0;
  const load = async () => {
    const mine = (asked += 1);
    try {
      const known = await api.memories(state.name, box.value.trim());
      if (mine !== asked) return;
      about.textContent = known.memories.length
        ? "A memory stands where its part of the conversation was, once that has left; when any of it comes back, the memory steps aside."
        : box.value.trim()
          ? "Nothing that is remembered has to do with it."
          : known.enabled
            ? "Nothing is remembered yet: that takes a few hundred words."
            : "Memories are turned off. The setting memory.enabled turns them on; they are worth it with a model that can write well.";
      // What is being written is not taken away.
      if (!list.querySelector("textarea")) list.replaceChildren(...known.memories.map(row));
    } catch (error) {
      about.textContent = error.message;
      list.replaceChildren();
    }
  };
  const doing = async (what) => {
    try {
      await what;
    } catch (error) {
      toast(error.message, { wrong: true });
    }
    load();
  };
  const row = (memory) => {
    const marks = [
      memory.stands && "stands in the window",
      memory.reflection && "looks back",
      memory.pinned && "📌 pinned",
      memory.resting && "resting",
      memory.edited && "edited",
    ].filter(Boolean);
    const button = (label, act) =>
      el("button", { type: "button", "aria-label": `${label}: memory ${memory.id}`, onclick: act }, label);
    const change = (values) => () => doing(api.changeMemory(state.name, memory.id, values));
    const text = el("p", { class: "said" }, memory.text);
    const node = el(
      "div",
      { class: "row", data: { memory: memory.id } },
      el(
        "p",
        { class: "quiet" },
        [`turns ${memory.from} to ${memory.to}`, time(memory.at), memory.model, ...marks].join(" · "),
      ),
      text,
      memory.conflicts.length ? el("p", { class: "wrong" }, `contradicts memory ${memory.conflicts.join(", ")}`) : null,
      el(
        "div",
        { class: "bar" },
        button("Edit", () => edit(memory, node, text)),
        button(memory.pinned ? "Unpin" : "Pin", change({ pinned: !memory.pinned })),
        button(memory.resting ? "Use" : "Rest", change({ resting: !memory.resting })),
        button("Delete", () => {
          if (confirm("Delete this memory? What it is of stays.")) doing(api.deleteMemory(state.name, memory.id));
        }),
      ),
    );
    return node;
  };
  const edit = (memory, node, text) => {
    const written = el("textarea", { rows: "6", "aria-label": `What memory ${memory.id} says` });
    written.value = memory.text;
    const done = (save) => async () => {
      try {
        if (save) await api.changeMemory(state.name, memory.id, { text: written.value });
        written.remove();
        load();
      } catch (error) {
        toast(error.message, { wrong: true });
      }
    };
    const bar = el(
      "div",
      { class: "bar" },
      el("button", { type: "button", onclick: done(true) }, "Save"),
      el("button", { type: "button", onclick: done(false) }, "Leave it"),
    );
    text.replaceWith(written);
    node.querySelector(".bar").replaceWith(bar);
    written.focus();
  };
  panel.append(el("div", { class: "bar" }, box), about, list);
  load();
  return {
    event: (event) => {
      if (["memory", "done", "changed"].includes(event.type)) load();
    },
  };
}

// The panel “Memories”: the model's summaries of parts of the chat that are out of context.

import { freeName } from "./actions.js";
import { api } from "./api.js";
import { emit } from "./bus.js";
import { ask, el, time, toast } from "./dom.js";
import { openConversation, state } from "./state.js";

export function memories(panel) {
  const about = el("p", { class: "quiet", role: "status" });
  const list = el("div", {});
  const asked = el("div", {});
  const box = el("input", {
    id: "memory-q",
    type: "search",
    placeholder: "Find a memory",
    "aria-label": "Find a memory",
    oninput: () => load(),
  });
  let requests = 0;
  const load = async () => {
    const request = (requests += 1);
    try {
      const found = await api.memories(state.name, box.value.trim());
      if (request !== requests) return;
      about.textContent = found.memories.length
        ? "A memory is placed in the context where its part of the chat was, once that part has been removed. It is hidden when any of that part is brought back."
        : box.value.trim()
          ? "No memory matches."
          : found.enabled
            ? "No memory yet. The first one is formed after a few hundred words."
            : "Memories are off. Turn them on with the setting memory.enabled; they need a model that writes good summaries.";
      // A memory that is being edited is not replaced.
      if (!list.querySelector("textarea")) list.replaceChildren(...found.memories.map(row));
      const open = found.memories.some((memory) => memory.conflicts.length);
      const conflicts = open ? await api.memoryConflicts(state.name) : [];
      if (request === requests) asked.replaceChildren(...conflicts.map(conflict));
    } catch (error) {
      about.textContent = error.message;
      list.replaceChildren();
    }
  };
  const run = async (request) => {
    try {
      await request;
    } catch (error) {
      toast(error.message, { error: true });
    }
    load();
  };
  const row = (memory) => {
    const marks = [
      memory.placed && "in the context",
      memory.reflection && "reflection",
      memory.pinned && "📌 pinned",
      memory.disabled && "off",
      memory.edited && "edited",
    ].filter(Boolean);
    const button = (label, onClick) =>
      el("button", { type: "button", "aria-label": `${label}: memory ${memory.id}`, onclick: onClick }, label);
    const update = (values) => () => run(api.updateMemory(state.name, memory.id, values));
    const text = el("p", { class: "message-text" }, memory.text);
    const node = el(
      "div",
      { class: "row", data: { memory: memory.id } },
      el(
        "p",
        { class: "quiet" },
        [
          memory.carried ? "from another chat" : `turns ${memory.first_turn} to ${memory.last_turn}`,
          time(memory.at),
          memory.model,
          ...marks,
        ].join(" · "),
      ),
      text,
      memory.conflicts.length ? el("p", { class: "error" }, `contradicts memory ${memory.conflicts.join(", ")}`) : null,
      el(
        "div",
        { class: "bar" },
        button("Edit", () => edit(memory, node, text)),
        button("Where from", () => showOrigins(memory, node)),
        button(memory.pinned ? "Unpin" : "Pin", update({ pinned: !memory.pinned })),
        button(memory.disabled ? "On" : "Off", update({ disabled: !memory.disabled })),
        button("Carry", () => run(carry(memory))),
        button("Delete", () => {
          if (confirm("Delete this memory? The messages that it summarizes stay."))
            run(api.deleteMemory(state.name, memory.id));
        }),
      ),
    );
    return node;
  };
  // A copy of the memory in another chat, or in a new one, which is opened.
  const carry = async (memory) => {
    const wanted = await ask("Carry this memory into another chat?", {
      label: "Name of the chat",
      value: await freeName(`${state.name} · next`),
      confirm: "Carry",
      about: "The chat is created if there is none of that name. It begins with the memory in its system prompt.",
    });
    const name = wanted?.trim();
    if (!name) return;
    await api.carryMemories(name, [{ conversation: state.name, id: memory.id }]);
    emit("list");
    toast(`Carried into “${name}”.`, { action: "Open", onAction: () => openConversation(name) });
  };
  // Two memories that contradict each other: the user decides.
  const conflict = ({ first, second, first_sentence, second_sentence, reason }) => {
    const keep = (label, kept) =>
      el(
        "button",
        { type: "button", onclick: () => run(api.resolveConflict(state.name, { first, second, keep: kept })) },
        label,
      );
    return el(
      "div",
      { class: "row", data: { conflict: `${first}-${second}` } },
      el("p", { class: "error" }, `Which is right? (${reason})`),
      el("p", { class: "message-text" }, `${first}: ${first_sentence}`),
      el("p", { class: "message-text" }, `${second}: ${second_sentence}`),
      el("div", { class: "bar" }, keep("The first", "first"), keep("The second", "second"), keep("Both", "both")),
    );
  };
  const showOrigins = async (memory, node) => {
    const before = node.querySelector(".origins");
    if (before) {
      before.remove();
      return;
    }
    try {
      const found = await api.memoryOrigins(state.name, memory.id);
      const bytes = new TextEncoder().encode(found.text);
      const part = ({ start, end }) => new TextDecoder().decode(bytes.slice(start, end));
      const source = (span) =>
        span.kind === "markup"
          ? "markup"
          : [span.kind, span.chunk && `paragraph ${span.chunk}`].filter(Boolean).join(", ");
      const rows = found.spans.map((span) =>
        el(
          "div",
          { class: "row" },
          el("p", { class: "quiet" }, source(span)),
          el("p", { class: "message-text" }, part(span)),
        ),
      );
      const seen = found.segments.map((segment) => segment.block).join(", ");
      node.append(
        el("div", { class: "origins" }, ...rows, el("p", { class: "quiet" }, seen ? `The model saw: ${seen}` : "")),
      );
    } catch (error) {
      toast(error.message, { error: true });
    }
  };
  const edit = (memory, node, text) => {
    const textBox = el("textarea", { rows: "6", "aria-label": `Text of memory ${memory.id}` });
    textBox.value = memory.text;
    const finish = (save) => async () => {
      try {
        if (save) await api.updateMemory(state.name, memory.id, { text: textBox.value });
        textBox.remove();
        load();
      } catch (error) {
        toast(error.message, { error: true });
      }
    };
    const bar = el(
      "div",
      { class: "bar" },
      el("button", { type: "button", onclick: finish(true) }, "Save"),
      el("button", { type: "button", onclick: finish(false) }, "Cancel"),
    );
    text.replaceWith(textBox);
    node.querySelector(".bar").replaceWith(bar);
    textBox.focus();
  };
  panel.append(el("div", { class: "bar" }, box), about, asked, list);
  load();
  return {
    event: (event) => {
      if (["memory_changed", "done", "changed"].includes(event.type)) load();
    },
  };
}

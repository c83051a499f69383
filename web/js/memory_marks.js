// Where memories are in the context: a box between the messages.

import { emit } from "./bus.js";
import { el } from "./dom.js";
import { state } from "./state.js";

const memoryNodes = new Map();

/** The memories that are in the context before a message. They are few. */
export function memoriesBefore(turn, messages) {
  const { placed_memories = [] } = state.snapshot;
  const at = messages.findIndex((message) => message.turn === turn);
  const previous = at > 0 ? messages[at - 1].turn : -1;
  return placed_memories
    .filter((memory) => memory.turn > previous && memory.turn <= turn && (at > 0 || memory.turn === turn || turn === 0))
    .map((memory) => {
      const key = JSON.stringify([state.name, memory]);
      if (!memoryNodes.has(key))
        memoryNodes.set(
          key,
          el(
            "article",
            { class: "memory", data: { turn: memory.turn - 0.5 }, "aria-label": `memory ${memory.id}` },
            el(
              "button",
              { type: "button", class: "link", onclick: () => emit("panel", "memories") },
              `✎ Memory ${memory.id} is in the context here`,
            ),
            el("p", {}, memory.text),
          ),
        );
      return memoryNodes.get(key);
    });
}

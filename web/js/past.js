// The view “Time travel”: the context as it was after an earlier message.

import { speakerOf } from "./actions.js";
import { api } from "./api.js";
import { count, el, number } from "./dom.js";
import { lastMessages } from "./reducers.js";
import { state } from "./state.js";

export function contextAtTurn(panel) {
  const last = lastMessages(state, 1)[0]?.turn ?? 0;
  const slider = el("input", {
    id: "past-turn",
    type: "range",
    min: "0",
    max: String(last),
    value: String(last),
    class: "long",
  });
  const about = el("p", { class: "quiet", role: "status" });
  const list = el("div", {});
  let requests = 0;
  const load = async () => {
    const request = ++requests;
    try {
      const context = await api.contextAtTurn(state.name, slider.value);
      if (request !== requests) return;
      const removed = new Set(context.removed_since);
      about.textContent = `After message ${context.turn + 1}: ${number(context.live)} tokens in the context, ${count(context.chunks.length, "paragraph")}, ${removed.size} of them out of context now.`;
      list.replaceChildren(
        ...context.chunks.map((chunk) =>
          el(
            "div",
            { class: "row" },
            el(
              "p",
              { class: "quiet" },
              `message ${chunk.turn + 1}, ${speakerOf(chunk)}${chunk.pinned ? " · pinned" : ""}${removed.has(chunk.id) ? " · out of context now" : ""}`,
            ),
            el("p", { class: "text", tabindex: "0" }, chunk.text.trim()),
          ),
        ),
      );
    } catch (error) {
      about.textContent = error.message;
      list.replaceChildren();
    }
  };
  let timer = null;
  slider.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(load, 120);
  });
  panel.append(el("div", { class: "bar" }, el("label", { for: "past-turn" }, "Message"), slider), about, list);
  load();
  return {
    event: (event) => {
      if (event.type === "done") slider.max = String(event.summary.turn);
    },
  };
}

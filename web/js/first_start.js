// What an empty chat shows: what Halo is, the model in use, and something to begin with.

import { emit } from "./bus.js";
import { el } from "./dom.js";
import { state } from "./state.js";

const EXAMPLES = [
  "Explain how a bicycle stays upright, in three sentences.",
  "Write a Python function that counts the words of a text file.",
  "Let's write a story together. It begins in a lighthouse.",
  "I will tell you about my week. Ask me questions about it.",
];

let status = null;

/** The status of the server, for the name of the model. */
export function setStatus(value) {
  status = value;
}

// Models below a billion parameters, by their usual names.
const isTiny = (model) => /(^|[^\d.])(\d{2,3})m([^a-z]|$)/i.test(model);

// The model in use; of a very small one, what to expect and how to get a better one.
function modelHint(model) {
  const name = el("b", {}, model);
  if (!isTiny(model)) return el("div", { class: "model-hint" }, el("p", {}, "The model is ", name, "."));
  return el(
    "div",
    { class: "model-hint", data: { hint: "tiny" } },
    el("p", {}, "The model is ", name, ". It is very small: good for a first look, weak in its answers."),
    el(
      "button",
      {
        type: "button",
        class: "outlined",
        title: "Download one, or use the address of Ollama, KoboldCPP, LM Studio, llama-server or vLLM",
        onclick: () => emit("panel", "models"),
      },
      "Choose a better model",
    ),
  );
}

export function drawEmpty(log, empty) {
  const shown = log.querySelector(":scope > .empty");
  if (!empty) {
    shown?.remove();
    return;
  }
  const deleted = state.snapshot.tokens > 0;
  const key = `${deleted}${status?.model ?? ""}`;
  if (shown?.dataset.key === key) return;
  shown?.remove();
  const model = status?.model ?? "";
  log.append(
    deleted
      ? el(
          "div",
          { class: "empty", data: { key } },
          el("h2", {}, "Every message of this chat is deleted"),
          el("p", { class: "quiet" }, "They are not lost: Inspect lists them, and they can be restored from there."),
          el("button", { type: "button", class: "outlined", onclick: () => emit("panel", "graveyard") }, "Show them"),
        )
      : el(
          "div",
          { class: "empty", data: { key } },
          el("h2", {}, "What shall we talk about?"),
          el(
            "p",
            { class: "quiet" },
            "Halo never cuts off a long chat: paragraphs that the model pays little attention to leave the context, stay in " +
              "place here, and come back when you talk about them.",
          ),
          model ? modelHint(model) : null,
          el(
            "div",
            { class: "examples" },
            ...EXAMPLES.map((text) => el("button", { type: "button", onclick: () => emit("draft", text) }, text)),
          ),
        ),
  );
}

// The view “This chat”: a system prompt and values of sampling that replace the settings in this chat only.

import { api } from "./api.js";
import { el, number, toast } from "./dom.js";
import { readDraft, writeDraft } from "./drafts.js";
import { rangeSlider } from "./range_slider.js";
import { state } from "./state.js";

/**
 * @typedef {{ user_name: string, model_name: string, about_user: string }} Persona
 * @typedef {{ system_prompt: string | null, sampling: Record<string, number | null>, persona: Persona }} ChatOptions
 */

/** @type {() => Persona} */
const nobody = () => ({ user_name: "", model_name: "", about_user: "" });

const NAMES = [
  { key: "user_name", label: "Your name", rows: 1 },
  { key: "model_name", label: "Name of the model", rows: 1 },
  { key: "about_user", label: "About you", rows: 3 },
];

const FIELDS = [
  { key: "temperature", label: "Temperature", about: "0: always the most likely word", min: 0, max: 5, step: 0.05 },
  { key: "top_p", label: "Top-p", about: "1: off", min: 0, max: 1, step: 0.01 },
  { key: "top_k", label: "Top-k", about: "0: off", min: 0, max: 1_000_000, step: 1 },
  { key: "min_p", label: "Min-p", about: "0: off", min: 0, max: 1, step: 0.01 },
  { key: "repetition_penalty", label: "Repetition penalty", about: "1: off", min: 1, max: 10, step: 0.01 },
  { key: "max_tokens", label: "Longest answer", about: "tokens", min: 1, max: 1_000_000, step: 1 },
];

/** Named sets of values. They leave the length of answers alone. */
export const PRESETS = {
  Precise: { temperature: 0.2, top_p: 0.9, top_k: 40, min_p: 0.05, repetition_penalty: 1.05 },
  Balanced: { temperature: 0.7, top_p: 0.9, top_k: 40, min_p: 0, repetition_penalty: 1 },
  Creative: { temperature: 1.1, top_p: 0.97, top_k: 100, min_p: 0.02, repetition_penalty: 1 },
};

const readPending = (name) => readDraft("options", name);

/** The options of a chat that is not stored yet, under its final name: they are sent before its first message. */
export async function sendPendingOptions(from, name) {
  const pending = readPending(from);
  if (!pending) return;
  await api.setOptions(name, pending);
  writeDraft("options", from, null);
}

const same = (one, other) => Math.abs(one - other) < 1e-6;

/** The preset that these values are; null if they are none. */
export const presetOf = (values) =>
  Object.keys(PRESETS).find((name) =>
    Object.entries(PRESETS[name]).every(([key, value]) => same(values[key] ?? Number.NaN, value)),
  ) ?? null;

/** @param {HTMLElement} panel */
export async function chatOptions(panel) {
  const { name } = state;
  /** @type {ChatOptions} */
  let own = { system_prompt: null, sampling: {}, persona: nobody() };
  /** @type {ChatOptions} */
  let defaults = { system_prompt: "", sampling: {}, persona: nobody() };
  const isNew = () => !!state.snapshot?.fresh;
  const status = el("p", { class: "quiet", role: "status" });
  const prompt = el("textarea", { id: "own-prompt", rows: "6", dir: "auto" });
  const inputs = new Map();
  const sliders = new Map();
  const names = new Map();
  const presets = el("div", { class: "bar", role: "group", "aria-label": "Presets" });

  let edits = 0; // what is being loaded does not replace what was set meanwhile
  const save = async () => {
    edits += 1;
    try {
      if (isNew()) writeDraft("options", name, own);
      else await api.setOptions(name, own);
      status.textContent = isNew()
        ? "Saved. It holds from the first message."
        : "Saved. It holds from the next message.";
      status.className = "quiet";
    } catch (error) {
      status.textContent = error.message;
      status.className = "error";
    }
    draw();
  };
  const setValue = (key, text) => {
    own.sampling = { ...own.sampling, [key]: text === "" ? null : Number(text) };
    return save();
  };
  prompt.addEventListener("change", () => {
    own.system_prompt = prompt.value === "" ? null : prompt.value;
    save();
  });
  const draw = () => {
    prompt.placeholder = defaults.system_prompt || "No system prompt";
    if (document.activeElement !== prompt) prompt.value = own.system_prompt ?? "";
    for (const [key, input] of inputs) {
      input.placeholder = number(defaults.sampling[key] ?? 0);
      if (document.activeElement !== input) input.value = own.sampling[key] ?? "";
      sliders.get(key).show(own.sampling[key] ?? defaults.sampling[key] ?? 0);
    }
    for (const [key, input] of names) if (document.activeElement !== input) input.value = own.persona?.[key] ?? "";
    const effective = { ...defaults.sampling };
    for (const [key, value] of Object.entries(own.sampling)) if (value !== null) effective[key] = value;
    const chosen = presetOf(effective);
    for (const button of presets.children)
      button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.preset === chosen));
  };
  for (const preset of Object.keys(PRESETS))
    presets.append(
      el(
        "button",
        {
          type: "button",
          class: "outlined",
          data: { preset },
          onclick: () => {
            own.sampling = { ...own.sampling, ...PRESETS[preset] };
            save();
          },
        },
        preset,
      ),
    );
  const field = ({ key, label, about, min, max, step }) => {
    const input = el("input", { id: `own-${key}`, type: "number", min, max, step, inputmode: "decimal" });
    input.addEventListener("change", () => {
      const { badInput, rangeOverflow, rangeUnderflow } = input.validity;
      if (badInput || rangeOverflow || rangeUnderflow) {
        status.textContent = `${label} must be a number from ${number(min)} to ${number(max)}.`;
        status.className = "error";
      } else setValue(key, input.value);
    });
    inputs.set(key, input);
    const range = { min, max, whole: step === 1 };
    const slider = rangeSlider(
      range,
      label,
      (value) => {
        input.value = String(value);
      },
      (value) => setValue(key, String(value)),
    );
    sliders.set(key, slider);
    return el(
      "div",
      { class: "row own-value" },
      el("label", { for: `own-${key}` }, label, " ", el("span", { class: "quiet" }, about)),
      el("div", { class: "bar" }, input, slider.node),
    );
  };
  const nameField = ({ key, label, rows }) => {
    const id = `own-${key}`;
    const input =
      rows === 1
        ? el("input", { id, dir: "auto", maxlength: "200", autocomplete: "off" })
        : el("textarea", { id, rows: String(rows), dir: "auto" });
    input.addEventListener("change", () => {
      own.persona = { ...nobody(), ...own.persona, [key]: input.value };
      save();
    });
    names.set(key, input);
    return el("div", { class: "row own-name" }, el("label", { for: id }, label), input);
  };
  const load = async () => {
    const before = edits;
    try {
      const view = await api.options(name);
      defaults = view.defaults;
      if (before === edits) own = (isNew() && readPending(name)) || view.own;
      draw();
    } catch (error) {
      status.textContent = error.message;
      status.className = "error";
    }
  };
  // A slider has no place before its value is known: a key that is pressed then would do nothing.
  await load();
  panel.append(
    el("p", { class: "quiet" }, "What is empty here follows the settings; the grey value is theirs."),
    el("h3", {}, el("label", { for: "own-prompt" }, "System prompt")),
    prompt,
    el("h3", {}, "Names"),
    el(
      "p",
      { class: "quiet" },
      "They stand above the messages, and the model is told them. In the system prompt, {{user}} and {{char}} stand for them.",
    ),
    ...NAMES.map(nameField),
    el("h3", {}, "Sampling"),
    presets,
    ...FIELDS.map(field),
    el(
      "div",
      { class: "bar" },
      el(
        "button",
        {
          type: "button",
          class: "outlined",
          id: "reset-options",
          onclick: async () => {
            own = { system_prompt: null, sampling: {}, persona: nobody() };
            await save();
            toast("This chat follows the settings again.");
          },
        },
        "Reset to the settings",
      ),
    ),
    status,
  );
  draw();
  return { settings: load, event: (event) => event.action === "options_changed" && load() };
}

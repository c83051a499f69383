// The view “Settings”: grouped, found by the usual words, saved one by one. A row is updated at its place, so that focus and
// scroll position stay.

import { api } from "./api.js";
import { pageSettings } from "./appearance.js";
import { el, number, toast, withCode } from "./dom.js";
import { rangeSlider } from "./range_slider.js";
import { state } from "./state.js";

// The first group whose pattern matches has the setting.
/** @type {[string, RegExp][]} */
const GROUPS = [
  ["Model", /^(preset|model\.|chat\.|tools\.)/],
  ["Sampling", /^generation\./],
  ["Context", /^(context\.|prune\.|resurrect\.|chunk\.|recall\.|kv\.)/],
  ["Memory", /^(memory\.|lethe\.|premise\.)/],
  ["Rooms", /^rooms\./],
  ["Server", /^server\./],
  ["Research", /./],
];

// Names for the settings whose key does not say enough; the others are named after their key.
const LABELS = {
  preset: "Preset of all settings",
  "context.max_tokens": "Context size",
  "context.sink_tokens": "First tokens that always stay",
  "context.recent_tokens": "Latest tokens that always stay",
  "context.room_tokens": "Room for paragraphs that come back",
  "model.context": "Context length of the model",
  "model.cooling_tokens": "Longest prompt of a remote model",
  "model.gpu_layers": "Layers on the GPU",
  "model.attention": "Where attention is read",
  "brightness.stride": "Tokens from one attention row to the next",
  "model.fetch": "Download missing default models",
  "generation.max_tokens": "Longest answer",
  "generation.top_k": "Top-k",
  "generation.top_p": "Top-p",
  "generation.min_p": "Min-p",
  "generation.repetition": "Repetition penalty",
  "generation.seed": "Random seed",
  "chat.system": "System prompt",
  "chat.dates": "Tell the model the time of messages",
  "chat.user_name": "Your name before each message",
  "chat.assistant_name": "Name of the model before each answer",
  "tools.enabled": "Tools and notes of the model",
  "reasoning.keep": "Keep the reasoning in the context",
  "chunk.min_tokens": "Shortest paragraph",
  "chunk.max_tokens": "Longest paragraph",
  "prune.policy": "What leaves first when the context is full",
  "prune.fill": "How full the context is before something leaves",
  "resurrect.limit": "Limit of what comes back",
  "resurrect.floor": "Least relevance of what comes back",
  "resurrect.candidates": "Search hits that are considered",
  "resurrect.preview_tokens": "Tokens of a draft answer to search with",
  "resurrect.user_boost": "Weight of your own messages in search",
  "recall.mode": "Search by words, meaning or both",
  "recall.embedder": "Embedding model",
  "recall.diversity": "Variety of what search finds",
  "premise.check": "Check what questions assume",
  "premise.principles": "Principles of that check",
  "memory.enabled": "Memories",
  "lethe.enabled": "Erase old text by age",
  "lethe.grace_days": "Days in which a deletion can be undone",
  "kv.mode": "KV cache of what left the context",
  "kv.type": "Type of the KV cache",
  "kv.ram": "KV cache in memory",
  "kv.disk": "KV cache on disk",
  "server.listen": "Address and port",
  "server.key": "API key",
  "server.max_body": "Largest request",
  "server.max_import": "Largest import",
  "trace.attention": "Stored attention of a chat",
  "server.rate": "Requests per second",
};

// Words of other programs for our settings.
const WORDS = {
  "chat.system": "system prompt persona instructions character",
  "generation.max_tokens": "answer length response length max new tokens reply num_predict",
  "generation.temperature": "creativity randomness",
  "generation.repetition": "repetition penalty repeat",
  "generation.seed": "random",
  "context.max_tokens": "context size window num_ctx ctx",
  "model.context": "context size window num_ctx ctx",
  "model.gpu_layers": "gpu cuda metal vulkan ngl offload",
  "model.attention": "flash attention gpu",
  "recall.embedder": "embedding model rag search",
  "server.listen": "port address host",
  "server.key": "api key password",
  "memory.enabled": "summary summaries remember",
  "lethe.grace_days": "delete undo trash",
};

const unitOf = (key) =>
  /tokens$|^generation\.max|context$/.test(key)
    ? "tokens"
    : /days$/.test(key)
      ? "days"
      : /minutes$/.test(key)
        ? "minutes"
        : /(delay|idle)$/.test(key)
          ? "seconds"
          : "";

/** The name of a setting for people; its key stays visible beside it. */
export function settingLabel(key) {
  const [, ...rest] = key.split(".");
  const words = (rest.length ? rest : [key]).join(" ").replaceAll("_", " ");
  return LABELS[key] ?? `${words.slice(0, 1).toUpperCase()}${words.slice(1)}`;
}

export function settings(panel, { q = "" } = {}) {
  const list = el("div", {});
  const find = el("input", {
    id: "settings-q",
    type: "search",
    placeholder: "Find a setting",
    oninput: () => filter(),
  });
  find.value = q;
  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of list.querySelectorAll(".row")) {
      const text = `${row.textContent} ${row.dataset.words}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const group of list.querySelectorAll("details")) {
      const matches = group.querySelectorAll(".row:not([hidden])").length;
      group.hidden = matches === 0;
      if (words.length) group.open = true;
    }
  };
  const load = async () => {
    try {
      const all = await api.settings();
      const groups = new Map(GROUPS.map(([name]) => [name, []]));
      for (const setting of all) groups.get(GROUPS.find(([, pattern]) => pattern.test(setting.key))[0]).push(setting);
      list.replaceChildren(
        appearanceGroup(),
        ...[...groups]
          .filter(([, rows]) => rows.length)
          .map(([name, rows]) =>
            el(
              "details",
              { open: ["Model", "Sampling"].includes(name) },
              el("summary", {}, name),
              name === "Context" ? contextSplit(all) : null,
              ...rows.map((setting) => settingRow(setting)),
            ),
          ),
      );
      filter();
    } catch (error) {
      list.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  panel.append(
    el("div", { class: "bar" }, el("label", { class: "hidden", for: "settings-q" }, "Find a setting"), find),
    list,
  );
  load();
}

function appearanceGroup() {
  return el(
    "details",
    { open: true },
    el("summary", {}, "Appearance"),
    el("div", { class: "row", data: { words: "theme dark light colour font text size appearance" } }, pageSettings()),
  );
}

// How the context of the open chat is divided, as the meter below the message box shows it too.
function contextSplit(all) {
  const { snapshot } = state;
  if (!snapshot || snapshot.fresh || !snapshot.limit) return null;
  const longest = Number(all.find((setting) => setting.key === "generation.max_tokens")?.value ?? 0);
  const { limit, system_prompt_tokens: system, budget_after_turn: stays } = snapshot;
  const parts = [
    ["system", "System prompt", system],
    ["kept", "Messages that can stay", Math.max(0, stays - system)],
    ["reserved", "Room for the next message, what comes back and the answer", Math.max(0, limit - stays)],
  ];
  const bar = el("div", { class: "split-bar", "aria-hidden": "true" });
  for (const [kind, , tokens] of parts) {
    const part = el("i", { class: kind });
    part.style.width = `${(100 * Number(tokens)) / limit}%`;
    bar.append(part);
  }
  return el(
    "div",
    { class: "split" },
    el(
      "p",
      { class: "quiet" },
      `A context of ${number(limit)} tokens in this chat; an answer has at most ${number(longest)}.`,
    ),
    bar,
    el(
      "ul",
      {},
      ...parts.map(([kind, label, tokens]) =>
        el("li", {}, el("i", { class: kind }), ` ${label}: `, el("b", {}, number(tokens))),
      ),
    ),
  );
}

function settingRow(setting) {
  const row = el("div", { class: "row", data: { words: WORDS[setting.key] ?? "" } });
  drawRow(row, setting);
  return row;
}

function sliderFor(setting, input, save) {
  const { node, show } = rangeSlider(
    setting.range,
    settingLabel(setting.key),
    (value) => {
      input.value = String(value);
    },
    (value) => save(String(value)),
  );
  node.disabled = setting.read_only;
  show(setting.value);
  return node;
}

function drawRow(row, setting) {
  const id = `set-${setting.key}`;
  const free = setting.choices.length < 2;
  const isSwitch = setting.default === "true" || setting.default === "false";
  const isText = setting.key === "chat.system";
  const input = isText
    ? el("textarea", { id, rows: "4", disabled: setting.read_only })
    : !free || isSwitch
      ? el(
          "select",
          { id, disabled: setting.read_only },
          ...(setting.choices.length > 1 ? setting.choices : ["true", "false"]).map((choice) =>
            el("option", { value: choice, selected: choice === setting.value }, choice),
          ),
        )
      : el("input", {
          id,
          class: setting.range ? "number" : "long",
          value: setting.value,
          disabled: setting.read_only,
        });
  if (isText) input.value = setting.value;
  const errorLine = el("p", { class: "error", role: "alert" });
  const save = async (value) => {
    errorLine.textContent = "";
    try {
      await api.updateSetting(setting.key, value);
      const restart = setting.needs_restart ? " It takes effect after a restart." : "";
      toast(`${settingLabel(setting.key)} is now ${value ?? setting.default}.${restart}`);
      await update(row, setting.key);
    } catch (error) {
      errorLine.textContent = error.message;
    }
  };
  input.addEventListener("change", () => save(input.value));
  const unit = unitOf(setting.key);
  row.replaceChildren(
    el(
      "p",
      {},
      el("label", { for: id }, el("b", {}, settingLabel(setting.key))),
      " ",
      el("code", { class: "key" }, setting.key),
    ),
    el("p", { class: "quiet" }, ...withCode(setting.about)),
    el(
      "div",
      { class: "bar" },
      input,
      unit && setting.range ? el("span", { class: "unit" }, unit) : null,
      setting.range && free ? sliderFor(setting, input, save) : null,
      setting.value !== setting.default && !setting.read_only
        ? el("button", { type: "button", onclick: () => save(null) }, "Reset")
        : null,
    ),
    el(
      "p",
      { class: "quiet" },
      `${setting.allowed} · default ${setting.default} · from ${setting.origin}${setting.needs_restart ? " · needs a restart" : ""}`,
    ),
    ...(setting.read_only ? [el("p", { class: "quiet" }, `Read-only here: ${setting.read_only_reason}`)] : []),
    errorLine,
  );
}

// Draws one row again, with the focus where it was.
async function update(row, key) {
  const setting = (await api.settings()).find((one) => one.key === key);
  const focused = row.contains(document.activeElement)
    ? /** @type {HTMLInputElement} */ (document.activeElement)
    : null;
  drawRow(row, setting);
  if (!focused) return;
  const again = focused.id ? row.querySelector(`[id="${focused.id}"]`) : row.querySelector('input[type="range"]');
  (again ?? row.querySelector("input, select, textarea"))?.focus({ preventScroll: true });
}

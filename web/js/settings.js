// The view “Settings”: grouped, found by the usual words, saved one by one. A row is updated at its place, so that focus and
// scroll position stay.

import { api } from "./api.js";
import { pageSettings } from "./appearance.js";
import { el, number, toast, withCode } from "./dom.js";

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

// A slider beside the field of a number. Wide ranges are logarithmic, so that small numbers can be chosen too.
function sliderFor(setting, input, save) {
  const { min, max, whole } = setting.range;
  const logarithmic = min >= 0 && max - min > 1000;
  const toPlace = (value) =>
    logarithmic ? Math.log1p(value - min) / Math.log1p(max - min) : (value - min) / (max - min || 1);
  const toValue = (place) => {
    const value = logarithmic ? min + Math.expm1(place * Math.log1p(max - min)) : min + place * (max - min);
    if (whole || value >= 100) return Math.round(value);
    return Number(value.toPrecision(2));
  };
  const value = Number(setting.value);
  const slider = el("input", {
    type: "range",
    min: "0",
    max: "1",
    step: whole && !logarithmic ? String(1 / (max - min || 1)) : "0.005",
    "aria-label": `${setting.key}, from ${number(min)} to ${number(max)}`,
    disabled: setting.read_only,
  });
  slider.value = String(Number.isNaN(value) ? 0 : toPlace(value));
  slider.addEventListener("input", () => {
    input.value = String(toValue(Number(slider.value)));
  });
  slider.addEventListener("change", () => save(input.value));
  return slider;
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
        ...[...groups]
          .filter(([, rows]) => rows.length)
          .map(([name, rows]) =>
            el(
              "details",
              { open: ["Model", "Sampling"].includes(name) },
              el("summary", {}, name),
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
    pageSettings(),
    list,
  );
  load();
}

function settingRow(setting) {
  const row = el("div", { class: "row", data: { words: WORDS[setting.key] ?? "" } });
  drawRow(row, setting);
  return row;
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
      toast(`${setting.key} is now ${value ?? setting.default}.${restart}`);
      await update(row, setting.key);
    } catch (error) {
      errorLine.textContent = error.message;
    }
  };
  input.addEventListener("change", () => save(input.value));
  const unit = unitOf(setting.key);
  row.replaceChildren(
    el("p", {}, el("label", { for: id }, el("b", {}, setting.key))),
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

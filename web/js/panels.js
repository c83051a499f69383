// The panels beside the chat: one at a time, opened by a button, a key or a click.

import { api } from "./api.js";
import { emit, on } from "./bus.js";
import { captures } from "./captures.js";
import { editChunks, editLast, regenerate } from "./chat.js";
import { $, ask, count, el, number, svg, time, toast } from "./dom.js";
import { graveyard } from "./graveyard.js";
import { memories } from "./memories.js";
import { normalize, shadeStyle } from "./shade.js";
import { closeTab, openConversation, renameTab, state } from "./state.js";
import { stats } from "./stats.js";

const PANELS = {
  conversations: ["Chats", conversations],
  graveyard: ["Out of context", graveyard],
  search: ["Search", search],
  stats: ["Statistics", stats],
  past: ["What the model saw then", contextAtTurn],
  notes: ["The model's notes", notes],
  captures: ["Attention recordings", captures],
  memories: ["Memories", memories],
  settings: ["Settings", settings],
  help: ["Help", help],
  chunk: ["Paragraph", chunkDetails],
};

let open = null; // the open panel: its name and its event handlers

export function init() {
  on("panel", (target) => (typeof target === "string" ? toggle(target) : toggle(target.panel, target)));
  on("event", (event) => open?.handlers?.event?.(event));
  on("state", () => open?.handlers?.state?.());
  on("settings", () => open?.handlers?.settings?.());
  on("conversation", () => {
    if (open) draw(open.name === "chunk" ? "graveyard" : open.name);
  });
  for (const button of $("tools").querySelectorAll("button"))
    button.addEventListener("click", () => toggle(button.dataset.panel));
  document.addEventListener("keydown", (event) => {
    const names = Object.keys(PANELS);
    if (event.altKey && /^[0-9]$/.test(event.key)) {
      event.preventDefault();
      toggle(names[(Number(event.key) + 9) % 10]);
    }
    if (event.key === "Escape" && open && $("panel").contains(document.activeElement)) close();
  });
}

function toggle(name, options = {}) {
  if (open?.name === name && name !== "chunk") close();
  else draw(name, options, true);
}

function close() {
  const button = $("tools").querySelector(`[data-panel="${open?.name}"]`);
  open = null;
  $("panel").hidden = true;
  markButtons();
  (button ?? $("message")).focus();
}

function markButtons() {
  for (const button of $("tools").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.panel === open?.name));
}

function draw(name, options = {}, focus = false) {
  const [title, build] = PANELS[name];
  const panel = $("panel");
  const closeButton = el("button", { type: "button", "aria-label": "Close the panel", onclick: close }, "×");
  panel.replaceChildren(el("h2", {}, title, closeButton));
  panel.hidden = false;
  open = { name };
  open.handlers = build(panel, options) ?? {};
  markButtons();
  if (focus) (panel.querySelector("input, select") ?? closeButton).focus();
}

// ---- chats

function conversations(panel) {
  const list = el("div", {});
  const load = async () => {
    try {
      const all = await api.conversations();
      list.replaceChildren(...all.map(row));
      if (!all.length) list.append(el("p", { class: "quiet" }, "No chats yet."));
    } catch (error) {
      list.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  const row = (chat) =>
    el(
      "div",
      { class: "row" },
      el(
        "p",
        {},
        el(
          "button",
          {
            type: "button",
            "aria-current": String(chat.name === state.name),
            onclick: () => openConversation(chat.name),
          },
          chat.name,
        ),
      ),
      el(
        "p",
        { class: "quiet" },
        `${count(chat.turns, "message")} · ${number(chat.live)} of ${number(chat.tokens)} tokens in the context · ${time(chat.updated)}`,
      ),
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => rename(chat.name) }, "Rename"),
        el("button", { type: "button", onclick: () => branch(chat.name) }, "Branch"),
      ),
    );
  const rename = async (name) => {
    const to = await ask(`Rename “${name}”`, { label: "New name", value: name });
    if (!to || to === name) return;
    try {
      await api.rename(name, to);
      renameTab(name, to);
      load();
    } catch (error) {
      toast(error.message, { error: true });
    }
  };
  const branch = async (name) => {
    const to = await ask(`Branch “${name}”`, { label: "Name", value: `${name} 2` });
    if (!to) return;
    try {
      await api.branch(name, to);
      openConversation(to);
    } catch (error) {
      toast(error.message, { error: true });
    }
  };
  panel.append(
    el(
      "div",
      { class: "bar" },
      el(
        "button",
        {
          type: "button",
          onclick: async () => {
            const name = await ask("New chat", { label: "Name" });
            if (name) {
              openConversation(name);
              $("message").focus();
            }
          },
        },
        "New",
      ),
      el("button", { type: "button", onclick: regenerate }, "Regenerate"),
      el("button", { type: "button", onclick: editLast }, "Edit last message"),
    ),
    list,
  );
  load();
  return {
    event: (event) => {
      if (["done", "changed"].includes(event.type)) load();
    },
  };
}

export function initTabs() {
  const nav = $("tabs");
  const drawTabs = () =>
    nav.replaceChildren(
      ...state.tabs.map((name) =>
        el(
          "button",
          {
            type: "button",
            "aria-current": String(name === state.name),
            title: `${name} (middle click closes the tab)`,
            onclick: () => openConversation(name),
            onauxclick: (event) => {
              if (event.button === 1) closeTab(name);
            },
          },
          name,
        ),
      ),
    );
  on("conversation", drawTabs);
  on("tabs", drawTabs);
  drawTabs();
}

// ---- search

function search(panel) {
  const list = el("div", { role: "status" });
  const run = async (event) => {
    event.preventDefault();
    const q = panel.querySelector("#search-q").value;
    if (!q.trim()) return;
    try {
      const found = await api.search(state.name, q);
      list.replaceChildren(
        ...found.map((hit) =>
          el(
            "div",
            { class: "row" },
            el(
              "p",
              { class: "quiet" },
              `turn ${hit.chunk.turn}, ${hit.chunk.role} · ${hit.chunk.live ? "in the context" : "out of context"} · ${number(hit.score)}`,
            ),
            el("p", { class: "text", tabindex: "0" }, hit.chunk.text.trim()),
            el("p", { class: "quiet" }, hit.reason),
            el(
              "div",
              { class: "bar" },
              hit.chunk.live
                ? null
                : el(
                    "button",
                    { type: "button", onclick: () => editChunks("resurrect", [hit.chunk.id]) },
                    "Bring back",
                  ),
              el(
                "button",
                { type: "button", onclick: () => emit("panel", { panel: "chunk", chunk: hit.chunk.id }) },
                "Details",
              ),
            ),
          ),
        ),
      );
      if (!found.length) list.replaceChildren(el("p", { class: "quiet" }, "No match."));
    } catch (error) {
      list.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  panel.append(
    el(
      "form",
      { class: "bar", onsubmit: run },
      el("label", { class: "hidden", for: "search-q" }, "Search for"),
      el("input", { id: "search-q", type: "search", placeholder: "words or meaning" }),
      el("button", { type: "submit" }, "Find"),
    ),
    list,
  );
}

// ---- what the model saw then

function contextAtTurn(panel) {
  const last = Math.max(0, ...[...state.chunks.values()].map((chunk) => chunk.turn));
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
      about.textContent = `After turn ${context.turn}: ${number(context.live)} tokens in the context, ${count(context.chunks.length, "paragraph")}, ${removed.size} of them out of context now.`;
      list.replaceChildren(
        ...context.chunks.map((chunk) =>
          el(
            "div",
            { class: "row" },
            el(
              "p",
              { class: "quiet" },
              `turn ${chunk.turn}, ${chunk.role}${chunk.pinned ? " · pinned" : ""}${removed.has(chunk.id) ? " · out of context now" : ""}`,
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
  panel.append(el("div", { class: "bar" }, el("label", { for: "past-turn" }, "Turn"), slider), about, list);
  load();
  return {
    event: (event) => {
      if (event.type === "done") slider.max = String(event.summary.turn);
    },
  };
}

// ---- notes

function notes(panel) {
  const box = el("textarea", { id: "note", spellcheck: "false" });
  const about = el("p", { class: "quiet", role: "status" });
  let file = "notes.json";
  const load = async () => {
    try {
      const [note] = await api.notes(state.name);
      file = note?.file ?? file;
      box.value = note?.text ?? "";
      about.textContent = note
        ? `${file}: the model writes it when tools.enabled is set.`
        : "The notes are empty. The model writes them when tools.enabled is set. What you write here must be JSON.";
    } catch (error) {
      about.textContent = error.message;
    }
  };
  panel.append(
    about,
    el("label", { class: "hidden", for: "note" }, "Notes"),
    box,
    el(
      "div",
      { class: "bar" },
      el(
        "button",
        {
          type: "button",
          onclick: async () => {
            try {
              await api.writeNotes(state.name, file, box.value);
              toast("Saved.");
            } catch (error) {
              toast(error.message, { error: true });
            }
          },
        },
        "Save",
      ),
    ),
  );
  load();
  return {
    event: (event) => {
      if (event.type === "tool_called") load();
    },
  };
}

// ---- settings

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

function settings(panel) {
  const list = el("div", {});
  const find = el("input", {
    id: "settings-q",
    type: "search",
    placeholder: "Find a setting",
    oninput: () => filter(),
  });
  const filter = () => {
    for (const row of list.querySelectorAll(".row"))
      row.hidden = !row.textContent.toLowerCase().includes(find.value.toLowerCase());
  };
  const load = async () => {
    try {
      list.replaceChildren(...(await api.settings()).map(row));
      filter();
    } catch (error) {
      list.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  const row = (setting) => {
    const id = `set-${setting.key}`;
    const free = setting.choices.length < 2;
    const input =
      !free || setting.default === "true" || setting.default === "false"
        ? el(
            "select",
            { id, disabled: setting.read_only },
            ...(setting.choices.length > 1 ? setting.choices : ["true", "false"]).map((choice) =>
              el("option", { value: choice, selected: choice === setting.value }, choice),
            ),
          )
        : el("input", { id, class: "long", value: setting.value, disabled: setting.read_only });
    const errorLine = el("p", { class: "error", role: "alert" });
    const save = async (value) => {
      errorLine.textContent = "";
      try {
        await api.updateSetting(setting.key, value);
        toast(
          `${setting.key} is now ${value ?? setting.default}${setting.needs_restart ? "; restart the server to apply it" : ""}`,
        );
        load();
      } catch (error) {
        errorLine.textContent = error.message;
      }
    };
    input.addEventListener("change", () => save(input.value));
    const slider = setting.range && free ? sliderFor(setting, input, save) : null;
    return el(
      "div",
      { class: "row" },
      el("p", {}, el("label", { for: id }, el("b", {}, setting.key))),
      el("p", { class: "quiet" }, setting.about),
      el(
        "div",
        { class: "bar" },
        input,
        slider,
        setting.value !== setting.default && !setting.read_only
          ? el("button", { type: "button", onclick: () => save(null) }, "Reset")
          : null,
      ),
      el(
        "p",
        { class: "quiet" },
        `${setting.allowed} · default ${setting.default} · from ${setting.origin}${setting.needs_restart ? " · needs a restart" : ""}`,
      ),
      setting.read_only ? el("p", { class: "quiet" }, `Read-only here: ${setting.read_only_reason}`) : null,
      errorLine,
    );
  };
  panel.append(
    pageSettings(),
    el("div", { class: "bar" }, el("label", { class: "hidden", for: "settings-q" }, "Find a setting"), find),
    list,
  );
  load();
  return { settings: () => {} };
}

// Settings of the page itself, kept in this browser.
function pageSettings() {
  const theme = el(
    "select",
    {
      id: "theme",
      onchange: () => {
        localStorage.setItem("theme", theme.value);
        applyAppearance();
        emit("theme");
      },
    },
    ...["system", "dark", "light"].map((name) =>
      el("option", { value: name, selected: name === (localStorage.getItem("theme") ?? "system") }, name),
    ),
  );
  const size = el(
    "select",
    {
      id: "size",
      onchange: () => {
        localStorage.setItem("size", size.value);
        applyAppearance();
      },
    },
    ...["13", "14", "16", "18", "20", "24"].map((px) =>
      el("option", { value: px, selected: px === (localStorage.getItem("size") ?? "16") }, `${px} px`),
    ),
  );
  return el(
    "div",
    { class: "bar" },
    el("label", { for: "theme" }, "Theme"),
    theme,
    el("label", { for: "size" }, "Text"),
    size,
  );
}

export function applyAppearance() {
  const theme = localStorage.getItem("theme") ?? "system";
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.documentElement.style.setProperty("--size", `${localStorage.getItem("size") ?? 16}px`);
}

// ---- one paragraph, token by token

function chunkDetails(panel, { chunk: id }) {
  const body = el("div", {});
  panel.append(body);
  const load = async () => {
    try {
      const details = await api.chunk(state.name, id);
      const tokens = details.tokens.filter((token) => !token.template);
      const values = tokens.map((token) => token.brightness);
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const tokenNodes = tokens.map((token) => {
        const node = el(
          "span",
          {
            class: "token",
            data: { position: token.position },
            title: `${JSON.stringify(token.text)} · id ${token.id} · brightness ${number(token.brightness)}${token.live ? "" : " · out of context"}`,
          },
          token.text,
        );
        const { colour, ground } = shadeStyle(normalize(token.brightness, least, most));
        Object.assign(node.style, { color: colour, background: ground });
        return node;
      });
      const text = el("div", { class: "chunk" }, ...tokenNodes);
      const attention = el("div", {});
      if (details.chunk.role === "assistant") {
        attention.append(el("p", { class: "quiet" }, "Click a token of the latest answer to see its attention."));
        for (const node of tokenNodes) {
          node.tabIndex = 0;
          node.setAttribute("role", "button");
        }
        const show = (event) => {
          const node = event.target.closest(".token");
          if (node) showTokenAttention(attention, node.dataset.position);
        };
        text.addEventListener("click", show);
        text.addEventListener("keydown", (event) => {
          if (event.key === "Enter") show(event);
        });
      }
      body.replaceChildren(
        el(
          "p",
          { class: "quiet" },
          `${id} · ${count(details.chunk.tokens, "token")} · ${details.chunk.live ? "in the context" : "out of context"}${details.chunk.pinned ? " · pinned" : ""}`,
        ),
        text,
        attention,
        el(
          "dl",
          {},
          el("dt", {}, "brightest token"),
          el("dd", {}, number(details.chunk.peak)),
          el("dt", {}, "votes"),
          el("dd", {}, number(details.votes)),
          el("dt", {}, "attention in total"),
          el("dd", {}, details.attention.toFixed(3)),
          el("dt", {}, "share per token"),
          el("dd", {}, details.share === null ? "not measured yet" : `${(details.share * 1000).toFixed(3)} ‰ per step`),
          ...(details.pair ? [el("dt", {}, "belongs to"), el("dd", {}, details.pair)] : []),
        ),
        el("h3", {}, "History"),
        details.history.length
          ? el(
              "ol",
              {},
              ...details.history.map((entry) =>
                el("li", {}, `${time(entry.at)}: ${entry.action}${entry.reason ? `, because ${entry.reason}` : ""}`),
              ),
            )
          : el("p", { class: "quiet" }, "It has always been in the context."),
        el(
          "div",
          { class: "bar" },
          details.chunk.live
            ? null
            : el("button", { type: "button", onclick: () => editChunks("resurrect", [id]) }, "Bring back"),
          el(
            "button",
            { type: "button", onclick: () => editChunks(details.chunk.pinned ? "unpin" : "pin", [id]) },
            details.chunk.pinned ? "Unpin" : "Pin",
          ),
        ),
      );
    } catch (error) {
      body.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  load();
  return {
    event: (event) => {
      if (["done", "changed"].includes(event.type)) load();
    },
  };
}

// The attention of one token as a chart: a bar for each paragraph, and the tokens with the largest shares.
async function showTokenAttention(box, position) {
  let attention;
  try {
    attention = await api.tokenAttention(state.name, position);
  } catch (error) {
    box.replaceChildren(el("p", { class: "quiet" }, error.message));
    return;
  }
  const rows = [
    ["system prompt", attention.system_prompt],
    ["this answer", attention.answer],
    ...attention.chunks.slice(0, 10),
  ];
  const most = Math.max(...rows.map(([, share]) => share), 1e-6),
    rowHeight = 16;
  const bars = rows.flatMap(([name, share], n) => {
    const label = svg("text", { x: 2, y: n * rowHeight + 12 });
    label.textContent = name;
    const value = svg("text", { x: 96 + (share / most) * 240, y: n * rowHeight + 12 });
    value.textContent = `${(share * 100).toFixed(1)} %`;
    return [
      label,
      svg("rect", { x: 92, y: n * rowHeight + 3, width: (share / most) * 240, height: rowHeight - 5, fill: "#ffdc64" }),
      value,
    ];
  });
  const chart = svg(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 400 ${rows.length * rowHeight + 4}`,
      role: "img",
      "aria-label": `attention of ${JSON.stringify(attention.text)}: ${rows.map(([name, share]) => `${name} ${(share * 100).toFixed(0)} percent`).join(", ")}`,
    },
    ...bars,
  );
  chart.style.height = `${rows.length * 1.1}rem`;
  box.replaceChildren(
    el("h3", {}, `Attention of “${attention.text.trim()}”`),
    chart,
    el(
      "p",
      { class: "quiet" },
      "Largest shares: ",
      ...attention.tokens
        .slice(0, 8)
        .flatMap((token) => [
          el("b", {}, token.text.trim() || "·"),
          ` (${(token.share * 100).toFixed(1)} %, ${token.chunk}) `,
        ]),
    ),
  );
}

// ---- help

function help(panel) {
  const keys = [
    ["Enter", "send"],
    ["Shift+Enter", "new line"],
    ["Esc", "stop the answer"],
    ["Esc while editing", "cancel the edit"],
    ["Alt+1 … Alt+9", "open a panel"],
    ["Tab, j, k", "next or previous paragraph"],
    ["p", "pin or unpin"],
    ["m", "merge into the paragraph above"],
    ["x", "remove from context"],
    ["Del", "delete"],
    ["Enter on a paragraph", "tokens and history"],
  ];
  const terms = [
    ["bright, dim", "how much attention the model paid to it, relative to the other paragraphs in the context"],
    ["out of context", "the model does not see it now; it is brought back when a message is about it, or by you"],
    ["pinned", "is never removed from the context"],
    [
      "deleted",
      "removed from the context and from search; it is listed and can be restored until it is forgotten for good",
    ],
  ];
  panel.append(
    el("dl", {}, ...keys.flatMap(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)])),
    el("dl", {}, ...terms.flatMap(([term, meaning]) => [el("dt", {}, term), el("dd", {}, meaning)])),
  );
}

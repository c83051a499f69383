// The panels beside the conversation: one at a time, opened by a button, a key or a click.

import { api } from "./api.js";
import { on, tell } from "./bus.js";
import { captures } from "./captures.js";
import { again, edit, signal } from "./chat.js";
import { $, ask, count, el, number, svg, time, toast } from "./dom.js";
import { graveyard } from "./graveyard.js";
import { memories } from "./memories.js";
import { look, place } from "./shade.js";
import { closeTab, renameTab, show, state } from "./state.js";
import { stats } from "./stats.js";

const PANELS = {
  conversations: ["Conversations", conversations],
  graveyard: ["What has left the window", graveyard],
  search: ["Search", search],
  stats: ["How it goes", stats],
  past: ["What the model saw", past],
  notes: ["The model's notes", notes],
  captures: ["Recorded answers", captures],
  memories: ["What the model remembers", memories],
  settings: ["Settings", settings],
  help: ["Keys and words", help],
  chunk: ["One paragraph", chunk],
};

let open = null; // what is open, and what it wants to hear of

export function begin() {
  on("panel", (wanted) => (typeof wanted === "string" ? toggle(wanted) : toggle(wanted.panel, wanted)));
  on("event", (event) => open?.hears?.event?.(event));
  on("state", () => open?.hears?.state?.());
  on("settings", () => open?.hears?.settings?.());
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
  mark();
  (button ?? $("message")).focus();
}

function mark() {
  for (const button of $("tools").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.panel === open?.name));
}

function draw(name, options = {}, focus = false) {
  const [title, make] = PANELS[name];
  const panel = $("panel");
  const shut = el("button", { type: "button", "aria-label": "Close the panel", onclick: close }, "×");
  panel.replaceChildren(el("h2", {}, title, shut));
  panel.hidden = false;
  open = { name };
  open.hears = make(panel, options) ?? {};
  mark();
  if (focus) (panel.querySelector("input, select") ?? shut).focus();
}

// ---- conversations

function conversations(panel) {
  const list = el("div", {});
  const load = async () => {
    try {
      const all = await api.conversations();
      list.replaceChildren(...all.map(row));
      if (!all.length) list.append(el("p", { class: "quiet" }, "There is none yet."));
    } catch (error) {
      list.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  };
  const row = (talk) =>
    el(
      "div",
      { class: "row" },
      el(
        "p",
        {},
        el(
          "button",
          { type: "button", "aria-current": String(talk.name === state.name), onclick: () => show(talk.name) },
          talk.name,
        ),
      ),
      el(
        "p",
        { class: "quiet" },
        `${count(talk.turns, "message")} · ${number(talk.live)} of ${number(talk.tokens)} tokens in the window · ${time(talk.used)}`,
      ),
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => rename(talk.name) }, "Rename"),
        el("button", { type: "button", onclick: () => branch(talk.name) }, "Branch"),
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
      toast(error.message, { wrong: true });
    }
  };
  const branch = async (name) => {
    const to = await ask(`A conversation that shares the past of “${name}”`, { label: "Its name", value: `${name} 2` });
    if (!to) return;
    try {
      await api.branch(name, to);
      show(to);
    } catch (error) {
      toast(error.message, { wrong: true });
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
            const name = await ask("A new conversation", { label: "Its name" });
            if (name) {
              show(name);
              $("message").focus();
            }
          },
        },
        "New",
      ),
      el("button", { type: "button", onclick: again }, "Regenerate"),
      el("button", { type: "button", onclick: edit }, "Edit last message"),
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

export function tabs() {
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
            onclick: () => show(name),
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
  const go = async (event) => {
    event.preventDefault();
    const q = panel.querySelector("#search-q").value;
    if (!q.trim()) return;
    try {
      const found = await api.search(state.name, q);
      list.replaceChildren(
        ...found.map((one) =>
          el(
            "div",
            { class: "row" },
            el(
              "p",
              { class: "quiet" },
              `turn ${one.chunk.turn}, ${one.chunk.role} · ${one.chunk.live ? "in the window" : "has left"} · ${number(one.score)}`,
            ),
            el("p", { class: "text", tabindex: "0" }, one.chunk.text.trim()),
            el("p", { class: "quiet" }, one.because),
            el(
              "div",
              { class: "bar" },
              one.chunk.live
                ? null
                : el("button", { type: "button", onclick: () => signal("resurrect", [one.chunk.chunk]) }, "Call back"),
              el(
                "button",
                { type: "button", onclick: () => tell("panel", { panel: "chunk", chunk: one.chunk.chunk }) },
                "Why",
              ),
            ),
          ),
        ),
      );
      if (!found.length) list.replaceChildren(el("p", { class: "quiet" }, "Nothing was found."));
    } catch (error) {
      list.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  };
  panel.append(
    el(
      "form",
      { class: "bar", onsubmit: go },
      el("label", { class: "hidden", for: "search-q" }, "What to look for"),
      el("input", { id: "search-q", type: "search", placeholder: "words, or what is meant" }),
      el("button", { type: "submit" }, "Find"),
    ),
    list,
  );
}

// ---- the past

function past(panel) {
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
  let asked = 0;
  const load = async () => {
    const mine = ++asked;
    try {
      const then = await api.past(state.name, slider.value);
      if (mine !== asked) return;
      const gone = new Set(then.gone);
      about.textContent = `After turn ${then.turn}: ${number(then.live)} tokens in the window, ${count(then.chunks.length, "paragraph")}, of which ${gone.size} are not there now.`;
      list.replaceChildren(
        ...then.chunks.map((chunk) =>
          el(
            "div",
            { class: "row" },
            el(
              "p",
              { class: "quiet" },
              `turn ${chunk.turn}, ${chunk.role}${chunk.pinned ? " · pinned" : ""}${gone.has(chunk.chunk) ? " · has left since" : ""}`,
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
  let moving = null;
  slider.addEventListener("input", () => {
    clearTimeout(moving);
    moving = setTimeout(load, 120);
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
        ? `${file}: the model writes this itself, when tools.enabled is set.`
        : "The model has noted nothing yet. It notes only when tools.enabled is set; what you write here must be JSON.";
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
              await api.writeNote(state.name, file, box.value);
              toast("Noted.");
            } catch (error) {
              toast(error.message, { wrong: true });
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
      if (event.type === "tool") load();
    },
  };
}

// ---- settings

function settings(panel) {
  const list = el("div", {});
  const find = el("input", {
    id: "settings-q",
    type: "search",
    placeholder: "find a setting",
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
      list.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  };
  const row = (setting) => {
    const id = `set-${setting.key}`;
    const free = setting.words.length === 0 || setting.words.length === 1;
    const input =
      !free || setting.default === "true" || setting.default === "false"
        ? el(
            "select",
            { id, disabled: setting.fixed },
            ...(setting.words.length > 1 ? setting.words : ["true", "false"]).map((word) =>
              el("option", { value: word, selected: word === setting.value }, word),
            ),
          )
        : el("input", { id, class: "long", value: setting.value, disabled: setting.fixed });
    const wrong = el("p", { class: "wrong", role: "alert" });
    const set = async (value) => {
      wrong.textContent = "";
      try {
        await api.set(setting.key, value);
        toast(
          `${setting.key} is ${value === null ? `back to ${setting.default}` : value} now${setting.at_start ? ", when the program is started again" : ""}`,
        );
        load();
      } catch (error) {
        wrong.textContent = error.message;
      }
    };
    input.addEventListener("change", () => set(input.value));
    return el(
      "div",
      { class: "row" },
      el("p", {}, el("label", { for: id }, el("b", {}, setting.key))),
      el("p", { class: "quiet" }, setting.about),
      el(
        "div",
        { class: "bar" },
        input,
        setting.value !== setting.default && !setting.fixed
          ? el("button", { type: "button", onclick: () => set(null) }, "Reset")
          : null,
      ),
      el(
        "p",
        { class: "quiet" },
        `${setting.allowed} · default ${setting.default} · from ${setting.origin}${setting.fixed ? ", which is stronger than this page" : ""}${setting.at_start ? " · counts when the program is started again" : ""}`,
      ),
      wrong,
    );
  };
  panel.append(
    ofThePage(),
    el("div", { class: "bar" }, el("label", { class: "hidden", for: "settings-q" }, "Find a setting"), find),
    list,
  );
  load();
  return { settings: () => {} };
}

// How the page itself looks: of this browser only.
function ofThePage() {
  const theme = el(
    "select",
    {
      id: "theme",
      onchange: () => {
        localStorage.setItem("theme", theme.value);
        appearance();
        tell("theme");
      },
    },
    ...["system", "dark", "light"].map((word) =>
      el("option", { value: word, selected: word === (localStorage.getItem("theme") ?? "system") }, word),
    ),
  );
  const size = el(
    "select",
    {
      id: "size",
      onchange: () => {
        localStorage.setItem("size", size.value);
        appearance();
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

export function appearance() {
  const theme = localStorage.getItem("theme") ?? "system";
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.documentElement.style.setProperty("--size", `${localStorage.getItem("size") ?? 16}px`);
}

// ---- one chunk, word by word

function chunk(panel, { chunk: name }) {
  const body = el("div", {});
  panel.append(body);
  const load = async () => {
    try {
      const close = await api.chunk(state.name, name);
      const said = close.words.filter((word) => !word.frame);
      const lights = said.map((word) => word.light);
      const [least, most] = [Math.min(...lights), Math.max(...lights)];
      const words = said.map((word) => {
        const node = el(
          "span",
          {
            class: "word",
            data: { position: word.position },
            title: `${JSON.stringify(word.text)} · number ${word.id} · brightness ${number(word.light)}${word.live ? "" : " · has left"}`,
          },
          word.text,
        );
        Object.assign(node.style, {
          color: look(place(word.light, least, most)).colour,
          background: look(place(word.light, least, most)).ground,
        });
        return node;
      });
      const text = el("div", { class: "chunk" }, ...words);
      const looked = el("div", {});
      if (close.chunk.role === "assistant") {
        looked.append(el("p", { class: "quiet" }, "Click a word of the latest answer to see what it looked at."));
        for (const word of words) {
          word.tabIndex = 0;
          word.setAttribute("role", "button");
        }
        const show = (event) => {
          const word = event.target.closest(".word");
          if (word) lookedAt(looked, word.dataset.position);
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
          `${name} · ${count(close.chunk.tokens, "token")} · ${close.chunk.live ? "in the window" : "has left"}${close.chunk.pinned ? " · pinned" : ""}`,
        ),
        text,
        looked,
        el(
          "dl",
          {},
          el("dt", {}, "brightest token"),
          el("dd", {}, number(close.chunk.peak)),
          el("dt", {}, "stood out"),
          el("dd", {}, count(close.votes, "time")),
          el("dt", {}, "attention in all"),
          el("dd", {}, close.attention.toFixed(3)),
          el("dt", {}, "share of a token"),
          el("dd", {}, close.share === null ? "never looked at" : `${(close.share * 1000).toFixed(3)} ‰ at a step`),
          ...(close.pair ? [el("dt", {}, "belongs to"), el("dd", {}, close.pair)] : []),
        ),
        el("h3", {}, "What happened to it"),
        close.history.length
          ? el(
              "ol",
              {},
              ...close.history.map((one) =>
                el("li", {}, `${time(one.at)}: ${one.what}${one.why ? `, because ${one.why}` : ""}`),
              ),
            )
          : el("p", { class: "quiet" }, "It has been in the window since it was said."),
        el(
          "div",
          { class: "bar" },
          close.chunk.live
            ? null
            : el("button", { type: "button", onclick: () => signal("resurrect", [name]) }, "Call back"),
          el(
            "button",
            { type: "button", onclick: () => signal(close.chunk.pinned ? "unpin" : "pin", [name]) },
            close.chunk.pinned ? "Unpin" : "Pin",
          ),
        ),
      );
    } catch (error) {
      body.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  };
  load();
  return {
    event: (event) => {
      if (["done", "changed"].includes(event.type)) load();
    },
  };
}

// Who did a word look at, as a picture: a bar for each paragraph, and the words it looked at most.
async function lookedAt(box, position) {
  let look;
  try {
    look = await api.looks(state.name, position);
  } catch (error) {
    box.replaceChildren(el("p", { class: "quiet" }, error.message));
    return;
  }
  const rows = [["instructions", look.instructions], ["this answer", look.itself], ...look.chunks.slice(0, 10)];
  const most = Math.max(...rows.map(([, share]) => share), 1e-6),
    high = 16;
  const bars = rows.flatMap(([name, share], n) => {
    const label = svg("text", { x: 2, y: n * high + 12 });
    label.textContent = name;
    const value = svg("text", { x: 96 + (share / most) * 240, y: n * high + 12 });
    value.textContent = `${(share * 100).toFixed(1)} %`;
    return [
      label,
      svg("rect", { x: 92, y: n * high + 3, width: (share / most) * 240, height: high - 5, fill: "#ffdc64" }),
      value,
    ];
  });
  const picture = svg(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 400 ${rows.length * high + 4}`,
      role: "img",
      "aria-label": `what ${JSON.stringify(look.text)} looked at: ${rows.map(([name, share]) => `${name} ${(share * 100).toFixed(0)} percent`).join(", ")}`,
    },
    ...bars,
  );
  picture.style.height = `${rows.length * 1.1}rem`;
  box.replaceChildren(
    el("h3", {}, `What “${look.text.trim()}” looked at`),
    picture,
    el(
      "p",
      { class: "quiet" },
      "Most of all at: ",
      ...look.tokens
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
    ["Shift+Enter", "a new line"],
    ["Esc", "stop the answer"],
    ["Esc while editing", "leave the last message as it is"],
    ["Alt+1 … Alt+9", "the panels"],
    ["Tab, j, k", "through the paragraphs"],
    ["p", "pin or unpin"],
    ["m", "join to the one before"],
    ["x", "send out of the window"],
    ["Del", "delete"],
    ["Enter on a paragraph", "what happened to it, word by word"],
  ];
  const words = [
    ["bright, dim", "how much the model has looked at it; the scale is that of the window now"],
    ["left", "out of the window, not forgotten: it comes back by itself when it matters, or when you call it"],
    ["pinned", "cannot leave"],
    [
      "deleted",
      "out of the window and out of search; it is listed, and can be restored, until it is forgotten on purpose",
    ],
  ];
  panel.append(
    el("dl", {}, ...keys.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("dl", {}, ...words.flatMap(([word, what]) => [el("dt", {}, word), el("dd", {}, what)])),
  );
}

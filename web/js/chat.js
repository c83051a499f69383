// The conversation: chunks by turn, shaded by how much the model has looked at them, and the box to speak in.

import { Away, api } from "./api.js";
import { on, tell } from "./bus.js";
import { $, ask, count, el, grow, number, time, toast } from "./dom.js";
import { look } from "./shade.js";
import { refresh, state } from "./state.js";

const turns = new Map(); // elements by turn
const nodes = new Map(); // elements by chunk
const drawn = new Map(); // what is drawn of each, to skip what has not changed
let scheduled = false;
let atEnd = true; // whether what is said last is in sight, and stays so
let whole = true; // whether more has changed than the end of the answer that is being given

const WHO = { user: "You", assistant: "Model", system: "System" };

export function begin() {
  on("conversation", () => {
    clear();
    leaveEdit();
    load();
    redraw();
    drawVariants();
  });
  on("state", () => {
    redraw();
    drawVariants();
  });
  on("event", hint);
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", reshade);
  on("theme", reshade);
  follow();
  composer();
}

function clear() {
  $("log").replaceChildren();
  remembered = "";
  atEnd = true;
  turns.clear();
  nodes.clear();
  drawn.clear();
  $("hints").replaceChildren();
}

export function reshade() {
  for (const known of drawn.values()) known.light = null;
  redraw();
}

function redraw() {
  whole = true;
  schedule();
}

// Draws once a frame, however much has happened.
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw();
  });
}

// A token costs its own few characters: everything else is looked at only when something else has changed.
function draw() {
  const log = $("log");
  const below = log.scrollHeight - log.scrollTop;
  if (state.now) {
    if (whole) whole = drawWhole();
    for (const [name, text] of state.running?.parts ?? []) stream(name, text);
    welcome(state.order.length === 0 && !state.running);
  }
  trouble();
  standing();
  if (atEnd) toEnd();
  else if (whole) log.scrollTop = log.scrollHeight - below;
  if (whole) schedule();
}

// To the end of what was said. How high something is the browser knows only when it comes into sight, so it may take a few steps.
function toEnd(steps = 8) {
  const log = $("log");
  log.scrollTop = log.scrollHeight;
  if (steps > 0)
    requestAnimationFrame(() => {
      if (atEnd && log.scrollHeight - log.scrollTop - log.clientHeight > 1) toEnd(steps - 1);
    });
}

// Whoever scrolls up stays there, until they are at the end again.
function follow() {
  const log = $("log");
  let last = 0;
  log.addEventListener(
    "scroll",
    () => {
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      if (near) atEnd = true;
      else if (log.scrollTop < last - 2) atEnd = false;
      last = log.scrollTop;
    },
    { passive: true },
  );
}

// How long a frame may take of what others do meanwhile, in milliseconds.
const SLICE = 8;

// All that is in the window, the latest first. Returns whether there is more to do in another frame.
function drawWhole() {
  const until = performance.now() + SLICE;
  for (const name of [...nodes.keys()]) {
    if (!state.chunks.has(name) && !state.running?.parts.has(name)) drop(name);
  }
  for (let at = state.order.length - 1; at >= 0; at -= 1) {
    if (performance.now() > until) return true;
    const chunk = state.chunks.get(state.order[at]);
    settle(chunk);
    shade(chunk);
  }
  for (const [turn, node] of turns) heading(turn, node);
  remember();
  return false;
}

// Memories where they stand; they are few, and drawn anew when one has changed.
let remembered = "";
function remember() {
  const { standing = [] } = state.now;
  const key = JSON.stringify(standing);
  if (key === remembered) return;
  remembered = key;
  const log = $("log");
  log.querySelectorAll(".memory").forEach((node) => node.remove());
  for (const memory of standing) {
    const node = el(
      "article",
      { class: "memory", data: { turn: memory.turn - 0.5 }, "aria-label": `memory ${memory.memory}` },
      el(
        "button",
        { type: "button", class: "link", onclick: () => tell("panel", "memories") },
        `✎ memory ${memory.memory} stands here`,
      ),
      el("p", {}, memory.text),
    );
    log.insertBefore(
      node,
      [...log.querySelectorAll(".turn")].find((turn) => Number(turn.dataset.turn) >= memory.turn) ?? null,
    );
  }
}

function welcome(empty) {
  const there = $("log").querySelector(".empty");
  const words =
    state.now.tokens > 0
      ? "Nothing of this conversation is in the context now. What was pruned or deleted is not lost: the second button above lists it."
      : "Nothing has been said here yet. Say something: what the model looks at grows bright, what it does not look at grows dim " +
        "and leaves the window, and whatever matters again comes back to its own place.";
  if (!empty) {
    there?.remove();
    return;
  }
  if (there?.textContent === words) return;
  there?.remove();
  $("log").append(el("p", { class: "empty" }, words));
}

// A conversation that cannot be shown says why; it is never drawn as an empty one.
function trouble() {
  const there = $("log").querySelector(".trouble");
  if (!state.failed) {
    there?.remove();
    return;
  }
  if (there?.dataset.why === state.failed) return;
  there?.remove();
  $("log").prepend(
    el(
      "p",
      { class: "trouble wrong", role: "alert", data: { why: state.failed } },
      `“${state.name}” cannot be shown: ${state.failed}. Nothing is lost. `,
      el("button", { type: "button", onclick: refresh }, "Try again"),
    ),
  );
}

// The versions of the last answer, where there are more than one.
let versions = 0;
async function drawVariants() {
  const mine = (versions += 1);
  const box = $("variants");
  const { name } = state;
  let all = [];
  if (state.now && !state.now.fresh && !state.running && !state.failed) {
    try {
      all = await api.variants(name);
    } catch {
      all = [];
    }
  }
  if (mine !== versions || name !== state.name) return;
  box.hidden = all.length < 2;
  if (box.hidden) {
    box.replaceChildren();
    return;
  }
  const at = all.findIndex((one) => one.stands);
  const choose = (to) => async () => {
    try {
      await api.chooseVariant(name, all[to].turn);
    } catch (error) {
      toast(error.message, { wrong: true });
    }
  };
  const step = (mark, label, to) =>
    el("button", { type: "button", "aria-label": label, disabled: !all[to], onclick: choose(to) }, mark);
  const what = all[Math.max(at, 0)].messages.length > 1 ? "Version" : "Answer";
  box.replaceChildren(
    step("‹", `Previous ${what.toLowerCase()}`, at - 1),
    el("span", {}, `${what} ${at + 1} of ${all.length}`),
    step("›", `Next ${what.toLowerCase()}`, at + 1),
  );
}

function drop(name) {
  const node = nodes.get(name);
  const turn = node.closest(".turn");
  turn.querySelector(`.gap[data-before="${name}"]`)?.remove();
  node.remove();
  nodes.delete(name);
  drawn.delete(name);
  if (!turn.querySelector(".chunk")) {
    turn.remove();
    turns.delete(Number(turn.dataset.turn));
  }
}

function turnOf(id, role) {
  let node = turns.get(id);
  if (node) return node;
  node = el(
    "article",
    { class: `turn ${role}`, data: { turn: id } },
    el("h2", {}, el("b", {}, WHO[role] ?? role), el("time", {}), el("span", { class: "end" })),
  );
  turns.set(id, node);
  // Most are the first or the last.
  const log = $("log");
  let after = log.querySelector(".turn");
  if (!after || Number(log.lastElementChild.dataset.turn) < id) after = null;
  while (after && Number(after.dataset.turn) < id) after = after.nextElementSibling;
  log.insertBefore(node, after);
  return node;
}

function heading(id, node) {
  const [, at, end] = node.firstChild.children;
  const told = state.now.times[id] ? time(state.now.times[id]) : "";
  if (at.textContent !== told) at.textContent = told;
  const ends = {
    length: "cut at its longest",
    aborted: "stopped",
    failed: "broken off",
    interrupted: "cut off when the program ended",
  };
  const ended = [
    state.now.premises?.[id] ? `無 taken for granted, and not so: ${state.now.premises[id]}` : "",
    ends[state.now.ends[id]] ?? "",
  ]
    .filter(Boolean)
    .join(" · ");
  if (end.textContent !== ended) end.textContent = ended;
  end.classList.toggle("wrong", ["failed", "interrupted"].includes(state.now.ends[id]));
}

// A chunk at its place in its turn.
function settle(chunk) {
  const known = drawn.get(chunk.chunk);
  if (known?.chunk === chunk) return;
  const key = JSON.stringify([chunk.text, chunk.pinned, chunk.gap, chunk.why, chunk.tools]);
  const node = nodes.get(chunk.chunk);
  if (known?.key === key) {
    known.chunk = chunk;
    return;
  }
  const fresh = el(
    "div",
    {
      class: chunk.back ? "chunk back" : "chunk",
      tabindex: "0",
      data: { chunk: chunk.chunk, position: chunk.position },
      "aria-label": `${WHO[chunk.role]}, turn ${chunk.turn}, paragraph ${chunk.sentence}${chunk.pinned ? ", pinned" : ""}`,
      role: "group",
    },
    text(chunk),
    chunk.back && chunk.why ? el("span", { class: "why" }, `↩ back: ${chunk.why}`) : null,
  );
  if (chunk.back)
    setTimeout(() => {
      delete chunk.back;
      fresh.classList.remove("back");
    }, 2600);
  if (node) node.replaceWith(fresh);
  else {
    const turn = turnOf(chunk.turn, chunk.role);
    const behind = [...turn.querySelectorAll(".chunk")].find(
      (other) => Number(other.dataset.position) > chunk.position,
    );
    turn.insertBefore(fresh, behind ?? null);
  }
  nodes.set(chunk.chunk, fresh);
  drawn.set(chunk.chunk, { chunk, key, light: null });
  gap(fresh, chunk);
}

function text(chunk) {
  const parts = [];
  if (chunk.pinned) parts.push(el("span", { class: "mark", role: "img", "aria-label": "pinned" }, "📌"));
  let at = 0;
  for (const [from, to] of chunk.tools ?? []) {
    parts.push(chunk.text.slice(at, from), el("span", { class: "tool" }, chunk.text.slice(from, to)));
    at = to;
  }
  parts.push(chunk.text.slice(at).replace(/\s+$/, ""));
  return parts;
}

// Where something has left, a line says how much.
function gap(node, chunk) {
  node.parentNode.querySelector(`.gap[data-before="${chunk.chunk}"]`)?.remove();
  if (!chunk.gap) return;
  const line = el(
    "button",
    { class: "gap", type: "button", data: { before: chunk.chunk }, onclick: () => tell("panel", "graveyard") },
    `${count(chunk.gap, "paragraph")} left the window here`,
  );
  node.before(line);
}

// The bar and the colours of a chunk; nothing is touched that is as it should be.
function shade(chunk) {
  // What has just come is as bright as can be, until it is seen who looks at it.
  const light = Math.round((chunk.light ?? 1) * 200) / 200;
  const known = drawn.get(chunk.chunk);
  if (known.light === light) return;
  known.light = light;
  const node = nodes.get(chunk.chunk);
  const { bar, colour, ground } = look(light);
  Object.assign(node.style, { borderLeftColor: bar, color: colour, background: ground });
  node.title = `${chunk.chunk} · brighter than ${Math.round(light * 100)} % of the window · brightest token ${number(chunk.peak)} · ${count(chunk.tokens, "token")}`;
}

// The answer as it comes: text is added to the end, nothing else is touched.
function stream(name, said) {
  let node = nodes.get(name);
  if (!node) {
    const [, role, turn] = /^([a-z])(\d+)\./.exec(name);
    node = el("div", { class: "chunk pending", data: { chunk: name, position: Number.MAX_SAFE_INTEGER } }, "");
    turnOf(Number(turn), { u: "user", a: "assistant", s: "system" }[role]).append(node);
    nodes.set(name, node);
    drawn.set(name, { key: "", light: null });
    node.append(document.createTextNode(""));
  }
  const known = drawn.get(name);
  const shown = known.shown ?? 0;
  if (said.length > shown) {
    node.lastChild.appendData ? node.lastChild.appendData(said.slice(shown)) : node.append(said.slice(shown));
    known.shown = said.length;
  }
}

function standing() {
  const { now, running } = state;
  const meter = $("meter");
  if (!now) {
    $("standing").textContent = "";
    return;
  }
  const limit = now.limit || 1;
  meter.setAttribute("aria-valuemax", limit);
  meter.setAttribute("aria-valuenow", now.live);
  meter.firstElementChild.style.width = `${Math.min(100, (now.live / limit) * 100)}%`;
  // What is being said is in the window before it is counted with what was said.
  const said = Math.max(now.tokens, now.live - (now.instruction_tokens ?? 0));
  const parts = now.fresh ? [] : [`window ${number(now.live)}/${number(now.limit)}`, `${number(said)} said in all`];
  $("standing").title =
    `${number(now.live)} tokens are in the window, ${number(now.instruction_tokens ?? 0)} of them the standing instructions. ` +
    `After an answer ${number(now.stays)} may stay: the rest is room for the next message, its answer and what comes back for it.`;
  meter.lastElementChild.style.left = `${Math.min(100, (now.stays / limit) * 100)}%`;
  if (now.last) parts.push(`${number(now.last.pace)} tokens/s`);
  if (now.attention === false) parts.push("this model does not tell what it looks at");
  $("standing").textContent = parts.join(" · ");
  $("dead").textContent = number(now.dead);
  $("going").textContent = !running
    ? ""
    : running.ahead > 0
      ? `waiting: ${running.ahead} ahead`
      : running.reading && running.reading.of > 64
        ? `reading ${running.reading.done}/${running.reading.of}`
        : running.parts.size
          ? "speaking"
          : "thinking";
  $("stop").hidden = !running;
}

// What comes, leaves and fails is said where it happens.
function hint(event) {
  if (event.type === "token" || event.type === "reading") schedule();
  else redraw();
  if (["waiting", "said", "done", "failed"].includes(event.type)) drawVariants();
  const hints = $("hints");
  const line = (words) => hints.replaceChildren(...words);
  if (event.type === "said") {
    back.clear();
    hints.replaceChildren();
  }
  if (event.type === "returned" && event.chunk) {
    back.set(event.chunk.chunk, event.chunk.text.trim());
    line(cameBack("came back for this"));
  }
  if (event.type === "premise")
    line([
      el(
        "span",
        { class: "wrong" },
        `無 You take for granted: “${event.premise}”. ${event.reason}. ${event.suggestion}`,
      ),
    ]);
  if (event.type === "done") {
    const parts = [];
    if (back.size) parts.push(...cameBack("came back for this answer"));
    if (event.summary.left) parts.push(el("span", {}, `${count(event.summary.left, "paragraph")} left the window. `));
    if (parts.length) hints.replaceChildren(...parts);
  }
  if (event.type === "exceeded") toast(event.why, { wrong: true });
  if (event.type === "notice") toast(event.text);
  // Whoever sent it is told in their own place.
  if (event.type === "failed" && !sending) toast(event.why, { wrong: true });
}

const back = new Map(); // what has come back for the answer that is being given, or was given last

// What came back, by its first words; a click tells why, and what became of it.
function cameBack(words) {
  const one = ([name, text]) =>
    el(
      "button",
      { type: "button", class: "link", onclick: () => tell("panel", { panel: "chunk", chunk: name }) },
      `“${text.slice(0, 40)}${text.length > 40 ? "…" : ""}”${state.chunks.has(name) ? "" : " (has left again)"}`,
    );
  return [
    el("span", {}, `↩ ${count(back.size, "paragraph")} ${words}: `),
    ...[...back].slice(0, 3).map(one),
    el("span", {}, back.size > 3 ? " and more. " : ". "),
  ];
}

// ---- the box to speak in: what is typed is kept until it is stored on the server.

const draft = () => `draft:${state.name}`;
const sent = (name) => `sent:${name}`;

function load() {
  const box = $("message");
  box.value = localStorage.getItem(draft()) ?? "";
  grow(box);
  resume();
}

// A message that was on its way when the page was left is sent with the number that it had: the server takes it once.
async function resume() {
  const { name } = state;
  const waiting = JSON.parse(localStorage.getItem(sent(name)) ?? "null");
  if (!waiting) return;
  await deliver(name, waiting);
}

function composer() {
  const box = $("message");
  box.addEventListener("input", () => {
    if (!editing) localStorage.setItem(draft(), box.value);
    grow(box);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
    if (event.key === "Escape") {
      if (editing) leaveEdit();
      else stop();
    }
  });
  $("cancel-edit").addEventListener("click", () => {
    leaveEdit();
    box.focus();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
}

let editing = false; // whether what is in the box replaces the last message
let sending = false;

async function send() {
  const box = $("message");
  const text = box.value;
  const name = state.name;
  if (!text.trim() || sending) return;
  if (editing) {
    if (await attempt(name, () => api.instead(name, text))) leaveEdit();
    return;
  }
  const message = { id: crypto.randomUUID(), text };
  localStorage.setItem(sent(name), JSON.stringify(message));
  await deliver(name, message);
}

// Sends a message; until the server has it, it is kept here.
async function deliver(name, message) {
  const box = $("message");
  if (state.running) toast("Queued. It is sent when this answer is done.");
  const done = await attempt(name, () => api.say(name, message.text, message.id));
  // Without an answer nobody knows whether it was taken: it is asked again with the same number.
  if (done === null) return;
  localStorage.removeItem(sent(name));
  if (!done) return;
  localStorage.removeItem(`draft:${name}`);
  if (state.name === name && box.value === message.text) {
    box.value = "";
    grow(box);
  }
  if (state.now?.fresh) refresh();
}

// Whether it was done; null where the server did not answer.
async function attempt(name, work) {
  $("send").disabled = true;
  sending = true;
  try {
    await work();
    return true;
  } catch (error) {
    toast(`Not sent: ${error.message}. What you wrote is still in the box.`, { wrong: true });
    return error instanceof Away ? null : false;
  } finally {
    $("send").disabled = false;
    sending = false;
    if (state.name === name) $("message").focus();
  }
}

export async function stop() {
  if (!state.running) return;
  try {
    await api.stop(state.name);
  } catch (error) {
    toast(error.message, { wrong: true });
  }
}

// The last message comes into the box to be edited. A banner says so until it is sent or cancelled, and what was in the box is kept.
export function edit() {
  const last = [...state.chunks.values()].filter((chunk) => chunk.role === "user").at(-1);
  if (!last || state.running) return;
  const box = $("message");
  editing = true;
  $("editing").hidden = false;
  $("send").textContent = "Replace";
  box.value = [...state.chunks.values()]
    .filter((chunk) => chunk.turn === last.turn)
    .map((chunk) => chunk.text)
    .join("")
    .trim();
  grow(box);
  box.focus();
}

function leaveEdit() {
  if (!editing) return;
  editing = false;
  $("editing").hidden = true;
  $("send").textContent = "Send";
  const box = $("message");
  box.value = localStorage.getItem(draft()) ?? "";
  grow(box);
}

export async function again() {
  if (state.running) return;
  try {
    await api.again(state.name);
  } catch (error) {
    toast(error.message, { wrong: true });
  }
}

// ---- the user's own hand

const DONE = {
  pin: "Pinned",
  unpin: "Unpinned",
  prune: "Sent out of the window",
  resurrect: "Called back",
  delete: "Deleted",
  merge: "Joined to the one before",
  restore: "Restored",
};

export async function signal(what, chunks) {
  if (what === "delete" && !(await sureToDelete(chunks[0]))) return;
  const name = state.name;
  try {
    const done = await api.signal(name, what, chunks);
    const pinned = what === "resurrect" ? `; pinned: ${chunks.join(", ")}` : "";
    const where = what === "delete" ? " It is listed under Deleted." : "";
    // What was deleted can be undone for as long as nobody closes this; later, from the list.
    toast(`${DONE[what]}: ${done.chunks.join(", ")}${pinned}.${where}`, {
      offer: "Undo",
      act: () => undo(name, done.undo),
      stay: what === "delete" ? null : undefined,
    });
  } catch (error) {
    toast(error.message, { wrong: true });
  }
}

// Shows what goes with a paragraph before it is deleted.
async function sureToDelete(chunk) {
  let along = [];
  try {
    along = (await api.chunk(state.name, chunk)).goes_along;
  } catch (error) {
    toast(error.message, { wrong: true });
    return false;
  }
  const lines = along.map((one) => el("li", {}, `${WHO[one.role]}: ${one.text.trim().slice(0, 160)}`));
  const more = lines.length
    ? el(
        "div",
        {},
        el("p", {}, `${count(lines.length, "paragraph")} cannot stand without it and will be deleted too:`),
        el("ul", { class: "along" }, ...lines),
      )
    : null;
  return ask("Delete this paragraph?", {
    about:
      "It leaves the context and search. It stays in the list of deleted paragraphs, from where it can be restored.",
    go: "Delete",
    more,
  });
}

async function undo(name, what) {
  try {
    await api.undo(name, what);
    toast("Taken back.");
  } catch (error) {
    toast(error.message, { wrong: true });
  }
}

// The buttons of a chunk: they come when it is pointed at or focused, and on a touch screen when it is tapped, by which nothing else
// happens.
function hand(node) {
  const name = node.dataset.chunk;
  const chunk = state.chunks.get(name);
  if (!chunk || node.querySelector(".hand")) return;
  const button = (mark, label, act) =>
    el(
      "button",
      {
        type: "button",
        title: label,
        "aria-label": `${mark}: ${name}`,
        onclick: (event) => {
          event.stopPropagation();
          act();
        },
      },
      mark,
    );
  node.append(
    el(
      "span",
      { class: "hand" },
      button(chunk.pinned ? "Unpin" : "Pin", chunk.pinned ? "Unpin (p)" : "Pin (p)", () =>
        signal(chunk.pinned ? "unpin" : "pin", [name]),
      ),
      chunk.sentence > 0 ? button("Join", "Join to the paragraph before (m)", () => signal("merge", [name])) : null,
      button("Remove from context", "Remove from context (x)", () => signal("prune", [name])),
      button("Delete", "Delete (Del)", () => signal("delete", [name])),
      button("Why", "What happened to it, word by word (Enter)", () => tell("panel", { panel: "chunk", chunk: name })),
    ),
  );
}

const touch = matchMedia("(hover: none)");

export function keys() {
  const log = $("log");
  const over = (event) => {
    const node = event.target.closest?.(".chunk");
    if (node && !touch.matches) hand(node);
  };
  log.addEventListener("pointerover", over);
  log.addEventListener("focusin", over);
  log.addEventListener("click", (event) => {
    if (!touch.matches || event.target.closest("button, a")) return;
    const node = event.target.closest(".chunk");
    for (const other of log.querySelectorAll(".chunk.open")) if (other !== node) other.classList.remove("open");
    if (!node) return;
    hand(node);
    node.classList.toggle("open");
  });
  log.addEventListener("keydown", (event) => {
    const node = event.target.closest(".chunk");
    if (!node || event.target !== node || event.ctrlKey || event.metaKey || event.altKey) return;
    const name = node.dataset.chunk;
    const chunk = state.chunks.get(name);
    if (!chunk) return;
    const all = [...log.querySelectorAll(".chunk")];
    const step = (by) => all[all.indexOf(node) + by]?.focus();
    const act = {
      p: () => signal(chunk.pinned ? "unpin" : "pin", [name]),
      m: () => signal("merge", [name]),
      x: () => signal("prune", [name]),
      Delete: () => signal("delete", [name]),
      Enter: () => tell("panel", { panel: "chunk", chunk: name }),
      j: () => step(1),
      ArrowDown: () => step(1),
      k: () => step(-1),
      ArrowUp: () => step(-1),
      Escape: () => $("message").focus(),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
}

// Rooms: a world as its people see it, and the Architect's hand on it. The server owns all state; this draws what it tells.

import { api, listen } from "./api.js";
import { $, ask, count, el, number, time, toast } from "./dom.js";
import { mind } from "./mind.js";

const FEELINGS = { thumbs_up: "👍", thumbs_down: "👎", brain: "🧠", heart: "❤️" };
const ARCHITECT = 0;

const page = { worlds: [], name: null, world: null, room: null, agent: null, older: new Map(), seen: new Map(), attends: new Map() };
let asked = 0;

// Does something on the server; what goes wrong is told, and nothing else happens.
async function doing(what) {
  try { return await what; } catch (error) { toast(error.message, { wrong: true }); return null; }
}

const wish = async (values) => take(await doing(api.wish(page.name, values)));

function take(world) {
  if (!world || world.name !== page.name) return;
  asked += 1;
  page.world = world;
  draw();
}

async function refresh() {
  const mine = (asked += 1);
  page.worlds = (await doing(api.worlds())) ?? page.worlds;
  if (!page.worlds.some((world) => world.name === page.name)) page.name = page.worlds[0]?.name ?? null;
  const world = page.name && (await doing(api.world(page.name)));
  if (mine !== asked) return;
  page.world = world || null;
  draw();
}

function show(name) {
  Object.assign(page, { name, world: null, room: null, agent: null });
  page.older.clear();
  page.seen.clear();
  location.hash = encodeURIComponent(name);
  refresh();
}

function draw() {
  drawWorlds();
  const { world } = page;
  for (const id of ["run", "step", "speed", "message", "send"]) $(id).disabled = !world;
  if (!world) {
    for (const id of ["rooms", "board", "panel", "hints"]) $(id).replaceChildren();
    $("log").replaceChildren(el("div", { class: "empty" },
      el("p", {}, "A world is a place where many agents live: each has a room, remembers only what it writes down, and thinks on its own heartbeat."),
      el("button", { type: "button", id: "first", onclick: newWorld }, "Begin with five who live at a harbour")));
    return;
  }
  if (!world.rooms.some((room) => room.id === page.room)) {
    // Where most people are.
    page.room = [...world.rooms].sort((a, b) => b.members.length - a.members.length)[0]?.id ?? null;
  }
  $("run").textContent = world.paused ? "Run" : "Pause";
  $("run").setAttribute("aria-pressed", String(!world.paused));
  const speeds = [...$("speed").options].map((option) => Number(option.value));
  if (speeds.includes(world.speed)) $("speed").value = String(world.speed);
  drawRooms();
  drawRoom();
  drawPanel();
}

function drawWorlds() {
  $("tabs").replaceChildren(
    ...page.worlds.map((world) => el("button", { type: "button", "aria-current": String(world.name === page.name), onclick: () => show(world.name) }, world.name)),
    el("button", { type: "button", title: "A new world", "aria-label": "A new world", onclick: newWorld }, "+"));
}

async function newWorld() {
  const name = await ask("A new world", { label: "Name", value: page.worlds.length ? "" : "harbour", go: "Begin", about: "It begins with five who live at a harbour; `halo rooms new NAME --file WORLD.toml` begins with your own." });
  if (!name) return;
  const made = await doing(api.newWorld(name.trim()));
  if (made) show(made.name);
}

const room = () => page.world?.rooms.find((one) => one.id === page.room);

function drawRooms() {
  $("rooms").replaceChildren(...page.world.rooms.map((one) => {
    const last = one.messages.at(-1)?.id ?? 0;
    if (one.id === page.room || !page.seen.has(one.id)) page.seen.set(one.id, last);
    const fresh = last > page.seen.get(one.id);
    return el("button", { type: "button", data: { room: one.id }, "aria-current": String(one.id === page.room), class: fresh ? "new" : "", onclick: () => { page.room = one.id; draw(); $("message").focus(); } },
      one.id === ARCHITECT ? "Your room" : `${one.owner}'s room`, one.requests.length ? " 🔔" : "",
      el("small", {}, one.billboard ?? count(one.members.length, "member")));
  }));
}

function drawRoom() {
  const here = room();
  if (!here) return;
  const inside = here.members.some((member) => member.id === ARCHITECT);
  $("board").replaceChildren(
    el("b", {}, here.billboard ? `📌 ${here.billboard}` : `${here.owner}'s room`),
    el("span", { class: "quiet" }, `${here.wpm} words a minute`),
    inside
      ? el("button", { type: "button", id: "leave", onclick: () => wish({ wish: "leave", room: here.id }) }, "Leave")
      : el("button", { type: "button", id: "join", onclick: () => wish({ wish: "join", room: here.id }) }, "Join"));
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60 || log.dataset.room !== String(here.id);
  // What slides out of the latest that are sent stays on the page.
  const before = page.shown?.id === here.id ? page.shown.messages.filter((said) => said.id < (here.messages[0]?.id ?? 0)) : [];
  page.shown = { id: here.id, messages: here.messages };
  if (before.length) page.older.set(here.id, Object.assign([...(page.older.get(here.id) ?? []), ...before], { done: page.older.get(here.id)?.done }));
  const older = page.older.get(here.id) ?? [];
  const first = older[0]?.id ?? here.messages[0]?.id ?? 0;
  const known = new Set(here.messages.map((said) => said.id));
  const all = [...older.filter((said) => !known.has(said.id)), ...here.messages];
  const rows = all.map((said) => row(said, all));
  if (first > 1 && here.messages.length >= 100 && page.older.get(here.id)?.done !== true) {
    rows.unshift(el("button", { type: "button", class: "gap", onclick: () => loadOlder(here.id, first) }, "what was said before"));
  }
  log.dataset.room = String(here.id);
  log.replaceChildren(...rows);
  if (!rows.length) log.append(el("p", { class: "empty" }, "Nothing was said here yet."));
  if (atEnd) log.scrollTop = log.scrollHeight;
  const writing = here.members.filter((member) => member.writing).map((member) => member.name);
  const thinking = page.world.agents.find((agent) => agent.id === page.world.thinking);
  $("hints").textContent = [
    writing.length ? `${writing.join(", ")} ${writing.length === 1 ? "is" : "are"} writing…` : "",
    thinking ? `${thinking.name} is thinking…` : "",
  ].filter(Boolean).join("  ");
}

async function loadOlder(id, before) {
  const found = await doing(api.roomMessages(page.name, id, before));
  if (!found) return;
  const all = [...found, ...(page.older.get(id) ?? [])];
  all.done = found.length === 0;
  page.older.set(id, all);
  drawRoom();
}

function row(said, all) {
  const answered = said.reply_to && all.find((other) => other.id === said.reply_to);
  const mine = said.by === ARCHITECT;
  const feel = said.by !== null && el("div", { class: Object.keys(said.reactions).length ? "feel felt" : "feel" },
    Object.entries(FEELINGS).map(([name, sign]) => {
      const who = said.reactions[name] ?? [];
      return el("button", { type: "button", class: who.length ? "has" : "", disabled: mine || who.includes("The Architect"), data: { feeling: name }, title: who.length ? who.join(", ") : name.replace("_", " "), "aria-label": `${name.replace("_", " ")}: ${who.length}`, onclick: () => wish({ wish: "react", message: said.id, reaction: name }) }, who.length ? `${sign} ${who.length}` : sign);
    }));
  return el("article", { class: `said${mine ? " mine" : ""}${said.by === null ? " system" : ""}`, data: { message: said.id } },
    el("h2", {}, el("b", {}, said.name), el("time", {}, time(said.at)), el("span", {}, `#${said.id}`)),
    said.reply_to ? el("div", { class: "answers" }, answered ? `↳ ${answered.name}: ${answered.text.slice(0, 80)}` : `↳ #${said.reply_to}`) : null,
    el("p", {}, said.text),
    feel);
}

function drawPanel() {
  const panel = $("panel");
  if (page.agent !== null) {
    const agent = page.world.agents.find((one) => one.id === page.agent);
    if (agent) return mind(panel, page, agent, { wish, close: () => { page.agent = null; drawPanel(); } });
    page.agent = null;
  }
  const here = room();
  if (!here) return panel.replaceChildren();
  // What somebody is sliding is not taken away.
  if (panel.querySelector("input[type=range]:active")) return;
  const held = panel.querySelector("input[type=range]:focus")?.dataset.of;
  panel.replaceChildren(
    el("h2", {}, "Who is here"),
    ...here.requests.map((request) => el("div", { class: "row request", data: { request: request.id } },
      el("p", {}, `${request.name} asks to come in, with the key “${request.key}”.`),
      el("div", { class: "bar" },
        el("button", { type: "button", onclick: () => wish({ wish: "grant", room: here.id, request: request.id }) }, "Let in"),
        el("button", { type: "button", onclick: () => wish({ wish: "deny", room: here.id, request: request.id }) }, "Refuse")))),
    ...here.members.map((member) => person(member, here)),
    here.keys.length ? el("p", { class: "quiet" }, `Keys: ${here.keys.join(", ")}`) : null,
    el("div", { class: "bar" }, el("button", { type: "button", id: "newcomer", onclick: newcomer }, "New agent here")));
  panel.replaceChildren(...[...panel.childNodes].filter((node) => node.textContent !== "null"));
  if (held) panel.querySelector(`input[data-of="${held}"]`)?.focus();
}

// What somebody has just set stands until it is so: a state from before does not take it back.
async function attend(values, key) {
  page.attends.set(key, values.value);
  await wish(values);
  if (page.attends.get(key) === values.value) page.attends.delete(key);
  drawPanel();
}

function person(member, here) {
  if (member.id === ARCHITECT) return el("div", { class: "agent" }, el("span", {}, "The Architect (you)"));
  const agent = page.world.agents.find((one) => one.id === member.id);
  if (!agent) return el("div", { class: "agent" }, member.name);
  const key = `${agent.id}-${here.id}`;
  const set = Number.parseInt(page.attends.get(key) ?? "", 10);
  const share = el("output", {}, set >= 0 ? `${set} %` : member.attention === "%*" ? `${number(member.share)} % (shared)` : `${number(member.share)} %`);
  const slider = el("input", { type: "range", min: "0", max: "100", step: "5", value: String(set >= 0 ? set : Math.round(member.share)), data: { of: key }, "aria-label": `How much ${agent.name} attends to this room`, oninput: (event) => { share.textContent = `${event.target.value} %`; }, onchange: (event) => attend({ wish: "attend", agent: agent.id, room: here.id, value: `${event.target.value}%` }, key) });
  return el("div", { class: "agent", data: { agent: agent.id } },
    el("button", { type: "button", title: `${agent.name}'s mind`, onclick: () => { page.agent = agent.id; drawPanel(); } }, pulse(agent), el("span", {}, agent.name), el("small", { class: "quiet" }, standing(agent))),
    el("label", {}, "attention", share, slider),
    member.attention === "%*" ? null : el("button", { type: "button", class: "link", onclick: () => wish({ wish: "attend", agent: agent.id, room: here.id, value: "%*" }) }, "share what others leave"));
}

function pulse(agent) {
  const beats = page.world.thinking === agent.id;
  return el("i", { class: beats ? "pulse beats" : "pulse", data: { pulse: agent.id }, "aria-hidden": "true" });
}

function standing(agent) {
  if (agent.paused) return "paused";
  if (agent.asleep) return `asleep until ${time(agent.asleep)}`;
  return `every ${number(agent.interval)} s, ${count(agent.beats, "beat")}`;
}

async function newcomer() {
  const name = await ask("Somebody new", { label: "Name", go: "Next" });
  if (!name) return;
  const prompt = await ask(`Who is ${name}?`, { label: "In a sentence or two", go: "Make" });
  if (prompt) wish({ wish: "create", name, prompt, room: page.room });
}

// What happened: the state is read again, once for however much came in the meantime.
let soon = null;
function heard(event) {
  if (event.type !== "world" || event.name !== page.name) return;
  if (event.failed) toast(event.failed, { wrong: true });
  if (event.beat !== null && event.beat !== undefined) {
    for (const sign of document.querySelectorAll(`[data-pulse="${event.beat}"]`)) {
      sign.classList.remove("once");
      requestAnimationFrame(() => sign.classList.add("once"));
    }
  }
  soon ??= setTimeout(() => { soon = null; refresh(); }, 150);
}

$("run").addEventListener("click", async () => take(await doing(api.pace(page.name, { paused: !page.world.paused }))));
$("step").addEventListener("click", async () => take(await doing(api.pace(page.name, { step: true }))));
$("speed").addEventListener("change", async (event) => take(await doing(api.pace(page.name, { speed: Number(event.target.value) }))));
$("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || page.room === null) return;
  const world = await doing(api.wish(page.name, { wish: "say", room: page.room, message: text }));
  // What was not said stays in the box.
  if (world) { $("message").value = ""; take(world); $("log").scrollTop = $("log").scrollHeight; }
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
});

if (["dark", "light"].includes(localStorage.getItem("theme"))) document.documentElement.dataset.theme = localStorage.getItem("theme");
page.name = decodeURIComponent(location.hash.slice(1)) || null;
listen(heard, (connected) => {
  $("away").hidden = connected;
  $("away").textContent = connected ? "" : "The server is away. What you write stays here; the page goes on by itself when the server is back.";
  if (connected) refresh();
});
// Who thinks is known only to the server; a look now and then is enough.
setInterval(() => { if (page.world && !page.world.paused && !document.hidden) refresh(); }, 2000);

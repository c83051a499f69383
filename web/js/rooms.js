// Rooms: a world as its people see it, and the Architect's hand on it. The server owns all state; this draws what it tells.

import { Away, api, listen } from "./api.js";
import { $, ask, count, el, grow, number, render, time, toast } from "./dom.js";
import { mind } from "./mind.js";

const FEELINGS = { thumbs_up: "👍", thumbs_down: "👎", brain: "🧠", heart: "❤️" };
const ARCHITECT = 0;
// As many messages as the server sends at a time, and how many are on the page while nobody looks at older ones.
const SENT = 100;
const KEPT = 300;

const page = {
  worlds: null,
  name: null,
  world: null,
  room: null,
  agent: null,
  connected: true,
  trouble: null,
  log: { room: null, messages: [], whole: false, stale: true },
  // The last that was seen in each room, shares that are being set, what is half written, what is answered, and what hearts did.
  seen: new Map(),
  attends: new Map(),
  drafts: new Map(),
  answering: null,
  thoughts: new Map(),
};

// Does something on the server; what goes wrong is told, and nothing else happens.
async function doing(what) {
  try {
    return await what;
  } catch (error) {
    toast(error.message, { wrong: true });
    return null;
  }
}

async function wish(values) {
  const world = await doing(api.wish(page.name, values));
  await take(world);
  return world !== null;
}

async function take(world) {
  if (!world || world.name !== page.name) return;
  if (world.left) toast("Left for the program that runs this world: it does it when nobody thinks there.");
  page.world = world;
  page.log.stale = true;
  await latest().catch(() => {});
  draw();
}

// The state is read again: by one at a time, and once more for however much happened meanwhile.
let reading = false;
let again = false;
async function refresh() {
  again = true;
  if (reading) return;
  reading = true;
  while (again) {
    again = false;
    await read();
    draw();
  }
  reading = false;
}

async function read() {
  try {
    page.worlds = await api.worlds();
    const names = page.worlds.map((world) => world.name);
    if (!names.includes(page.name)) {
      // It was ended, here or elsewhere.
      if (page.name !== null) toast(`There is no world ${page.name} any more.`);
      enter(names[0] ?? null);
      history.replaceState(null, "", page.name === null ? location.pathname : `#${encodeURIComponent(page.name)}`);
    }
    const { name } = page;
    const world = name === null ? null : await api.world(name);
    if (page.name !== name) {
      again = true;
      return;
    }
    page.world = world;
    await latest();
    page.trouble = null;
  } catch (error) {
    // What is there stays; that the server is away is said elsewhere.
    page.trouble = error instanceof Away ? null : error.message;
  }
}

// The latest messages of the room that is shown. Where so many came that some are missing between, it begins with them.
async function latest() {
  const here = room();
  if (!here) return;
  if (page.log.room !== here.id) page.log = { room: here.id, messages: [], whole: false, stale: true };
  const { log } = page;
  const known = log.messages.at(-1)?.id ?? 0;
  if (!log.stale && here.last === known) return;
  log.stale = false;
  let found;
  try {
    found = await api.roomMessages(page.name, here.id);
  } catch (error) {
    log.stale = true;
    throw error;
  }
  if (page.log !== log) return;
  if (found.length === SENT && found[0].id > known) Object.assign(log, { messages: found, whole: false });
  else merge(log, found);
  if (found.length < SENT) log.whole = true;
  if (log.messages.length > KEPT && atEnd()) Object.assign(log, { messages: log.messages.slice(-SENT), whole: false });
}

function merge(log, found) {
  const all = new Map([...log.messages, ...found].map((said) => [said.id, said]));
  log.messages = [...all.values()].sort((a, b) => a.id - b.id);
}

async function older() {
  const { log } = page;
  const found = await doing(api.roomMessages(page.name, log.room, log.messages[0]?.id));
  if (!found || page.log !== log) return;
  merge(log, found);
  log.whole = found.length < SENT;
  const box = $("log");
  const below = box.scrollHeight - box.scrollTop;
  drawRoom();
  box.scrollTop = box.scrollHeight - below;
}

async function react(said, reaction) {
  if (!(await wish({ wish: "react", message: said.id, reaction }))) return;
  const { log } = page;
  const found = await doing(api.roomMessages(page.name, log.room, said.id + 1));
  if (!found || page.log !== log) return;
  merge(
    log,
    found.filter((one) => one.id === said.id),
  );
  drawRoom();
}

function enter(name) {
  keepDraft();
  Object.assign(page, {
    name,
    world: null,
    room: null,
    agent: null,
    answering: null,
    trouble: null,
    log: { room: null, messages: [], whole: false, stale: true },
  });
  for (const map of [page.seen, page.attends, page.thoughts]) map.clear();
}

function show(name) {
  enter(name);
  location.hash = encodeURIComponent(name);
  draw();
  refresh();
}

function goTo(id) {
  keepDraft();
  page.room = id;
  const draft = page.drafts.get(`${page.name}/${id}`);
  $("message").value = draft?.text ?? "";
  page.answering = draft?.answering ?? null;
  grow($("message"));
  $("message").focus();
  draw();
  latest().then(draw, (error) => toast(error.message, { wrong: true }));
}

function keepDraft() {
  if (page.room !== null)
    page.drafts.set(`${page.name}/${page.room}`, { text: $("message").value, answering: page.answering });
}

function draw() {
  drawWorlds();
  drawTrouble();
  const { world } = page;
  for (const id of ["run", "step", "speed"]) $(id).disabled = !world || world.elsewhere;
  for (const id of ["message", "send"]) $(id).disabled = !world || (id === "send" && sending);
  $("clock").textContent = world ? time(world.now) : "";
  if (!world) return drawNothing();
  if (!world.rooms.some((room) => room.id === page.room)) {
    // Where most people are.
    const most = [...world.rooms].sort((a, b) => b.members.length - a.members.length)[0]?.id ?? null;
    if (most !== null) return goTo(most);
  }
  $("run").textContent = world.paused ? "Run" : "Pause";
  $("run").setAttribute("aria-pressed", String(!world.paused));
  const speeds = [...$("speed").options].map((option) => Number(option.value));
  if (speeds.includes(world.speed) && document.activeElement !== $("speed")) $("speed").value = String(world.speed);
  drawRooms();
  drawRoom();
  drawPanel();
}

function drawTrouble() {
  const told = !page.connected
    ? "The server is away. What you write stays here; the page goes on by itself when the server is back."
    : page.trouble
      ? page.world && `This may not be as it is now: ${page.trouble}`
      : page.world?.elsewhere &&
        "Another program runs this world: time is in its hands, and what you say is left for it until nobody thinks there.";
  $("away").hidden = !told;
  if ($("away").textContent !== (told || "")) $("away").textContent = told || "";
}

function drawNothing() {
  for (const id of ["rooms", "board", "panel", "hints", "answering"]) render($(id));
  const about = (...parts) => render($("log"), el("div", { class: "empty" }, parts));
  if (page.trouble)
    about(el("p", { role: "status" }, page.trouble), el("button", { type: "button", onclick: refresh }, "Try again"));
  else if (page.worlds?.length === 0) {
    about(
      el(
        "p",
        {},
        "A world is a place where many agents live: each has a room, remembers only what it writes down, and thinks on its own heartbeat.",
      ),
      el("button", { type: "button", id: "first", onclick: newWorld }, "Begin with five who live at a harbour"),
    );
  } else about(el("p", {}, "…"));
}

function drawWorlds() {
  render(
    $("tabs"),
    (page.worlds ?? []).map((world) =>
      el(
        "button",
        {
          type: "button",
          "aria-current": String(world.name === page.name),
          data: { key: world.name },
          onclick: () => show(world.name),
        },
        world.name,
      ),
    ),
    el("button", { type: "button", title: "A new world", "aria-label": "A new world", onclick: newWorld }, "+"),
  );
}

async function newWorld() {
  const file = el("input", { type: "file", id: "world-file", accept: ".toml,text/plain" });
  let name = page.worlds?.length ? "" : "harbour";
  let about = "It begins with five who live at a harbour, or with those of a file of yours.";
  // What was entered stays until it can be done.
  for (;;) {
    name = await ask("A new world", {
      label: "Name",
      value: name,
      go: "Begin",
      about,
      more: el("label", {}, "Your own world, as TOML (if you like) ", file),
    });
    if (!name) return;
    const known = () => page.worlds?.some((world) => world.name === name.trim());
    const before = known();
    try {
      const text = file.files.length ? await file.files[0].text() : undefined;
      show((await api.newWorld(name.trim(), text)).name);
      return;
    } catch (error) {
      about = error.message;
      // It may have been made, and its model be away.
      await refresh();
      if (known() && !before) {
        toast(about, { wrong: true });
        show(name.trim());
        return;
      }
    }
  }
}

async function endWorld() {
  const { name } = page;
  if (
    !(await ask(`End ${name} for good?`, {
      go: "End it",
      about: "Everybody who lives there, and all that was said there, will be gone.",
    }))
  )
    return;
  await doing(api.endWorld(name));
  refresh();
}

const room = () => page.world?.rooms.find((one) => one.id === page.room);

function drawRooms() {
  render(
    $("rooms"),
    page.world.rooms.map((one) => {
      if (one.id === page.room || !page.seen.has(one.id)) page.seen.set(one.id, one.last);
      const fresh = one.last > page.seen.get(one.id);
      return el(
        "button",
        {
          type: "button",
          data: { room: one.id, key: `room-${one.id}` },
          "aria-current": String(one.id === page.room),
          class: fresh ? "new" : "",
          onclick: () => goTo(one.id),
        },
        one.id === ARCHITECT ? "Your room" : `${one.owner}'s room`,
        one.requests.length ? " 🔔" : "",
        el("small", {}, one.billboard ?? count(one.members.length, "member")),
      );
    }),
    el(
      "button",
      { type: "button", class: "link", id: "end", data: { key: "end" }, onclick: endWorld },
      "End this world…",
    ),
  );
}

const cut = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;

function drawRoom() {
  const here = room();
  if (!here) return;
  const inside = here.members.some((member) => member.id === ARCHITECT);
  render(
    $("board"),
    el("b", {}, here.billboard ? `📌 ${here.billboard}` : `${here.owner}'s room`),
    el("span", { class: "quiet" }, `${here.wpm} words a minute`),
    inside
      ? el(
          "button",
          {
            type: "button",
            id: "leave",
            data: { key: "leave" },
            onclick: () => wish({ wish: "leave", room: here.id }),
          },
          "Leave",
        )
      : el(
          "button",
          { type: "button", id: "join", data: { key: "join" }, onclick: () => wish({ wish: "join", room: here.id }) },
          "Join",
        ),
  );
  const box = $("log");
  const follow = atEnd() || box.dataset.room !== String(here.id);
  const { messages, whole } = page.log.room === here.id ? page.log : { messages: [], whole: false };
  const byId = new Map(messages.map((said) => [said.id, said]));
  const rows = messages.map((said) => row(said, byId));
  if (messages.length && !whole)
    rows.unshift(
      el("button", { type: "button", class: "gap", data: { key: "older" }, onclick: older }, "what was said before"),
    );
  if (!rows.length)
    rows.push(el("p", { class: "empty", data: { key: "nothing" } }, here.last ? "…" : "Nothing was said here yet."));
  // In another room nothing is news.
  if (box.dataset.room !== String(here.id)) box.replaceChildren();
  box.dataset.room = String(here.id);
  render(box, rows);
  if (follow) box.scrollTop = box.scrollHeight;
  const writing = here.members.filter((member) => member.writing).map((member) => member.name);
  const thinking = page.world.agents.find((agent) => agent.id === page.world.thinking);
  $("hints").textContent = [
    writing.length ? `${writing.join(", ")} ${writing.length === 1 ? "is" : "are"} writing…` : "",
    thinking ? `${thinking.name} is thinking…` : "",
  ]
    .filter(Boolean)
    .join("  ");
  const { answering } = page;
  $("answering").hidden = !answering;
  render(
    $("answering"),
    answering && [
      el("span", {}, `↳ ${answering.name}: ${cut(answering.text)}`),
      el(
        "button",
        {
          type: "button",
          "aria-label": "Answer nothing in particular",
          onclick: () => {
            page.answering = null;
            drawRoom();
          },
        },
        "×",
      ),
    ],
  );
}

function row(said, byId) {
  const answered = said.reply_to && byId.get(said.reply_to);
  const mine = said.by === ARCHITECT;
  const feel =
    said.by !== null &&
    el(
      "div",
      { class: Object.keys(said.reactions).length ? "feel felt" : "feel" },
      Object.entries(FEELINGS).map(([name, sign]) => {
        const who = said.reactions[name] ?? [];
        return el(
          "button",
          {
            type: "button",
            class: who.length ? "has" : "",
            disabled: mine || who.includes("The Architect"),
            data: { feeling: name },
            title: who.length ? who.join(", ") : name.replace("_", " "),
            "aria-label": `${name.replace("_", " ")}: ${who.length}`,
            onclick: () => react(said, name),
          },
          who.length ? `${sign} ${who.length}` : sign,
        );
      }),
      el(
        "button",
        {
          type: "button",
          class: "reply",
          "aria-label": `Answer ${said.name}`,
          onclick: () => {
            page.answering = said;
            drawRoom();
            $("message").focus();
          },
        },
        "↳",
      ),
    );
  return el(
    "article",
    {
      class: `said${mine ? " mine" : ""}${said.by === null ? " system" : ""}`,
      data: { message: said.id, key: said.id },
    },
    el("h2", {}, el("b", {}, said.name), el("time", {}, time(said.at)), el("span", {}, `#${said.id}`)),
    said.reply_to
      ? el("div", { class: "answers" }, answered ? `↳ ${answered.name}: ${cut(answered.text)}` : `↳ #${said.reply_to}`)
      : null,
    el("p", {}, said.text),
    feel,
  );
}

function drawPanel() {
  const panel = $("panel");
  if (page.agent !== null) {
    const agent = page.world.agents.find((one) => one.id === page.agent);
    if (agent)
      return mind(panel, page, agent, {
        wish,
        think,
        pulse,
        close: () => {
          page.agent = null;
          drawPanel();
        },
      });
    page.agent = null;
  }
  const here = room();
  if (!here) return render(panel);
  render(
    panel,
    el(
      "div",
      { data: { key: "people" } },
      el("h2", {}, "Who is here"),
      here.requests.map((request) =>
        el(
          "div",
          { class: "row request", data: { request: request.id, key: `request-${request.id}` } },
          el("p", {}, `${request.name} asks to come in, with the key “${request.key}”.`),
          el(
            "div",
            { class: "bar" },
            el(
              "button",
              { type: "button", onclick: () => wish({ wish: "grant", room: here.id, request: request.id }) },
              "Let in",
            ),
            el(
              "button",
              { type: "button", onclick: () => wish({ wish: "deny", room: here.id, request: request.id }) },
              "Refuse",
            ),
          ),
        ),
      ),
      here.members.map((member) => person(member, here)),
      here.keys.length ? el("p", { class: "quiet", data: { key: "keys" } }, `Keys: ${here.keys.join(", ")}`) : null,
      el(
        "div",
        { class: "bar", data: { key: "newcomer" } },
        el("button", { type: "button", id: "newcomer", onclick: newcomer }, "New agent here"),
      ),
    ),
  );
}

// What somebody has just set stands until it is so: a state from before does not take it back.
async function attend(values, key) {
  page.attends.set(key, values.value);
  await wish(values);
  if (page.attends.get(key) === values.value) page.attends.delete(key);
  draw();
}

// Somebody thinks at once, also where time stands still.
async function think(agent) {
  if ((await wish({ wish: "wake", agent: agent.id })) && page.world.open && page.world.paused)
    take(await doing(api.pace(page.name, { step: true })));
}

function person(member, here) {
  const key = `${member.id}-${here.id}`;
  if (member.id === ARCHITECT)
    return el("div", { class: "agent", data: { key } }, el("span", {}, "The Architect (you)"));
  const agent = page.world.agents.find((one) => one.id === member.id);
  if (!agent) return el("div", { class: "agent", data: { key } }, member.name);
  /** @type {HTMLInputElement | null} */
  const held = document.querySelector(`input[data-of="${key}"]:active`);
  const set = Number.parseInt(held?.value ?? page.attends.get(key) ?? "", 10);
  const share =
    set >= 0
      ? `${set} %`
      : member.attention === "%*"
        ? `${number(member.share)} % (shared)`
        : `${number(member.share)} %`;
  const slider = el("input", {
    type: "range",
    min: "0",
    max: "100",
    step: "5",
    value: String(set >= 0 ? set : Math.round(member.share)),
    data: { of: key },
    "aria-label": `How much ${agent.name} attends to this room`,
    oninput: (event) => {
      event.target.previousElementSibling.textContent = `${event.target.value} %`;
    },
    onchange: (event) =>
      attend({ wish: "attend", agent: agent.id, room: here.id, value: `${event.target.value}%` }, key),
  });
  return el(
    "div",
    { class: "agent", data: { agent: agent.id, key } },
    el(
      "button",
      {
        type: "button",
        title: `${agent.name}'s mind`,
        onclick: () => {
          page.agent = agent.id;
          drawPanel();
        },
      },
      pulse(agent),
      el("span", {}, agent.name),
      el("small", { class: "quiet" }, standing(agent)),
    ),
    el("label", {}, "attention", el("output", {}, share), slider),
    member.attention === "%*"
      ? null
      : el(
          "button",
          {
            type: "button",
            class: "link",
            onclick: () => wish({ wish: "attend", agent: agent.id, room: here.id, value: "%*" }),
          },
          "share what others leave",
        ),
  );
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
let refreshTimer = null;
function heard(event) {
  const missed = event.type === "missed";
  if (event.type !== "world" && !missed) return;
  if (!missed && event.name !== page.name && !event.listed) return;
  if (event.failed) toast(event.failed, { wrong: true });
  if (event.thought) page.thoughts.set(event.beat, event.thought);
  if (event.beat !== null && event.beat !== undefined) beat(event.beat);
  if (missed || event.rooms.includes(page.log.room)) page.log.stale = true;
  if (refreshTimer) return;
  refreshTimer = setTimeout(() => {
    refreshTimer = null;
    refresh();
  }, 150);
}

function beat(id) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const shape = [
    { transform: "scale(1)" },
    { transform: "scale(1.6)", background: "var(--good)" },
    { transform: "scale(1)" },
  ];
  for (const sign of document.querySelectorAll(`[data-pulse="${id}"]`))
    sign.animate(shape, { duration: 600, iterations: 2 });
}

let sending = false;
const pace = async (values) => take(await doing(api.pace(page.name, values)));

async function send() {
  const box = $("message");
  const { name, room: id, answering } = page;
  const text = box.value;
  if (!text.trim() || id === null || sending) return;
  $("send").disabled = sending = true;
  const world = await doing(api.wish(name, { wish: "say", room: id, message: text.trim(), reply_to: answering?.id }));
  $("send").disabled = sending = false;
  // What was not said stays in the box, and so does what was written since.
  if (!world) return;
  page.drafts.delete(`${name}/${id}`);
  if (page.name === name && page.room === id) {
    if (box.value === text) box.value = "";
    if (page.answering === answering) page.answering = null;
    grow(box);
  }
  await take(world);
  $("log").scrollTop = $("log").scrollHeight;
}

$("run").addEventListener("click", () => pace({ paused: !page.world.paused }));
$("step").addEventListener("click", () => pace({ step: true }));
$("speed").addEventListener("change", (event) => pace({ speed: Number(event.target.value) }));
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("input", () => grow($("message")));
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
addEventListener("hashchange", () => {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name && name !== page.name) show(name);
});

if (["dark", "light"].includes(localStorage.getItem("theme")))
  document.documentElement.dataset.theme = localStorage.getItem("theme");
page.name = decodeURIComponent(location.hash.slice(1)) || null;
listen(heard, (connected) => {
  page.connected = connected;
  page.log.stale = true;
  drawTrouble();
  if (connected) refresh();
});
// Who thinks is known only to the server, and what another program does in a world only to the store: a look now and then is enough.
let looks = 0;
setInterval(() => {
  looks += 1;
  if (document.hidden || !page.connected) return;
  if (page.world?.paused === false || page.world?.elsewhere || page.trouble || looks % 3 === 0) refresh();
}, 2000);

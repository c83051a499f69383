// The page of a world: its rooms, messages and agents, and the user's commands. The server owns all state; this draws it.

import { openAgentForm } from "./agent_form.js";
import { api, ServerUnreachable, subscribe } from "./api.js";
import { $, ask, autoGrow, count, el, render, time, toast } from "./dom.js";
import { membersPanel } from "./members.js";
import { showMind } from "./mind.js";

const REACTIONS = { thumbs_up: "👍", thumbs_down: "👎", brain: "🧠", heart: "❤️" };
const ARCHITECT = 0;
// Messages in one response, and messages that are drawn at most unless the user reads older ones.
const PAGE_SIZE = 100;
const MAX_DRAWN = 300;

const page = {
  worlds: null,
  name: null,
  world: null,
  room: null,
  agent: null,
  connected: true,
  loadError: null,
  log: { room: null, messages: [], complete: false, stale: true },
  lastRead: new Map(), // the last message that was drawn in each room
  pendingAttention: new Map(), // attention shares that were set and not yet confirmed
  drafts: new Map(),
  replyTo: null,
  usage: new Map(), // tokens of the last heartbeat of each agent
};

// Awaits a request; shows its error and returns null if it fails.
async function attempt(request) {
  try {
    return await request;
  } catch (error) {
    toast(error.message, { error: true });
    return null;
  }
}

async function runCommand(command) {
  const world = await attempt(api.worldCommand(page.name, command));
  await useWorld(world);
  return world !== null;
}

async function useWorld(world) {
  if (!world || world.name !== page.name) return;
  if (world.queued)
    toast("Queued for the program that runs this world: it runs the command when no agent is thinking.");
  page.world = world;
  page.log.stale = true;
  await loadLatest().catch(() => {});
  draw();
}

// Loads the world. Calls during a load cause one more load, however many they are.
let loading = false;
let loadAgain = false;
async function refresh() {
  loadAgain = true;
  if (loading) return;
  loading = true;
  while (loadAgain) {
    loadAgain = false;
    await load();
    draw();
  }
  loading = false;
}

async function load() {
  try {
    page.worlds = await api.worlds();
    const names = page.worlds.map((world) => world.name);
    if (!names.includes(page.name)) {
      // It was deleted, here or elsewhere.
      if (page.name !== null) toast(`The world ${page.name} was deleted.`);
      selectWorld(names[0] ?? null);
      history.replaceState(null, "", page.name === null ? location.pathname : `#${encodeURIComponent(page.name)}`);
    }
    const { name } = page;
    const world = name === null ? null : await api.world(name);
    if (page.name !== name) {
      loadAgain = true;
      return;
    }
    page.world = world;
    await loadLatest();
    page.loadError = null;
  } catch (error) {
    // The world that is drawn stays; `connected` reports a server that cannot be reached.
    page.loadError = error instanceof ServerUnreachable ? null : error.message;
  }
}

// Loads the latest messages of the open room. If messages between those and the drawn ones are missing, the log starts over.
async function loadLatest() {
  const room = openRoom();
  if (!room) return;
  if (page.log.room !== room.id) page.log = { room: room.id, messages: [], complete: false, stale: true };
  const { log } = page;
  const lastDrawn = log.messages.at(-1)?.id ?? 0;
  if (!log.stale && room.last_message === lastDrawn) return;
  log.stale = false;
  let found;
  try {
    found = await api.roomMessages(page.name, room.id);
  } catch (error) {
    log.stale = true;
    throw error;
  }
  if (page.log !== log) return;
  if (found.length === PAGE_SIZE && found[0].id > lastDrawn) Object.assign(log, { messages: found, complete: false });
  else mergeMessages(log, found);
  if (found.length < PAGE_SIZE) log.complete = true;
  if (log.messages.length > MAX_DRAWN && atEnd())
    Object.assign(log, { messages: log.messages.slice(-PAGE_SIZE), complete: false });
}

function mergeMessages(log, found) {
  const all = new Map([...log.messages, ...found].map((message) => [message.id, message]));
  log.messages = [...all.values()].sort((a, b) => a.id - b.id);
}

async function loadOlder() {
  const { log } = page;
  const found = await attempt(api.roomMessages(page.name, log.room, log.messages[0]?.id));
  if (!found || page.log !== log) return;
  mergeMessages(log, found);
  log.complete = found.length < PAGE_SIZE;
  const box = $("log");
  const below = box.scrollHeight - box.scrollTop;
  drawRoom();
  box.scrollTop = box.scrollHeight - below;
}

async function react(message, reaction) {
  if (!(await runCommand({ command: "react", message: message.id, reaction }))) return;
  const { log } = page;
  const found = await attempt(api.roomMessages(page.name, log.room, message.id + 1));
  if (!found || page.log !== log) return;
  mergeMessages(
    log,
    found.filter((other) => other.id === message.id),
  );
  drawRoom();
}

function selectWorld(name) {
  saveDraft();
  Object.assign(page, {
    name,
    world: null,
    room: null,
    agent: null,
    replyTo: null,
    loadError: null,
    log: { room: null, messages: [], complete: false, stale: true },
  });
  for (const map of [page.lastRead, page.pendingAttention, page.usage]) map.clear();
}

function openWorld(name) {
  selectWorld(name);
  location.hash = encodeURIComponent(name);
  draw();
  refresh();
}

function goToRoom(id) {
  saveDraft();
  page.room = id;
  const draft = page.drafts.get(`${page.name}/${id}`);
  $("message").value = draft?.text ?? "";
  page.replyTo = draft?.replyTo ?? null;
  autoGrow($("message"));
  $("message").focus();
  draw();
  loadLatest().then(draw, (error) => toast(error.message, { error: true }));
}

function saveDraft() {
  if (page.room !== null)
    page.drafts.set(`${page.name}/${page.room}`, { text: $("message").value, replyTo: page.replyTo });
}

function draw() {
  drawWorlds();
  drawBanner();
  const { world } = page;
  for (const id of ["run", "step", "speed"]) $(id).disabled = !world || world.runs_elsewhere;
  for (const id of ["message", "send"]) $(id).disabled = !world || (id === "send" && sending);
  $("clock").textContent = world ? time(world.now) : "";
  if (!world) return drawNoWorld();
  if (!world.rooms.some((room) => room.id === page.room)) {
    // The room with the most members.
    const busiest = [...world.rooms].sort((a, b) => b.members.length - a.members.length)[0]?.id ?? null;
    if (busiest !== null) return goToRoom(busiest);
  }
  $("run").textContent = world.paused ? "Run" : "Pause";
  $("run").setAttribute("aria-pressed", String(!world.paused));
  const speeds = [...$("speed").options].map((option) => Number(option.value));
  if (speeds.includes(world.speed) && document.activeElement !== $("speed")) $("speed").value = String(world.speed);
  drawRooms();
  drawRoom();
  drawPanel();
}

function drawBanner() {
  const text = !page.connected
    ? "Server unreachable; reconnecting… Your draft is kept on this page."
    : page.loadError
      ? page.world && `This world may have changed since it was loaded: ${page.loadError}`
      : page.world?.runs_elsewhere &&
        "Another program runs this world: it controls the clock, and your commands are queued until no agent is thinking.";
  $("offline").hidden = !text;
  if ($("offline").textContent !== (text || "")) $("offline").textContent = text || "";
}

function drawNoWorld() {
  for (const id of ["rooms", "billboard", "panel", "hints", "replying"]) render($(id));
  const show = (...parts) => render($("log"), el("div", { class: "empty" }, parts));
  if (page.loadError)
    show(el("p", { role: "status" }, page.loadError), el("button", { type: "button", onclick: refresh }, "Try again"));
  else if (page.worlds?.length === 0) {
    show(
      el(
        "p",
        {},
        "A world has rooms and agents. Each agent has a room of its own, remembers only what it writes down, and thinks at its own interval.",
      ),
      el("button", { type: "button", id: "create-example", onclick: newWorld }, "Create example world"),
    );
  } else show(el("p", {}, "…"));
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
          onclick: () => openWorld(world.name),
        },
        world.name,
      ),
    ),
    el("button", { type: "button", title: "New world", "aria-label": "New world", onclick: newWorld }, "+"),
  );
}

async function newWorld() {
  const file = el("input", { type: "file", id: "world-file", accept: ".toml,text/plain" });
  let name = page.worlds?.length ? "" : "harbour";
  let about = "Without a file, the example world is created: five agents at a harbour.";
  // The dialog opens again with the same name until the world can be created.
  for (;;) {
    name = await ask("New world", {
      label: "Name",
      value: name,
      confirm: "Create",
      about,
      more: el("label", {}, "World file, TOML (optional) ", file),
    });
    if (!name) return;
    const exists = () => page.worlds?.some((world) => world.name === name.trim());
    const existed = exists();
    try {
      const text = file.files.length ? await file.files[0].text() : undefined;
      openWorld((await api.createWorld(name.trim(), text)).name);
      return;
    } catch (error) {
      about = error.message;
      // It may have been created although its model cannot be reached.
      await refresh();
      if (exists() && !existed) {
        toast(about, { error: true });
        openWorld(name.trim());
        return;
      }
    }
  }
}

async function deleteWorld() {
  const { name } = page;
  if (
    !(await ask(`Delete ${name} for good?`, {
      confirm: "Delete",
      about: "All of its agents and messages are deleted.",
    }))
  )
    return;
  await attempt(api.deleteWorld(name));
  refresh();
}

const openRoom = () => page.world?.rooms.find((room) => room.id === page.room);

function drawRooms() {
  render(
    $("rooms"),
    page.world.rooms.map((room) => {
      if (room.id === page.room || !page.lastRead.has(room.id)) page.lastRead.set(room.id, room.last_message);
      const unread = room.last_message > page.lastRead.get(room.id);
      return el(
        "button",
        {
          type: "button",
          data: { room: room.id, key: `room-${room.id}` },
          "aria-current": String(room.id === page.room),
          class: unread ? "new" : "",
          onclick: () => goToRoom(room.id),
        },
        room.id === ARCHITECT ? "Your room" : `${room.owner}'s room`,
        room.requests.length ? " 🔔" : "",
        el("small", {}, room.billboard ?? count(room.members.length, "member")),
      );
    }),
    el(
      "button",
      { type: "button", class: "link", id: "delete-world", data: { key: "delete-world" }, onclick: deleteWorld },
      "Delete this world…",
    ),
  );
}

const truncate = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;

function drawRoom() {
  const room = openRoom();
  if (!room) return;
  const joined = room.members.some((member) => member.id === ARCHITECT);
  render(
    $("billboard"),
    el("b", {}, room.billboard ? `📌 ${room.billboard}` : `${room.owner}'s room`),
    el("span", { class: "quiet" }, `${room.wpm} words per minute`),
    joined
      ? el(
          "button",
          {
            type: "button",
            id: "leave",
            data: { key: "leave" },
            onclick: () => runCommand({ command: "leave", room: room.id }),
          },
          "Leave",
        )
      : el(
          "button",
          {
            type: "button",
            id: "join",
            data: { key: "join" },
            onclick: () => runCommand({ command: "join", room: room.id }),
          },
          "Join",
        ),
  );
  const box = $("log");
  const follow = atEnd() || box.dataset.room !== String(room.id);
  const { messages, complete } = page.log.room === room.id ? page.log : { messages: [], complete: false };
  const byId = new Map(messages.map((message) => [message.id, message]));
  const rows = messages.map((message) => messageRow(message, byId));
  if (messages.length && !complete)
    rows.unshift(
      el("button", { type: "button", class: "gap", data: { key: "older" }, onclick: loadOlder }, "Older messages"),
    );
  if (!rows.length)
    rows.push(el("p", { class: "empty", data: { key: "nothing" } }, room.last_message ? "…" : "No messages yet."));
  // The log announces only new messages of the same room to screen readers.
  if (box.dataset.room !== String(room.id)) box.replaceChildren();
  box.dataset.room = String(room.id);
  render(box, rows);
  if (follow) box.scrollTop = box.scrollHeight;
  const writing = room.members.filter((member) => member.writing).map((member) => member.name);
  const thinking = page.world.agents.find((agent) => agent.id === page.world.thinking);
  $("hints").textContent = [
    writing.length ? `${writing.join(", ")} ${writing.length === 1 ? "is" : "are"} writing…` : "",
    thinking ? `${thinking.name} is thinking…` : "",
    page.world.paused && !page.world.runs_elsewhere
      ? "Time stands still: nobody thinks or answers. “Run” starts it, “Step” runs one heartbeat."
      : "",
  ]
    .filter(Boolean)
    .join("  ");
  const { replyTo } = page;
  $("replying").hidden = !replyTo;
  render(
    $("replying"),
    replyTo && [
      el("span", {}, `↳ ${replyTo.name}: ${truncate(replyTo.text)}`),
      el(
        "button",
        {
          type: "button",
          "aria-label": "Cancel the reply",
          onclick: () => {
            page.replyTo = null;
            drawRoom();
          },
        },
        "×",
      ),
    ],
  );
}

function messageRow(message, byId) {
  const original = message.reply_to && byId.get(message.reply_to);
  const mine = message.by === ARCHITECT;
  const reactions =
    message.by !== null &&
    el(
      "div",
      { class: Object.keys(message.reactions).length ? "reactions any" : "reactions" },
      Object.entries(REACTIONS).map(([name, sign]) => {
        const who = message.reactions[name] ?? [];
        return el(
          "button",
          {
            type: "button",
            class: who.length ? "has" : "",
            disabled: mine || who.includes("The Architect"),
            data: { reaction: name },
            title: who.length ? who.join(", ") : name.replace("_", " "),
            "aria-label": `${name.replace("_", " ")}: ${who.length}`,
            onclick: () => react(message, name),
          },
          who.length ? `${sign} ${who.length}` : sign,
        );
      }),
      el(
        "button",
        {
          type: "button",
          class: "reply",
          "aria-label": `Reply to ${message.name}`,
          onclick: () => {
            page.replyTo = message;
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
      class: `message${mine ? " mine" : ""}${message.by === null ? " system" : ""}`,
      data: { message: message.id, key: message.id },
    },
    el("h2", {}, el("b", {}, message.name), el("time", {}, time(message.at)), el("span", {}, `#${message.id}`)),
    message.reply_to
      ? el(
          "div",
          { class: "reply-to" },
          original ? `↳ ${original.name}: ${truncate(original.text)}` : `↳ #${message.reply_to}`,
        )
      : null,
    el("p", {}, message.text),
    reactions,
  );
}

function drawPanel() {
  const panel = $("panel");
  if (page.agent !== null) {
    const agent = page.world.agents.find((other) => other.id === page.agent);
    if (agent)
      return showMind(panel, page, agent, {
        runCommand,
        editAgent,
        wake,
        close: () => openAgent(null),
      });
    page.agent = null;
  }
  const room = openRoom();
  if (!room) return render(panel);
  render(panel, membersPanel(page, room, { runCommand, editAgent, setAttention, openAgent }));
}

function openAgent(id) {
  page.agent = id;
  drawPanel();
}

// A share that was just set is drawn until the server confirms it: an older state must not reset the slider.
async function setAttention(command, key) {
  page.pendingAttention.set(key, command.value);
  await runCommand(command);
  if (page.pendingAttention.get(key) === command.value) page.pendingAttention.delete(key);
  draw();
}

// The agent thinks at once, even if the world is paused.
async function wake(agent) {
  if ((await runCommand({ command: "wake", agent: agent.id })) && page.world.open && page.world.paused)
    useWorld(await attempt(api.setClock(page.name, { step: true })));
}

// Creates an agent in the open room, or changes one.
function editAgent(agent = null) {
  openAgentForm(page.world, page.room, agent, async (command) => {
    if (!command) return null;
    try {
      await useWorld(await api.worldCommand(page.name, command));
      return null;
    } catch (error) {
      return error.message;
    }
  });
}

// Events are collected for 150 ms; then the world is loaded once.
let refreshTimer = null;
function handleEvent(event) {
  const missed = event.type === "missed";
  if (event.type !== "world_changed" && !missed) return;
  if (!missed && event.name !== page.name && !event.worlds_changed) return;
  if (event.error) toast(event.error, { error: true });
  if (event.usage) page.usage.set(event.beat, event.usage);
  if (event.beat !== null && event.beat !== undefined) animatePulse(event.beat);
  if (missed || event.rooms.includes(page.log.room)) page.log.stale = true;
  if (refreshTimer) return;
  refreshTimer = setTimeout(() => {
    refreshTimer = null;
    refresh();
  }, 150);
}

function animatePulse(id) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const keyframes = [
    { transform: "scale(1)" },
    { transform: "scale(1.6)", background: "var(--good)" },
    { transform: "scale(1)" },
  ];
  for (const dot of document.querySelectorAll(`[data-pulse="${id}"]`))
    dot.animate(keyframes, { duration: 600, iterations: 2 });
}

let sending = false;
const setClock = async (values) => useWorld(await attempt(api.setClock(page.name, values)));

async function send() {
  const box = $("message");
  const { name, room: id, replyTo } = page;
  const text = box.value;
  if (!text.trim() || id === null || sending) return;
  $("send").disabled = sending = true;
  const world = await attempt(
    api.worldCommand(name, { command: "say", room: id, message: text.trim(), reply_to: replyTo?.id }),
  );
  $("send").disabled = sending = false;
  // After an error the text stays in the box; so does text that was typed meanwhile.
  if (!world) return;
  page.drafts.delete(`${name}/${id}`);
  if (page.name === name && page.room === id) {
    if (box.value === text) box.value = "";
    if (page.replyTo === replyTo) page.replyTo = null;
    autoGrow(box);
  }
  await useWorld(world);
  $("log").scrollTop = $("log").scrollHeight;
}

$("run").addEventListener("click", () => setClock({ paused: !page.world.paused }));
$("step").addEventListener("click", () => setClock({ step: true }));
$("speed").addEventListener("change", (event) => setClock({ speed: Number(event.target.value) }));
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("input", () => autoGrow($("message")));
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
addEventListener("hashchange", () => {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name && name !== page.name) openWorld(name);
});

if (["dark", "light"].includes(localStorage.getItem("theme")))
  document.documentElement.dataset.theme = localStorage.getItem("theme");
page.name = decodeURIComponent(location.hash.slice(1)) || null;
subscribe(handleEvent, (connected) => {
  page.connected = connected;
  page.log.stale = true;
  drawBanner();
  if (connected) refresh();
});
// No event says which agent is thinking, or what another program changes in the world, so the page also polls.
let polls = 0;
setInterval(() => {
  polls += 1;
  if (document.hidden || !page.connected) return;
  if (page.world?.paused === false || page.world?.runs_elsewhere || page.loadError || polls % 3 === 0) refresh();
}, 2000);

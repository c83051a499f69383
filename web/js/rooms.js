// The page of rooms: starts the parts, and sends the user's messages. The server owns all state; rooms_store.js has a copy.

import { openAgentForm } from "./agent_form.js";
import { api, subscribe } from "./api.js";
import { applyAppearance } from "./appearance.js";
import { on } from "./bus.js";
import { $, autoGrow, render, time } from "./dom.js";
import { membersPanel } from "./members.js";
import { showMind } from "./mind.js";
import { atEnd, drawOlder, drawRoom } from "./room_log.js";
import { drawBanner, drawNoWorld, drawRooms, drawWorlds } from "./rooms_list.js";
import { defaultRoom, openRoom } from "./rooms_reducers.js";
import * as store from "./rooms_store.js";

const { rooms } = store;

function draw() {
  drawWorlds();
  drawBanner();
  const { world } = rooms;
  for (const id of ["run", "step", "speed"]) $(id).disabled = !world || world.runs_elsewhere;
  for (const id of ["message", "send"]) $(id).disabled = !world || (id === "send" && sending);
  $("clock").textContent = world ? time(world.now) : "";
  if (!world) return drawNoWorld();
  const room = defaultRoom(rooms);
  if (room !== rooms.room && room !== null) return store.goToRoom(room);
  $("run").textContent = world.paused ? "Run" : "Pause";
  $("run").setAttribute("aria-pressed", String(!world.paused));
  const speeds = [...$("speed").options].map((option) => Number(option.value));
  if (speeds.includes(world.speed) && document.activeElement !== $("speed")) $("speed").value = String(world.speed);
  drawRooms();
  drawRoom();
  drawPanel();
}

function drawPanel() {
  const panel = $("panel");
  const { runCommand, setAttention, openAgent, wake } = store;
  const agent = rooms.world.agents.find((other) => other.id === rooms.agent);
  if (agent) return showMind(panel, rooms, agent, { runCommand, editAgent, wake, close: () => openAgent(null) });
  const room = openRoom(rooms);
  if (!room) return render(panel);
  render(panel, membersPanel(rooms, room, { runCommand, editAgent, setAttention, openAgent }));
}

// Creates an agent in the open room, or changes one.
function editAgent(agent = null) {
  openAgentForm(rooms.world, rooms.room, agent, async (command) => {
    if (!command) return null;
    try {
      await store.useWorld(await api.worldCommand(rooms.name, command));
      return null;
    } catch (error) {
      return error.message;
    }
  });
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

// ---- the message box

const draftKey = () => `${rooms.name}/${rooms.room}`;

function saveDraft() {
  if (rooms.room !== null) rooms.drafts.set(draftKey(), { text: $("message").value, replyTo: rooms.replyTo });
}

function loadDraft() {
  const draft = rooms.drafts.get(draftKey());
  $("message").value = draft?.text ?? "";
  rooms.replyTo = draft?.replyTo ?? null;
  autoGrow($("message"));
  $("message").focus();
}

let sending = false;
async function send() {
  const box = $("message");
  const { name, room: id, replyTo } = rooms;
  const text = box.value;
  if (!text.trim() || id === null || sending) return;
  $("send").disabled = sending = true;
  const world = await store.attempt(
    api.worldCommand(name, { command: "say", room: id, message: text.trim(), reply_to: replyTo?.id }),
  );
  $("send").disabled = sending = false;
  // After an error the text stays in the box; so does text that was typed meanwhile.
  if (!world) return;
  rooms.drafts.delete(`${name}/${id}`);
  if (rooms.name === name && rooms.room === id) {
    if (box.value === text) box.value = "";
    if (rooms.replyTo === replyTo) rooms.replyTo = null;
    autoGrow(box);
  }
  await store.useWorld(world);
  $("log").scrollTop = $("log").scrollHeight;
}

// ---- start

applyAppearance();
store.init(atEnd);
on("rooms", draw);
on("older", drawOlder);
on("leave", saveDraft);
on("room", loadDraft);
on("beat", animatePulse);
$("run").addEventListener("click", () => store.setClock({ paused: !rooms.world.paused }));
$("step").addEventListener("click", () => store.setClock({ step: true }));
$("speed").addEventListener("change", (event) => store.setClock({ speed: Number(event.target.value) }));
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
  if (name && name !== rooms.name) store.openWorld(name);
});
subscribe(store.handleEvent, store.setConnected);
store.followOtherProgram();

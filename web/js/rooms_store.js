// The store of the page of rooms. Only this module changes the state, with the functions of rooms_reducers.js, from the server's
// responses and events; the other modules draw it.

import { api, ServerUnreachable } from "./api.js";
import { emit } from "./bus.js";
import { toast } from "./dom.js";
import {
  applyLatest,
  applyMessages,
  applyRoomsEvent,
  applyWorld,
  emptyRooms,
  logToLoad,
  PAGE_SIZE,
  selectWorld,
} from "./rooms_reducers.js";

export const rooms = emptyRooms();

let isAtEnd = () => true; // whether the reader is at the end of the log

export function init(atEnd) {
  isAtEnd = atEnd;
  rooms.name = decodeURIComponent(location.hash.slice(1)) || null;
}

/** Awaits a request; shows its error and returns null if it fails. */
export async function attempt(request) {
  try {
    return await request;
  } catch (error) {
    toast(error.message, { error: true });
    return null;
  }
}

/** Runs a command and returns the world as it is after it; null if the command failed. */
export async function runCommand(command) {
  const world = await attempt(api.worldCommand(rooms.name, command));
  await useWorld(world);
  return world;
}

/** Takes a world that a command has returned. */
export async function useWorld(world) {
  if (!applyWorld(rooms, world)) return;
  if (world.queued)
    toast("Queued for the program that runs this world: it runs the command when no agent is thinking.");
  await loadLatest().catch(() => {});
  emit("rooms");
}

export const setClock = async (values) => useWorld(await attempt(api.setClock(rooms.name, values)));

// Loads the world. Calls during a load cause one more load, however many they are.
let loading = false;
let loadAgain = false;
export async function refresh() {
  loadAgain = true;
  if (loading) return;
  loading = true;
  while (loadAgain) {
    loadAgain = false;
    await load();
    emit("rooms");
  }
  loading = false;
}

async function load() {
  try {
    rooms.worlds = await api.worlds();
    const names = rooms.worlds.map((world) => world.name);
    if (!names.includes(rooms.name)) {
      // It was deleted, here or elsewhere.
      if (rooms.name !== null) toast(`The world ${rooms.name} was deleted.`);
      leaveWorld(names[0] ?? null);
      history.replaceState(null, "", rooms.name === null ? location.pathname : `#${encodeURIComponent(rooms.name)}`);
    }
    const { name } = rooms;
    const world = name === null ? null : await api.world(name);
    if (rooms.name !== name) {
      loadAgain = true;
      return;
    }
    const { stale } = rooms.log;
    applyWorld(rooms, world);
    // Loading the world says which messages are new.
    rooms.log.stale = stale;
    await loadLatest();
    rooms.loadError = null;
  } catch (error) {
    // The world that is drawn stays; `connected` reports a server that cannot be reached.
    rooms.loadError = error instanceof ServerUnreachable ? null : error.message;
  }
}

/** Loads the latest messages of the open room. */
export async function loadLatest() {
  const log = logToLoad(rooms);
  if (!log) return;
  log.stale = false;
  let found;
  try {
    found = await api.roomMessages(rooms.name, log.room);
  } catch (error) {
    log.stale = true;
    throw error;
  }
  if (rooms.log === log) applyLatest(log, found, isAtEnd());
}

/** Loads older messages of the open room. */
export async function loadOlder() {
  const { log } = rooms;
  const found = await attempt(api.roomMessages(rooms.name, log.room, log.messages[0]?.id));
  if (!found || rooms.log !== log) return;
  applyMessages(log, found);
  log.complete = found.length < PAGE_SIZE;
  emit("older");
}

export async function react(message, reaction) {
  if (!(await runCommand({ command: "react", message: message.id, reaction }))) return;
  const { log } = rooms;
  const found = await attempt(api.roomMessages(rooms.name, log.room, message.id + 1));
  if (!found || rooms.log !== log) return;
  applyMessages(
    log,
    found.filter((other) => other.id === message.id),
  );
  emit("rooms");
}

function leaveWorld(name) {
  emit("leave");
  selectWorld(rooms, name);
}

export function openWorld(name) {
  leaveWorld(name);
  location.hash = encodeURIComponent(name);
  emit("rooms");
  refresh();
}

export function goToRoom(id) {
  emit("leave");
  rooms.room = id;
  emit("room");
  emit("rooms");
  loadLatest().then(
    () => emit("rooms"),
    (error) => toast(error.message, { error: true }),
  );
}

export function openAgent(id) {
  rooms.agent = id;
  emit("rooms");
}

export function setReply(message) {
  rooms.replyTo = message;
  emit("rooms");
}

/** A share that was just set is drawn until the server confirms it: an older state must not reset the slider. */
export async function setAttention(command, key) {
  rooms.pendingAttention.set(key, command.value);
  await runCommand(command);
  if (rooms.pendingAttention.get(key) === command.value) rooms.pendingAttention.delete(key);
  emit("rooms");
}

/** The agent thinks at once, even if the world is paused. */
export async function wake(agent) {
  // The world of the response: a refresh that began before the command may have stored an older one, in which it was closed.
  const world = await runCommand({ command: "wake", agent: agent.id });
  if (world?.open && world.paused) await setClock({ step: true });
}

export function setConnected(connected) {
  rooms.connected = connected;
  rooms.log.stale = true;
  emit("rooms");
  if (connected) refresh();
}

// Events are collected for 150 ms; then the world is loaded once.
let refreshTimer = null;
export function handleEvent(event) {
  const isOpen = event.type === "world_changed" && event.name === rooms.name;
  const reload = applyRoomsEvent(rooms, event);
  if (isOpen && event.error) toast(event.error, { error: true });
  if (isOpen && event.beat !== null && event.beat !== undefined) emit("beat", event.beat);
  if (!reload) {
    if (isOpen) emit("rooms");
    return;
  }
  if (refreshTimer !== null) return;
  refreshTimer = setTimeout(() => {
    refreshTimer = null;
    refresh();
  }, 150);
}

/** The events of this server say nothing of a world that another program runs, so such a world is loaded by time. */
export function followOtherProgram() {
  setInterval(() => {
    if (!document.hidden && rooms.connected && rooms.world?.runs_elsewhere) refresh();
  }, 2000);
}

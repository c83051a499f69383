// How the state of the page of rooms changes: pure functions of a state and a response or an event of the server. Nothing here
// draws, waits or sends, so `node --test` runs these functions without a browser.

/** Messages in one response, and messages that are kept at most unless the user reads older ones. */
export const PAGE_SIZE = 100;
const MAX_KEPT = 300;

/** The room of the user. */
export const ARCHITECT = 0;

/** @typedef {{ room: number | null, messages: any[], complete: boolean, stale: boolean }} RoomLog */

/** @returns {RoomLog} */
const emptyLog = (room = null) => ({ room, messages: [], complete: false, stale: true });

/**
 * @typedef {{
 *   worlds: any[] | null, name: string | null, world: any, room: number | null, agent: number | null, connected: boolean,
 *   loadError: string | null, log: RoomLog, lastRead: Map<number, number>, pendingAttention: Map<string, string>,
 *   drafts: Map<string, any>, replyTo: any, usage: Map<number, any>,
 * }} RoomsState
 * @returns {RoomsState}
 */
export const emptyRooms = () => ({
  worlds: null,
  name: null, // of the open world
  world: null, // as the server sent it last
  room: null,
  agent: null, // whose mind is shown
  connected: true,
  loadError: null,
  log: emptyLog(),
  lastRead: new Map(), // the last message that was drawn in each room
  pendingAttention: new Map(), // attention shares that were set and not yet confirmed
  drafts: new Map(),
  replyTo: null,
  usage: new Map(), // tokens of the last heartbeat of each agent
});

/** Another world: nothing is known of it. Drafts stay. */
export function selectWorld(state, name) {
  Object.assign(state, { name, world: null, room: null, agent: null, replyTo: null, loadError: null, log: emptyLog() });
  for (const map of [state.lastRead, state.pendingAttention, state.usage]) map.clear();
}

/** A world as the server sent it. Returns whether it is the open one. */
export function applyWorld(state, world) {
  if (!world || world.name !== state.name) return false;
  state.world = world;
  state.log.stale = true;
  return true;
}

export const openRoom = (state) => state.world?.rooms.find((room) => room.id === state.room);

/** The room to show: the open one, or the one with the most members. */
export function defaultRoom({ world, room }) {
  if (world.rooms.some((other) => other.id === room)) return room;
  return [...world.rooms].sort((a, b) => b.members.length - a.members.length)[0]?.id ?? null;
}

/** The log of the open room; null if its latest messages are there already. */
export function logToLoad(state) {
  const room = openRoom(state);
  if (!room) return null;
  if (state.log.room !== room.id) state.log = emptyLog(room.id);
  const last = state.log.messages.at(-1)?.id ?? 0;
  return !state.log.stale && room.last_message === last ? null : state.log;
}

/** The latest messages. If messages between those and the known ones are missing, the log starts over. */
export function applyLatest(log, found, atEnd) {
  const last = log.messages.at(-1)?.id ?? 0;
  if (found.length === PAGE_SIZE && found[0].id > last) Object.assign(log, { messages: found, complete: false });
  else applyMessages(log, found);
  if (found.length < PAGE_SIZE) log.complete = true;
  if (log.messages.length > MAX_KEPT && atEnd)
    Object.assign(log, { messages: log.messages.slice(-PAGE_SIZE), complete: false });
}

export function applyMessages(log, found) {
  const all = new Map([...log.messages, ...found].map((message) => [message.id, message]));
  log.messages = [...all.values()].sort((a, b) => a.id - b.id);
}

/**
 * Applies an event. Returns whether the world must be loaded again because the event does not say everything that changed.
 * @param {RoomsState} state
 */
export function applyRoomsEvent(state, event) {
  if (event.type === "missed") {
    state.log.stale = true;
    return true;
  }
  if (event.type !== "world_changed") return false;
  if (event.name !== state.name) return event.worlds_changed;
  if (event.thinking !== null && event.thinking !== undefined) {
    if (state.world) state.world.thinking = event.thinking;
    return false;
  }
  if (event.usage) state.usage.set(event.beat, event.usage);
  // Another agent may be thinking still.
  if (event.beat !== null && event.beat !== undefined && state.world?.thinking === event.beat) {
    state.world.thinking = null;
  }
  if (event.rooms.includes(state.log.room)) state.log.stale = true;
  return true;
}

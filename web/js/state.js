// The page's copy of the open conversation. Only this module changes it, from the server's responses and events; all other
// modules draw it.

import { api, ServerUnreachable } from "./api.js";
import { emit } from "./bus.js";

export const state = {
  name: null, // of the open conversation
  snapshot: null, // the conversation as the server sent it last
  chunks: new Map(), // the chunks of the context window, by id
  order: [], // their ids, by position
  running: null, // the answer that is being generated
  tabs: [],
  connected: false,
  loadError: null, // why the conversation cannot be shown
};

let pendingEvents = null; // events that arrived while the conversation was being loaded
let requests = 0; // only the response to the latest request counts

const savedTabs = () => JSON.parse(localStorage.getItem("tabs") ?? "[]");
const saveTabs = () => localStorage.setItem("tabs", JSON.stringify(state.tabs));

export function init() {
  state.tabs = savedTabs();
  const fromAddress = decodeURIComponent(location.hash.slice(1));
  openConversation(fromAddress || localStorage.getItem("last") || state.tabs[0] || "main");
}

export function openConversation(name) {
  state.name = name;
  if (!state.tabs.includes(name)) state.tabs.push(name);
  saveTabs();
  localStorage.setItem("last", name);
  if (decodeURIComponent(location.hash.slice(1)) !== name) location.hash = encodeURIComponent(name);
  state.snapshot = null;
  state.loadError = null;
  state.running = null;
  state.chunks.clear();
  state.order = [];
  emit("conversation");
  return refresh();
}

export function closeTab(name) {
  state.tabs = state.tabs.filter((tab) => tab !== name);
  saveTabs();
  if (state.name === name) openConversation(state.tabs[0] ?? "main");
  else emit("tabs");
}

export function renameTab(from, to) {
  state.tabs = state.tabs.map((tab) => (tab === from ? to : tab));
  saveTabs();
  if (state.name === from) openConversation(to);
  else emit("tabs");
}

// Loads the conversation. Events that arrive meanwhile are applied after it, if they are newer.
export async function refresh() {
  const name = state.name;
  const request = (requests += 1);
  pendingEvents ??= [];
  let snapshot;
  try {
    snapshot = await api.conversation(name);
  } catch (error) {
    if (request !== requests) return;
    if (error instanceof ServerUnreachable) {
      pendingEvents = null;
      return;
    }
    // Only a conversation that does not exist is empty; every other failure is shown as an error.
    if (error.status !== 404) {
      pendingEvents = null;
      if (name === state.name) {
        state.loadError = error.message;
        emit("state");
      }
      return;
    }
    snapshot = {
      name,
      chunks: [],
      placed_memories: [],
      last_event: 0,
      live: 0,
      tokens: 0,
      pruned: 0,
      limit: 0,
      budget_after_turn: 0,
      notices: [],
      times: {},
      finish_reasons: {},
      premises: {},
      fresh: true,
    };
  }
  // An older snapshot must not replace a newer one: the events between the two would be lost.
  if (request !== requests || name !== state.name) return;
  state.loadError = null;
  state.snapshot = snapshot;
  state.chunks = new Map(snapshot.chunks.map((chunk) => [chunk.id, chunk]));
  state.order = snapshot.chunks.map((chunk) => chunk.id);
  state.running = snapshot.running ? { ahead: snapshot.running.ahead, chunks: new Map(snapshot.running.chunks) } : null;
  emit("state");
  const newer = (pendingEvents ?? []).filter((event) => event.number > snapshot.last_event);
  pendingEvents = null;
  newer.forEach(apply);
}

export function handleEvent(event) {
  if (event.type === "missed") return refresh();
  if (event.type === "settings_changed") {
    emit("settings");
    return refresh();
  }
  if (event.conversation !== state.name) return emit("elsewhere", event);
  if (pendingEvents) pendingEvents.push(event);
  else apply(event);
}

function insertChunk(chunk) {
  const present = state.chunks.has(chunk.id);
  state.chunks.set(chunk.id, chunk);
  if (present) return;
  // A new chunk is mostly the last; a resurrected one goes to its own position.
  let at = state.order.length;
  while (at > 0 && state.chunks.get(state.order[at - 1]).position > chunk.position) at -= 1;
  state.order.splice(at, 0, chunk.id);
  if (chunk.resurrected) addPrunedBefore(state.order[at + 1], -1);
}

function removeChunk(id) {
  const at = state.order.indexOf(id);
  if (at < 0) return;
  addPrunedBefore(state.order[at + 1], state.chunks.get(id).pruned_before + 1);
  state.chunks.delete(id);
  state.order.splice(at, 1);
}

function addPrunedBefore(id, by) {
  const chunk = state.chunks.get(id);
  if (chunk && by) state.chunks.set(id, { ...chunk, pruned_before: Math.max(0, chunk.pruned_before + by) });
}

const newAnswer = (ahead = 0) => ({ ahead, chunks: new Map() });

function apply(event) {
  const { snapshot } = state;
  if (!snapshot) return;
  if (event.live !== undefined) snapshot.live = event.live;
  switch (event.type) {
    case "queued":
      state.running = newAnswer(event.ahead);
      break;
    case "message_stored":
      if (snapshot.fresh) {
        refresh();
        return;
      }
      state.running = newAnswer();
      event.chunks.forEach(insertChunk);
      snapshot.times[event.turn] = Date.now();
      break;
    case "resurrected":
      if (event.chunk) {
        insertChunk({ ...event.chunk, reason: event.reason, resurrected: true });
        snapshot.pruned -= 1;
      }
      break;
    case "pruned":
      removeChunk(event.chunk);
      snapshot.pruned += 1;
      break;
    case "prefilling":
      state.running ??= newAnswer();
      state.running.prefilling = event;
      break;
    case "token": {
      state.running ??= newAnswer();
      state.running.prefilling = null;
      state.running.ahead = 0;
      const { chunks } = state.running;
      chunks.set(event.chunk, (chunks.get(event.chunk) ?? "") + event.text);
      break;
    }
    case "done":
      finishTurn(snapshot, event);
      break;
    case "failed":
      state.running = null;
      refresh();
      break;
    case "false_premise":
      if (state.running) state.running.premise = `“${event.premise}”: ${event.reason}`;
      break;
    case "memory_changed":
      if (event.action === "placed") refresh();
      break;
    case "changed":
      refresh();
      break;
    default:
  }
  emit("event", event);
}

function finishTurn(snapshot, event) {
  const { turn, finish_reason } = event.summary;
  const premise = state.running?.premise;
  state.running = null;
  Object.assign(snapshot, {
    live: event.live,
    pruned: event.pruned,
    tokens: event.tokens,
    last_summary: event.summary,
  });
  event.chunks.forEach(insertChunk);
  snapshot.times[turn] = Date.now();
  if (premise) snapshot.premises[turn] = premise;
  if (!["end", "stop"].includes(finish_reason)) snapshot.finish_reasons[turn] = finish_reason;
  for (const [id, peak, pruned_before, relative_brightness] of event.window) {
    const chunk = state.chunks.get(id);
    if (!chunk) continue;
    Object.assign(chunk, { peak, relative_brightness });
    addPrunedBefore(id, pruned_before - chunk.pruned_before);
  }
}

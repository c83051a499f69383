// What the page knows. Only this module changes it, by what the server tells; everything else is drawn from it.

import { Away, api } from "./api.js";
import { tell } from "./bus.js";

export const state = {
  name: null, // the conversation that is shown
  now: null, // it, as the server told it
  chunks: new Map(), // what is in its window, by name
  order: [], // their names, by place
  running: null, // the answer that is being given
  tabs: [],
  connected: false,
  failed: null, // why the conversation cannot be shown
};

let waiting = null; // events that came while the state was on its way
let asked = 0; // how often it was asked for: only the last answer counts

const saved = () => JSON.parse(localStorage.getItem("tabs") ?? "[]");
const keepTabs = () => localStorage.setItem("tabs", JSON.stringify(state.tabs));

export function begin() {
  state.tabs = saved();
  const wanted = decodeURIComponent(location.hash.slice(1));
  show(wanted || localStorage.getItem("last") || state.tabs[0] || "main");
}

export function show(name) {
  state.name = name;
  if (!state.tabs.includes(name)) state.tabs.push(name);
  keepTabs();
  localStorage.setItem("last", name);
  if (decodeURIComponent(location.hash.slice(1)) !== name) location.hash = encodeURIComponent(name);
  state.now = null;
  state.failed = null;
  state.running = null;
  state.chunks.clear();
  state.order = [];
  tell("conversation");
  return refresh();
}

export function closeTab(name) {
  state.tabs = state.tabs.filter((tab) => tab !== name);
  keepTabs();
  if (state.name === name) show(state.tabs[0] ?? "main");
  else tell("tabs");
}

export function renameTab(from, to) {
  state.tabs = state.tabs.map((tab) => (tab === from ? to : tab));
  keepTabs();
  if (state.name === from) show(to);
  else tell("tabs");
}

// Reads the conversation anew. What happens meanwhile is applied behind it, as far as it is newer.
export async function refresh() {
  const name = state.name;
  const mine = (asked += 1);
  waiting ??= [];
  let now;
  try {
    now = await api.state(name);
  } catch (error) {
    if (mine !== asked) return;
    if (error instanceof Away) {
      waiting = null;
      return;
    }
    // Only one that is not there is empty; everything else is an error, and shown as one.
    if (error.status !== 404) {
      waiting = null;
      if (name === state.name) {
        state.failed = error.message;
        tell("state");
      }
      return;
    }
    now = {
      name,
      chunks: [],
      standing: [],
      events: 0,
      live: 0,
      tokens: 0,
      dead: 0,
      limit: 0,
      stays: 0,
      notices: [],
      times: {},
      ends: {},
      premises: {},
      fresh: true,
    };
  }
  // An older state behind a newer one would take back what was heard between the two.
  if (mine !== asked || name !== state.name) return;
  state.failed = null;
  state.now = now;
  state.chunks = new Map(now.chunks.map((chunk) => [chunk.chunk, chunk]));
  state.order = now.chunks.map((chunk) => chunk.chunk);
  state.running = now.running ? { ahead: now.running.ahead, parts: new Map(now.running.parts) } : null;
  tell("state");
  const missed = (waiting ?? []).filter((event) => event.number > now.events);
  waiting = null;
  missed.forEach(apply);
}

export function heard(event) {
  if (event.type === "missed") return refresh();
  if (event.type === "settings") {
    tell("settings");
    return refresh();
  }
  if (event.conversation !== state.name) return tell("elsewhere", event);
  if (waiting) waiting.push(event);
  else apply(event);
}

function place(chunk) {
  const known = state.chunks.get(chunk.chunk);
  state.chunks.set(chunk.chunk, chunk);
  if (known) return;
  // What is new is mostly last; what returns goes to its own place.
  let at = state.order.length;
  while (at > 0 && state.chunks.get(state.order[at - 1]).position > chunk.position) at -= 1;
  state.order.splice(at, 0, chunk.chunk);
  if (chunk.back) widen(state.order[at + 1], -1);
}

function remove(name) {
  const at = state.order.indexOf(name);
  if (at < 0) return;
  widen(state.order[at + 1], state.chunks.get(name).gap + 1);
  state.chunks.delete(name);
  state.order.splice(at, 1);
}

// More has left before a chunk, or less.
function widen(name, by) {
  const chunk = state.chunks.get(name);
  if (chunk && by) state.chunks.set(name, { ...chunk, gap: Math.max(0, chunk.gap + by) });
}

function apply(event) {
  const { now } = state;
  if (!now) return;
  if (event.live !== undefined) now.live = event.live;
  switch (event.type) {
    case "waiting":
      state.running = { ahead: event.ahead, parts: new Map() };
      break;
    case "said":
      if (now.fresh) {
        refresh();
        return;
      }
      state.running = { ahead: 0, parts: new Map() };
      event.chunks.forEach(place);
      now.times[event.turn] = Date.now();
      break;
    case "returned":
      if (event.chunk) {
        place({ ...event.chunk, why: event.why, back: true });
        now.dead -= 1;
      }
      break;
    case "left":
      remove(event.chunk);
      now.dead += 1;
      break;
    case "reading":
      state.running ??= { ahead: 0, parts: new Map() };
      state.running.reading = event;
      break;
    case "token": {
      state.running ??= { ahead: 0, parts: new Map() };
      state.running.reading = null;
      state.running.ahead = 0;
      const { parts } = state.running;
      parts.set(event.chunk, (parts.get(event.chunk) ?? "") + event.text);
      break;
    }
    case "done": {
      const premise = state.running?.premise;
      state.running = null;
      Object.assign(now, { live: event.live, dead: event.dead, tokens: event.tokens, last: event.summary });
      event.chunks.forEach(place);
      now.times[event.summary.turn] = Date.now();
      if (premise) now.premises[event.summary.turn] = premise;
      if (!["end", "stop"].includes(event.summary.finish)) now.ends[event.summary.turn] = event.summary.finish;
      for (const [name, peak, gap, light] of event.window) {
        const chunk = state.chunks.get(name);
        if (!chunk) continue;
        Object.assign(chunk, { peak, light });
        widen(name, gap - chunk.gap);
      }
      break;
    }
    case "failed":
      state.running = null;
      refresh();
      break;
    case "premise":
      if (state.running) state.running.premise = `“${event.premise}”: ${event.reason}`;
      break;
    case "memory":
      if (event.what === "stands") refresh();
      break;
    case "changed":
      refresh();
      break;
    default:
  }
  tell("event", event);
}

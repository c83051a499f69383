// The one store of the page. Only this module changes the state, with the functions of reducers.js, from the server's responses
// and events; all other modules draw it.

import { ApiError, api, ServerUnreachable } from "./api.js";
import { emit } from "./bus.js";
import {
  applyEvent,
  applySnapshot,
  applyTranscript,
  dropMessages,
  END_PAGES,
  emptyState,
  freshSnapshot,
  openChat,
  PAGE,
} from "./reducers.js";
import { isUntitled, untitledName } from "./titles.js";

export const state = emptyState();

let pendingEvents = null; // events that arrived while the chat was being loaded
let missing = null; // the open chat, if the server did not have it when it was asked last
let requests = 0; // only the response to the latest request counts
const loadingPages = new Map(); // requests for pages, so that none is loaded twice at once

// The name follows “#/”, so that it never names an element of the page.
const nameInAddress = () => decodeURIComponent(location.hash.replace(/^#\/?/, ""));

/** The address of a chat on this page. */
export const chatAddress = (name) => `#/${encodeURIComponent(name)}`;

export async function init() {
  addEventListener("hashchange", () => {
    const name = nameInAddress();
    if (name && name !== state.name) openConversation(name);
  });
  const name = nameInAddress() || localStorage.getItem("last") || untitledName();
  await openConversation(name, { isNew: true });
}

/**
 * Opens a chat. With `isNew`, the server may not have it: its list is asked first, because the browser reports a request for a chat
 * that does not exist as an error in its console.
 */
export async function openConversation(name, { isNew = false } = {}) {
  openChat(state, name);
  missing = isNew ? name : null;
  loadingPages.clear();
  localStorage.setItem("last", name);
  // Every step of the history has a state, so that a link that was just followed can be told from a step back or forward.
  if (nameInAddress() && nameInAddress() !== name) history.pushState({}, "", chatAddress(name));
  else history.replaceState(history.state ?? {}, "", chatAddress(name));
  emit("conversation");
  await refresh();
}

// Whether the server has no such chat.
async function isMissing(name) {
  if (isUntitled(name)) return true;
  if (name !== missing) return false;
  const stored = (await api.conversations()).some((chat) => chat.name === name);
  if (stored && missing === name) missing = null;
  return !stored;
}

export function setConnected(connected) {
  state.connected = connected;
  emit("connected", connected);
}

const emptyTail = { total: 0, offset: 0, messages: [] };

// Loads the chat. Events that arrive meanwhile are applied after it, if they are newer.
export async function refresh() {
  const { name } = state;
  const request = (requests += 1);
  pendingEvents ??= [];
  let snapshot;
  let tail = emptyTail;
  try {
    if (await isMissing(name)) throw new ApiError(404, "a new chat is not stored yet");
    [snapshot, tail] = await Promise.all([api.chatState(name), api.transcript(name, { limit: END_PAGES * PAGE })]);
  } catch (error) {
    if (request !== requests) return;
    // Only a chat that does not exist is empty; every other failure is shown as an error.
    if (error.status !== 404) {
      pendingEvents = null;
      if (name === state.name && !(error instanceof ServerUnreachable)) {
        state.loadError = { message: error.message, status: error.status };
        emit("state");
      }
      return;
    }
    snapshot = freshSnapshot(name);
  }
  // An older snapshot must not replace a newer one: the events between the two would be lost.
  if (request !== requests || name !== state.name) return;
  applySnapshot(state, snapshot, tail);
  emit("state");
  loadVariants();
  const newer = (pendingEvents ?? []).filter((event) => event.number > snapshot.last_event);
  pendingEvents = null;
  newer.forEach(apply);
}

/** Loads a page of the transcript, unless it is loaded. */
export function loadPage(page) {
  if (state.pages.has(page)) return Promise.resolve();
  const { name } = state;
  if (!loadingPages.has(page)) {
    const load = api
      .transcript(name, { offset: page * PAGE, limit: PAGE })
      .then((range) => {
        if (name !== state.name) return;
        applyTranscript(state, range);
        emit("page", page);
      })
      .finally(() => loadingPages.delete(page));
    loadingPages.set(page, load);
  }
  return loadingPages.get(page);
}

/** The index of a turn in the transcript; null if it is deleted. */
export async function indexOfTurn(turn) {
  for (const [page, messages] of state.pages) {
    const at = messages.findIndex((message) => message.turn === turn);
    if (at >= 0) return page * PAGE + at;
  }
  const { offset, messages } = await api.transcript(state.name, { around: turn, limit: 2 });
  const at = messages.findIndex((message) => message.turn === turn);
  return at < 0 ? null : offset + at;
}

/** Pages that are not drawn are dropped, so that a long chat does not fill the memory. */
export function dropPage(page) {
  dropMessages(state, page);
}

let variantRequests = 0;
export async function loadVariants() {
  const request = (variantRequests += 1);
  const { name } = state;
  let variants = [];
  if (state.snapshot && !state.snapshot.fresh && !state.running && !state.loadError) {
    try {
      variants = (await api.variants(name)).map((one) => ({ ...one, messages: one.messages.length }));
    } catch {
      variants = [];
    }
  }
  if (request !== variantRequests || name !== state.name) return;
  state.variants = variants;
  emit("variants");
}

export function handleEvent(event) {
  if (event.type === "missed") return refresh();
  if (event.type === "settings_changed") {
    emit("settings");
    return refresh();
  }
  if (event.type === "model_download") return emit("download", event);
  if (event.type === "import_progress") return emit("import", event);
  if (["done", "changed", "message_stored"].includes(event.type)) emit("list", event);
  if (event.conversation !== state.name) return emit("elsewhere", event);
  if (pendingEvents) pendingEvents.push(event);
  else apply(event);
}

function apply(event) {
  if (!state.snapshot) return;
  if (applyEvent(state, event)) refresh();
  if (event.type === "done") loadVariants();
  emit("event", event);
}

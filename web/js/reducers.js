// How the state of the open chat changes: pure functions of a state and a response or an event of the server. Nothing here
// draws, waits or sends, so `node --test` runs these functions without a browser.

/**
 * A paragraph.
 * @typedef {{
 *   id: string, turn: number, index: number, role: string, position: number, tokens: number, live: boolean, pinned: boolean,
 *   peak: number, relative_brightness: number | null, attention?: number | null, text: string, tool_ranges: [number, number][], pruned_before: number,
 *   reason?: string | null, resurrected?: boolean,
 * }} Chunk
 *
 * An answer or exchange that can be chosen: its first turn identifies it.
 * @typedef {{ turn: number, current: boolean, messages: number }} Variant
 *
 * A message of the transcript.
 * @typedef {{
 *   turn: number, role: string, at: number | null, finish_reason?: string | null, premise?: string | null,
 *   used: { id: string, turn: number, text: string }[], speaker?: string | null, variants?: Variant[], has_attention?: boolean,
 *   chunks: Chunk[],
 * }} Message
 *
 * An answer that is being generated: its text by chunk.
 * @typedef {{ ahead: number, chunks: Map<string, string>, prefilling?: any, premise?: string }} RunningAnswer
 *
 * @typedef {{
 *   name: string | null, snapshot: any, chunks: Map<string, Chunk>, moved: Map<string, boolean>, running: RunningAnswer | null,
 *   connected: boolean, loadError: { message: string, status: number } | null, total: number, pages: Map<number, Message[]>, recalled: Map<string, Chunk>,
 *   reasons: Map<string, string>, variants: Variant[],
 * }} ChatState
 */

/** Messages of one page of the transcript. Pages are loaded and drawn as a whole. */
export const PAGE = 20;

/** Pages at the end that are always drawn. */
export const END_PAGES = 4;

/** @returns {ChatState} */
export const emptyState = () => ({
  name: null, // of the open chat
  snapshot: null, // the chat as the server sent it last
  chunks: new Map(), // the paragraphs in the context, by id, as far as their messages are loaded
  moved: new Map(), // whether paragraphs are in the context, by the events since the chat was loaded
  running: null, // the answer that is being generated
  connected: false,
  loadError: null, // why the chat cannot be shown
  total: 0, // messages of the whole chat
  pages: new Map(), // the loaded messages, by page
  recalled: new Map(), // paragraphs that were brought back for the running answer
  reasons: new Map(), // why paragraphs left or came back, as far as events have said it
  variants: [], // of the last answer or exchange
});

/** The state of a chat that was just opened: nothing is known of it. */
export function openChat(state, name) {
  Object.assign(state, { ...emptyState(), name, connected: state.connected });
}

/** A chat that does not exist yet. */
export const freshSnapshot = (name) => ({
  name,
  placed_memories: [],
  last_event: 0,
  live: 0,
  tokens: 0,
  pruned: 0,
  limit: 0,
  budget_after_turn: 0,
  notices: [],
  fresh: true,
});

/** The chat and the end of its transcript, as the server sent them. */
export function applySnapshot(state, snapshot, tail) {
  state.loadError = null;
  state.snapshot = snapshot;
  state.chunks.clear();
  state.moved.clear();
  state.running = snapshot.running ? { ahead: snapshot.running.ahead, chunks: new Map(snapshot.running.chunks) } : null;
  applyTail(state, tail);
}

/** A range of the transcript. Only pages that the range covers completely are stored. */
export function applyTranscript(state, { total, offset, messages }) {
  const end = offset + messages.length;
  for (let page = Math.ceil(offset / PAGE); page * PAGE < end; page += 1) {
    const part = messages.slice(page * PAGE - offset, (page + 1) * PAGE - offset);
    if (part.length < PAGE && end < total) continue;
    state.pages.set(page, part);
    for (const message of part) for (const chunk of message.chunks) placeChunk(state, chunk);
  }
}

// An event may be newer than the response.
function placeChunk(state, chunk) {
  if (state.moved.get(chunk.id) ?? chunk.live) state.chunks.set(chunk.id, chunk);
  else state.chunks.delete(chunk.id);
}

/** Forgets a page that is not drawn. */
export function dropMessages(state, page) {
  for (const message of state.pages.get(page) ?? []) for (const { id } of message.chunks) state.chunks.delete(id);
  state.pages.delete(page);
}

// The end of the transcript. The running answer is drawn after it, not as a stored message.
function applyTail(state, { total, offset, messages }) {
  const running = runningTurn(state);
  const stored = messages.filter((message) => message.turn !== running);
  state.total = total - (messages.length - stored.length);
  state.pages.clear();
  applyTranscript(state, { total: state.total, offset, messages: stored });
  if (state.total === 0) state.pages.set(0, []);
}

/** Whether another process has the chat open, so that it can only be read. */
export const isReadOnly = ({ snapshot }) => snapshot?.in_use_by !== null && snapshot?.in_use_by !== undefined;

/** The turn of the running answer; null if it has no token yet. */
export function runningTurn(state) {
  const first = state.running?.chunks.keys().next().value;
  return first === undefined ? null : Number(/\d+/.exec(first)[0]);
}

/** The loaded message of a turn. */
export function findMessage(state, turn) {
  for (const messages of state.pages.values()) {
    const found = messages.find((message) => message.turn === turn);
    if (found) return found;
  }
  return null;
}

/** The messages at the end of the transcript, as far as they are loaded. */
export function lastMessages(state, count = 2) {
  const last = Math.floor(Math.max(0, state.total - 1) / PAGE);
  return [...(state.pages.get(last - 1) ?? []), ...(state.pages.get(last) ?? [])].slice(-count);
}

function appendMessage(state, message) {
  const known = findMessage(state, message.turn);
  if (known) {
    Object.assign(known, message);
    return;
  }
  const page = Math.floor(state.total / PAGE);
  if (state.total % PAGE === 0 && !state.pages.has(page)) state.pages.set(page, []);
  state.pages.get(page)?.push(message);
  state.total += 1;
}

function insertChunk(state, chunk) {
  state.chunks.set(chunk.id, chunk);
  state.moved.set(chunk.id, true);
}

function removeChunk(state, id) {
  state.chunks.delete(id);
  state.moved.set(id, false);
}

// The answer before a new message stays one of its variants.
function keepVariants(state) {
  const [last] = lastMessages(state, 1);
  if (last) last.variants = state.variants;
  state.variants = [];
}

const newAnswer = (ahead = 0) => ({ ahead, chunks: new Map() });

/**
 * Applies an event. Returns whether the chat must be loaded again because the event does not say everything that changed.
 * @param {ChatState} state
 */
export function applyEvent(state, event, now = Date.now()) {
  const { snapshot } = state;
  if (event.live !== undefined) snapshot.live = event.live;
  switch (event.type) {
    case "queued":
      state.running = newAnswer(event.ahead);
      break;
    case "message_stored":
      if (snapshot.fresh) return true;
      state.running = newAnswer();
      keepVariants(state);
      for (const chunk of event.chunks) insertChunk(state, chunk);
      if (event.chunks.length)
        appendMessage(state, {
          turn: event.turn,
          role: event.chunks[0].role,
          at: now,
          used: [],
          chunks: event.chunks,
        });
      break;
    case "resurrected":
      if (!event.chunk) break;
      insertChunk(state, { ...event.chunk, reason: event.reason, resurrected: true });
      state.recalled.set(event.chunk.id, event.chunk);
      state.reasons.set(event.chunk.id, event.reason);
      snapshot.pruned -= 1;
      break;
    case "pruned":
      removeChunk(state, event.chunk);
      state.reasons.set(event.chunk, event.reason);
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
      finishTurn(state, event, now);
      break;
    case "failed":
      state.running = null;
      return true;
    case "false_premise":
      if (state.running) state.running.premise = `“${event.premise}”: ${event.reason}`;
      break;
    case "memory_changed":
      return event.action === "placed";
    case "changed":
      // Under its old name there is nothing to load; the window that has renamed the chat opens the new one.
      return event.action !== "renamed";
    default:
  }
  return false;
}

function finishTurn(state, event, now) {
  const { snapshot, running, recalled } = state;
  const { turn, finish_reason, resurrected_chunks = [] } = event.summary;
  state.running = null;
  Object.assign(snapshot, {
    live: event.live,
    pruned: event.pruned,
    tokens: event.tokens,
    last_summary: event.summary,
  });
  for (const chunk of event.chunks) insertChunk(state, chunk);
  if (event.chunks.length)
    appendMessage(state, {
      turn,
      role: event.chunks[0].role,
      at: now,
      finish_reason: ["end", "stop"].includes(finish_reason) ? null : finish_reason,
      premise: running?.premise ?? null,
      variants: [],
      used: resurrected_chunks
        .map((id) => recalled.get(id) ?? state.chunks.get(id))
        .filter(Boolean)
        .map(({ id, turn: from, text }) => ({ id, turn: from, text: text.trim().slice(0, 120) })),
      chunks: event.chunks,
    });
  state.recalled = new Map();
  for (const [id, peak, pruned_before, relative_brightness, attention] of event.window) {
    const chunk = state.chunks.get(id);
    if (chunk) Object.assign(chunk, { peak, relative_brightness, pruned_before, attention });
  }
}

// Pointing at a word of an answer lights what it attended to, in whatever it attended to that is drawn.

import { api } from "./api.js";
import { on } from "./bus.js";
import { $ } from "./dom.js";
import { clearAttention, paintAttention, textMap } from "./light.js";
import { findMessage } from "./reducers.js";
import { state } from "./state.js";

const DWELL = 140; // milliseconds that the pointer rests before it asks

const tokensByChunk = new Map(); // the tokens of chunks: start, end and position
const attentionByToken = new Map();
let timer = null;
let shown = null; // the position of the token that is lit

export function init() {
  const log = $("log");
  log.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch" || state.running) return;
    clearTimeout(timer);
    const { clientX, clientY, target } = event;
    const node = /** @type {Element} */ (target).closest?.(".turn.assistant .chunk");
    if (!node) {
      clear();
      return;
    }
    timer = setTimeout(() => show(node, clientX, clientY), DWELL);
  });
  log.addEventListener("pointerleave", () => {
    clearTimeout(timer);
    clear();
  });
  for (const topic of ["conversation", "state"]) on(topic, forget);
  on("event", (event) => {
    if (["message_stored", "done"].includes(event.type)) forget();
  });
}

function forget() {
  tokensByChunk.clear();
  attentionByToken.clear();
  shown = null;
}

function clear() {
  if (shown === null) return;
  shown = null;
  clearAttention();
}

// The index in the chunk's source under a point; -1 if there is no text.
function sourceIndex(node, x, y) {
  let container;
  let offset;
  if (document.caretPositionFromPoint) {
    const caret = document.caretPositionFromPoint(x, y);
    container = caret?.offsetNode;
    offset = caret?.offset;
  } else {
    const range = document.caretRangeFromPoint(x, y);
    container = range?.startContainer;
    offset = range?.startOffset;
  }
  const map = textMap(node);
  const entry = map?.nodes.find((one) => one.node === container);
  return entry ? (map.places[Math.min(entry.start + offset, map.places.length - 1)] ?? -1) : -1;
}

async function show(node, x, y) {
  const id = node.dataset.chunk;
  const message = findMessage(state, Number(/\d+/.exec(id)[0]));
  const at = message?.has_attention === false ? -1 : sourceIndex(node, x, y);
  if (at < 0) {
    clear();
    return;
  }
  const { name } = state;
  try {
    if (!tokensByChunk.has(id)) tokensByChunk.set(id, loadTokens(id));
    const token = (await tokensByChunk.get(id)).find((one) => one.start <= at && at < one.end);
    if (!token || token.position === shown) return;
    if (!attentionByToken.has(token.position))
      attentionByToken.set(token.position, api.tokenAttention(name, token.position));
    const attention = await attentionByToken.get(token.position);
    if (name !== state.name || state.running) return;
    shown = token.position;
    paintAttention({
      tokens: attention.tokens
        .filter((one) => one.range)
        .map(({ chunk, range: [start, end], share }) => ({ chunk, start, end, share })),
      chunks: attention.chunks,
    });
  } catch (error) {
    // Of an answer that has just ended, the page does not know yet whether its attention is stored.
    if (error.status === 404 && message && message.has_attention === undefined) message.has_attention = false;
  }
}

async function loadTokens(id) {
  let start = 0;
  const tokens = [];
  for (const { text, position, template } of (await api.chunk(state.name, id)).tokens) {
    if (template) continue;
    tokens.push({ start, end: start + text.length, position });
    start += text.length;
  }
  return tokens;
}

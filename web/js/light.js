// Light on single words: where the model looks while it answers, what a word of an answer attended to, and the brightest words of
// the context. They are painted with the CSS Custom Highlight API, which styles ranges of text and leaves the elements as they are.

import { align, renderedRange } from "./align.js";
import { api } from "./api.js";
import { on } from "./bus.js";
import { $, toast } from "./dom.js";
import { state } from "./state.js";
import { chunkNode } from "./transcript.js";

// The style sheet has a style for each level: ::highlight(attended-1) to ::highlight(attended-5), and the same for bright.
const LEVELS = 5;
const supported = "highlights" in CSS;
const shining = new Set(); // the elements of chunks that the running answer attends to
let latest = null; // the latest attention event, until it is painted
let requests = 0; // only the response to the latest request counts
let repaint = 0; // the timer of the next request

const isOn = () => localStorage.getItem("brightest") === "on";

export function init() {
  const button = $("brightest");
  button.hidden = !supported;
  button.setAttribute("aria-pressed", String(isOn()));
  button.addEventListener("click", () => {
    localStorage.setItem("brightest", isOn() ? "off" : "on");
    button.setAttribute("aria-pressed", String(isOn()));
    paintBrightest();
  });
  on("event", (event) => {
    if (event.type === "attention") follow(event);
    if (["done", "failed"].includes(event.type)) clearAttention();
    if (["message_stored", "resurrected", "pruned", "done"].includes(event.type)) paintBrightestSoon();
  });
  on("conversation", clearAttention);
  on("state", paintBrightest);
}

// Paints once a frame, however many events arrived.
function follow(event) {
  const scheduled = latest !== null;
  latest = event;
  if (scheduled) return;
  requestAnimationFrame(() => {
    if (latest) paintAttention(latest);
    latest = null;
  });
}

/** Lights the words that a token attended to, and the paragraphs that they are in. */
export function paintAttention({ tokens, chunks }) {
  const most = tokens[0]?.share ?? 1;
  paint(
    "attended",
    tokens.map(({ chunk, start, end, share }) => ({ chunk, start, end, t: Math.sqrt(share / most) })),
  );
  for (const node of shining) node.style.removeProperty("--attention");
  shining.clear();
  for (const [id, share] of chunks) {
    const node = chunkNode(id);
    if (!node) continue;
    // Absolute, as the bar is: the same ring is the same share in every chat. The root keeps small shares visible.
    node.style.setProperty("--attention", Math.sqrt(share).toFixed(2));
    shining.add(node);
  }
}

export function clearAttention() {
  latest = null;
  for (const node of shining) node.style.removeProperty("--attention");
  shining.clear();
  paint("attended", []);
}

// One request for all the events of a turn that arrive together.
function paintBrightestSoon() {
  clearTimeout(repaint);
  if (isOn()) repaint = setTimeout(paintBrightest, 100);
}

async function paintBrightest() {
  const request = (requests += 1);
  const { name, snapshot } = state;
  let tokens = [];
  if (supported && isOn() && snapshot && !snapshot.fresh) {
    try {
      const { floor, peak, chunks } = await api.brightness(name);
      const place = (brightness) => (peak > floor ? (brightness - floor) / (peak - floor) : 1);
      tokens = chunks.flatMap((row) =>
        row.tokens.map(([start, end, brightness]) => ({ chunk: row.chunk, start, end, t: place(brightness) })),
      );
    } catch (error) {
      if (request === requests) toast(error.message, { error: true });
    }
  }
  if (request !== requests || name !== state.name) return;
  // The paragraphs are drawn in the next frame.
  requestAnimationFrame(() => requestAnimationFrame(() => paint("bright", tokens)));
}

// Highlights tokens; `t` is the strength of each, from 0 to 1.
function paint(name, tokens) {
  if (!supported) return;
  const levels = Array.from({ length: LEVELS }, () => new Highlight());
  for (const { chunk, start, end, t } of tokens) {
    const range = textRange(chunkNode(chunk), start, end);
    if (range) levels[Math.min(LEVELS - 1, Math.floor(t * LEVELS))].add(range);
  }
  levels.forEach((highlight, level) => CSS.highlights.set(`${name}-${level + 1}`, highlight));
}

/**
 * The text nodes of a paragraph with the place of each in its rendered text, and the source of each character. Labels and buttons
 * are no text of the paragraph.
 */
export function textMap(node) {
  const box = node.querySelector(".text");
  if (!box) return null;
  const nodes = [];
  let text = "";
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let found = walker.nextNode(); found; found = walker.nextNode()) {
    if (/** @type {Text} */ (found).parentElement.closest("[data-skip]")) continue;
    nodes.push({ node: found, start: text.length });
    text += /** @type {Text} */ (found).data;
  }
  const cached = node.textMap;
  if (cached && cached.text === text && nodes.every((entry, at) => entry.node === cached.nodes[at]?.node))
    return cached;
  node.textMap = { nodes, text, places: align(node.sourceText ?? text, text) };
  return node.textMap;
}

// The range of a part of a chunk's source; null if it is not drawn.
function textRange(node, start, end) {
  const map = node ? textMap(node) : null;
  const range = map && renderedRange(map.places, start, end);
  if (!range) return null;
  const [from, to] = range;
  const at = (place) => map.nodes.findLast((entry) => entry.start <= place);
  const [first, last] = [at(from), at(to - 1)];
  return new StaticRange({
    startContainer: first.node,
    startOffset: from - first.start,
    endContainer: last.node,
    endOffset: to - last.start,
  });
}

// The transcript: everything that was said, at its place. Pages of messages are loaded and drawn when they come into view; the
// others are empty boxes of about their height, so that a chat of any length scrolls.

import { emit, on } from "./bus.js";
import { $, el } from "./dom.js";
import { drawEmpty } from "./first_start.js";
import { isReady, loadMarkdown, nextContext, renderText, replaceBlocks, startContext } from "./markdown.js";
import { chunkNodes, drawMessage, forgetMessage } from "./message.js";
import { lastMessages, PAGE, runningTurn } from "./reducers.js";
import { dropPage, indexOfTurn, loadPage, refresh, state } from "./state.js";

const MESSAGE_HEIGHT = 96; // of a message that was never drawn
const KEPT_PAGES = 24; // pages whose messages stay in memory

const pageNodes = []; // the box of each page
const heights = new Map(); // of pages that were drawn
const inView = new Set(); // the pages near the viewport
const turnNodes = new Map(); // the drawn messages, by turn
let runningNode = null;
let scheduled = false;
let dirty = true; // whether more has changed than the end of the running answer
let atEnd = true; // whether the log is scrolled to its end, and follows it

const observer = new IntersectionObserver(observePages, { root: $("log"), rootMargin: "1200px 0px" });

/** The element of a chunk, if it is drawn. */
export const chunkNode = (id) => chunkNodes.get(id);

export function init() {
  on("conversation", () => {
    clear();
    schedule();
  });
  for (const topic of ["state", "variants", "page", "touch", "status"]) on(topic, redraw);
  on("event", (event) => {
    if (event.type === "message_stored") atEnd = true;
    if (["token", "attention", "prefilling"].includes(event.type)) schedule();
    else redraw();
  });
  on("theme", redraw);
  on("jump", ({ turn, chunk }) => jumpTo(turn, chunk));
  initScroll();
  $("to-end").addEventListener("click", () => {
    atEnd = true;
    scrollToEnd();
  });
}

function clear() {
  observer.disconnect();
  $("log").replaceChildren();
  pageNodes.length = 0;
  heights.clear();
  inView.clear();
  turnNodes.clear();
  chunkNodes.clear();
  runningNode = null;
  atEnd = true;
  dirty = true;
}

function redraw() {
  dirty = true;
  schedule();
}

// Draws once a frame, however many events arrived.
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw();
  });
}

function draw() {
  const log = $("log");
  if (state.snapshot && (state.total > 0 || state.running) && !isReady()) {
    // The first message needs the libraries; they are small and local.
    loadMarkdown().then(redraw, redraw);
    if (dirty) drawLoadError();
    return;
  }
  if (dirty && state.snapshot) {
    dirty = false;
    drawPages();
    const { live, budget_after_turn, pruned } = state.snapshot;
    // While there is room for everything, attention decides nothing, and no bars are shown.
    log.classList.toggle("filling", pruned > 0 || (budget_after_turn > 0 && live / budget_after_turn >= 0.6));
    drawEmpty(log, state.total === 0 && !state.running && !state.loadError);
  }
  drawLoadError();
  drawRunning();
  if (atEnd) scrollToEnd();
  emit("drawn");
}

function drawPages() {
  const log = $("log");
  const wanted = Math.max(1, Math.ceil(state.total / PAGE));
  while (pageNodes.length > wanted) {
    const node = pageNodes.pop();
    observer.unobserve(node);
    inView.delete(pageNodes.length);
    emptyPage(node);
    node.remove();
  }
  while (pageNodes.length < wanted) {
    const page = pageNodes.length;
    const node = el("div", { class: "page", data: { page } });
    pageNodes.push(node);
    node.style.height = `${estimate(page)}px`;
    log.insertBefore(node, runningNode);
    observer.observe(node);
  }
  // The end is always drawn: it is what a chat opens at, and where messages arrive.
  for (const page of [wanted - 2, wanted - 1]) if (page >= 0) inView.add(page);
  for (const page of inView) drawPage(page);
}

const estimate = (page) => heights.get(page) ?? Math.min(PAGE, Math.max(1, state.total - page * PAGE)) * MESSAGE_HEIGHT;

function drawPage(page) {
  const messages = state.pages.get(page);
  if (!messages) {
    if (state.total > 0) loadPage(page).catch((error) => showPageError(page, error));
    return;
  }
  const box = pageNodes[page];
  box.style.height = "";
  const lastTurn = runningTurn(state) === null ? lastMessages(state, 1)[0]?.turn : null;
  const wanted = [];
  for (const message of messages) {
    const node = drawMessage(turnNodes.get(message.turn), message, { last: message.turn === lastTurn });
    turnNodes.set(message.turn, node);
    for (const memory of memoriesBefore(message.turn, messages)) wanted.push(memory);
    wanted.push(node);
  }
  const kept = new Set(wanted);
  for (const old of [...box.children]) if (!kept.has(old)) removeNode(old);
  wanted.forEach((node, at) => {
    if (box.children[at] !== node) box.insertBefore(node, box.children[at] ?? null);
  });
}

function removeNode(node) {
  const turn = Number(node.dataset.turn);
  if (turnNodes.get(turn) === node) turnNodes.delete(turn);
  forgetMessage(node);
  node.remove();
}

function emptyPage(node) {
  for (const child of [...node.children]) removeNode(child);
}

function showPageError(page, error) {
  const retry = () => {
    pageNodes[page]?.replaceChildren();
    redraw();
  };
  pageNodes[page]?.replaceChildren(
    el(
      "p",
      { class: "load-error error" },
      `These messages cannot be loaded: ${error.message}. `,
      el("button", { type: "button", onclick: retry }, "Try again"),
    ),
  );
}

// The memories that are in the context before a message. They are few.
const memoryNodes = new Map();
function memoriesBefore(turn, messages) {
  const { placed_memories = [] } = state.snapshot;
  const at = messages.findIndex((message) => message.turn === turn);
  const previous = at > 0 ? messages[at - 1].turn : -1;
  return placed_memories
    .filter((memory) => memory.turn > previous && memory.turn <= turn && (at > 0 || memory.turn === turn || turn === 0))
    .map((memory) => {
      const key = JSON.stringify([state.name, memory]);
      if (!memoryNodes.has(key))
        memoryNodes.set(
          key,
          el(
            "article",
            { class: "memory", data: { turn: memory.turn - 0.5 }, "aria-label": `memory ${memory.id}` },
            el(
              "button",
              { type: "button", class: "link", onclick: () => emit("panel", "memories") },
              `✎ Memory ${memory.id} is in the context here`,
            ),
            el("p", {}, memory.text),
          ),
        );
      return memoryNodes.get(key);
    });
}

function observePages(entries) {
  for (const { target, isIntersecting } of entries) {
    const page = Number(target.dataset.page);
    if (pageNodes[page] !== target) continue;
    if (isIntersecting) inView.add(page);
    else if (page < pageNodes.length - 2 && !target.contains(document.activeElement)) {
      // Its height is kept, so that nothing moves.
      heights.set(page, target.offsetHeight);
      target.style.height = `${target.offsetHeight}px`;
      inView.delete(page);
      emptyPage(target);
    }
  }
  const idle = [...state.pages.keys()].filter((page) => !inView.has(page) && page < pageNodes.length - 2);
  for (const page of idle.slice(0, Math.max(0, state.pages.size - KEPT_PAGES))) dropPage(page);
  redraw();
}

// A chat that cannot be loaded shows the error; it is never drawn as an empty one.
function drawLoadError() {
  const shown = $("log").querySelector(":scope > .load-error");
  if (!state.loadError) {
    shown?.remove();
    return;
  }
  if (shown?.dataset.error === state.loadError) return;
  shown?.remove();
  $("log").prepend(
    el(
      "p",
      { class: "load-error error", role: "alert", data: { error: state.loadError } },
      `“${state.name}” cannot be loaded: ${state.loadError}. Nothing is lost. `,
      el("button", { type: "button", onclick: refresh }, "Try again"),
    ),
  );
}

// The running answer, after all pages. Only the paragraph that grows is rendered again.
function drawRunning() {
  const turn = runningTurn(state);
  if (turn === null) {
    if (runningNode) {
      for (const [id, node] of chunkNodes) if (runningNode.contains(node)) chunkNodes.delete(id);
      runningNode.remove();
      runningNode = null;
      dirty = true;
      // The stored answer is drawn in the same frame, so that nothing jumps.
      drawPages();
      dirty = false;
    }
    return;
  }
  if (!runningNode || Number(runningNode.dataset.turn) !== turn) {
    runningNode?.remove();
    runningNode = el(
      "article",
      { class: "turn assistant running", data: { turn } },
      el("h2", {}, el("b", {}, "Model")),
      el("div", { class: "body" }),
    );
    $("log").append(runningNode);
  }
  const body = runningNode.lastElementChild;
  let context = startContext();
  const chunks = [...state.running.chunks];
  chunks.forEach(([id, text], n) => {
    let node = chunkNodes.get(id);
    if (!node?.isConnected || node.parentElement !== body) {
      node = el("div", { class: "chunk pending", data: { chunk: id } }, el("div", { class: "text", dir: "auto" }));
      body.append(node);
      chunkNodes.set(id, node);
    }
    node.classList.toggle("caret", false);
    if (node.sourceText !== text) {
      node.sourceText = text;
      replaceBlocks(node.firstElementChild, renderText(text, [], context));
    }
    node.firstElementChild.classList.toggle("caret", n === chunks.length - 1);
    context = nextContext(context, text);
  });
}

// ---- scrolling

// Boxes get their real heights when they come into view, so scrolling to the end may take a few steps.
function scrollToEnd(steps = 8) {
  const log = $("log");
  log.scrollTop = log.scrollHeight;
  if (steps > 0)
    requestAnimationFrame(() => {
      if (atEnd && log.scrollHeight - log.scrollTop - log.clientHeight > 1) scrollToEnd(steps - 1);
    });
}

// A reader who scrolls up stays there until the end is in view again.
function initScroll() {
  const log = $("log");
  let last = 0;
  log.addEventListener(
    "scroll",
    () => {
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      if (near) atEnd = true;
      else if (log.scrollTop < last - 2) atEnd = false;
      last = log.scrollTop;
      $("to-end").hidden = near;
      emit("scroll");
    },
    { passive: true },
  );
}

/** The indexes of the first and the last message in view. */
export function visibleRange() {
  const { top, bottom } = $("log").getBoundingClientRect();
  const indexAt = (edge) => {
    for (const [page, node] of pageNodes.entries()) {
      const box = node.getBoundingClientRect();
      if (box.bottom < edge) continue;
      const count = Math.min(PAGE, state.total - page * PAGE);
      const part = Math.max(0, Math.min(1, (edge - box.top) / (box.height || 1)));
      return page * PAGE + part * count;
    }
    return state.total;
  };
  return [indexAt(top), indexAt(bottom)];
}

/** Scrolls to a message by its index in the whole chat. */
export async function scrollToIndex(index) {
  const page = Math.floor(Math.max(0, Math.min(index, state.total - 1)) / PAGE);
  atEnd = false;
  inView.add(page);
  await Promise.all([loadMarkdown(), loadPage(page)]);
  if (!state.snapshot) return;
  drawPages();
  const node = pageNodes[page];
  const messages = state.pages.get(page) ?? [];
  const turn = messages[Math.min(messages.length - 1, Math.floor(index) - page * PAGE)]?.turn;
  (turnNodes.get(turn) ?? node)?.scrollIntoView({ block: "start" });
}

/** Scrolls to a paragraph and marks it for a moment. */
export async function jumpTo(turn, chunk) {
  const index = await indexOfTurn(turn);
  if (index === null) return;
  await scrollToIndex(index);
  const target = chunkNodes.get(chunk) ?? turnNodes.get(turn)?.querySelector(".chunk");
  if (!target) return;
  target.scrollIntoView({ block: "center" });
  target.focus({ preventScroll: true });
  target.classList.remove("found");
  requestAnimationFrame(() => target.classList.add("found"));
  setTimeout(() => target.classList.remove("found"), 2700);
}

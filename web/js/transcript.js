// The transcript: everything that was said, at its place. Pages of messages are loaded and drawn when they come into view; one
// spacer takes the place of all pages between two that are drawn, so that a chat of any length scrolls.

import { speakerOf } from "./actions.js";
import { emit, on } from "./bus.js";
import { $, el } from "./dom.js";
import { drawEmpty } from "./first_start.js";
import { restoreFolds } from "./folds.js";
import { isReady, loadMarkdown, nextContext, patchContent, renderText, startContext } from "./markdown.js";
import { memoriesBefore } from "./memory_marks.js";
import { chunkNodes, drawChips, drawMessage, forgetMessage } from "./message.js";
import { PageHeights } from "./page_heights.js";
import { END_PAGES, lastMessages, PAGE, runningTurn } from "./reducers.js";
import { dropPage, indexOfTurn, loadPage, refresh, state } from "./state.js";

const MESSAGE_HEIGHT = 96; // of a message that was never drawn
const KEPT_PAGES = 48; // pages whose messages stay in memory

const MARGIN = 1200; // pages that are so near the viewport are drawn

const pageNodes = new Map(); // the boxes of the pages near the viewport and at the end, by page
const spacers = new Map(); // the place of the pages before such a page that are not drawn, by page
const heights = new PageHeights(estimate);
const turnNodes = new Map(); // the drawn messages, by turn
let runningNode = null;
let scheduled = false;
let dirty = true; // whether more has changed than the end of the running answer
let following = false; // whether the pages in view are computed in the next frame
let goal = null; // the page that is being scrolled to
let jumps = 0; // numbers the jumps to a message: only the latest one arrives
let jumping = false; // whether the page of the latest jump is being loaded
let atEnd = true; // whether the log is scrolled to its end, and follows it

const sizes = new ResizeObserver(measurePages);

/** The element of a chunk, if it is drawn. */
export const chunkNode = (id) => chunkNodes.get(id);

export function init() {
  on("conversation", () => {
    clear();
    schedule();
  });
  for (const topic of ["state", "variants", "touch", "status"]) on(topic, redraw);
  on("page", drawLoadedPage);
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
  sizes.disconnect();
  cancelJump();
  $("log").replaceChildren();
  pageNodes.clear();
  spacers.clear();
  heights.resize(0);
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

const sourceOf = (/** @type {any} */ node) => node.sourceText ?? "";

// The focus stays at a paragraph whatever becomes of it: one that is merged is in the paragraph above, and after one that is
// deleted comes the next.
function keepFocus(work) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement?.closest?.("#log .chunk"));
  work();
  const { activeElement } = document;
  if (!focused || focused.isConnected || (activeElement && activeElement !== document.body)) return;
  const place = Number(focused.dataset.position);
  const all = /** @type {HTMLElement[]} */ ([...$("log").querySelectorAll(".chunk")]);
  const merged = all.findLast(
    (node) =>
      node.dataset.turn === focused.dataset.turn &&
      Number(node.dataset.position) < place &&
      sourceOf(node).endsWith(sourceOf(focused).trimEnd()),
  );
  const next = merged ?? all.find((node) => Number(node.dataset.position) >= place) ?? all.at(-1);
  (next ?? $("message")).focus({ preventScroll: true });
}

function draw() {
  keepFocus(drawAll);
}

function drawAll() {
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
  heights.resize(Math.max(1, Math.ceil(state.total / PAGE)));
  mountPages();
  for (const page of pageNodes.keys()) drawPage(page);
}

function estimate(page) {
  return Math.min(PAGE, Math.max(1, state.total - page * PAGE)) * MESSAGE_HEIGHT;
}

// The pages to draw: those near the viewport, and the end, which a chat opens at and where messages arrive.
function wantedPages() {
  const last = heights.length - 1;
  const wanted = new Set();
  for (let page = Math.max(0, last - END_PAGES + 1); page <= last; page += 1) wanted.add(page);
  const { scrollTop, clientHeight } = $("log");
  const top = atEnd ? heights.total - clientHeight : scrollTop;
  const to = heights.pageAt(top + clientHeight + MARGIN);
  for (let page = heights.pageAt(top - MARGIN); page <= to; page += 1) wanted.add(page);
  for (const [page, node] of pageNodes)
    if (page <= last && (page === goal || node.contains(document.activeElement))) wanted.add(page);
  if (goal !== null && goal <= last) wanted.add(goal);
  return wanted;
}

// Creates the boxes of the wanted pages and removes the others. Returns the new ones.
function mountPages() {
  const log = $("log");
  const wanted = wantedPages();
  for (const [page, node] of pageNodes) {
    if (wanted.has(page)) continue;
    sizes.unobserve(node);
    emptyPage(node);
    node.remove();
    pageNodes.delete(page);
  }
  const fresh = [];
  let after = -1;
  let place = log.querySelector(":scope > .page, :scope > .spacer");
  const keep = (node) => {
    if (place === node) place = place.nextElementSibling;
    else log.insertBefore(node, place ?? runningNode);
  };
  const used = new Set();
  for (const page of [...wanted].sort((one, other) => one - other)) {
    if (page > after + 1) {
      let spacer = spacers.get(page);
      if (!spacer) {
        spacer = el("div", { class: "spacer", "aria-hidden": "true" });
        spacers.set(page, spacer);
      }
      const height = `${heights.top(page) - heights.top(after + 1)}px`;
      if (spacer.style.height !== height) spacer.style.height = height;
      used.add(page);
      keep(spacer);
    }
    let node = pageNodes.get(page);
    if (!node) {
      node = el("div", { class: "page", data: { page } });
      node.style.height = `${heights.get(page)}px`;
      pageNodes.set(page, node);
      sizes.observe(node);
      fresh.push(page);
    }
    keep(node);
    after = page;
  }
  for (const [page, spacer] of spacers)
    if (!used.has(page)) {
      spacer.remove();
      spacers.delete(page);
    }
  return fresh;
}

// The real heights of drawn pages. The spacers above the viewport have the sums of heights that are known, so nothing moves.
function measurePages(entries) {
  for (const { target, borderBoxSize } of entries) {
    const page = Number(target.dataset.page);
    if (pageNodes.get(page) === target && page < heights.length) heights.set(page, borderBoxSize[0].blockSize);
  }
}

function drawLoadedPage(page) {
  if (!state.snapshot || !isReady()) return redraw();
  keepFocus(() => drawPage(page));
  if (atEnd) scrollToEnd();
  emit("drawn");
}

// The reader has scrolled: only pages that are new in view are drawn.
function followViewport() {
  if (!state.snapshot || !isReady()) return;
  const fresh = mountPages();
  for (const page of fresh) drawPage(page);
  if (!fresh.length) return;
  const idle = [...state.pages.keys()].filter((page) => !pageNodes.has(page));
  for (const page of idle.slice(0, Math.max(0, state.pages.size - KEPT_PAGES))) dropPage(page);
  emit("drawn");
}

function drawPage(page) {
  const messages = state.pages.get(page);
  if (!messages) {
    if (state.total > 0) loadPage(page).catch((error) => showPageError(page, error));
    return;
  }
  const box = pageNodes.get(page);
  if (!box) return;
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
    pageNodes.get(page)?.replaceChildren();
    redraw();
  };
  pageNodes
    .get(page)
    ?.replaceChildren(
      el(
        "p",
        { class: "load-error error" },
        `These messages cannot be loaded: ${error.message}. `,
        el("button", { type: "button", onclick: retry }, "Try again"),
      ),
    );
}

// What a failure to load means, and what to do.
function loadAdvice(status) {
  if (status === 401 || status === 403) return "This server does not let you read it: check the key.";
  if (status === 429) return "There were too many requests; wait a moment.";
  if (status === 503) return "It is busy or not available now. Nothing is lost.";
  if (status >= 500) return "Its file may be damaged: “halo doctor” checks and repairs it, after a backup.";
  return "Nothing is lost.";
}

// A chat that cannot be loaded shows the error; it is never drawn as an empty one.
function drawLoadError() {
  const shown = $("log").querySelector(":scope > .load-error");
  if (!state.loadError) {
    shown?.remove();
    return;
  }
  const { message, status } = state.loadError;
  if (shown?.dataset.error === message) return;
  shown?.remove();
  $("log").prepend(
    el(
      "div",
      { class: "load-error", role: "alert", data: { error: message } },
      el("strong", { class: "error" }, `“${state.name}” cannot be loaded.`),
      el("p", {}, loadAdvice(status)),
      el("p", { class: "quiet" }, `${message}.`),
      el("button", { type: "button", class: "outlined", onclick: refresh }, "Try again"),
    ),
  );
}

// The running answer, after all pages. Only the paragraph that grows is rendered again.
function drawRunning() {
  const turn = runningTurn(state);
  // What was brought back is shown before the first word.
  const used = state.running ? [...state.recalled.values()] : [];
  if (turn === null && used.length === 0) {
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
  runningNode ??= el(
    "article",
    { class: "turn assistant running" },
    el("h2", {}, el("b", {}, speakerOf({ role: "assistant" }))),
    el("div", { class: "body" }),
  );
  if (!runningNode.isConnected) $("log").append(runningNode);
  runningNode.dataset.turn = turn ?? "";
  drawChips(runningNode, { used });
  const body = runningNode.children[1];
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
      patchContent(node.firstElementChild, restoreFolds(id, renderText(text, [], context)));
    }
    node.firstElementChild.classList.toggle("caret", n === chunks.length - 1);
    context = nextContext(context, text);
  });
}

// ---- scrolling

// Boxes get their real heights when they come into view, so scrolling to the end may take a few steps.
function scrollToEnd(steps = 8) {
  const log = $("log");
  // An empty chat begins with a heading, which a small screen must show first.
  if (log.querySelector(":scope > .empty")) {
    log.scrollTop = 0;
    return;
  }
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
  // A reader who scrolls does not want to be taken elsewhere any more.
  for (const type of ["wheel", "touchmove"]) log.addEventListener(type, cancelJump, { passive: true });
  log.addEventListener(
    "scroll",
    () => {
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      if (near && !jumping) atEnd = true;
      else if (log.scrollTop < last - 2) atEnd = false;
      last = log.scrollTop;
      // A scroll event of what was in view before must not end the jump that is being loaded.
      if (!jumping) goal = null;
      $("to-end").hidden = near;
      if (!following) {
        following = true;
        requestAnimationFrame(() => {
          following = false;
          followViewport();
        });
      }
      emit("scroll");
    },
    { passive: true },
  );
}

/** The indexes of the first and the last message in view. */
export function visibleRange() {
  const log = $("log");
  if (!heights.length) return [0, 0];
  const padding = Math.max(0, pageNodes.get(0)?.offsetTop ?? 0);
  const indexAt = (y) => {
    const page = heights.pageAt(y);
    const count = Math.min(PAGE, state.total - page * PAGE);
    const part = Math.max(0, Math.min(1, (y - heights.top(page)) / (heights.get(page) || 1)));
    return Math.min(state.total, page * PAGE + part * count);
  };
  const top = log.scrollTop - padding;
  return [indexAt(top), indexAt(top + log.clientHeight)];
}

function cancelJump() {
  jumps += 1;
  jumping = false;
  goal = null;
}

/** Scrolls to a message by its index in the whole chat. */
export async function scrollToIndex(index) {
  const page = Math.floor(Math.max(0, Math.min(index, state.total - 1)) / PAGE);
  const jump = (jumps += 1);
  atEnd = false;
  goal = page;
  jumping = true;
  try {
    await Promise.all([loadMarkdown(), loadPage(page)]);
  } finally {
    if (jump === jumps) jumping = false;
  }
  if (!state.snapshot || jump !== jumps) return;
  atEnd = false;
  drawPages();
  const messages = state.pages.get(page) ?? [];
  const turn = messages[Math.min(messages.length - 1, Math.floor(index) - page * PAGE)]?.turn;
  (turnNodes.get(turn) ?? pageNodes.get(page))?.scrollIntoView({ block: "start" });
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

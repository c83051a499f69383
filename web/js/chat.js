// The chat log, shaded by how much attention each paragraph received, and the message box.

import { api, ServerUnreachable } from "./api.js";
import { emit, on } from "./bus.js";
import { $, ask, autoGrow, count, el, number, time, toast } from "./dom.js";
import { shadeStyle } from "./shade.js";
import { refresh, state } from "./state.js";

const turnNodes = new Map(); // elements by turn
const chunkNodes = new Map(); // elements by chunk id
const drawn = new Map(); // what was drawn of each chunk, to skip those that have not changed
let scheduled = false;
let atEnd = true; // whether the log is scrolled to its end, and follows it
let allDirty = true; // whether more has changed than the end of the running answer

const ROLE_LABELS = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

export function init() {
  on("conversation", () => {
    clear();
    cancelEdit();
    loadDraft();
    redraw();
    drawVariants();
  });
  on("state", () => {
    redraw();
    drawVariants();
  });
  on("event", showEvent);
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", reshade);
  on("theme", reshade);
  initScroll();
  initComposer();
}

/** The element of a chunk, if it is drawn. */
export const chunkNode = (id) => chunkNodes.get(id);

function clear() {
  $("log").replaceChildren();
  drawnMemories = "";
  atEnd = true;
  turnNodes.clear();
  chunkNodes.clear();
  drawn.clear();
  $("hints").replaceChildren();
}

export function reshade() {
  for (const entry of drawn.values()) entry.brightness = null;
  redraw();
}

function redraw() {
  allDirty = true;
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

// A token only appends its text; everything else is compared only when another event arrived.
function draw() {
  const log = $("log");
  const below = log.scrollHeight - log.scrollTop;
  if (state.snapshot) {
    if (allDirty) allDirty = drawAll();
    for (const [id, text] of state.running?.chunks ?? []) drawRunningChunk(id, text);
    drawEmptyHint(state.order.length === 0 && !state.running);
  }
  drawLoadError();
  drawStatus();
  if (atEnd) scrollToEnd();
  else if (allDirty) log.scrollTop = log.scrollHeight - below;
  if (allDirty) schedule();
}

// The browser lays elements out only when they come into view, so scrolling to the end may take a few steps.
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
    },
    { passive: true },
  );
}

// Milliseconds of a frame that drawing may take.
const FRAME_BUDGET = 8;

// Draws all chunks, the latest first. Returns whether chunks are left for the next frame.
function drawAll() {
  const deadline = performance.now() + FRAME_BUDGET;
  for (const id of [...chunkNodes.keys()]) {
    if (!state.chunks.has(id) && !state.running?.chunks.has(id)) removeChunk(id);
  }
  for (let at = state.order.length - 1; at >= 0; at -= 1) {
    const chunk = state.chunks.get(state.order[at]);
    drawChunk(chunk);
    shadeChunk(chunk);
    // Checked after a chunk, so that every frame draws at least the latest one, before the answer that follows it.
    if (at > 0 && performance.now() > deadline) return true;
  }
  for (const [turn, node] of turnNodes) drawHeading(turn, node);
  drawMemories();
  return false;
}

// The memories in the context. They are few, so all are drawn again when one has changed.
let drawnMemories = "";
function drawMemories() {
  const { placed_memories = [] } = state.snapshot;
  const key = JSON.stringify(placed_memories);
  if (key === drawnMemories) return;
  drawnMemories = key;
  const log = $("log");
  log.querySelectorAll(".memory").forEach((node) => node.remove());
  for (const memory of placed_memories) {
    const node = el(
      "article",
      { class: "memory", data: { turn: memory.turn - 0.5 }, "aria-label": `memory ${memory.id}` },
      el(
        "button",
        { type: "button", class: "link", onclick: () => emit("panel", "memories") },
        `✎ Memory ${memory.id} is in the context here`,
      ),
      el("p", {}, memory.text),
    );
    log.insertBefore(
      node,
      [...log.querySelectorAll(".turn")].find((turn) => Number(turn.dataset.turn) >= memory.turn) ?? null,
    );
  }
}

function drawEmptyHint(empty) {
  const shown = $("log").querySelector(".empty");
  const text =
    state.snapshot.tokens > 0
      ? "No paragraph of this chat is in the context now. They are not lost: “Out of context” above lists them."
      : "This chat is empty. Paragraphs that the model pays attention to are drawn bright. When the context is full, the dimmest " +
        "ones are removed from it, and they are brought back when a message is about them.";
  if (!empty) {
    shown?.remove();
    return;
  }
  if (shown?.textContent === text) return;
  shown?.remove();
  $("log").append(el("p", { class: "empty" }, text));
}

// A chat that cannot be loaded shows the error; it is never drawn as an empty one.
function drawLoadError() {
  const shown = $("log").querySelector(".load-error");
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

// The variants of the last answer, if there is more than one.
let variantRequests = 0;
async function drawVariants() {
  const request = (variantRequests += 1);
  const box = $("variants");
  const { name } = state;
  let all = [];
  if (state.snapshot && !state.snapshot.fresh && !state.running && !state.loadError) {
    try {
      all = await api.variants(name);
    } catch {
      all = [];
    }
  }
  if (request !== variantRequests || name !== state.name) return;
  box.hidden = all.length < 2;
  if (box.hidden) {
    box.replaceChildren();
    return;
  }
  const at = all.findIndex((variant) => variant.current);
  const choose = (to) => async () => {
    try {
      await api.chooseVariant(name, all[to].turn);
    } catch (error) {
      toast(error.message, { error: true });
    }
  };
  const step = (mark, label, to) =>
    el("button", { type: "button", "aria-label": label, disabled: !all[to], onclick: choose(to) }, mark);
  const what = all[Math.max(at, 0)].messages.length > 1 ? "Version" : "Answer";
  box.replaceChildren(
    step("‹", `Previous ${what.toLowerCase()}`, at - 1),
    el("span", {}, `${what} ${at + 1} of ${all.length}`),
    step("›", `Next ${what.toLowerCase()}`, at + 1),
  );
}

function removeChunk(id) {
  const node = chunkNodes.get(id);
  const turn = node.closest(".turn");
  turn.querySelector(`.gap[data-before="${id}"]`)?.remove();
  node.remove();
  chunkNodes.delete(id);
  drawn.delete(id);
  if (!turn.querySelector(".chunk")) {
    turn.remove();
    turnNodes.delete(Number(turn.dataset.turn));
  }
}

function turnNode(id, role) {
  let node = turnNodes.get(id);
  if (node) return node;
  node = el(
    "article",
    { class: `turn ${role}`, data: { turn: id } },
    el("h2", {}, el("b", {}, ROLE_LABELS[role] ?? role), el("time", {}), el("span", { class: "finish" })),
  );
  turnNodes.set(id, node);
  // Most new turns are the first or the last.
  const log = $("log");
  let after = log.querySelector(".turn");
  if (!after || Number(log.lastElementChild.dataset.turn) < id) after = null;
  while (after && Number(after.dataset.turn) < id) after = after.nextElementSibling;
  log.insertBefore(node, after);
  return node;
}

function drawHeading(id, node) {
  const [, timeNode, finishNode] = node.firstChild.children;
  const { times, premises, finish_reasons } = state.snapshot;
  const at = times[id] ? time(times[id]) : "";
  if (timeNode.textContent !== at) timeNode.textContent = at;
  const labels = {
    length: "maximum length reached",
    aborted: "stopped",
    failed: "failed",
    interrupted: "interrupted when the program ended",
  };
  const finish = [
    premises?.[id] ? `無 Your question assumes something that was contradicted: ${premises[id]}` : "",
    labels[finish_reasons[id]] ?? "",
  ]
    .filter(Boolean)
    .join(" · ");
  if (finishNode.textContent !== finish) finishNode.textContent = finish;
  finishNode.classList.toggle("error", ["failed", "interrupted"].includes(finish_reasons[id]));
}

// Draws a chunk at its position in its turn.
function drawChunk(chunk) {
  const entry = drawn.get(chunk.id);
  if (entry?.chunk === chunk) return;
  const key = JSON.stringify([chunk.text, chunk.pinned, chunk.pruned_before, chunk.reason, chunk.tool_ranges]);
  const old = chunkNodes.get(chunk.id);
  if (entry?.key === key) {
    entry.chunk = chunk;
    return;
  }
  const node = el(
    "div",
    {
      class: chunk.resurrected ? "chunk resurrected" : "chunk",
      tabindex: "0",
      data: { chunk: chunk.id, position: chunk.position },
      "aria-label": `${ROLE_LABELS[chunk.role]}, turn ${chunk.turn}, paragraph ${chunk.index}${chunk.pinned ? ", pinned" : ""}`,
      role: "group",
    },
    chunkText(chunk),
    chunk.resurrected && chunk.reason ? el("span", { class: "reason" }, `↩ brought back: ${chunk.reason}`) : null,
  );
  if (chunk.resurrected)
    setTimeout(() => {
      delete chunk.resurrected;
      node.classList.remove("resurrected");
    }, 2600);
  if (old) old.replaceWith(node);
  else {
    const turn = turnNode(chunk.turn, chunk.role);
    const next = [...turn.querySelectorAll(".chunk")].find((other) => Number(other.dataset.position) > chunk.position);
    turn.insertBefore(node, next ?? null);
  }
  chunkNodes.set(chunk.id, node);
  drawn.set(chunk.id, { chunk, key, brightness: null });
  drawGap(node, chunk);
}

function chunkText(chunk) {
  const parts = [];
  if (chunk.pinned) parts.push(el("span", { class: "mark", role: "img", "aria-label": "pinned" }, "📌"));
  let at = 0;
  for (const [from, to] of chunk.tool_ranges ?? []) {
    parts.push(chunk.text.slice(at, from), el("span", { class: "tool" }, chunk.text.slice(from, to)));
    at = to;
  }
  parts.push(chunk.text.slice(at).replace(/\s+$/, ""));
  return parts;
}

// A line where pruned paragraphs were.
function drawGap(node, chunk) {
  node.parentNode.querySelector(`.gap[data-before="${chunk.id}"]`)?.remove();
  if (!chunk.pruned_before) return;
  const line = el(
    "button",
    { class: "gap", type: "button", data: { before: chunk.id }, onclick: () => emit("panel", "graveyard") },
    `${count(chunk.pruned_before, "paragraph")} out of context here`,
  );
  node.before(line);
}

// The bar and the colours of a chunk; styles are set only when they change.
function shadeChunk(chunk) {
  // A new chunk has full brightness until attention to it has been measured.
  const brightness = Math.round((chunk.relative_brightness ?? 1) * 200) / 200;
  const entry = drawn.get(chunk.id);
  if (entry.brightness === brightness) return;
  entry.brightness = brightness;
  const node = chunkNodes.get(chunk.id);
  const { bar, colour, ground } = shadeStyle(brightness);
  Object.assign(node.style, { borderLeftColor: bar, color: colour, background: ground });
  node.title = `${chunk.id} · brighter than ${Math.round(brightness * 100)} % of the context · brightest token ${number(chunk.peak)} · ${count(chunk.tokens, "token")}`;
}

// Appends the new text of the running answer; nothing else is touched.
function drawRunningChunk(id, text) {
  let node = chunkNodes.get(id);
  if (!node) {
    const [, role, turn] = /^([a-z])(\d+)\./.exec(id);
    node = el("div", { class: "chunk pending", data: { chunk: id, position: Number.MAX_SAFE_INTEGER } }, "");
    turnNode(Number(turn), { u: "user", a: "assistant", s: "system", t: "tool" }[role]).append(node);
    chunkNodes.set(id, node);
    drawn.set(id, { key: "", brightness: null });
    node.append(document.createTextNode(""));
  }
  const entry = drawn.get(id);
  const shown = entry.shown ?? 0;
  if (text.length > shown) {
    node.lastChild.appendData ? node.lastChild.appendData(text.slice(shown)) : node.append(text.slice(shown));
    entry.shown = text.length;
  }
}

function drawStatus() {
  const { snapshot, running } = state;
  const meter = $("meter");
  if (!snapshot) {
    $("summary").textContent = "";
    return;
  }
  const limit = snapshot.limit || 1;
  meter.setAttribute("aria-valuemax", limit);
  meter.setAttribute("aria-valuenow", snapshot.live);
  meter.firstElementChild.style.width = `${Math.min(100, (snapshot.live / limit) * 100)}%`;
  meter.lastElementChild.style.left = `${Math.min(100, (snapshot.budget_after_turn / limit) * 100)}%`;
  $("summary").textContent = statusText(snapshot);
  $("summary").title =
    `${number(snapshot.live)} tokens are in the context, ${number(snapshot.system_prompt_tokens ?? 0)} of them the system prompt. ` +
    `After an answer, paragraphs are removed until ${number(snapshot.budget_after_turn)} remain, ` +
    "so that the next message and its answer fit.";
  $("pruned-count").textContent = number(snapshot.pruned);
  $("progress").textContent = progressText(running);
  $("stop").hidden = !running;
}

function statusText(snapshot) {
  // The tokens of a running answer are in the context before they are counted in the conversation.
  const total = Math.max(snapshot.tokens, snapshot.live - (snapshot.system_prompt_tokens ?? 0));
  const parts = snapshot.fresh
    ? []
    : [`Context ${number(snapshot.live)} / ${number(snapshot.limit)} tokens`, `${number(total)} tokens in total`];
  if (snapshot.last_summary) parts.push(`${number(snapshot.last_summary.tokens_per_second)} tokens/s`);
  if (snapshot.attention === false) parts.push("no attention data from this model");
  return parts.join(" · ");
}

function progressText(running) {
  if (!running) return "";
  if (running.ahead > 0) return `queued, ${running.ahead} ahead`;
  if (running.prefilling && running.prefilling.total > 64)
    return `reading the context ${running.prefilling.done}/${running.prefilling.total}`;
  return running.chunks.size ? "answering" : "thinking";
}

// Redraws what an event changed, and shows hints and errors.
function showEvent(event) {
  if (event.type === "attention") return;
  if (event.type === "token" || event.type === "prefilling") schedule();
  else redraw();
  if (["queued", "message_stored", "done", "failed"].includes(event.type)) drawVariants();
  const hints = $("hints");
  if (event.type === "message_stored") {
    resurrected.clear();
    hints.replaceChildren();
  }
  if (event.type === "resurrected" && event.chunk) {
    resurrected.set(event.chunk.id, event.chunk.text.trim());
    hints.replaceChildren(...resurrectedHint("brought back for this message"));
  }
  if (event.type === "false_premise")
    hints.replaceChildren(
      el(
        "span",
        { class: "error" },
        `無 Your question assumes something that was contradicted: “${event.premise}”. ${event.reason}. ${event.suggestion}`,
      ),
    );
  if (event.type === "done") {
    const parts = [];
    if (resurrected.size) parts.push(...resurrectedHint("brought back for this answer"));
    if (event.summary.pruned)
      parts.push(el("span", {}, `${count(event.summary.pruned, "paragraph")} removed from the context. `));
    if (parts.length) hints.replaceChildren(...parts);
  }
  if (event.type === "budget_exceeded") toast(event.reason, { error: true });
  if (event.type === "notice") toast(event.text);
  // A message that this page is sending reports its own failure.
  if (event.type === "failed" && !sending) toast(event.error, { error: true });
}

const resurrected = new Map(); // paragraphs brought back for the running or the last answer: text by chunk id

// The first words of each paragraph that was brought back; a click opens it.
function resurrectedHint(label) {
  const link = ([id, text]) =>
    el(
      "button",
      { type: "button", class: "link", onclick: () => emit("panel", { panel: "chunk", chunk: id }) },
      `“${text.slice(0, 40)}${text.length > 40 ? "…" : ""}”${state.chunks.has(id) ? "" : " (removed again)"}`,
    );
  return [
    el("span", {}, `↩ ${count(resurrected.size, "paragraph")} ${label}: `),
    ...[...resurrected].slice(0, 3).map(link),
    el("span", {}, resurrected.size > 3 ? " and more. " : ". "),
  ];
}

// ---- the message box: a draft is kept in the browser until the server has stored it.

const draftKey = (name) => `draft:${name}`;
const sentKey = (name) => `sent:${name}`;

function loadDraft() {
  const box = $("message");
  box.value = localStorage.getItem(draftKey(state.name)) ?? "";
  autoGrow(box);
  resendMessage();
}

// A message that was being sent when the page was closed is sent again with the same id: the server stores it once.
async function resendMessage() {
  const { name } = state;
  const unsent = JSON.parse(localStorage.getItem(sentKey(name)) ?? "null");
  if (!unsent) return;
  await deliver(name, unsent);
}

function initComposer() {
  const box = $("message");
  box.addEventListener("input", () => {
    if (!editing) localStorage.setItem(draftKey(state.name), box.value);
    autoGrow(box);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
    if (event.key === "Escape") {
      if (editing) cancelEdit();
      else stop();
    }
  });
  $("cancel-edit").addEventListener("click", () => {
    cancelEdit();
    box.focus();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
}

let editing = false; // whether the text in the box replaces the last message
let sending = false;

async function send() {
  const box = $("message");
  const text = box.value;
  const name = state.name;
  if (!text.trim() || sending) return;
  if (editing) {
    if (await attempt(name, () => api.editLast(name, text))) cancelEdit();
    return;
  }
  const message = { id: crypto.randomUUID(), text };
  localStorage.setItem(sentKey(name), JSON.stringify(message));
  await deliver(name, message);
}

// Sends a message and keeps it in the browser until the server has it.
async function deliver(name, message) {
  const box = $("message");
  if (state.running) toast("Queued. It is sent when the current answer is complete.");
  const done = await attempt(name, () => api.sendMessage(name, message.text, message.id));
  // Without a response it is unknown whether the message was stored: it is sent again later, with the same id.
  if (done === null) return;
  localStorage.removeItem(sentKey(name));
  if (!done) return;
  localStorage.removeItem(draftKey(name));
  if (state.name === name && box.value === message.text) {
    box.value = "";
    autoGrow(box);
  }
  if (state.snapshot?.fresh) refresh();
}

// Returns whether the request succeeded; null if the server did not answer.
async function attempt(name, work) {
  $("send").disabled = true;
  sending = true;
  try {
    await work();
    return true;
  } catch (error) {
    toast(`Not sent: ${error.message}. Your text is still in the box.`, { error: true });
    return error instanceof ServerUnreachable ? null : false;
  } finally {
    $("send").disabled = false;
    sending = false;
    if (state.name === name) $("message").focus();
  }
}

export async function stop() {
  if (!state.running) return;
  try {
    await api.stop(state.name);
  } catch (error) {
    toast(error.message, { error: true });
  }
}

// Puts the last message into the box to be edited. A banner is shown until it is sent or cancelled; the draft is kept.
export function editLast() {
  const last = [...state.chunks.values()].filter((chunk) => chunk.role === "user").at(-1);
  if (!last || state.running) return;
  const box = $("message");
  editing = true;
  $("editing").hidden = false;
  $("send").textContent = "Replace";
  box.value = [...state.chunks.values()]
    .filter((chunk) => chunk.turn === last.turn)
    .map((chunk) => chunk.text)
    .join("")
    .trim();
  autoGrow(box);
  box.focus();
}

function cancelEdit() {
  if (!editing) return;
  editing = false;
  $("editing").hidden = true;
  $("send").textContent = "Send";
  const box = $("message");
  box.value = localStorage.getItem(draftKey(state.name)) ?? "";
  autoGrow(box);
}

export async function regenerate() {
  if (state.running) return;
  try {
    await api.regenerate(state.name);
  } catch (error) {
    toast(error.message, { error: true });
  }
}

// ---- manual edits

const EDITED = {
  pin: "Pinned",
  unpin: "Unpinned",
  prune: "Removed from context",
  resurrect: "Brought back",
  delete: "Deleted",
  merge: "Merged into the paragraph above",
  undelete: "Restored",
};

export async function editChunks(edit, chunks) {
  if (edit === "delete" && !(await confirmDelete(chunks[0]))) return;
  const name = state.name;
  try {
    const result = await api.editChunks(name, edit, chunks);
    const pinned = edit === "resurrect" ? `; pinned: ${chunks.join(", ")}` : "";
    const where = edit === "delete" ? " It is listed under Deleted." : "";
    // The offer to undo a deletion stays until it is closed; later, the list of deleted paragraphs has it.
    toast(`${EDITED[edit]}: ${result.chunks.join(", ")}${pinned}.${where}`, {
      action: "Undo",
      onAction: () => undo(name, result.undo),
      stay: edit === "delete" ? null : undefined,
    });
  } catch (error) {
    toast(error.message, { error: true });
  }
}

// Lists the dependent paragraphs before one is deleted.
async function confirmDelete(chunk) {
  let dependents = [];
  try {
    dependents = (await api.chunk(state.name, chunk)).dependents;
  } catch (error) {
    toast(error.message, { error: true });
    return false;
  }
  const lines = dependents.map((other) =>
    el("li", {}, `${ROLE_LABELS[other.role]}: ${other.text.trim().slice(0, 160)}`),
  );
  const more = lines.length
    ? el(
        "div",
        {},
        el("p", {}, `${count(lines.length, "dependent paragraph")} will be deleted too:`),
        el("ul", { class: "dependents" }, ...lines),
      )
    : null;
  return ask("Delete this paragraph?", {
    about:
      "It is removed from the context and from search. It stays in the list of deleted paragraphs and can be restored from there.",
    confirm: "Delete",
    more,
  });
}

async function undo(name, id) {
  try {
    await api.undo(name, id);
    toast("Undone.");
  } catch (error) {
    toast(error.message, { error: true });
  }
}

// The buttons of a paragraph. They appear on hover and focus; on a touch screen a tap shows them and does nothing else.
function showActions(node) {
  const id = node.dataset.chunk;
  const chunk = state.chunks.get(id);
  if (!chunk || node.querySelector(".actions")) return;
  const button = (label, title, onClick) =>
    el(
      "button",
      {
        type: "button",
        title,
        "aria-label": `${label}: ${id}`,
        onclick: (event) => {
          event.stopPropagation();
          onClick();
        },
      },
      label,
    );
  node.append(
    el(
      "span",
      { class: "actions" },
      button(chunk.pinned ? "Unpin" : "Pin", chunk.pinned ? "Unpin (p)" : "Pin (p)", () =>
        editChunks(chunk.pinned ? "unpin" : "pin", [id]),
      ),
      chunk.index > 0 ? button("Merge", "Merge into the paragraph above (m)", () => editChunks("merge", [id])) : null,
      button("Remove from context", "Remove from context (x)", () => editChunks("prune", [id])),
      button("Delete", "Delete (Del)", () => editChunks("delete", [id])),
      button("Details", "Tokens and history (Enter)", () => emit("panel", { panel: "chunk", chunk: id })),
    ),
  );
}

const touch = matchMedia("(hover: none)");

export function initKeys() {
  const log = $("log");
  const over = (event) => {
    const node = event.target.closest?.(".chunk");
    if (node && !touch.matches) showActions(node);
  };
  log.addEventListener("pointerover", over);
  log.addEventListener("focusin", over);
  log.addEventListener("click", (event) => {
    if (!touch.matches || event.target.closest("button, a")) return;
    const node = event.target.closest(".chunk");
    for (const other of log.querySelectorAll(".chunk.open")) if (other !== node) other.classList.remove("open");
    if (!node) return;
    showActions(node);
    node.classList.toggle("open");
  });
  log.addEventListener("keydown", (event) => {
    const node = event.target.closest(".chunk");
    if (!node || event.target !== node || event.ctrlKey || event.metaKey || event.altKey) return;
    const id = node.dataset.chunk;
    const chunk = state.chunks.get(id);
    if (!chunk) return;
    const all = [...log.querySelectorAll(".chunk")];
    const step = (by) => all[all.indexOf(node) + by]?.focus();
    const command = {
      p: () => editChunks(chunk.pinned ? "unpin" : "pin", [id]),
      m: () => editChunks("merge", [id]),
      x: () => editChunks("prune", [id]),
      Delete: () => editChunks("delete", [id]),
      Enter: () => emit("panel", { panel: "chunk", chunk: id }),
      j: () => step(1),
      ArrowDown: () => step(1),
      k: () => step(-1),
      ArrowUp: () => step(-1),
      Escape: () => $("message").focus(),
    }[event.key];
    if (command) {
      event.preventDefault();
      command();
    }
  });
}

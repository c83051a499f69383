// One message of the transcript: its heading, its paragraphs in and out of context, what it used, and its buttons.

import * as actions from "./actions.js";
import { api } from "./api.js";
import { emit } from "./bus.js";
import { el, number, shortTime, time } from "./dom.js";
import { restoreFolds } from "./folds.js";
import { nextContext, plainText, renderText, startContext } from "./markdown.js";
import { openMenu } from "./menu.js";
import { explainHistory } from "./reasons.js";
import { lastMessages } from "./reducers.js";
import { attentionLevel, shadeStyle } from "./shade.js";
import * as speech from "./speech.js";
import { state } from "./state.js";

const FINISH_LABELS = {
  length: "Stopped at the length limit",
  aborted: "Stopped",
  failed: "Failed",
  interrupted: "Interrupted when the server stopped",
};

/** The elements of chunks that are drawn, by id. */
export const chunkNodes = new Map();

const read = new Set(); // ghosts that the user has opened

/**
 * Draws a message, or updates its element.
 * @param {import("./reducers.js").Message} message
 * @param {{ last: boolean }} place
 */
export function drawMessage(node, message, place) {
  node ??= el(
    "article",
    { class: `turn ${message.role}`, data: { turn: message.turn } },
    el("h2", {}, el("b", {}), el("time", {}), el("span")),
    el("div", { class: "body" }),
  );
  const [heading, body] = node.children;
  drawHeading(heading, message);
  drawChunks(body, message);
  const out = message.chunks.every((chunk) => !state.chunks.has(chunk.id));
  node.classList.toggle("all-out", out);
  body.classList.toggle("all-ghosts", out);
  node.classList.toggle("last", place.last);
  drawChips(node, message);
  drawActions(node, message, place);
  return node;
}

/** Forgets the paragraphs of a message that is no longer drawn. */
export function forgetMessage(node) {
  for (const chunk of node.querySelectorAll(".chunk"))
    if (chunkNodes.get(chunk.dataset.chunk) === chunk) chunkNodes.delete(chunk.dataset.chunk);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {Partial<import("./reducers.js").Message>} message */
function drawHeading(heading, message) {
  const { at, premise, finish_reason } = message;
  const [speaker, timeNode, finishNode] = heading.children;
  setText(speaker, actions.speakerOf(message));
  setText(timeNode, at ? shortTime(at) : "");
  if (at && timeNode.title !== time(at)) timeNode.title = time(at);
  const finish = [
    premise ? `無 Your question assumes something that was contradicted: ${premise}` : "",
    FINISH_LABELS[finish_reason] ?? "",
  ];
  setText(finishNode, finish.filter(Boolean).join(" · "));
  const error = ["failed", "interrupted"].includes(finish_reason);
  const wanted = error ? "finish error" : "finish";
  if (finishNode.className !== wanted) finishNode.className = wanted;
}

function drawChunks(body, message) {
  let context = startContext();
  let place = body.firstElementChild;
  const wanted = new Set(message.chunks.map((chunk) => chunk.id));
  for (const old of [...body.children])
    if (!wanted.has(old.dataset.chunk)) {
      if (place === old) place = old.nextElementSibling;
      old.remove();
    }
  for (const chunk of message.chunks) {
    const live = state.chunks.get(chunk.id);
    const key = JSON.stringify([chunk.text, chunk.tool_ranges, !!live, !!live?.pinned, read.has(chunk.id)]);
    let node = place?.dataset.chunk === chunk.id ? place : null;
    if (node) place = node.nextElementSibling;
    if (node?.drawnKey !== key) {
      const fresh = live ? liveChunk(chunk, live, message, context) : ghostChunk(chunk, message);
      fresh.drawnKey = key;
      if (node) {
        // The focus stays at the paragraph, whatever becomes of it.
        const focused = node.contains(document.activeElement);
        node.replaceWith(fresh);
        if (focused) fresh.focus({ preventScroll: true });
      } else body.insertBefore(fresh, place);
      node = fresh;
    }
    chunkNodes.set(chunk.id, node);
    if (live) shadeChunk(node, live);
    context = nextContext(context, chunk.text);
  }
}

const chunkLabel = (chunk, rest) =>
  `${actions.ROLE_LABELS[chunk.role] ?? chunk.role}, message ${chunk.turn + 1}, paragraph ${chunk.index + 1}${rest}`;

const chunkBox = (chunk, kind, rest) =>
  el("div", {
    class: kind,
    tabindex: "-1",
    role: "group",
    data: { chunk: chunk.id, position: chunk.position, turn: chunk.turn },
    "aria-label": chunkLabel(chunk, rest),
  });

function liveChunk(chunk, live, message, context) {
  const node = chunkBox(chunk, live.resurrected ? "chunk resurrected" : "chunk", live.pinned ? ", pinned" : "");
  const text = el("div", { class: "text", dir: "auto" });
  text.append(restoreFolds(chunk.id, renderText(chunk.text, chunk.tool_ranges, context)));
  node.append(text);
  node.sourceText = chunk.text;
  if (live.pinned)
    node.append(el("span", { class: "mark", role: "img", "aria-label": "pinned", title: "Pinned" }, "📌"));
  if (message.chunks.length > 1)
    node.append(
      el(
        "button",
        {
          type: "button",
          class: "chunk-menu",
          tabindex: "-1",
          "aria-label": "Paragraph menu",
          "aria-haspopup": "menu",
          onclick: (event) => openMenu(event.currentTarget, chunkItems(chunk.id), "Paragraph"),
        },
        "⋯",
      ),
    );
  if (live.resurrected) {
    node.append(el("span", { class: "reason" }, "↩ brought back"));
    setTimeout(() => {
      delete live.resurrected;
      node.classList.remove("resurrected");
    }, 2600);
  }
  return node;
}

/** What can be done with a paragraph. */
export function chunkItems(id) {
  const live = state.chunks.get(id);
  const text = live?.text ?? "";
  const item = (label, key, edit, danger = false) => ({
    label,
    key,
    danger,
    run: () => actions.editChunks(edit, [id], text),
  });
  if (!live)
    return [
      item("Bring back", "x", "resurrect"),
      { label: "Why it left", key: "Enter", run: () => actions.showDetails(id) },
      item("Delete", "Del", "delete", true),
    ];
  return [
    live.pinned ? item("Unpin", "p", "unpin") : item("Pin", "p", "pin"),
    item("Remove from context", "x", "prune"),
    live.index > 0 && item("Merge with the paragraph above", "m", "merge"),
    { label: "Why", key: "Enter", run: () => actions.showDetails(id) },
    item("Delete", "Del", "delete", true),
  ];
}

// A paragraph out of context: two lines at its place. A click opens it for reading.
function ghostChunk(chunk, message) {
  const open = read.has(chunk.id);
  const node = chunkBox(chunk, open ? "chunk ghost read" : "chunk ghost", ", out of context");
  const toggle = () => {
    if (open) read.delete(chunk.id);
    else read.add(chunk.id);
    emit("touch", message.turn);
  };
  const text = open ? chunk.text.trim() : plainText(chunk.text);
  const reason = el("p", { class: "ghost-reason", role: "status", hidden: true });
  const why = async () => {
    reason.hidden = !reason.hidden;
    if (reason.hidden) return;
    reason.textContent = "…";
    reason.textContent = await loadReason(chunk.id);
    node.classList.add("read");
  };
  if (chunk === message.chunks[0]) node.dataset.role = actions.ROLE_LABELS[chunk.role] ?? chunk.role;
  node.append(
    el("div", { class: "text plain", dir: "auto", onclick: toggle, title: open ? "Show less" : "Show all" }, text),
    el(
      "span",
      { class: "ghost-actions" },
      el("button", { type: "button", tabindex: "-1", onclick: why }, "Why"),
      el(
        "button",
        { type: "button", tabindex: "-1", onclick: () => actions.editChunks("resurrect", [chunk.id], chunk.text) },
        "Bring back",
      ),
      el(
        "button",
        {
          type: "button",
          tabindex: "-1",
          class: "more",
          "aria-label": "More",
          "aria-haspopup": "menu",
          onclick: (event) => openMenu(event.currentTarget, messageItems(message, false), "Message"),
        },
        "⋯",
      ),
    ),
    reason,
  );
  node.sourceText = chunk.text;
  return node;
}

async function loadReason(id) {
  try {
    const { history } = await api.chunk(state.name, id);
    const entry = history.findLast((one) => one.action === "pruned");
    return entry ? `${explainHistory(entry)}.` : "It has not been in the context yet.";
  } catch (error) {
    return error.message;
  }
}

// The bar beside a paragraph, and its place among the others as its title. Both are set only when they change.
function shadeChunk(node, chunk) {
  const { attention, relative_brightness: place } = chunk;
  const measured = attention !== null && attention !== undefined;
  // A new chunk has full brightness until attention to it has been measured.
  const brightness = measured ? Math.round(attentionLevel(attention) * 200) / 200 : 1;
  if (node.drawnBrightness !== brightness) {
    node.drawnBrightness = brightness;
    node.style.setProperty("--b", String(brightness));
    node.style.setProperty("--bar", shadeStyle(brightness).bar);
  }
  const parts = [
    `Attention: ${measured ? `${number(Number(attention.toPrecision(2)))} ‰ per token` : "not measured yet"}`,
    // The bar is absolute; this is the value that pruning ranks by. The dimmest paragraph leaves first.
    place !== null && place !== undefined ? `brightness in this context: ${Math.round(place * 100)} of 100` : "",
    `${number(chunk.tokens)} tokens`,
  ];
  const title = parts.filter(Boolean).join(" · ");
  if (node.title !== title) node.title = title;
}

const usedLabel = (text) => {
  const plain = plainText(text);
  return `↩ used: ${plain.slice(0, 60)}${plain.length > 60 ? "…" : ""}`;
};

const MAX_CHIPS = 4; // the others are shown on demand

// What the answer used: a chip for each paragraph that was brought back for it, which leads to it.
export function drawChips(node, { used: found = [] }) {
  // In the order in which they were said.
  const used = [...found].sort((one, other) => one.turn - other.turn);
  const old = node.querySelector(".chips");
  const key = used.map(({ id }) => id).join();
  if ((old?.dataset.key ?? "") === key) return;
  old?.remove();
  if (!used.length) return;
  const chips = used.map(({ turn, id, text }) =>
    el(
      "button",
      {
        type: "button",
        class: "chip",
        data: { leads: id },
        tabindex: "-1",
        title: text,
        onclick: () => emit("jump", { turn, chunk: id }),
      },
      usedLabel(text),
    ),
  );
  const box = el("div", { class: "chips", data: { key } }, ...chips.slice(0, MAX_CHIPS));
  const rest = chips.slice(MAX_CHIPS);
  if (rest.length)
    box.append(
      el(
        "button",
        { type: "button", class: "chip", tabindex: "-1", onclick: (event) => event.currentTarget.replaceWith(...rest) },
        `and ${rest.length} more`,
      ),
    );
  node.children[1].after(box);
}

const canEdit = (message) => ["user", "assistant"].includes(message.role);

const button = (label, onClick, more = {}) =>
  el("button", { type: "button", tabindex: "-1", onclick: onClick, ...more }, label);

function drawActions(node, message, { last }) {
  const variants = last ? state.variants : (message.variants ?? []);
  const canAnswer = last && !state.running;
  const key = JSON.stringify([
    last,
    canAnswer,
    message.finish_reason,
    !!state.running,
    variants.map((variant) => [variant.turn, variant.current, variant.messages]),
  ]);
  if (node.drawnActions === key) return;
  node.drawnActions = key;
  const focused = document.activeElement?.closest(".acts")?.parentElement === node ? document.activeElement : null;
  node.querySelector(".acts")?.remove();
  const assistant = message.role === "assistant";
  const bar = el(
    "div",
    { class: "acts", role: "toolbar", "aria-label": "Message" },
    button("Copy", () => actions.copyText(actions.messageText(message))),
    assistant && canAnswer
      ? button("Regenerate", actions.regenerate, { title: "Another answer; this one is kept" })
      : null,
    assistant && !last
      ? button("Regenerate", () => actions.regenerateInBranch(message), {
          title: "Another answer in a branch; this chat stays as it is",
          disabled: !!state.running,
        })
      : null,
    variants.length > 1 ? variantSwitch(message, variants, last) : null,
    assistant && canAnswer && message.finish_reason === "length"
      ? button("Continue", actions.continueAnswer, { class: "continue", title: "The answer goes on where it stopped" })
      : null,
    canEdit(message) ? button("Edit", () => emit("edit", message)) : null,
    button("Branch", () => actions.branch(message.turn), { title: "A copy of the chat up to here" }),
    button("⋯", (event) => openMenu(event.currentTarget, messageItems(message, canAnswer), "Message"), {
      class: "more",
      "aria-label": "More",
      "aria-haspopup": "menu",
    }),
  );
  if (last) for (const one of bar.querySelectorAll("button")) one.tabIndex = 0;
  node.append(bar);
  if (focused)
    (
      [...bar.querySelectorAll("button")].find((one) => one.textContent === focused.textContent) ??
      bar.querySelector("button")
    ).focus({ preventScroll: true });
}

function variantSwitch(message, variants, last) {
  const at = Math.max(
    0,
    variants.findIndex((variant) => variant.current),
  );
  const what = variants[at].messages > 1 ? "version" : "answer";
  const choose = last ? actions.chooseVariant : (variant) => actions.chooseVariantInBranch(message, variant);
  const place = last ? "" : " in a branch";
  const step = (mark, label, to) =>
    button(mark, () => choose(variants[to]), {
      "aria-label": `${label} ${what}${place}`,
      title: `${label} ${what}${place}`,
      disabled: !variants[to] || !!state.running,
    });
  return el(
    "span",
    { class: "variants", role: "group", "aria-label": `Variants of this ${what}` },
    step("‹", "Previous", at - 1),
    el("span", {}, `${at + 1}/${variants.length}`),
    step("›", "Next", at + 1),
  );
}

const isLast = (message) => lastMessages(state, 1)[0]?.turn === message.turn;

/** Everything that can be done with a message, for touch screens and the keyboard. */
export function messageItems(message, canAnswer) {
  const ids = message.chunks.map((chunk) => chunk.id);
  const live = ids.filter((id) => state.chunks.has(id));
  const out = ids.filter((id) => !state.chunks.has(id));
  const pinned = live.length > 0 && live.every((id) => state.chunks.get(id).pinned);
  const text = actions.messageText(message);
  const item = (label, edit, chunks, danger = false) =>
    chunks.length > 0 && { label, danger, run: () => actions.editChunks(edit, chunks, text) };
  return [
    { label: "Copy", run: () => actions.copyText(text) },
    message.role === "assistant" && canAnswer && { label: "Regenerate", run: actions.regenerate },
    message.role === "assistant" &&
      !isLast(message) && { label: "Regenerate in a branch", run: () => actions.regenerateInBranch(message) },
    message.role === "assistant" && canAnswer && { label: "Continue", run: actions.continueAnswer },
    canEdit(message) && { label: "Edit", run: () => emit("edit", message) },
    speech.isReading(message.turn)
      ? { label: "Stop reading", run: speech.stop }
      : speech.canRead() && { label: "Read aloud", run: () => speech.readAloud(message.turn, text) },
    { label: "Branch from here", run: () => actions.branch(message.turn) },
    pinned ? item("Unpin", "unpin", live) : item("Pin", "pin", live),
    item("Remove from context", "prune", live),
    item("Bring back", "resurrect", out),
    { label: "Why", run: () => actions.showDetails(ids[0]) },
    item("Delete", "delete", ids, true),
  ];
}

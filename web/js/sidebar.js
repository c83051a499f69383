// The list of chats: new, search over all, rename, duplicate, export, delete and restore, import.

import { freeName } from "./actions.js";
import { api } from "./api.js";
import { emit, on } from "./bus.js";
import { $, ask, count, el, render, time, toast } from "./dom.js";
import { forgetDrafts, moveDrafts } from "./drafts.js";
import { openMenu } from "./menu.js";
import { bytes } from "./models.js";
import { chatAddress, openConversation, state } from "./state.js";
import { isUntitled, untitledName } from "./titles.js";

let chats = [];
let deleted = [];
let results = null; // of the search; null if nothing is searched
let error = null;
let timer = null;
let searches = 0;

export function init() {
  $("new-chat").addEventListener("click", newChat);
  $("chat-search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, 200);
  });
  $("import").addEventListener("click", () => $("import-files").click());
  $("import-files").addEventListener("change", () => {
    importFiles([...$("import-files").files]);
    $("import-files").value = "";
  });
  $("open-sidebar").addEventListener("click", () => setOpen(true));
  $("close-sidebar").addEventListener("click", () => setOpen(false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.body.classList.contains("sidebar-open")) setOpen(false);
    if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
      event.preventDefault();
      newChat();
    }
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if ($("open-sidebar").offsetParent) setOpen(true);
      $("chat-search").focus();
    }
  });
  document.addEventListener("pointerdown", (event) => {
    const inside = /** @type {Element} */ (event.target).closest?.("#sidebar, .menu, dialog, #open-sidebar");
    if (!inside && document.body.classList.contains("sidebar-open")) setOpen(false);
  });
  initDrop();
  on("conversation", () => {
    draw();
    setOpen(false);
  });
  on("list", reload);
  on("import", (event) => runningImports.get(event.id)?.(event));
  on("connected", (connected) => connected && load());
  load();
}

function setOpen(open) {
  if (document.body.classList.contains("sidebar-open") === open) return;
  document.body.classList.toggle("sidebar-open", open);
  $("open-sidebar").setAttribute("aria-expanded", String(open));
  (open ? $("new-chat") : $("open-sidebar")).focus();
}

let reloadTimer = null;
function reload() {
  clearTimeout(reloadTimer);
  reloadTimer = setTimeout(load, 100);
}

async function load() {
  try {
    [chats, deleted] = await Promise.all([api.conversations(), api.deletedConversations()]);
    error = null;
  } catch (why) {
    error = why.message;
  }
  draw();
}

export function newChat() {
  openConversation(untitledName());
  $("message").focus();
}

const DAY = 86_400_000;

function group(updated) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (updated >= today) return "Today";
  if (updated >= today - DAY) return "Yesterday";
  if (updated >= today - 7 * DAY) return "Last 7 days";
  if (updated >= today - 30 * DAY) return "Last 30 days";
  return new Date(updated).toLocaleDateString([], { month: "long", year: "numeric" });
}

function draw() {
  const box = $("chats");
  if (results) {
    drawResults(box);
    return;
  }
  const gone = new Set(deleted.map((chat) => chat.name));
  const names = new Set(chats.map((chat) => chat.name));
  // A chat that was retokenized for another model has a kept original; it is the same chat.
  const shown = chats.filter((chat) => !gone.has(chat.name) && !chat.original_of);
  if (state.name && !names.has(state.name) && !isUntitled(state.name))
    shown.unshift({ name: state.name, updated: Date.now() });
  const children = [];
  let last = "";
  for (const chat of shown) {
    const heading = group(chat.updated);
    if (heading !== last) children.push(el("h2", { data: { key: `h-${heading}` } }, heading));
    last = heading;
    children.push(chatRow(chat));
  }
  if (error) children.push(el("p", { class: "error" }, `The chats cannot be listed: ${error}`));
  else if (!shown.length) children.push(el("p", { class: "quiet" }, "No chats yet."));
  if (deleted.length) {
    children.push(el("h2", { data: { key: "h-deleted" } }, `Deleted (${deleted.length})`));
    children.push(...deleted.map(deletedRow));
  }
  render(box, ...children);
}

function chatRow({ name }) {
  return el(
    "div",
    { class: name === state.name ? "chat-row current" : "chat-row", data: { key: name, chat: name } },
    el("a", { href: chatAddress(name), title: name, "aria-current": name === state.name ? "page" : null }, name),
    el(
      "button",
      {
        type: "button",
        "aria-label": `Menu of ${name}`,
        "aria-haspopup": "menu",
        onclick: (event) => openMenu(event.currentTarget, chatItems(name), `Chat ${name}`),
      },
      "⋯",
    ),
  );
}

function deletedRow({ name, due }) {
  return el(
    "div",
    { class: "chat-row", data: { key: `deleted-${name}`, deleted: name } },
    el("span", { class: "quiet", title: `Erased for good on ${time(due)}` }, name),
    el("button", { type: "button", class: "always", onclick: () => restore(name) }, "Restore"),
  );
}

const chatItems = (name) => [
  { label: "Rename", run: () => rename(name) },
  { label: "Duplicate", run: () => duplicate(name) },
  { label: "Export for Halo", run: () => exportChat(name, "halo", "jsonl") },
  { label: "Export as Markdown", run: () => exportChat(name, "markdown", "md") },
  { label: "Delete", danger: true, run: () => remove(name) },
  { label: "Forget for good…", danger: true, run: () => forgetChat(name) },
];

const report = (why) => toast(why.message, { error: true });

export async function rename(name) {
  const to = await ask(`Rename “${name}”`, { label: "New name", value: name });
  if (!to || to === name) return;
  try {
    await api.rename(name, to);
    moveDrafts(name, to);
    if (state.name === name) await openConversation(to);
    load();
  } catch (why) {
    report(why);
  }
}

async function duplicate(name) {
  const copy = await freeName(`${name} copy`).catch(() => null);
  if (!copy) return;
  try {
    await api.branch(name, copy);
    await openConversation(copy);
    load();
  } catch (why) {
    report(why);
  }
}

async function exportChat(name, format, ending) {
  try {
    const address = URL.createObjectURL(await api.exportConversation(name, format));
    const file = `${name.replace(/[^\p{L}\p{N} ._-]/gu, "_").slice(0, 80)}.${ending}`;
    el("a", { href: address, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (why) {
    report(why);
  }
}

async function remove(name) {
  try {
    const { due } = await api.deleteConversation(name);
    if (state.name === name) newChat();
    await load();
    const until = due ? ` It can be restored until ${time(due)}.` : "";
    toast(`Deleted “${name}”.${until}`, { action: "Undo", onAction: () => restore(name), stay: null });
  } catch (why) {
    report(why);
  }
}

// Erases a chat with its name, without the days in which it could be restored.
async function forgetChat(name) {
  const sure = await ask(`Forget “${name}” for good?`, {
    confirm: "Forget for good",
    about:
      "Every message, memory and note of it is erased from the disk now, and its name too. Nobody can restore it. " +
      "“Delete” keeps it for some days.",
  });
  if (!sure) return;
  // The page must not load what is being erased.
  const wasOpen = state.name === name;
  if (wasOpen) newChat();
  try {
    await api.forget(name, { all: true, now: true });
    forgetDrafts(name);
    await load();
    toast("Forgotten for good.");
  } catch (why) {
    if (wasOpen) openConversation(name);
    report(why);
  }
}

async function restore(name) {
  try {
    await api.restoreConversation(name);
    await load();
    openConversation(name);
    toast(`Restored “${name}”.`);
  } catch (why) {
    report(why);
  }
}

// ---- search over all chats

async function search() {
  const q = $("chat-search").value.trim();
  const request = (searches += 1);
  if (!q) {
    results = null;
    draw();
    return;
  }
  results = { q, found: [], done: false, error: null };
  draw();
  try {
    // Each response has the chats that were searched in its time; a long list takes several.
    for (let offset = 0; offset !== null; ) {
      const { conversations, next } = await api.searchAll(q, offset);
      if (request !== searches) return;
      results.found.push(...conversations);
      offset = next;
      draw();
    }
  } catch (why) {
    if (request === searches) results.error = why.message;
  }
  if (request !== searches) return;
  results.done = true;
  draw();
}

/** A text with the words of a query marked. */
export function marked(text, q) {
  const words = q.split(/\s+/).filter(Boolean);
  const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
  if (!pattern) return [text];
  return text.split(new RegExp(`(${pattern})`, "gi")).map((part, n) => (n % 2 ? el("mark", {}, part) : part));
}

// A line of Markdown for reading in one line.
const withoutSigns = (text) =>
  text
    .replace(/[*`#~]+/g, "")
    .replace(/[|>]+|-{3,}/g, " ")
    .replace(/\s+/g, " ")
    .trim();

function drawResults(box) {
  const { q, found, done, error: why } = results;
  const children = found.flatMap(({ name, hits }) => [
    chatRow({ name }),
    ...hits.map((hit) =>
      el(
        "button",
        {
          type: "button",
          class: "chat-hit",
          data: { key: `${name}/${hit.chunk}` },
          onclick: async () => {
            if (state.name !== name) await openConversation(name);
            emit("jump", hit);
            setOpen(false);
          },
        },
        ...marked(withoutSigns(hit.text), q),
      ),
    ),
  ]);
  const about = why ? `Search failed: ${why}` : done ? (found.length ? "" : "No matches.") : "Searching…";
  render(box, el("p", { class: "quiet", role: "status", data: { key: "search-status" } }, about), ...children);
}

// ---- import

function initDrop() {
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    importFiles([...event.dataTransfer.files]);
  });
}

// A chat whose name is taken is imported under another.
async function importFile(file, id, onProgress) {
  const { max_import_bytes: limit } = await api.status();
  if (file.size > limit)
    throw new Error(
      `it has ${bytes(file.size)}, and this server takes ${bytes(limit)}. Raise “Largest import” (server.max_import), or use “halo import”.`,
    );
  try {
    return await api.importFile(file, undefined, id, onProgress);
  } catch (why) {
    if (why.status !== 409) throw why;
    const name = await freeName(file.name.replace(/\.[^.]*$/, "").trim() || "Imported chat");
    return api.importFile(file, name, id, onProgress);
  }
}

const runningImports = new Map(); // how to show the progress of each import that runs, by its id

// A toast with a bar: how much was sent, then how much of it the server has read.
function importProgress(file, step) {
  const id = crypto.getRandomValues(new Uint32Array(2)).join("-");
  const label = el("span", {}, `Importing ${file.name}${step}…`);
  const bar = el("progress", { max: "1", value: "0", "aria-label": `Progress of ${file.name}` });
  const box = el("div", { class: "toast importing" }, label, bar);
  $("toasts").append(box);
  const show = (verb, done, all) => {
    bar.value = all ? done / all : 1;
    label.textContent = `${verb} ${file.name}${step}: ${Math.floor(100 * bar.value)} %`;
  };
  runningImports.set(id, ({ done, all }) => show("Reading", done, all));
  return {
    id,
    sent: (done, all) => show("Sending", done, all),
    end: () => {
      runningImports.delete(id);
      box.remove();
    },
  };
}

/** What an import has created, and what of the file is not there. */
export function importSummary({ format, conversations, worlds, losses }) {
  const created = [
    conversations.length ? count(conversations.length, "chat") : "",
    worlds.length ? `${count(worlds.length, "world")} (under Rooms)` : "",
  ].filter(Boolean);
  const lost = Object.entries(losses).map(([kind, n]) => `${kind}: ${n}`);
  return (
    `Imported ${created.join(" and ") || "nothing"} from ${format}.` +
    (lost.length ? ` Not imported: ${lost.join(", ")}.` : "")
  );
}

async function importFiles(files) {
  const names = [];
  const summaries = [];
  let lost = false;
  for (const [n, file] of files.entries()) {
    const progress = importProgress(file, files.length > 1 ? ` (${n + 1} of ${files.length})` : "");
    try {
      const result = await importFile(file, progress.id, progress.sent);
      names.push(...result.conversations);
      summaries.push(importSummary(result));
      lost ||= Object.keys(result.losses).length > 0;
      await load();
    } catch (why) {
      toast(`${file.name} was not imported: ${why.message}`, { error: true, stay: 20_000 });
    } finally {
      progress.end();
    }
  }
  if (!summaries.length) return;
  const text = summaries.length > 1 && !lost ? `Imported ${count(names.length, "chat")}.` : summaries.join(" ");
  // What was lost stays until it is read.
  toast(text, { stay: lost ? null : undefined });
  if (names.length) openConversation(names[0]);
}

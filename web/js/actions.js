// What the buttons at messages and paragraphs do. Every change can be undone.

import { api } from "./api.js";
import { emit } from "./bus.js";
import { $, ask, count, el, toast } from "./dom.js";
import { openConversation, state } from "./state.js";

export const ROLE_LABELS = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

/** Who said a message: the name of an import, the name that this chat has for the role, or the role. */
/** @param {{ role?: string, speaker?: string | null }} message */
export function speakerOf({ role, speaker }) {
  const { user_name, model_name } = state.snapshot?.persona ?? {};
  const own = { user: user_name, assistant: model_name }[role];
  return speaker || own || ROLE_LABELS[role] || role;
}

const EDITED = {
  pin: "Pinned",
  unpin: "Unpinned",
  prune: "Removed from context",
  resurrect: "Brought back",
  delete: "Deleted",
  merge: "Merged into the paragraph above",
  undelete: "Restored",
};

const quote = (text) => {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 40 ? `“${line.slice(0, 40)}…”` : `“${line}”`;
};

const report = (error) => toast(`${error.message}`, { error: true });

/** The text of a message as it was written. */
export const messageText = (message) =>
  message.chunks
    .map((chunk) => chunk.text)
    .join("")
    .trim();

export async function copyText(text, what = "Copied.") {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without permission, or on a page that is not on localhost and not on HTTPS.
    const box = el("textarea", { class: "hidden" });
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  toast(what, { stay: 2000 });
}

export async function editChunks(edit, chunks, label = "") {
  if (!chunks.length) return;
  if (edit === "delete" && !(await confirmDelete(chunks))) return;
  const { name } = state;
  const undo = [];
  try {
    const result = await api.editChunks(name, edit, chunks);
    undo.push(result.undo);
    const pinned = edit === "resurrect" ? " and pinned" : "";
    const others = result.chunks.filter((id) => !chunks.includes(id)).length;
    const more = others ? ` with ${count(others, "related paragraph")}` : "";
    const where = edit === "delete" ? " It is listed under Deleted." : "";
    // The offer to undo a deletion stays until it is closed; later, the list of deleted paragraphs has it.
    toast(`${EDITED[edit]}${pinned}${label ? `: ${quote(label)}` : ""}${more}.${where}`, {
      action: "Undo",
      onAction: () => undoEdit(name, undo[0]),
      stay: edit === "delete" ? null : undefined,
    });
  } catch (error) {
    report(error);
  }
}

async function undoEdit(name, id) {
  try {
    await api.undo(name, id);
    toast("Undone.");
  } catch (error) {
    report(error);
  }
}

// Lists the dependent paragraphs before one is deleted.
async function confirmDelete(chunks) {
  const dependents = new Map();
  try {
    for (const chunk of chunks)
      for (const other of (await api.chunk(state.name, chunk)).dependents) dependents.set(other.id, other);
  } catch (error) {
    report(error);
    return false;
  }
  for (const chunk of chunks) dependents.delete(chunk);
  const lines = [...dependents.values()].map((other) =>
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
  return ask(chunks.length > 1 ? `Delete these ${chunks.length} paragraphs?` : "Delete this paragraph?", {
    about:
      "It is removed from the context and from search. It stays in the list of deleted paragraphs and can be restored from there.",
    confirm: "Delete",
    more,
  });
}

// A branch that ends with this message, which has the variants of it.
async function branchAt(message) {
  const from = state.name;
  const to = await freeName(`${from.replace(/ · branch( \d+)?$/, "")} · branch`);
  await api.branch(from, to, message.turn);
  return { from, to };
}

async function openBranch({ from, to }) {
  await openConversation(to);
  emit("list");
  toast(`Branch of “${from}”, which stays as it is.`, { action: "Back", onAction: () => openConversation(from) });
}

/** Another answer in the place of an older one: in a branch, because later messages build on the older one. */
export async function regenerateInBranch(message) {
  if (state.running) return;
  try {
    const branched = await branchAt(message);
    await api.regenerate(branched.to);
    await openBranch(branched);
  } catch (error) {
    report(error);
  }
}

/** Chooses a variant of an older message, in a branch. */
export async function chooseVariantInBranch(message, variant) {
  try {
    const branched = await branchAt(message);
    await api.chooseVariant(branched.to, variant.turn);
    await openBranch(branched);
  } catch (error) {
    report(error);
  }
}

export async function regenerate() {
  if (state.running) return;
  try {
    await api.regenerate(state.name);
  } catch (error) {
    report(error);
  }
}

/** Generates more of the last answer. */
export async function continueAnswer() {
  if (state.running) return;
  try {
    await api.continueAnswer(state.name);
  } catch (error) {
    report(error);
  }
}

export async function stop() {
  if (!state.running) return;
  try {
    await api.stop(state.name);
  } catch (error) {
    report(error);
  }
}

export async function chooseVariant(variant) {
  try {
    await api.chooseVariant(state.name, variant.turn);
  } catch (error) {
    report(error);
  }
}

/** A name that no chat has yet. */
export async function freeName(wanted) {
  const names = new Set((await api.conversations()).map((chat) => chat.name));
  if (!names.has(wanted)) return wanted;
  for (let n = 2; ; n += 1) if (!names.has(`${wanted} ${n}`)) return `${wanted} ${n}`;
}

/** A copy of the chat up to a turn, which is opened. */
export async function branch(turn, from = state.name) {
  try {
    const to = await freeName(`${from.replace(/ · branch( \d+)?$/, "")} · branch`);
    await api.branch(from, to, turn);
    await openConversation(to);
    emit("list");
    toast(`Branch of “${from}”.`, { action: "Back", onAction: () => openConversation(from) });
    $("message").focus();
    return to;
  } catch (error) {
    report(error);
    return null;
  }
}

export const showDetails = (chunk) => emit("panel", { panel: "chunk", chunk });

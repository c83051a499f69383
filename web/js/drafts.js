// What this browser keeps of a chat until the server has it: the draft, the attached files, the message that is being sent, the queue,
// and the choices for a chat that is not stored yet. Each is stored under the name of its chat.

/** @typedef {"draft" | "files" | "sent" | "queue" | "options" | "model"} DraftKind */

/** @type {DraftKind[]} */
const KINDS = ["draft", "files", "sent", "queue", "options", "model"];

/** @type {(kind: DraftKind, name: string) => string} */
export const draftKey = (kind, name) => `${kind}:${name}`;

/** @type {(name: string) => string} */
export const readText = (name) => localStorage.getItem(draftKey("draft", name)) ?? "";

/** @type {(name: string, text: string) => void} */
export function writeText(name, text) {
  if (text) localStorage.setItem(draftKey("draft", name), text);
  else localStorage.removeItem(draftKey("draft", name));
}

/** @type {(kind: DraftKind, name: string) => any} */
export const readDraft = (kind, name) => JSON.parse(localStorage.getItem(draftKey(kind, name)) ?? "null");

/**
 * Stores a value; null or an empty list removes it.
 * @type {(kind: DraftKind, name: string, value: any) => void}
 */
export function writeDraft(kind, name, value) {
  if (value === null || value.length === 0) localStorage.removeItem(draftKey(kind, name));
  else localStorage.setItem(draftKey(kind, name), JSON.stringify(value));
}

/** A renamed chat keeps its draft. */
export function moveDrafts(from, to) {
  for (const kind of KINDS) {
    const value = localStorage.getItem(draftKey(kind, from));
    localStorage.removeItem(draftKey(kind, from));
    if (value !== null) localStorage.setItem(draftKey(kind, to), value);
  }
}

/** Nothing of a chat that is forgotten stays in this browser. */
export function forgetDrafts(name) {
  for (const kind of KINDS) localStorage.removeItem(draftKey(kind, name));
}

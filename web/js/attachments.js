// Files that are sent with a message: text files, each as a folded block of the message with the name of the file.

import { $, el, render, toast } from "./dom.js";
import { readDraft, writeDraft } from "./drafts.js";

const MAX_BYTES = 256_000;
const MAX_TOTAL = 1_000_000; // all files of one message

/** @typedef {{ name: string, text: string }} AttachedFile */

/** @type {AttachedFile[]} */
let files = [];
let chat = null; // the chat that they are a part of the draft of

export function init() {
  $("attach").addEventListener("click", () => $("attach-files").click());
  $("attach-files").addEventListener("change", async () => {
    await attach([...$("attach-files").files]);
    $("attach-files").value = "";
    $("message").focus();
  });
  $("message").addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length) return;
    // Text that is copied from a document comes with a picture of it.
    const hasText = event.clipboardData.getData("text/plain") !== "";
    if (hasText && pasted.every((file) => file.type.startsWith("image/"))) return;
    event.preventDefault();
    attach(pasted);
  });
  const composer = $("composer");
  composer.addEventListener("drop", (event) => {
    const dropped = [...(event.dataTransfer?.files ?? [])];
    if (!dropped.length) return;
    // Elsewhere on the page, a file that is dropped is imported as a chat.
    event.preventDefault();
    event.stopPropagation();
    document.body.classList.remove("dropping");
    attach(dropped);
  });
}

/** The files that are attached in a chat, also after a reload. What was attached before any chat was open belongs to the first one. */
export function openDraft(name) {
  const early = chat === null ? files : [];
  chat = name;
  files = [...(readDraft("files", name) ?? []), ...early];
  if (early.length) store();
  draw();
}

function store() {
  if (chat === null) return;
  try {
    writeDraft("files", chat, files);
  } catch {
    toast("This browser has no room to keep the attached files: a reload forgets them.");
  }
}

async function attach(chosen) {
  for (const file of chosen) {
    const problem = await add(file);
    if (problem) toast(problem, { error: true });
  }
  store();
  draw();
}

const IMAGE_NAME = /\.(?:png|jpe?g|gif|webp|avif|heic|bmp|tiff?|ico)$/i;

// Returns why a file cannot be attached.
async function add(file) {
  const name = file.name || "pasted.txt";
  // A drawing in SVG is text.
  if ((file.type.startsWith("image/") && file.type !== "image/svg+xml") || IMAGE_NAME.test(name))
    return `${name} is an image: this model reads text.`;
  if (/^(?:audio|video)\//.test(file.type)) return `${name} is not a text file: this model reads text.`;
  if (file.size > MAX_BYTES)
    return `${name} is too large: ${Math.ceil(file.size / 1000)} kB; at most ${MAX_BYTES / 1000} kB can be attached.`;
  if (files.reduce((sum, other) => sum + other.text.length, file.size) > MAX_TOTAL)
    return `${name} is one too many: the files of a message can have ${MAX_TOTAL / 1000} kB together.`;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    return `${name} is not a text file: this model reads text.`;
  }
  if (text.includes("\0")) return `${name} is not a text file: this model reads text.`;
  if (!text.trim()) return `${name} is empty.`;
  files.push({ name, text });
  return null;
}

/** A file as a block of a message. */
export function fileBlock({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/^\s*(`{3,})/gm)].map((match) => match[1].length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([a-z0-9+#-]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "txt";
  const label = name.replace(/[`\n\r]/g, "_").slice(0, 120);
  return `${fence}${language} file=${label}\n${text.replace(/\s+$/, "")}\n${fence}`;
}

/** The message with the attached files, which are then no longer attached. */
export function takeAttachments(text) {
  const blocks = files.map(fileBlock);
  files = [];
  store();
  draw();
  return [text.trim(), ...blocks].filter(Boolean).join("\n\n");
}

export const hasAttachments = () => files.length > 0;

function draw() {
  const list = $("attached");
  list.hidden = files.length === 0;
  render(
    list,
    ...files.map((file, n) =>
      el(
        "li",
        { data: { key: `${n}-${file.name}` } },
        el("span", {}, file.name),
        el("span", { class: "quiet" }, `${Math.max(1, Math.round(file.text.length / 1000))} kB`),
        el(
          "button",
          {
            type: "button",
            "aria-label": `Remove ${file.name}`,
            onclick: () => {
              files = files.filter((other) => other !== file);
              store();
              draw();
              $("message").focus();
            },
          },
          "×",
        ),
      ),
    ),
  );
}

// Files that are sent with a message: text files, each as a folded block of the message with the name of the file.

import { $, el, render, toast } from "./dom.js";

const MAX_BYTES = 256_000;

/** @type {{ name: string, text: string }[]} */
let files = [];

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

async function attach(chosen) {
  for (const file of chosen) {
    const problem = await add(file);
    if (problem) toast(problem, { error: true });
  }
  draw();
}

// Returns why a file cannot be attached.
async function add(file) {
  const name = file.name || "pasted.txt";
  if (file.type.startsWith("image/")) return `${name} is an image: this model reads text.`;
  if (/^(?:audio|video)\//.test(file.type)) return `${name} is not a text file: this model reads text.`;
  if (file.size > MAX_BYTES)
    return `${name} is too large: ${Math.ceil(file.size / 1000)} kB; at most ${MAX_BYTES / 1000} kB can be attached.`;
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
  draw();
  return [text.trim(), ...blocks].filter(Boolean).join("\n\n");
}

export const hasAttachments = () => files.length > 0;

export function clearAttachments() {
  files = [];
  draw();
}

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

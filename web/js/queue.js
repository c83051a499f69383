// Messages that wait for the running answer. They are kept in the browser, shown above the message box, and can be edited or
// removed until they are sent.

import { emit, on } from "./bus.js";
import { $, el, render } from "./dom.js";
import { draftKey, readDraft, writeDraft } from "./drafts.js";
import { state } from "./state.js";

/** @typedef {{ id: string, text: string }} QueuedMessage */

let deliver = null; // sends a message; resolves to whether the server has it
let paused = false; // an answer that was stopped or failed does not send what waits for it

/** @returns {QueuedMessage[]} */
const read = (name) => readDraft("queue", name) ?? [];

function write(name, messages) {
  writeDraft("queue", name, messages);
  draw();
}

/** @param {(name: string, message: QueuedMessage) => Promise<boolean>} send */
export function init(send) {
  deliver = send;
  on("conversation", () => {
    paused = false;
    draw();
  });
  on("state", flush);
  on("connected", (connected) => connected && flush());
  on("event", (event) => {
    if (event.type === "failed") paused = true;
    if (event.type === "done") paused = !["end", "stop", "length"].includes(event.summary.finish_reason);
    if (["done", "failed"].includes(event.type)) {
      draw();
      flush();
    }
  });
  // Another window of this browser has changed the queue.
  addEventListener("storage", (event) => event.key === draftKey("queue", state.name) && draw());
}

export function enqueue(name, text) {
  write(name, [...read(name), { id: crypto.randomUUID(), text }]);
}

const remove = (name, id) =>
  write(
    name,
    read(name).filter((message) => message.id !== id),
  );

// Sends the first message, once in all windows of this browser.
async function flush() {
  const { name } = state;
  draw();
  const ready = () => name === state.name && state.connected && state.snapshot && !state.running && !paused;
  if (!ready() || !read(name).length) return;
  const send = async () => {
    const [message] = read(name);
    if (!message || !ready()) return;
    remove(name, message.id);
    // What the server does not take is in the queue again.
    if (!(await deliver(name, message))) {
      paused = true;
      write(name, [message, ...read(name)]);
    }
  };
  if (navigator.locks) await navigator.locks.request(draftKey("queue", name), send);
  else await send();
}

function draw() {
  const list = $("queue");
  const { name } = state;
  const messages = name ? read(name) : [];
  list.hidden = messages.length === 0;
  const button = (label, onclick) => el("button", { type: "button", onclick }, label);
  render(
    list,
    ...messages.map(({ id, text }, n) =>
      el(
        "li",
        { data: { key: id } },
        el("span", { class: "quiet" }, paused ? "Not sent" : "Queued"),
        el("span", { class: "queued-text", dir: "auto", title: text }, text.replace(/\s+/g, " ").slice(0, 200)),
        paused && n === 0
          ? button("Send now", () => {
              paused = false;
              flush();
            })
          : null,
        button("Edit", () => {
          remove(name, id);
          emit("draft", text);
        }),
        button("Remove", () => {
          remove(name, id);
          $("message").focus();
        }),
      ),
    ),
  );
}

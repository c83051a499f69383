// What the user should know of the open chat and of the server: each state with its reason and what can be done about it.

import { api } from "./api.js";
import { emit, on } from "./bus.js";
import { $, el, render, toast } from "./dom.js";
import { bytes } from "./models.js";
import { isReadOnly } from "./reducers.js";
import { refresh, state } from "./state.js";

let status = null; // of the server
let embedder = null; // the one that can be downloaded
let download = null; // its progress
const closed = new Set(); // notices that were closed on this page
let retry = null; // the timer of the next look at a chat that is in use elsewhere

const RETRY = 3000;

export function init() {
  on("status", async (value) => {
    status = value;
    draw();
    if (status.embedder || embedder) return;
    embedder = await api.models().then(
      (choices) => choices.downloadable_embedder,
      () => null,
    );
    draw();
  });
  for (const topic of ["conversation", "state"]) on(topic, draw);
  on("download", (event) => {
    if (event.name !== embedder?.name) return;
    download = event;
    if (event.error) toast(`${event.name} was not downloaded: ${event.error}`, { error: true });
    draw();
  });
}

function draw() {
  // The events of this server say nothing of what another program does.
  clearTimeout(retry);
  if (isReadOnly(state)) retry = setTimeout(() => state.connected && refresh(), RETRY);
  render($("notices"), ...[inUse(), missingModel(), missingEmbedder(), ...ofTheChat()].filter(Boolean));
}

const box = (key, strong, text, ...more) =>
  el("div", { class: strong ? "notice strong" : "notice", data: { key, notice: key } }, el("span", {}, text), ...more);

const action = (label, onclick) => el("button", { type: "button", class: "outlined", onclick }, label);

function closeButton(close) {
  const onclick = () => {
    close();
    draw();
    $("message").focus();
  };
  return el("button", { type: "button", "aria-label": "Close the notice", onclick }, "×");
}

function inUse() {
  if (!isReadOnly(state)) return null;
  const { in_use_by } = state.snapshot;
  const process = in_use_by > 0 ? ` (process ${in_use_by})` : "";
  const text = `Another Halo${process} has this chat open. You can read it here; to write, close it there first.`;
  return box("in-use", true, text, action("Try again", refresh));
}

function missingModel() {
  const model = state.snapshot?.missing_model;
  if (!model) return null;
  const text = `The model of this chat, ${model}, is not installed any more. The chat can be read; choose another model to go on.`;
  return box(
    "missing-model",
    true,
    text,
    action("Choose a model", () => emit("panel", "models")),
  );
}

function missingEmbedder() {
  if (!status || status.embedder || localStorage.getItem("embedder-notice") === "closed") return null;
  const about = "There is no embedding model, so search and memories go by words, not by meaning.";
  const done = download?.finished && !download.error;
  const size = embedder ? ` (${bytes(embedder.download_bytes)})` : "";
  const text = done
    ? `${embedder.name} is installed. It is used when the server is started again.`
    : download && !download.finished
      ? `${about} Downloading ${embedder.name}: ${Math.round((100 * download.done) / (download.all || 1))} %.`
      : about;
  const start = () =>
    api.downloadModel(embedder.name).then(
      () => {
        download = { done: 0, all: 1 };
        draw();
      },
      (error) => toast(error.message, { error: true }),
    );
  const canStart = embedder && (!download || (download.finished && download.error));
  return box(
    "embedder",
    false,
    text,
    canStart ? action(`Download ${embedder.name}${size}`, start) : null,
    closeButton(() => localStorage.setItem("embedder-notice", "closed")),
  );
}

// What the server says about how the chat was opened.
function ofTheChat() {
  const key = (text) => `${state.name}: ${text}`;
  return (state.snapshot?.notices ?? [])
    .filter((text) => !closed.has(key(text)))
    .map((text) =>
      box(
        `notice ${text}`,
        false,
        `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`,
        closeButton(() => closed.add(key(text))),
      ),
    );
}

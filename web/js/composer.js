// The message box: drafts, sending, stopping, editing earlier messages, and the context meter.

import { branch, freeName, messageText, stop } from "./actions.js";
import { api, ServerUnreachable } from "./api.js";
import * as attachments from "./attachments.js";
import { emit, on } from "./bus.js";
import { sendPendingOptions } from "./chat_options.js";
import { $, autoGrow, el, number, toast } from "./dom.js";
import { readDraft, readText, writeDraft, writeText } from "./drafts.js";
import { sendPendingModel } from "./models.js";
import * as queue from "./queue.js";
import { isReadOnly, lastMessages } from "./reducers.js";
import { openConversation, refresh, state } from "./state.js";
import { isUntitled, titleOf } from "./titles.js";

let editing = null; // the message whose text is in the box
let sending = false;
let isDue = false; // whether the text in the box is sent as soon as the chat is loaded

const touch = matchMedia("(hover: none)");

export function init() {
  const box = $("message");
  box.addEventListener("input", () => {
    isDue = false;
    if (!editing && state.name !== null) writeText(state.name, box.value);
    autoGrow(box);
    drawStatus();
  });
  box.addEventListener("keydown", (event) => {
    // On a touch screen Enter begins a new line: there is a button to send.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
    if (event.key === "Escape" && editing) {
      event.stopPropagation();
      cancelEdit();
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
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.running && !document.querySelector("dialog[open]")) stop();
  });
  attachments.init();
  queue.init((name, message) => deliver(name, message, true));
  on("edit", startEdit);
  on("send", (text) => deliver(state.name, { id: crypto.randomUUID(), text }));
  on("draft", (text) => {
    box.value = text;
    box.dispatchEvent(new Event("input"));
    box.focus();
  });
  // What was typed and attached while the page was loading belongs to the chat that it opens first.
  let early = true;
  on("conversation", () => {
    if (!early) isDue = false;
    const typed = early ? box.value : "";
    early = false;
    cancelEdit();
    attachments.openDraft(state.name);
    loadDraft(typed);
    drawStatus();
  });
  for (const topic of ["state", "connected"]) on(topic, drawStatus);
  on("state", () => {
    if (!isDue) return;
    isDue = false;
    drawStatus();
    // A chat that cannot be loaded keeps the text in the box.
    if (isLoaded()) send();
  });
  on("event", (event) => {
    showEvent(event);
    drawStatus();
  });
  on("connected", (connected) => connected && resend());
}

const isLoaded = () => state.snapshot !== null && !state.loadError;

function loadDraft(typed) {
  const box = $("message");
  const unsent = readDraft("sent", state.name);
  // A message that is being sent is not a draft.
  const draft = readText(state.name) === unsent?.text ? "" : readText(state.name);
  box.value = [draft, typed].filter(Boolean).join("\n");
  if (typed) writeText(state.name, box.value);
  autoGrow(box);
  $("hints").replaceChildren();
  if (unsent) resend();
}

// Sends a message again that the server may not have received. Its id makes sure that it is stored once.
async function resend() {
  const { name } = state;
  const unsent = readDraft("sent", name);
  if (unsent && !sending) await deliver(name, unsent);
}

async function send() {
  const box = $("message");
  if ((!box.value.trim() && !attachments.hasAttachments()) || sending) return;
  if (editing) return sendEdit(box.value);
  // Without the chat it is not known whether an answer runs, or whether this is the first message, which names the chat.
  if (state.name === null || (state.snapshot === null && !state.loadError)) {
    isDue = true;
    drawStatus();
    return;
  }
  if (attachments.hasAttachments()) {
    box.value = attachments.takeAttachments(box.value);
    writeText(state.name, box.value);
  }
  const text = box.value;
  if (state.running) {
    queue.enqueue(state.name, text);
    writeText(state.name, "");
    box.value = "";
    autoGrow(box);
    drawStatus();
    return;
  }
  const message = { id: crypto.randomUUID(), text };
  let { name } = state;
  if (isUntitled(name) && state.snapshot?.fresh) {
    // A new chat gets its name from its first message.
    try {
      name = await freeName(titleOf(text));
    } catch (error) {
      toast(`Not sent: ${error.message}. Your text is still in the box.`, { error: true });
      return;
    }
    writeText(state.name, "");
    writeText(name, text);
    try {
      await sendPendingModel(state.name, name);
      await sendPendingOptions(state.name, name);
    } catch (error) {
      toast(`Not sent: ${error.message}. Your text is still in the box.`, { error: true });
      return;
    }
    openConversation(name, { isNew: true });
    box.value = text;
  }
  if (state.snapshot?.fresh && state.name === name)
    await sendPendingModel(name, name)
      .then(() => sendPendingOptions(name, name))
      .catch((error) => toast(error.message, { error: true }));
  writeDraft("sent", name, message);
  await deliver(name, message);
}

// Sends a message and keeps it in the browser until the server has it. Returns whether the server has it or will get it.
async function deliver(name, message, queued = false) {
  const box = $("message");
  const done = await attempt(name, () => api.sendMessage(name, message.text, message.id));
  // Without a response it is unknown whether the message was stored: it is sent again later, with the same id.
  if (done === null) return true;
  writeDraft("sent", name, null);
  if (!done) {
    if (!queued && state.name === name && !box.value) box.value = message.text;
    return false;
  }
  if (!queued) {
    if (readText(name) === message.text) writeText(name, "");
    if (state.name === name && box.value === message.text) {
      box.value = "";
      autoGrow(box);
    }
  }
  if (state.snapshot?.fresh) refresh();
  emit("list");
  return true;
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

// ---- editing

const isLastQuestion = (message) =>
  lastMessages(state, 2).findLast((other) => other.role === "user")?.turn === message.turn;
const isLastAnswer = (message) => message.role === "assistant" && lastMessages(state, 1)[0]?.turn === message.turn;

/** Puts a message into the box. A banner is shown until it is sent or cancelled; the draft is kept. */
function startEdit(message) {
  if (state.running) {
    toast("The answer is being generated. Stop it, or wait until it is complete.");
    return;
  }
  const box = $("message");
  editing = message;
  $("editing").hidden = false;
  const [what, effect, label] = editEffect(message);
  $("editing").firstElementChild.replaceChildren(el("b", {}, what), ` ${effect}`);
  labelSend(label);
  box.value = messageText(message);
  autoGrow(box);
  box.focus();
}

// What is edited, what sending does, and the label of the button.
function editEffect(message) {
  if (isLastQuestion(message))
    return [
      "Editing your last message.",
      "Sending replaces it and its answer; the old version stays a variant.",
      "Replace",
    ];
  if (isLastAnswer(message))
    return ["Editing the last answer.", "Saving replaces it; the old version stays a variant.", "Save"];
  const what = message.role === "assistant" ? "Editing an earlier answer." : "Editing an earlier message.";
  return [what, "Sending makes a branch from here; this chat stays as it is.", "Branch"];
}

function cancelEdit() {
  if (!editing) return;
  editing = null;
  $("editing").hidden = true;
  labelSend("Send");
  const box = $("message");
  box.value = readText(state.name);
  autoGrow(box);
}

async function sendEdit(text) {
  const { name } = state;
  const message = editing;
  if (!text.trim()) return;
  if (isLastQuestion(message)) {
    if (await attempt(name, () => api.editLast(name, text))) cancelEdit();
    return;
  }
  if (isLastAnswer(message)) {
    if (await attempt(name, () => api.replaceAnswer(name, text))) cancelEdit();
    return;
  }
  // The branch ends before the message that is edited.
  const before = message.turn - 1;
  cancelEdit();
  const to = before < 0 ? await freeName(titleOf(text)) : await branch(before, name);
  if (to === null) return;
  if (message.role === "assistant") {
    await attempt(to, () => api.replaceAnswer(to, text));
    return;
  }
  if (before < 0) await openConversation(to);
  await deliver(to, { id: crypto.randomUUID(), text });
}

// ---- status

// The usual case is an arrow; what is unusual is named.
function labelSend(label) {
  $("send").textContent = label;
  if (label === "Send") $("send").dataset.icon = "↑";
  else delete $("send").dataset.icon;
}

function drawStatus() {
  const { snapshot, running } = state;
  $("stop").hidden = !running;
  $("send").hidden = !!running && !$("message").value.trim() && !editing;
  if (!editing) {
    labelSend(running ? "Queue" : "Send");
    $("send").title = running ? "It is sent after this answer (Enter)" : "Send (Enter)";
  }
  drawReadOnly();
  $("progress").textContent = isDue
    ? "sent as soon as the chat is loaded"
    : state.connected
      ? progressText(running)
      : "";
  if (!snapshot) {
    $("summary").textContent = "";
    $("meter-parts").hidden = true;
    $("meter").hidden = true;
    return;
  }
  const limit = snapshot.limit || 1;
  const meter = $("meter");
  meter.hidden = !!snapshot.fresh;
  const system = snapshot.system_prompt_tokens ?? 0;
  const kept = Math.max(0, snapshot.live - system);
  const reserved = Math.max(0, limit - snapshot.budget_after_turn);
  const share = (tokens) => `${Math.min(100, (tokens / limit) * 100)}%`;
  meter.setAttribute("aria-valuemax", limit);
  meter.setAttribute("aria-valuenow", snapshot.live);
  meter.children[0].style.width = share(system);
  meter.children[1].style.width = share(kept);
  meter.children[2].style.width = share(Math.min(reserved, Math.max(0, limit - snapshot.live)));
  $("meter-parts").hidden = !!snapshot.fresh;
  [system, kept, reserved].forEach((tokens, n) => {
    $("meter-parts").children[n].querySelector("b").textContent = number(tokens);
  });
  const parts =
    `System prompt ${number(system)} · messages ${number(kept)} · room for the next message and its answer ` +
    `${number(reserved)}. When the context is full, the paragraphs with the least attention leave it.`;
  meter.title = parts;
  meter.setAttribute("aria-valuetext", `${number(snapshot.live)} of ${number(limit)} tokens. ${parts}`);
  $("summary").textContent = summaryText(snapshot);
  $("summary").title = parts;
}

// A chat that another program writes can only be read here.
function drawReadOnly() {
  const box = $("message");
  const readOnly = isReadOnly(state);
  if (box.disabled === readOnly) return;
  box.disabled = readOnly;
  box.placeholder = readOnly ? "This chat is open in another program" : "Message";
  $("attach").disabled = readOnly;
}

function summaryText(snapshot) {
  const parts = snapshot.fresh ? [] : [`Context ${number(snapshot.live)} / ${number(snapshot.limit)} tokens`];
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

// Shows hints and errors, and announces finished answers to screen readers.
function showEvent(event) {
  const hint = (text, error = false) => {
    const hints = $("hints");
    hints.append(el("p", { class: error ? "error" : "" }, text));
    while (hints.children.length > 3) hints.firstElementChild.remove();
  };
  switch (event.type) {
    case "message_stored":
      $("hints").replaceChildren();
      break;
    case "done": {
      const text = event.chunks.map((chunk) => chunk.text).join("");
      $("announcer").textContent = `Answer: ${text.slice(0, 1500)}`;
      break;
    }
    case "false_premise":
      hint(
        `無 Your question assumes something that was contradicted: “${event.premise}”. ${event.reason}. ${event.suggestion}`,
        true,
      );
      break;
    case "budget_exceeded":
      toast(
        `The limit of the answer's length leaves no room for the chat: ${event.reason}. Lower generation.max_tokens or raise ` +
          "context.max_tokens.",
        {
          error: true,
          action: "Settings",
          onAction: () => emit("panel", { panel: "settings", q: "max_tokens" }),
          stay: 15_000,
        },
      );
      break;
    case "notice":
      hint(event.text);
      break;
    case "failed":
      // A message that this page is sending reports its own failure.
      if (!sending) toast(event.error, { error: true });
      break;
    case "scored":
      if (event.errors) hint(`Attention was not measured in ${event.errors}`, true);
      break;
    default:
  }
}

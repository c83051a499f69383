// The open room: its billboard, its messages, and who is writing or thinking.

import { $, el, render, time } from "./dom.js";
import { ARCHITECT, openRoom } from "./rooms_reducers.js";
import { loadOlder, react, rooms, runCommand, setReply } from "./rooms_store.js";

const REACTIONS = { thumbs_up: "👍", thumbs_down: "👎", brain: "🧠", heart: "❤️" };

const truncate = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);
/** Whether the reader is at the end of the log. */
export const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;

export function drawRoom() {
  const room = openRoom(rooms);
  if (!room) return;
  const joined = room.members.some((member) => member.id === ARCHITECT);
  render(
    $("billboard"),
    el("b", {}, room.billboard ? `📌 ${room.billboard}` : `${room.owner}'s room`),
    el("span", { class: "quiet" }, `written at ${room.wpm} words a minute`),
    joined
      ? el(
          "button",
          {
            type: "button",
            id: "leave",
            data: { key: "leave" },
            onclick: () => runCommand({ command: "leave", room: room.id }),
          },
          "Leave",
        )
      : el(
          "button",
          {
            type: "button",
            id: "join",
            data: { key: "join" },
            onclick: () => runCommand({ command: "join", room: room.id }),
          },
          "Join",
        ),
  );
  const box = $("log");
  const follow = atEnd() || box.dataset.room !== String(room.id);
  const { messages, complete } = rooms.log.room === room.id ? rooms.log : { messages: [], complete: false };
  const byId = new Map(messages.map((message) => [message.id, message]));
  const rows = messages.map((message) => messageRow(message, byId));
  if (messages.length && !complete)
    rows.unshift(
      el("button", { type: "button", class: "gap", data: { key: "older" }, onclick: loadOlder }, "Older messages"),
    );
  if (!rows.length)
    rows.push(el("p", { class: "empty", data: { key: "nothing" } }, room.last_message ? "…" : "No messages yet."));
  // The log announces only new messages of the same room to screen readers.
  if (box.dataset.room !== String(room.id)) box.replaceChildren();
  box.dataset.room = String(room.id);
  render(box, rows);
  if (follow) box.scrollTop = box.scrollHeight;
  const writing = room.members.filter((member) => member.writing).map((member) => member.name);
  const thinking = rooms.world.agents.find((agent) => agent.id === rooms.world.thinking);
  $("hints").textContent = [
    writing.length ? `${writing.join(", ")} ${writing.length === 1 ? "is" : "are"} writing…` : "",
    thinking ? `${thinking.name} is thinking…` : "",
    rooms.world.paused && !rooms.world.runs_elsewhere
      ? "Time stands still: nobody thinks or answers. “Run” starts it, “Step” runs one heartbeat."
      : "",
  ]
    .filter(Boolean)
    .join("  ");
  const { replyTo } = rooms;
  $("replying").hidden = !replyTo;
  render(
    $("replying"),
    replyTo && [
      el("span", {}, `↳ ${replyTo.name}: ${truncate(replyTo.text)}`),
      el(
        "button",
        {
          type: "button",
          "aria-label": "Cancel the reply",
          onclick: () => setReply(null),
        },
        "×",
      ),
    ],
  );
}

function messageRow(message, byId) {
  const original = message.reply_to && byId.get(message.reply_to);
  const mine = message.by === ARCHITECT;
  const reactions =
    message.by !== null &&
    el(
      "div",
      { class: Object.keys(message.reactions).length ? "reactions any" : "reactions" },
      Object.entries(REACTIONS).map(([name, sign]) => {
        const who = message.reactions[name] ?? [];
        return el(
          "button",
          {
            type: "button",
            class: who.length ? "has" : "",
            disabled: mine || who.includes("The Architect"),
            data: { reaction: name },
            title: who.length ? who.join(", ") : name.replace("_", " "),
            "aria-label": `${name.replace("_", " ")}: ${who.length}`,
            onclick: () => react(message, name),
          },
          who.length ? `${sign} ${who.length}` : sign,
        );
      }),
      el(
        "button",
        {
          type: "button",
          class: "reply",
          "aria-label": `Reply to ${message.name}`,
          onclick: () => {
            setReply(message);
            $("message").focus();
          },
        },
        "↳",
      ),
    );
  return el(
    "article",
    {
      class: `message${mine ? " mine" : ""}${message.by === null ? " system" : ""}`,
      data: { message: message.id, key: message.id },
    },
    el("h2", {}, el("b", {}, message.name), el("time", {}, time(message.at)), el("span", {}, `#${message.id}`)),
    message.reply_to
      ? el(
          "div",
          { class: "reply-to" },
          original ? `↳ ${original.name}: ${truncate(original.text)}` : `↳ #${message.reply_to}`,
        )
      : null,
    el("p", {}, message.text),
    reactions,
  );
}

/** Draws messages that were loaded above, without moving those that are read. */
export function drawOlder() {
  const box = $("log");
  const below = box.scrollHeight - box.scrollTop;
  drawRoom();
  box.scrollTop = box.scrollHeight - below;
}

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  applyEvent,
  applySnapshot,
  applyTranscript,
  dropMessages,
  emptyState,
  findMessage,
  lastMessages,
  PAGE,
} from "../js/reducers.js";

const chunk = (id, text, more = {}) => {
  const [, role, turn, index] = /^([uas])(\d+)\.(\d+)$/.exec(id);
  return {
    id,
    turn: Number(turn),
    index: Number(index),
    role: { u: "user", a: "assistant", s: "system" }[role],
    position: Number(turn) * 100 + Number(index),
    tokens: 3,
    live: true,
    pinned: false,
    text,
    tool_ranges: [],
    ...more,
  };
};

const message = (turn, text) => {
  const role = turn % 2 ? "a" : "u";
  const part = chunk(`${role}${turn}.0`, text);
  return { turn, role: part.role, at: 1, used: [], chunks: [part] };
};

function openState(count = 2, running = null) {
  const state = emptyState();
  const messages = Array.from({ length: count }, (_, turn) => message(turn, `text ${turn}`));
  const tail = messages.slice(-2 * PAGE);
  const snapshot = { running, pruned: 0, live: 6, tokens: 6 };
  applySnapshot(state, snapshot, { total: count, offset: count - tail.length, messages: tail });
  return state;
}

const done = (turn, chunks, more = {}) => ({
  type: "done",
  live: 9,
  pruned: 0,
  tokens: 12,
  chunks,
  window: [],
  summary: { turn, finish_reason: "end", ...more },
});

test("a message and its answer are appended to the transcript", () => {
  const state = openState();
  applyEvent(state, { type: "message_stored", turn: 2, chunks: [chunk("u2.0", "Hello")], live: 8 }, 5);
  assert.equal(state.total, 3);
  assert.deepEqual(lastMessages(state, 1)[0].at, 5);
  applyEvent(state, { type: "token", chunk: "a3.0", text: "Hi" });
  applyEvent(state, { type: "token", chunk: "a3.0", text: " you" });
  assert.equal(state.running.chunks.get("a3.0"), "Hi you");
  applyEvent(state, done(3, [chunk("a3.0", "Hi you")]));
  assert.equal(state.total, 4);
  assert.equal(state.running, null);
  assert.equal(lastMessages(state, 1)[0].chunks[0].text, "Hi you");
});

test("an event that arrives twice appends nothing", () => {
  const state = openState();
  for (let n = 0; n < 2; n += 1)
    applyEvent(state, { type: "message_stored", turn: 2, chunks: [chunk("u2.0", "Hello")], live: 8 });
  assert.equal(state.total, 3);
});

test("a pruned paragraph stays in the transcript and leaves the context", () => {
  const state = openState();
  applyEvent(state, { type: "pruned", chunk: "u0.0", reason: "full", live: 3 });
  assert.equal(state.chunks.has("u0.0"), false);
  assert.deepEqual([...state.chunks.keys()], ["a1.0"]);
  assert.equal(findMessage(state, 0).chunks[0].text, "text 0");
  assert.equal(state.snapshot.pruned, 1);
});

test("a resurrected paragraph returns to its position, and the answer says that it was used", () => {
  const state = openState();
  applyEvent(state, { type: "pruned", chunk: "u0.0", reason: "full", live: 3 });
  applyEvent(state, { type: "resurrected", chunk: chunk("u0.0", "text 0"), reason: "found by search", live: 6 });
  assert.equal(state.chunks.get("u0.0").resurrected, true);
  applyEvent(state, done(3, [chunk("a3.0", "Hi")], { resurrected_chunks: ["u0.0"] }));
  assert.deepEqual(lastMessages(state, 1)[0].used, [{ id: "u0.0", turn: 0, text: "text 0" }]);
});

test("only the pages at the end of a long chat are loaded", () => {
  const state = openState(25 * PAGE + 3);
  assert.equal(state.total, 25 * PAGE + 3);
  assert.deepEqual([...state.pages.keys()], [24, 25]);
  assert.equal(state.pages.get(25)[0].turn, 25 * PAGE);
  assert.equal(state.pages.get(25).length, 3);
});

test("a message after a full page begins the next page", () => {
  const state = openState(PAGE);
  applyEvent(state, {
    type: "message_stored",
    turn: PAGE,
    chunks: [chunk(`u${PAGE}.0`, "next")],
    live: 8,
  });
  assert.deepEqual(
    [...state.pages].map(([page, messages]) => [page, messages.length]),
    [
      [0, PAGE],
      [1, 1],
    ],
  );
});

test("the running answer is not a stored message", () => {
  const state = openState(4, { ahead: 0, chunks: [["a3.0", "so far"]] });
  assert.equal(state.total, 3);
  assert.equal(findMessage(state, 3), null);
  applyEvent(state, done(3, [chunk("a3.0", "so far and on")]));
  assert.equal(state.total, 4);
});

test("events that do not say everything ask for the chat again", () => {
  const cases = [
    [{ type: "changed", action: "pinned" }, true],
    [{ type: "failed", error: "x" }, true],
    [{ type: "memory_changed", action: "placed" }, true],
    [{ type: "memory_changed", action: "formed" }, false],
    [{ type: "notice", text: "x" }, false],
  ];
  for (const [event, reload] of cases) assert.equal(applyEvent(openState(), event), reload, event.type);
});

test("an event is newer than a page that is loaded after it", () => {
  const state = openState(PAGE * 4);
  assert.equal(state.chunks.has("u0.0"), false, "its page is not loaded");
  applyEvent(state, { type: "pruned", chunk: "u0.0", reason: "full", live: 3 });
  const messages = Array.from({ length: PAGE }, (_, turn) => message(turn, `text ${turn}`));
  applyTranscript(state, { total: PAGE * 4, offset: 0, messages });
  assert.equal(state.chunks.has("u0.0"), false);
  assert.equal(state.chunks.has("a1.0"), true);
  dropMessages(state, 0);
  assert.equal(state.chunks.has("a1.0"), false);
  assert.equal(state.pages.has(0), false);
});

test("the variants of an answer stay with it when the next message comes", () => {
  const state = openState();
  state.variants = [
    { turn: 1, current: true, messages: 1 },
    { turn: 3, current: false, messages: 1 },
  ];
  applyEvent(state, { type: "message_stored", turn: 4, chunks: [chunk("u4.0", "Next")], live: 8 }, 5);
  assert.equal(findMessage(state, 1).variants.length, 2);
  assert.deepEqual(state.variants, []);
});

test("an answer names what it used, also if it was brought back before the page was loaded", () => {
  const state = openState(4);
  applyEvent(state, { type: "token", chunk: "a5.0", text: "Hi" });
  applyEvent(state, done(5, [chunk("a5.0", "Hi")], { resurrected_chunks: ["u0.0"] }));
  assert.deepEqual(lastMessages(state, 1)[0].used, [{ id: "u0.0", turn: 0, text: "text 0" }]);
});

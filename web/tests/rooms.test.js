import assert from "node:assert/strict";
import { test } from "node:test";
import {
  applyLatest,
  applyMessages,
  applyRoomsEvent,
  applyWorld,
  defaultRoom,
  emptyRooms,
  logToLoad,
  PAGE_SIZE,
  selectWorld,
} from "../js/rooms_reducers.js";

const world = (last = 0) => ({
  name: "lamp",
  thinking: null,
  rooms: [
    { id: 0, members: [{ id: 0 }], last_message: 0 },
    { id: 1, members: [{ id: 0 }, { id: 1 }], last_message: last },
  ],
});

function opened(last) {
  const state = emptyRooms();
  selectWorld(state, "lamp");
  applyWorld(state, world(last));
  state.room = 1;
  return state;
}

const changed = (more) => ({
  type: "world_changed",
  name: "lamp",
  rooms: [],
  beat: null,
  worlds_changed: false,
  ...more,
});
const messages = (from, to) => Array.from({ length: to - from + 1 }, (_, n) => ({ id: from + n }));

test("a heartbeat ends the thinking of its agent", () => {
  const state = opened();
  state.world.thinking = 2;
  assert.equal(applyRoomsEvent(state, changed({ beat: 2, usage: { prompt_tokens: 7 } })), true);
  assert.equal(state.world.thinking, null);
  assert.deepEqual(state.usage.get(2), { prompt_tokens: 7 });
});

test("the event of an agent that begins to think says all that changed", () => {
  const state = opened();
  assert.equal(applyRoomsEvent(state, changed({ thinking: 2 })), false, "nothing is loaded");
  assert.equal(state.world.thinking, 2);
  assert.equal(applyRoomsEvent(state, changed({ name: "other", thinking: 3 })), false);
  assert.equal(state.world.thinking, 2);
});

test("events of other worlds change nothing", () => {
  const state = opened();
  assert.equal(applyRoomsEvent(state, changed({ name: "other", beat: 1 })), false);
  assert.equal(applyRoomsEvent(state, changed({ name: "other", worlds_changed: true })), true, "the list has changed");
  assert.equal(applyRoomsEvent(state, { type: "token", conversation: "main" }), false);
  assert.equal(state.world.thinking, null);
});

test("messages are loaded only if the open room has new ones", () => {
  const state = opened(3);
  const log = logToLoad(state);
  assert.equal(log.room, 1);
  log.stale = false;
  applyLatest(log, messages(1, 3), true);
  assert.equal(logToLoad(state), null, "the last message is there");
  applyRoomsEvent(state, changed({ rooms: [0] }));
  assert.equal(logToLoad(state), null, "another room has changed");
  applyRoomsEvent(state, changed({ rooms: [1] }));
  assert.equal(logToLoad(state), log);
  assert.equal(applyWorld(state, { name: "other", rooms: [] }), false);
});

test("a log with a gap starts over, and older messages join it", () => {
  const log = { room: 1, messages: messages(1, 5), complete: true, stale: false };
  applyLatest(log, messages(200, 200 + PAGE_SIZE - 1), true);
  assert.equal(log.messages[0].id, 200);
  assert.equal(log.complete, false);
  applyMessages(log, messages(150, 210));
  assert.equal(log.messages.length, 200 + PAGE_SIZE - 150);
  assert.deepEqual(
    log.messages.map(({ id }) => id),
    [...log.messages.map(({ id }) => id)].sort((a, b) => a - b),
  );
});

test("the room with the most members is opened", () => {
  const state = opened();
  assert.equal(defaultRoom({ ...state, room: null }), 1);
  assert.equal(defaultRoom({ ...state, room: 0 }), 0);
  assert.equal(defaultRoom({ ...state, room: 9 }), 1);
});

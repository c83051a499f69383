import assert from "node:assert/strict";
import { test } from "node:test";
import { ticks } from "../js/charts.js";

test("ticks are round and cover the values", () => {
  for (const [most, expected] of [
    [4, [0, 1, 2, 3, 4]],
    [400, [0, 100, 200, 300, 400]],
    [1234, [0, 500, 1000, 1500]],
    [0.07, [0, 0.025, 0.05, 0.075]],
  ])
    assert.deepEqual(ticks(most), expected, String(most));
});

test("counts have whole ticks", () => {
  assert.deepEqual(ticks(1, true), [0, 1]);
  assert.deepEqual(ticks(7, true), [0, 3, 6, 9]);
});

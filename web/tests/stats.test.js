import assert from "node:assert/strict";
import { test } from "node:test";

// The modules draw only when their views are opened; these functions need no page.
globalThis.document = /** @type {any} */ ({ getElementById: () => null, documentElement: { dataset: {} } });
globalThis.matchMedia = /** @type {any} */ (() => ({ matches: false, addEventListener() {} }));
globalThis.localStorage = /** @type {any} */ ({ getItem: () => null, setItem() {}, removeItem() {} });
globalThis.sessionStorage = globalThis.localStorage;
globalThis.location = /** @type {any} */ ({ hash: "" });
const { ATTENTION_BOUNDS, attendedText, attentionBins } = await import("../js/stats.js");
const { ticks } = await import("../js/charts.js");
const { attentionLevel } = await import("../js/shade.js");

test("ticks are round and cover the values", () => {
  for (const [most, expected] of [
    [4, [0, 1, 2, 3, 4]],
    [400, [0, 100, 200, 300, 400]],
    [1234, [0, 500, 1000, 1500]],
    [0.07, [0, 0.025, 0.05, 0.075]],
  ])
    assert.deepEqual(ticks(most), expected, String(most));
});

test("attention is counted on a logarithmic scale", () => {
  const bins = attentionBins([0.001, 0.01, 0.015, 1, 1.9, 60]);
  assert.equal(bins.length, ATTENTION_BOUNDS.length + 1);
  assert.equal(bins[0], 1, "under the first bound");
  assert.equal(bins[1], 2, "a bound belongs to the bin above it");
  assert.equal(bins[ATTENTION_BOUNDS.indexOf(1) + 1], 2);
  assert.equal(bins.at(-1), 1, "over the last bound");
});

test("attention to what came back is compared with the average", () => {
  assert.match(attendedText(null, 400), /not measured/);
  assert.match(attendedText(10, 400), /attended to it: 10 ‰ per token, 4 × the average/);
  assert.match(attendedText(2.5, 400), /as to the rest/);
  assert.match(attendedText(0.5, 400), /hardly/);
});

test("counts have whole ticks", () => {
  assert.deepEqual(ticks(1, true), [0, 1]);
  assert.deepEqual(ticks(7, true), [0, 3, 6, 9]);
});

test("a level of attention does not depend on the other paragraphs", () => {
  assert.equal(attentionLevel(0), 0);
  assert.equal(attentionLevel(0.02), 0);
  assert.equal(attentionLevel(20), 1);
  assert.equal(attentionLevel(900), 1);
  assert.ok(Math.abs(attentionLevel(0.02 * Math.sqrt(1000)) - 0.5) < 1e-9, "the middle is the geometric mean");
});

import assert from "node:assert/strict";
import { test } from "node:test";
import { PageHeights } from "../js/page_heights.js";

// A random generator with a seed: the same cases in every run.
function random(seed) {
  let state = seed;
  return (max) => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state % max;
  };
}

test("sums and places agree with a plain list", () => {
  const next = random(7);
  for (let run = 0; run < 200; run += 1) {
    const plain = [];
    const heights = new PageHeights((page) => 10 + (page % 3));
    for (let step = 0; step < 40; step += 1) {
      if (next(4) === 0) {
        const length = next(60);
        while (plain.length > length) plain.pop();
        while (plain.length < length) plain.push(10 + (plain.length % 3));
        heights.resize(length);
      } else if (plain.length) {
        const page = next(plain.length);
        plain[page] = 1 + next(500);
        heights.set(page, plain[page]);
      }
      let sum = 0;
      plain.forEach((height, page) => {
        assert.equal(heights.top(page), sum);
        assert.equal(heights.pageAt(sum), page);
        assert.equal(heights.pageAt(sum + height - 0.5), page);
        sum += height;
      });
      assert.equal(heights.total, sum);
      if (plain.length) assert.equal(heights.pageAt(sum + 1000), plain.length - 1);
      assert.equal(heights.pageAt(-5), 0);
    }
  }
});

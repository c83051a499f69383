import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const read = (path) => readFileSync(new URL(`../${path}`, import.meta.url), "utf8");

// Without the links, the browser finds a module only after it has read the one that imports it.
test("the page names every module that it needs at its start", () => {
  const needed = new Set();
  const follow = (name) => {
    if (needed.has(name)) return;
    needed.add(name);
    for (const [, other] of read(`js/${name}`).matchAll(/^(?:import|export)[^;]*?from "\.\/([\w.]+)";/gms))
      follow(other);
  };
  follow("main.js");
  needed.delete("main.js");
  const named = [...read("index.html").matchAll(/rel="modulepreload" href="js\/([\w.]+)"/g)].map(([, name]) => name);
  assert.deepEqual(named, [...needed].sort());
});

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { addressOf, findSections, parseSummary } from "../js/docs.js";
import { anchorOf } from "../js/markdown.js";

const summary = readFileSync(new URL("../../docs/SUMMARY.md", import.meta.url), "utf8");

test("the contents have the parts and the pages of the summary, in order", () => {
  const parts = parseSummary(
    "# Summary\n\n[Halo](README.md)\n\n# Begin\n\n- [Concepts](concepts.md)\n  - [Words](glossary.md)\n",
  );
  assert.deepEqual(parts, [
    { title: "", pages: [{ title: "Halo", path: "README.md", inner: false }] },
    {
      title: "Begin",
      pages: [
        { title: "Concepts", path: "concepts.md", inner: false },
        { title: "Words", path: "glossary.md", inner: true },
      ],
    },
  ]);
  const pages = parseSummary(summary).flatMap((part) => part.pages);
  assert.equal(pages.length, summary.match(/\.md\)/g)?.length);
});

test("links lead to pages and headings of the documentation, or out of it", () => {
  for (const [page, target, address] of [
    ["README.md", "connect.md", "#connect.md"],
    ["README.md", "api/halo.md#events", "#api/halo.md#events"],
    ["api/openai.md", "../clients.md", "#clients.md"],
    ["api/openai.md", "openai-tools.md", "#api/openai-tools.md"],
    ["concepts.md", "#brightness", "#concepts.md#brightness"],
    ["concepts.md", "https://example.org/a.md", "https://example.org/a.md"],
  ])
    assert.equal(addressOf(page, target), address, target);
});

test("a heading has the anchor that GitHub gives it", () => {
  for (const [heading, anchor] of [
    ["What it is not", "what-it-is-not"],
    ["A client shows an error", "a-client-shows-an-error"],
    ["kv.type: keys, values", "kvtype-keys-values"],
    ["snake_case – and a dash", "snake_case--and-a-dash"],
  ])
    assert.equal(anchorOf(heading), anchor);
});

test("a search finds sections with all words, headings first", () => {
  const text = [
    "# Rooms",
    "",
    "An agent thinks",
    "in a room.",
    "",
    "## The `HUD` of an agent",
    "",
    "What it sees",
    "of a **room**.",
    "",
  ].join("\n");
  assert.deepEqual(findSections(text, ["agent", "room"]), [
    { heading: "Rooms", line: "An agent thinks", inHeading: 1 },
    { heading: "The HUD of an agent", line: "of a room.", inHeading: 1 },
  ]);
  assert.deepEqual(findSections(text, ["hud"]), [{ heading: "The HUD of an agent", line: "", inHeading: 1 }]);
  assert.deepEqual(findSections(text, ["boat"]), []);
});

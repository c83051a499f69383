import assert from "node:assert/strict";
import { test } from "node:test";
import { align, renderedRange } from "../js/align.js";
import { nextContext, plainText, splitText, startContext } from "../js/markdown.js";
import { titleOf } from "../js/titles.js";

const shown = (source, rendered, word) => {
  const start = source.indexOf(word);
  const range = renderedRange(align(source, rendered), start, start + word.length);
  return range && rendered.slice(...range);
};

test("a range of the source is found in the rendered text", () => {
  const cases = [
    ["plain words here", "plain words here", "words", "words"],
    ["some **bold** text", "some bold text", "bold", "bold"],
    [
      "see [the page](https://example.org/a/very/long/address/that/goes/on/and/on/and/on) now",
      "see the page now",
      "now",
      "now",
    ],
    ["# Title\n\nand text", "Title\nand text\n", "text", "text"],
    ["- one\n- two\n", "one\ntwo\n", "two", "two"],
    ["**bo**ld and more", "bold and more", "ld", "ld"],
    ["`code` and 日本語", "code and 日本語", "日本語", "日本語"],
    ["a **", "a", "**", null],
  ];
  for (const [source, rendered, word, expected] of cases) assert.equal(shown(source, rendered, word), expected, source);
});

test("a text is split into Markdown, reasoning, tool calls and results", () => {
  const kinds = (...values) => splitText(...values).map(({ kind, text }) => [kind, text.trim()]);
  assert.deepEqual(kinds("Hello *you*"), [["markdown", "Hello *you*"]]);
  assert.deepEqual(kinds("<think>so</think>Yes"), [
    ["thinking", "so"],
    ["markdown", "Yes"],
  ]);
  assert.deepEqual(kinds("<think>never closed"), [["thinking", "never closed"]]);
  assert.deepEqual(kinds("still</think>Yes", [], true), [
    ["thinking", "still"],
    ["markdown", "Yes"],
  ]);
  const text = "Note. <tool>jq .</tool>✓ done After";
  const from = text.indexOf("✓");
  assert.deepEqual(kinds(text, [[from, from + 6]]), [
    ["markdown", "Note."],
    ["call", "jq ."],
    ["result", "✓ done"],
    ["markdown", "After"],
  ]);
});

test("a paragraph knows that it begins within a code block or within reasoning", () => {
  const after = (...texts) => texts.reduce(nextContext, startContext());
  assert.equal(after("text\n```python\nx = 1\n").fence, "```python");
  assert.equal(after("```python\nx = 1\n", "y = 2\n```\n").fence, null);
  assert.equal(after("````\n```\n").fence, "````");
  assert.equal(after("<think>a").thinking, true);
  assert.equal(after("<think>a", "b</think>c").thinking, false);
});

test("a chat is named after the first words of its first message", () => {
  assert.equal(titleOf("  Hello\n\tworld  "), "Hello world");
  assert.equal([...titleOf("word ".repeat(100))].length <= 48, true);
  assert.equal(titleOf("world: x").startsWith("world:"), false);
  assert.equal(titleOf("\u0000"), "Chat");
  assert.equal(titleOf("New chat"), "Chat");
});

test("a preview has no markup", () => {
  const cases = [
    ["Load **once** and `keep`", "Load once and keep"],
    ["```python\nx = 1\n```", "x = 1"],
    ["# Title\n\n> quote", "Title quote"],
    ["| a | b |\n|---|---|\n| 1 | 2 |", "a b 1 2"],
    ["[the page](https://example.org) here", "the page here"],
    ["2 * 3 * 4 and a_b_c", "2 * 3 * 4 and a_b_c"],
    ["*Sunday*, _or_ *the day after*", "Sunday, or the day after"],
    ["<think>so</think>Yes", "so Yes"],
  ];
  for (const [text, expected] of cases) assert.equal(plainText(text), expected);
});

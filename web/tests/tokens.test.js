import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const folder = new URL("../css/", import.meta.url);
const sheets = readdirSync(folder).map((name) => ({ name, text: readFileSync(new URL(name, folder), "utf8") }));
const tokens = sheets.find(({ name }) => name === "tokens.css").text;
const others = sheets.filter(({ name }) => name !== "tokens.css");

test("colours and fonts are named in tokens.css only", () => {
  for (const { name, text } of others) {
    // What is painted on words is specified by its strength.
    const rules = text.replace(/\/\*[\s\S]*?\*\//g, "").replace(/::highlight\([^}]*\}/g, "");
    assert.deepEqual(rules.match(/#[0-9a-f]{3,8}\b|\b(?:rgba?|hsla?|oklch)\(|system-ui|\bmonospace/gi) ?? [], [], name);
  }
});

test("every custom property that a sheet uses is a token or set beside it", () => {
  const named = new Set([...tokens.matchAll(/^\s*(--[\w-]+):/gm)].map(([, name]) => name));
  // These are set by scripts, for one element each, or in the same sheet.
  const local = new Set(["--b", "--bar", "--attention", "--stage"]);
  const rest = others.flatMap(({ name, text }) =>
    [...text.matchAll(/var\((--[\w-]+)/g)]
      .map(([, used]) => used)
      .filter((used) => !named.has(used) && !local.has(used))
      .map((used) => `${name}: ${used}`),
  );
  assert.deepEqual(rest, []);
  // No token is left over.
  const all = sheets.map(({ text }) => text).join("");
  const unused = [...named].filter((name) => !all.includes(`var(${name}`) && name !== "--size");
  assert.deepEqual(unused, []);
});

// The documentation: the pages of docs/, which the program has with it, in the order of docs/SUMMARY.md, and a search in all of them.
// The address is `docs.html#PAGE.md`, with another `#` before the anchor of a heading.

import { applyAppearance } from "./appearance.js";
import { $, count, el } from "./dom.js";
import { anchorOf, loadMarkdown, plainText, renderPage } from "./markdown.js";

const FIRST = "README.md";

/** @type {Map<string, Promise<string>>} */
const texts = new Map();

function load(path) {
  if (!texts.has(path))
    texts.set(
      path,
      fetch(`docs/${path}`).then((response) => {
        if (response.ok) return response.text();
        texts.delete(path);
        throw new Error(
          response.status === 404 ? `There is no page ${path}.` : `The server answers ${response.status}.`,
        );
      }),
    );
  return /** @type {Promise<string>} */ (texts.get(path));
}

/**
 * The parts of the documentation, each with its pages, as docs/SUMMARY.md lists them.
 * @param {string} summary
 * @returns {{ title: string, pages: { title: string, path: string, inner: boolean }[] }[]}
 */
export function parseSummary(summary) {
  const parts = [{ title: "", pages: [] }];
  for (const line of summary.split("\n")) {
    const page = /^(\s*)(?:- )?\[(.+)\]\((.+)\)$/.exec(line);
    if (page) parts.at(-1)?.pages.push({ title: page[2], path: page[3], inner: page[1] !== "" });
    else if (line.startsWith("# ") && line !== "# Summary") parts.push({ title: line.slice(2), pages: [] });
  }
  return parts.filter((part) => part.pages.length > 0);
}

/**
 * Where a link of a page leads: to another page, to a heading of the same one, or out of the documentation.
 * @param {string} page
 * @param {string} target
 */
export function addressOf(page, target) {
  if (/^[a-z][a-z0-9+.-]*:/i.test(target)) return target;
  const [path, anchor] = target.split("#");
  const to = path ? resolve(page, path) : page;
  return anchor ? `#${to}#${anchor}` : `#${to}`;
}

function resolve(page, path) {
  const parts = page.split("/").slice(0, -1);
  for (const part of path.split("/")) {
    if (part === "..") parts.pop();
    else if (part !== ".") parts.push(part);
  }
  return parts.join("/");
}

/**
 * The sections of a page that have all words, each with its heading and its first line with most of them. Sections whose heading has a
 * word come first.
 * @param {string} text
 * @param {string[]} words
 */
export function findSections(text, words) {
  const matches = (/** @type {string} */ part) => words.filter((word) => part.toLowerCase().includes(word)).length;
  const sections = text.split(/^(?=#{1,6}\s)/m).map((section) => {
    const [first, ...lines] = section.split("\n");
    const heading = plainText(first.replace(/^#+\s+/, ""));
    const best = lines.reduce((best, line) => (matches(line) > matches(best) ? line : best), "");
    return { heading, line: plainText(best), found: matches(section), inHeading: matches(heading) };
  });
  return sections
    .filter(({ found }) => found === words.length)
    .sort((one, other) => other.inHeading - one.inHeading)
    .map(({ heading, line, inHeading }) => ({ heading, line, inHeading }));
}

let parts = [];
let shown = 0;

const allPages = () => parts.flatMap((part) => part.pages);

function place() {
  const [path, anchor] = decodeURIComponent(location.hash.slice(1)).split("#");
  return { path: path || FIRST, anchor };
}

async function show() {
  const request = (shown += 1);
  const { path, anchor } = place();
  document.body.classList.remove("contents-open");
  $("doc-open").setAttribute("aria-expanded", "false");
  const page = $("doc-page");
  if (page.dataset.path !== path) {
    let content;
    try {
      const [text] = await Promise.all([load(path), loadMarkdown()]);
      const addresses = {
        link: (target) => addressOf(path, target),
        image: (target) => `docs/${resolve(path, target)}`,
      };
      content = renderPage(text, addresses);
    } catch (error) {
      content = el("p", { class: "error", role: "alert" }, error.message);
    }
    if (request !== shown) return;
    page.replaceChildren(content, neighbours(path));
    page.dataset.path = path;
    const title = allPages().find((other) => other.path === path)?.title ?? path;
    document.title = `${title} · Halo`;
    markCurrent();
  }
  const heading = anchor ? document.getElementById(anchor) : null;
  if (heading) heading.scrollIntoView();
  else page.scrollTop = 0;
}

function neighbours(path) {
  const pages = allPages();
  const at = pages.findIndex((page) => page.path === path);
  const link = (page, mark) => (page ? el("a", { href: `#${page.path}` }, mark(page.title)) : el("span"));
  return el(
    "nav",
    { class: "turn-page", "aria-label": "Pages before and after" },
    link(at > 0 ? pages[at - 1] : null, (title) => `← ${title}`),
    link(at >= 0 ? pages[at + 1] : null, (title) => `${title} →`),
  );
}

function markCurrent() {
  const { path } = place();
  for (const anchor of document.querySelectorAll("#doc-pages a[data-path]")) {
    if (/** @type {HTMLElement} */ (anchor).dataset.path === path) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
}

function drawContents() {
  $("doc-pages").replaceChildren(
    ...parts.flatMap((part) => [
      part.title ? el("h2", {}, part.title) : "",
      el(
        "ul",
        {},
        ...part.pages.map(({ title, path, inner }) =>
          el("li", {}, el("a", { href: `#${path}`, class: inner ? "inner" : "", data: { path } }, title)),
        ),
      ),
    ]),
  );
  markCurrent();
}

const MAX_HITS = 40;
let searches = 0;

async function search() {
  const request = (searches += 1);
  const words = $("doc-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return drawContents();
  const pages = allPages();
  const contents = await Promise.all(pages.map((page) => load(page.path).catch(() => "")));
  if (request !== searches) return;
  const hits = pages.flatMap((page, n) => findSections(contents[n], words).map((hit) => ({ page, ...hit })));
  hits.sort((one, other) => other.inHeading - one.inHeading);
  $("doc-pages").replaceChildren(
    el(
      "p",
      { role: "status" },
      count(hits.length, "place") + (hits.length > MAX_HITS ? `, the first ${MAX_HITS}:` : ""),
    ),
    el(
      "ul",
      {},
      ...hits
        .slice(0, MAX_HITS)
        .map(({ page, heading, line }) =>
          el(
            "li",
            {},
            el(
              "a",
              { class: "hit", href: `#${page.path}#${anchorOf(heading)}` },
              page.title,
              el("span", {}, line.length > 140 ? `${line.slice(0, 140)}…` : line),
            ),
          ),
        ),
    ),
  );
}

async function copyCode(event) {
  const button = event.target.closest?.(".copy-code");
  if (!button) return;
  const { textContent } = button.closest(".code-box").querySelector("pre");
  try {
    await navigator.clipboard.writeText(textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
}

async function start() {
  applyAppearance();
  $("doc-open").addEventListener("click", () => {
    const open = document.body.classList.toggle("contents-open");
    $("doc-open").setAttribute("aria-expanded", String(open));
  });
  $("doc-skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("doc-page").focus();
  });
  $("doc-search").addEventListener("input", search);
  document.addEventListener("click", copyCode);
  addEventListener("hashchange", show);
  try {
    parts = parseSummary(await load("SUMMARY.md"));
    drawContents();
  } catch (error) {
    $("doc-pages").replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
  }
  await show();
}

if (typeof document !== "undefined") start();

// Renders the text of a paragraph: Markdown, code, maths, folded reasoning and tool calls. The libraries are loaded when the
// first message is drawn. Nothing from a model runs: HTML in a message is text, and the result is sanitised.

import { el } from "./dom.js";

// Not a literal, so that the type checker does not read the libraries.
const load = (name) => import(`../vendor/${name}.js`);

let marked = null; // for messages
let library = null;
let purifier = null;
let loading = null;
let highlighter = null;
let katex = null;

/** Whether Markdown can be rendered now. */
export const isReady = () => marked !== null;

/** Loads the libraries for Markdown; resolves when they can be used. */
export function loadMarkdown() {
  loading ??= Promise.all([load("marked"), load("dompurify")]).then(([parser, purify]) => {
    purifier = purify.default;
    library = parser;
    marked = configure(new parser.Marked());
  });
  return loading;
}

const escapeHtml = (text) =>
  text.replace(/[&<>"']/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[char]);

const SAFE_ADDRESS = /^(?:https?:|mailto:)/i;

function configure(instance) {
  instance.use({
    gfm: true,
    breaks: true,
    extensions: [mathBlock, mathInline],
    renderer: {
      // HTML in a message is shown as the text that it is.
      html: ({ text }) => escapeHtml(text),
      // A block of an attached file names the file.
      code({ text, lang }) {
        const [, language, file] = /^(\S*)(?:\s+file=(.+))?/.exec(lang ?? "");
        const title = file ? ` title="${escapeHtml(file.trim())}"` : "";
        return `<pre><code class="language-${escapeHtml(language)}"${title}>${escapeHtml(text)}\n</code></pre>`;
      },
      // An image would be fetched from a server that the model names, so it is a link.
      image: ({ href, text }) => link(href, `🖼 ${escapeHtml(text || href)}`),
      link({ href, tokens }) {
        return link(href, this.parser.parseInline(tokens));
      },
    },
  });
  return instance;
}

const link = (href, inner) => (SAFE_ADDRESS.test(href) ? `<a href="${escapeHtml(href)}">${inner}</a>` : inner);

const math = (name, level, start, rule) => ({
  name,
  level,
  start: (text) => text.match(start)?.index,
  tokenizer(text) {
    const match = rule.exec(text);
    return match ? { type: name, raw: match[0], text: (match[1] ?? match[2]).trim() } : undefined;
  },
  renderer: ({ text }) => `<code class="${name}">${escapeHtml(text)}</code>`,
});
const mathBlock = math("math-block", "block", /\$\$|\\\[/, /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/);
// A price such as $5 or $10 is not maths: the closing mark does not follow a blank, and no digit follows it.
const mathInline = math(
  "math-inline",
  "inline",
  /\$|\\\(/,
  /^(?:\$(?!\s|\$)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/,
);

const PURIFY = {
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i input li ol p pre s span strong sub sup table tbody td th " +
    "thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "start", "class", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: SAFE_ADDRESS,
  RETURN_DOM_FRAGMENT: true,
};

const sanitise = (html) => purifier.sanitize(html, PURIFY);

/**
 * What a paragraph continues from the paragraphs before it in the same message: an open code block, or open reasoning.
 * @typedef {{ fence: string | null, thinking: boolean }} TextContext
 * @returns {TextContext}
 */
export const startContext = () => ({ fence: null, thinking: false });

/**
 * The context after a text.
 * @param {TextContext} context
 * @returns {TextContext}
 */
export function nextContext({ fence, thinking }, text) {
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
    if (!mark) continue;
    if (fence === null) fence = mark[1] + mark[2].trim();
    else if (line.trim().startsWith(fence.match(/^[`~]+/)[0]) && !mark[2].trim()) fence = null;
  }
  const opened = text.lastIndexOf("<think>");
  const closed = text.lastIndexOf("</think>");
  return { fence, thinking: opened === closed ? thinking : opened > closed };
}

/**
 * The parts of a text: Markdown, reasoning, tool calls and their results.
 * @param {string} text
 * @param {[number, number][]} toolRanges
 * @param {boolean} thinking whether the text begins within reasoning
 */
export function splitText(text, toolRanges = [], thinking = false) {
  const parts = [];
  let at = 0;
  for (const [from, to] of [...toolRanges, [text.length, text.length]]) {
    thinking = splitModelText(text.slice(at, from), thinking, parts);
    if (to > from) parts.push({ kind: "result", text: text.slice(from, to) });
    at = to;
  }
  return parts;
}

function splitModelText(text, thinking, parts) {
  const push = (kind, part) => part.trim() && parts.push({ kind, text: part });
  let rest = text;
  while (rest) {
    if (thinking) {
      const end = rest.indexOf("</think>");
      push("thinking", end < 0 ? rest : rest.slice(0, end));
      if (end < 0) return true;
      rest = rest.slice(end + "</think>".length);
      thinking = false;
      continue;
    }
    const match = /<think>|<tool>([\s\S]*?)<\/tool>/.exec(rest);
    push("markdown", match ? rest.slice(0, match.index) : rest);
    if (!match) return false;
    rest = rest.slice(match.index + match[0].length);
    if (match[1] !== undefined) parts.push({ kind: "call", text: match[1].trim() });
    else thinking = true;
  }
  return thinking;
}

/**
 * The elements of a paragraph.
 * @param {string} text
 * @param {[number, number][]} [toolRanges]
 * @param {TextContext} [context]
 */
export function renderText(text, toolRanges = [], context = startContext()) {
  const fragment = document.createDocumentFragment();
  const fold = (label, ...children) =>
    el("details", { class: "fold" }, el("summary", { data: { skip: "" } }, label), ...children);
  let call = null;
  let { fence } = context;
  for (const part of splitText(text, toolRanges, context.thinking)) {
    if (part.kind === "markdown") {
      fragment.append(renderMarkdown(part.text, fence));
      fence = null;
      call = null;
    } else if (part.kind === "thinking") {
      fragment.append(fold("Reasoning", renderMarkdown(part.text, null)));
    } else if (part.kind === "call") {
      call = fold("Tool call", el("pre", { tabindex: "0" }, part.text));
      fragment.append(call);
    } else {
      const result = el("div", { class: "tool" }, part.text.trim());
      if (call) call.append(result);
      else fragment.append(fold("Tool result", result));
      call?.querySelector("summary").replaceChildren(`Tool call ${result.textContent.includes("✓") ? "✓" : ""}`.trim());
    }
  }
  return fragment;
}

function renderMarkdown(text, fence) {
  if (!marked) return el("p", { class: "plain" }, text.trim());
  // A paragraph within a code block begins with its fence.
  const source = fence === null ? text : `${fence}\n${text.replace(/^\n/, "")}`;
  const fragment = decorate(sanitise(marked.parse(source, { async: false })), fence !== null);
  for (const anchor of fragment.querySelectorAll("a")) openElsewhere(anchor);
  for (const formula of fragment.querySelectorAll("code.math-block, code.math-inline")) typeset(formula);
  return fragment;
}

function openElsewhere(anchor) {
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer";
}

function decorate(fragment, continuesCode) {
  fragment.querySelectorAll("pre > code").forEach((code, n) => decorateCode(code, continuesCode && n === 0));
  for (const table of fragment.querySelectorAll("table")) {
    const box = el("div", { class: "table-box", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const box of fragment.querySelectorAll("input")) box.setAttribute("aria-label", "Item");
  return fragment;
}

const PURIFY_PAGE = {
  ...PURIFY,
  ALLOWED_TAGS: [...PURIFY.ALLOWED_TAGS, "img"],
  ALLOWED_ATTR: [...PURIFY.ALLOWED_ATTR, "src", "alt"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#|docs\/)/i,
};

/**
 * The elements of a page of the documentation, once {@link loadMarkdown} has resolved. Its headings get the anchors that links name.
 * @param {string} text
 * @param {{ link: (target: string) => string, image: (target: string) => string }} addresses of what the page names
 */
export function renderPage(text, addresses) {
  const pages = new library.Marked({
    gfm: true,
    renderer: {
      html: ({ text }) => escapeHtml(text),
      image: ({ href, text }) => `<img src="${escapeHtml(addresses.image(href))}" alt="${escapeHtml(text)}">`,
      link({ href, tokens }) {
        return `<a href="${escapeHtml(addresses.link(href))}">${this.parser.parseInline(tokens)}</a>`;
      },
    },
  });
  const fragment = decorate(purifier.sanitize(pages.parse(text, { async: false }), PURIFY_PAGE), false);
  const counts = new Map();
  for (const heading of fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const anchor = anchorOf(heading.textContent);
    const count = counts.get(anchor) ?? 0;
    counts.set(anchor, count + 1);
    heading.id = count ? `${anchor}-${count}` : anchor;
  }
  for (const anchor of fragment.querySelectorAll("a"))
    if (SAFE_ADDRESS.test(anchor.getAttribute("href") ?? "")) openElsewhere(anchor);
  return fragment;
}

/** The anchor that GitHub and mdBook give a heading. */
export const anchorOf = (heading) =>
  heading
    .toLowerCase()
    .replace(/[^\p{L}\p{N}_\- ]/gu, "")
    .trim()
    .replaceAll(" ", "-");

function decorateCode(code, continued) {
  // A paragraph can end with the fence of a code block whose code is in the next one.
  if (!code.textContent.trim() && !code.title) {
    code.parentElement.remove();
    return;
  }
  const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "";
  const pre = code.parentElement;
  pre.tabIndex = 0;
  const box = el(
    "div",
    { class: "code-box" },
    el(
      "div",
      { class: "code-head", data: { skip: "" } },
      el("span", {}, language || "code"),
      el("button", { type: "button", class: "copy-code", tabindex: "-1" }, "Copy"),
    ),
  );
  const { title } = code;
  if (title) {
    code.removeAttribute("title");
    const about = `File: ${title}${continued ? " (continued)" : ""}`;
    const summary = el("summary", { data: { skip: "" } }, about);
    const fold = el("details", { class: "fold attachment" }, summary);
    pre.replaceWith(fold);
    fold.append(box);
  } else pre.replaceWith(box);
  box.append(pre);
  if (!language) return;
  if (highlighter) paintCode(code, language);
  else loadHighlighter().then(() => paintCode(code, language));
}

let loadingHighlighter = null;
function loadHighlighter() {
  loadingHighlighter ??= load("highlight").then((library) => {
    highlighter = library.default;
  });
  return loadingHighlighter;
}

function paintCode(code, language) {
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(sanitise(value));
}

let loadingKatex = null;
function typeset(formula) {
  const tex = formula.textContent;
  const block = formula.classList.contains("math-block");
  const draw = () => {
    const box = el(block ? "div" : "span", { class: block ? "math-block" : "math", data: { skip: "" } });
    try {
      // MathML needs no fonts and no style sheet.
      katex.render(tex, box, {
        output: "mathml",
        displayMode: block,
        throwOnError: false,
        trust: false,
        maxExpand: 500,
      });
      formula.replaceWith(box);
    } catch {
      /* The source stays as code. */
    }
  };
  if (katex) {
    draw();
    return;
  }
  loadingKatex ??= load("katex").then((library) => {
    katex = library.default;
  });
  loadingKatex.then(draw);
}

/** A text in one line without its markup, for a preview. */
export const plainText = (text) =>
  text
    .replace(/<\/?(?:think|tool)>/g, " ")
    .replace(/^\s*(?:`{3,}|~{3,}).*$/gm, " ")
    .replace(/^\s*\|?[-:| ]+\|?\s*$/gm, " ")
    .replace(/!?\[([^\]]*)\]\([^)\s]*\)/g, "$1")
    .replace(/^\s{0,3}(?:#{1,6}|>)\s+/gm, "")
    .replace(/(\*\*|__|`)(\S(?:[^\n]*?\S)?)\1/g, "$2")
    .replace(/(?<![\w*])([*_])([^\s*_](?:[^\n*_]*[^\s*_])?)\1(?![\w*])/g, "$2")
    .replace(/\s*\|\s*/g, " ")
    .replace(/\s+/g, " ")
    .trim();

/**
 * Gives an element the content of a fragment. What is there and only grows stays the same element, so that a growing text does not
 * flicker, a click that has begun reaches its target, and a selection and the place in a wide code block stay.
 */
export function patchContent(box, fragment) {
  const wanted = [...fragment.childNodes];
  wanted.forEach((node, at) => {
    const shown = box.childNodes[at];
    if (!shown) box.append(node);
    else if (!shown.isEqualNode(node) && !patchNode(shown, node)) shown.replaceWith(node);
  });
  while (box.childNodes.length > wanted.length) box.lastChild.remove();
}

// Whether a node could take the content of another one.
function patchNode(shown, wanted) {
  if (shown.nodeType !== wanted.nodeType) return false;
  if (shown.nodeType === Node.TEXT_NODE) {
    if (wanted.data.startsWith(shown.data)) shown.appendData(wanted.data.slice(shown.data.length));
    else shown.data = wanted.data;
    return true;
  }
  // A formula is typeset as a whole.
  if (shown.tagName !== wanted.tagName || shown.matches(FORMULA) || wanted.matches(FORMULA)) return false;
  if (attributesOf(shown) !== attributesOf(wanted)) return false;
  patchContent(shown, wanted);
  return true;
}

const FORMULA = ".math, .math-block, .math-inline, math";

// Whether a fold is open is the reader's choice.
const attributesOf = (node) =>
  JSON.stringify([...node.attributes].map(({ name, value }) => [name, value]).filter(([name]) => name !== "open"));

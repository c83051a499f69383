// Creates and updates elements. Text is always set as text, so no message can inject markup.

/** @type {(id: string) => any} */
export const $ = (id) => document.getElementById(id);

/**
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {any[]} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...withoutEmpty(children));
  return node;
}

const withoutEmpty = (children) =>
  children.flat().filter((child) => child !== null && child !== undefined && child !== false);

// Replaces a node's children and keeps the elements that are the same, so that scroll position, focus and text that is being
// typed survive. An element with a key is recognised at every place in the list.
export function render(parent, ...children) {
  const wanted = withoutEmpty(children).map((child) =>
    child instanceof Node ? child : document.createTextNode(child),
  );
  const keys = new Set(wanted.map(key).filter(Boolean));
  const keyed = new Map();
  for (const old of [...parent.childNodes]) {
    if (!key(old)) continue;
    if (keys.has(key(old))) keyed.set(key(old), old);
    else old.remove();
  }
  let at = parent.firstChild;
  for (const next of wanted) {
    const old = key(next) ? keyed.get(key(next)) : at && !key(at) ? at : null;
    if (old && old.nodeName === next.nodeName) {
      if (old === at) at = at.nextSibling;
      else parent.insertBefore(old, at);
      patch(old, next);
    } else if (old && old === at) {
      at = at.nextSibling;
      old.replaceWith(next);
    } else {
      parent.insertBefore(next, at);
    }
  }
  while (at) {
    const surplus = at;
    at = at.nextSibling;
    surplus.remove();
  }
}

const key = (node) => node.dataset?.key;
const HANDLERS = ["onclick", "onchange", "oninput"];

function patch(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name, value } of [...next.attributes])
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const name of HANDLERS) if (old[name] !== next[name]) old[name] = next[name];
  // A value that the user is changing is left alone.
  if (old.nodeName === "INPUT" && old !== document.activeElement && old.value !== next.value) old.value = next.value;
  render(old, ...next.childNodes);
}

// Fits a text box to its text, up to 40 % of the window.
export function autoGrow(box) {
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
}

// Created on first use: creating a formatter takes longer than formatting a thousand values.
let numberFormat, timeFormat;

export const number = (n) =>
  (numberFormat ??= new Intl.NumberFormat("en", { maximumFractionDigits: 1 })).format(Number(n));
export const count = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
export const time = (at) =>
  (timeFormat ??= new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "short" })).format(at);

/** A text in which `names` are set as code. */
export const withCode = (text) => text.split("`").map((part, n) => (n % 2 ? el("code", {}, part) : part));

/** The time of today, or the day with its time. */
export function shortTime(at) {
  const date = new Date(at);
  const now = new Date();
  const clock = date.toLocaleTimeString([], { hour: "numeric", minute: "2-digit" });
  if (date.toDateString() === now.toDateString()) return clock;
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return `${date.toLocaleDateString([], { day: "numeric", month: "short", year })}, ${clock}`;
}

// Shows a message for a few seconds, with a button for `action` if there is one. With `stay: null` it stays until it is closed.
export function toast(text, { error = false, action = null, onAction = null, stay = error ? 9000 : 6000 } = {}) {
  const box = el("div", { class: error ? "toast error" : "toast" }, el("span", {}, text));
  const timer = stay === null ? null : setTimeout(() => box.remove(), stay);
  if (action) {
    box.append(
      el(
        "button",
        {
          type: "button",
          onclick: () => {
            clearTimeout(timer);
            box.remove();
            onAction();
          },
        },
        action,
      ),
    );
  }
  box.append(
    el(
      "button",
      {
        type: "button",
        "aria-label": "Close",
        onclick: () => {
          clearTimeout(timer);
          box.remove();
        },
      },
      "×",
    ),
  );
  // Two at a time: the older ones have been read.
  while ($("toasts").children.length > 1) $("toasts").firstElementChild.remove();
  $("toasts").append(box);
}

// Opens a dialog; resolves to the text that was entered (true if there is no input), or to null.
export function ask(title, { label = "", value = "", kind = "text", confirm = "OK", about = "", more = null } = {}) {
  const dialog = $("ask");
  const input = label ? el("input", { id: "ask-input", type: kind, value, required: true }) : null;
  return new Promise((resolve) => {
    const form = el(
      "form",
      { method: "dialog" },
      el("strong", {}, title),
      about ? el("span", { class: "quiet" }, about) : null,
      label ? el("label", { for: "ask-input" }, label) : null,
      input,
      more,
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
        el("button", { type: "submit", value: "yes" }, confirm),
      ),
    );
    dialog.replaceChildren(form);
    dialog.returnValue = "";
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (input ? input.value : true) : null);
    dialog.showModal();
    if (input) input.select();
  });
}

// Making elements. Text is always text: nothing that anybody said is ever read as markup.

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
  set(node, attributes);
  node.append(...present(children));
  return node;
}

const present = (children) =>
  children.flat().filter((child) => child !== null && child !== undefined && child !== false);

// Makes the inside of a node as these are, and keeps what is the same: whoever reads, points or types there is not disturbed. What
// has a key is the same wherever it stands.
export function render(parent, ...children) {
  const wanted = present(children).map((child) => (child instanceof Node ? child : document.createTextNode(child)));
  const keys = new Set(wanted.map(key).filter(Boolean));
  const known = new Map();
  for (const old of [...parent.childNodes]) {
    if (!key(old)) continue;
    if (keys.has(key(old))) known.set(key(old), old);
    else old.remove();
  }
  let at = parent.firstChild;
  for (const next of wanted) {
    const old = key(next) ? known.get(key(next)) : at && !key(at) ? at : null;
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
    const gone = at;
    at = at.nextSibling;
    gone.remove();
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
  // What somebody is setting is not taken away.
  if (old.nodeName === "INPUT" && old !== document.activeElement && old.value !== next.value) old.value = next.value;
  render(old, ...next.childNodes);
}

// Makes a box as high as what is in it, within reason.
export function grow(box) {
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
}

// Made once, when it is first needed: to make one takes longer than to write a thousand.
let numbers, times;

export const number = (n) => (numbers ??= new Intl.NumberFormat("en", { maximumFractionDigits: 1 })).format(Number(n));
export const count = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;
export const time = (at) =>
  (times ??= new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "short" })).format(at);

// Something that was done or went wrong, said in passing; what it offers can be done from there.
export function toast(text, { wrong = false, offer = null, act = null, stay = wrong ? 9000 : 6000 } = {}) {
  const box = el("div", { class: wrong ? "toast wrong" : "toast" }, el("span", {}, text));
  const gone = stay === null ? null : setTimeout(() => box.remove(), stay);
  if (offer) {
    box.append(
      el(
        "button",
        {
          type: "button",
          onclick: () => {
            clearTimeout(gone);
            box.remove();
            act();
          },
        },
        offer,
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
          clearTimeout(gone);
          box.remove();
        },
      },
      "×",
    ),
  );
  // Two at a time: what is older has been seen.
  while ($("toasts").children.length > 1) $("toasts").firstElementChild.remove();
  $("toasts").append(box);
}

// Asks for something; resolves to what was entered, or to null.
export function ask(title, { label = "", value = "", kind = "text", go = "OK", about = "", more = null } = {}) {
  const dialog = $("ask");
  const input = label ? el("input", { id: "asked", type: kind, value, required: true }) : null;
  return new Promise((resolve) => {
    const form = el(
      "form",
      { method: "dialog" },
      el("strong", {}, title),
      about ? el("span", { class: "quiet" }, about) : null,
      label ? el("label", { for: "asked" }, label) : null,
      input,
      more,
      el(
        "div",
        { class: "bar" },
        el("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
        el("button", { type: "submit", value: "yes" }, go),
      ),
    );
    dialog.replaceChildren(form);
    dialog.returnValue = "";
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (input ? input.value : true) : null);
    dialog.showModal();
    if (input) input.select();
  });
}

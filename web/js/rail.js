// The rail: the whole chat in one column, what is in the context now lit. A click or the arrow keys go there.

import { api } from "./api.js";
import { on } from "./bus.js";
import { $ } from "./dom.js";
import { state } from "./state.js";
import { scrollToIndex, visibleRange } from "./transcript.js";

const PARTS = 200;
let outline = { total: 0, parts: [] };
let requests = 0;
let timer = null;
let framed = false;

export function init() {
  const rail = $("rail");
  for (const topic of ["state", "conversation"]) on(topic, () => reload(0));
  on("event", (event) => {
    if (["done", "changed", "resurrected", "pruned", "message_stored"].includes(event.type)) reload(150);
  });
  on("theme", draw);
  for (const topic of ["scroll", "drawn"]) on(topic, drawViewport);
  new ResizeObserver(draw).observe(rail);
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", draw);
  const go = (event) => {
    const { top, height } = rail.getBoundingClientRect();
    scrollToIndex(((event.clientY - top) / height) * state.total);
  };
  rail.addEventListener("pointerdown", (event) => {
    rail.setPointerCapture(event.pointerId);
    go(event);
  });
  rail.addEventListener("pointermove", (event) => {
    if (rail.hasPointerCapture(event.pointerId)) go(event);
  });
  rail.addEventListener("keydown", (event) => {
    const [first, last] = visibleRange();
    const screen = Math.max(1, last - first);
    const to = {
      ArrowUp: first - 1,
      ArrowDown: first + 1,
      PageUp: first - screen,
      PageDown: first + screen,
      Home: 0,
      End: state.total - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    scrollToIndex(Math.max(0, to));
  });
}

function reload(delay) {
  clearTimeout(timer);
  timer = setTimeout(load, delay);
}

async function load() {
  const request = (requests += 1);
  const { name } = state;
  let found = { total: 0, parts: [] };
  if (state.snapshot && !state.snapshot.fresh) {
    try {
      found = await api.outline(name, PARTS);
    } catch {
      return;
    }
  }
  if (request !== requests || name !== state.name) return;
  outline = found;
  draw();
}

function draw() {
  const canvas = $("rail").querySelector("canvas");
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth * scale;
  const height = canvas.clientHeight * scale;
  if (!width || !height) return;
  Object.assign(canvas, { width, height });
  const paint = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const probe = getComputedStyle(canvas);
  const colours = ["--line", "--gold", "--blue"].map((name) => resolve(style.getPropertyValue(name), probe));
  const step = height / Math.max(1, outline.parts.length);
  const gap = step > 4 ? scale : 0;
  outline.parts.forEach((part, n) => {
    const lit = part.tokens ? part.live / part.tokens : 0;
    const ofUser = part.tokens ? part.user / part.tokens : 0;
    paint.globalAlpha = lit > 0 ? 0.25 + 0.35 * lit : 1;
    paint.fillStyle = colours[lit > 0 ? (ofUser > 0.5 ? 2 : 1) : 0];
    paint.fillRect(0, n * step, width, Math.max(1, step - gap));
  });
  drawViewport();
}

// A canvas does not know `light-dark()`: the browser computes the colour of an element.
function resolve(value, probe) {
  const pair = /light-dark\(([^,]+),\s*([^)]+)\)/.exec(value);
  if (!pair) return value.trim();
  return (probe.colorScheme.trim() === "light" || isLightScheme() ? pair[1] : pair[2]).trim();
}

const isLightScheme = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "light" : matchMedia("(prefers-color-scheme: light)").matches;
};

// Where the reader is. Once a frame, because a scroll has many events.
function drawViewport() {
  if (framed) return;
  framed = true;
  requestAnimationFrame(() => {
    framed = false;
    const rail = $("rail");
    const mark = rail.querySelector("i");
    const { total } = state;
    mark.hidden = total === 0;
    if (!total) return;
    const [first, last] = visibleRange();
    mark.style.top = `${(first / total) * 100}%`;
    mark.style.height = `${Math.max(0, ((last - first) / total) * 100)}%`;
    rail.setAttribute("aria-valuemax", String(total));
    rail.setAttribute("aria-valuenow", String(Math.floor(first) + 1));
    rail.setAttribute("aria-valuetext", `Message ${Math.floor(first) + 1} of ${total}`);
  });
}

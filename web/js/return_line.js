// A line from a paragraph that came back to the answer that used it: as long as the pointer or the focus is on its chip, and for a
// moment when it comes back, unless the reader wants no motion.

import { on } from "./bus.js";
import { $ } from "./dom.js";
import { chunkNode } from "./transcript.js";

const SVG = "http://www.w3.org/2000/svg";
const GAP = 12; // pixels between the text and the line
const RADIUS = 8;

let path = null;
let chips = []; // that lines lead to
let frame = 0;
let timer = null;

export function init() {
  const svg = document.createElementNS(SVG, "svg");
  svg.id = "return-line";
  svg.setAttribute("aria-hidden", "true");
  path = document.createElementNS(SVG, "path");
  svg.append(path);
  $("stage").append(svg);
  const log = $("log");
  const chipOf = (event) => /** @type {HTMLElement} */ (event.target).closest?.(".chip[data-leads]");
  for (const name of ["pointerover", "focusin"])
    log.addEventListener(name, (event) => chipOf(event) && show([chipOf(event)]));
  for (const name of ["pointerout", "focusout"]) log.addEventListener(name, (event) => chipOf(event) && show([]));
  log.addEventListener("scroll", drawSoon, { passive: true });
  addEventListener("resize", drawSoon);
  on("conversation", () => show([]));
  on("event", (event) => {
    if (event.type === "resurrected") announceReturn();
  });
}

// The chips are drawn in the next frame.
function announceReturn() {
  const duration = Number.parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--glow"));
  if (!duration) return;
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      show([...$("log").querySelectorAll(".turn.running .chip[data-leads]")]);
      timer = setTimeout(() => show([]), duration);
    }),
  );
}

function show(some) {
  clearTimeout(timer);
  chips = some;
  drawSoon();
}

function drawSoon() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    const lines = chips.filter((chip) => chip.isConnected).map(line);
    $("return-line").classList.toggle("shown", lines.length > 0);
    // A line that fades out keeps its shape.
    if (lines.length) path.setAttribute("d", lines.join(" "));
  });
}

// From the paragraph, or from the upper edge where it is not in view, along the left side to the chip.
function line(chip) {
  const stage = $("stage").getBoundingClientRect();
  const to = chip.getBoundingClientRect();
  const node = chunkNode(chip.dataset.leads);
  const from = node?.getBoundingClientRect();
  const x = to.left - stage.left - 4;
  const y = to.top + to.height / 2 - stage.top;
  const left = Math.max(3, Math.min(x, (from?.left ?? to.left) - stage.left) - GAP);
  const end = `V ${y - RADIUS} Q ${left} ${y} ${left + RADIUS} ${y} H ${x}`;
  const start = from ? from.top + Math.min(from.height / 2, 14) - stage.top : -1;
  if (start < 0 || start > y - 2 * RADIUS) return `M ${left} 0 ${end}`;
  return `M ${from.left - stage.left - 4} ${start} H ${left + RADIUS} Q ${left} ${start} ${left} ${start + RADIUS} ${end}`;
}

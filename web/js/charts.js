// Charts with axes, units and values under the pointer or the arrow keys. A chart is a row of columns: one for each turn or bin.

import { el, number, svg } from "./dom.js";

const WIDTH = 400;
const HEIGHT = 150;
const LEFT = 44;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 34;

/**
 * @typedef {{ value: number, className: string, label?: string }} ChartPart
 * @typedef {{ name: string, parts: ChartPart[], about: string }} ChartColumn
 * @typedef {{
 *   id?: string, summary: string, x: string, y: string, columns: ChartColumn[], line?: boolean, limit?: number,
 *   limitLabel?: string, log?: boolean, whole?: boolean,
 * }} ChartOptions
 */

/** Round numbers from 0 to at least `most`, at most five of them. */
export function ticks(most, whole = false) {
  const step = 10 ** Math.floor(Math.log10(Math.max(most, 1e-9)));
  const nice = [1, 2, 2.5, 5, 10].map((factor) => (factor * step) / 2).find((each) => most / each <= 4) ?? step * 5;
  const size = whole ? Math.max(1, Math.ceil(nice)) : nice;
  const all = [];
  for (let value = 0; value < most + size * 0.999; value += size) all.push(Number(value.toPrecision(6)));
  return all;
}

// Three digits, also of small numbers.
const axisNumber = (value) => (value >= 100 ? number(value) : String(Number(value.toPrecision(3))));

const text = (x, y, label, anchor = "start") => {
  const node = svg("text", { x, y, "text-anchor": anchor });
  node.textContent = label;
  return node;
};

/**
 * A chart. With `line`, the sums of the columns are joined by a line; otherwise the parts of a column are stacked, negative ones
 * below the axis. With `log`, heights are logarithmic.
 * @param {ChartOptions} options
 */
export function chart({ id, summary, x, y, columns, line = false, limit, limitLabel, log = false, whole = false }) {
  const scale = log ? (value) => Math.log2(Math.abs(value) + 1) * Math.sign(value) : (value) => value;
  const sum = (column, sign) => column.parts.reduce((total, part) => total + Math.max(0, sign * part.value), 0);
  const above = Math.max(limit ?? 0, ...columns.map((column) => sum(column, 1)), 0);
  const below = Math.max(...columns.map((column) => sum(column, -1)), 0);
  const upTicks = log ? [0, above] : ticks(Math.max(above, below > 0 ? 0 : 1e-9), whole);
  const downTicks = below > 0 ? (log ? [below] : ticks(below, whole).slice(1)) : [];
  const highest = scale(upTicks.at(-1) ?? 0);
  const lowest = scale(downTicks.at(-1) ?? 0);
  const all = highest + lowest || 1;
  const inner = HEIGHT - TOP - BOTTOM;
  const yOf = (value) => TOP + ((highest - scale(value)) / all) * inner;
  const wide = (WIDTH - LEFT - RIGHT) / Math.max(1, columns.length);
  const xOf = (n) => LEFT + n * wide;
  const parts = [];
  for (const value of [...upTicks, ...downTicks.map((tick) => -tick)]) {
    const at = yOf(value);
    parts.push(
      svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: value ? "chart-grid" : "chart-axis" }),
    );
    parts.push(text(LEFT - 4, at + 3, axisNumber(Math.abs(value)), "end"));
  }
  if (limit !== undefined) {
    const at = yOf(limit);
    parts.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: "chart-limit" }));
    if (limitLabel) parts.push(text(WIDTH - RIGHT, at < TOP + 10 ? at + 11 : at - 3, limitLabel, "end"));
  }
  if (line) {
    const points = columns.map((column, n) => `${xOf(n) + wide / 2},${yOf(sum(column, 1))}`);
    parts.push(svg("polyline", { points: points.join(" "), class: "chart-line" }));
    if (columns.length === 1)
      parts.push(svg("circle", { cx: xOf(0) + wide / 2, cy: yOf(sum(columns[0], 1)), r: 3, class: "chart-gold" }));
  } else
    columns.forEach((column, n) => {
      let up = 0;
      let down = 0;
      for (const { value, className } of column.parts) {
        const from = value >= 0 ? up : -down;
        const to = from + value;
        if (value >= 0) up += value;
        else down -= value;
        const top = Math.min(yOf(from), yOf(to));
        const height = Math.abs(yOf(from) - yOf(to));
        const gap = Math.min(2, wide / 4);
        parts.push(svg("rect", { x: xOf(n) + gap / 2, y: top, width: wide - gap, height, class: className }));
      }
    });
  const every = Math.max(1, Math.ceil(columns.length / 6));
  columns.forEach((column, n) => {
    const last = n === columns.length - 1;
    if ((n % every === 0 && columns.length - 1 - n >= every / 2) || last)
      parts.push(text(xOf(n) + wide / 2, HEIGHT - BOTTOM + 12, column.name, "middle"));
  });
  parts.push(text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 6, x, "middle"));
  const mark = svg("path", { class: "chart-mark", visibility: "hidden" });
  const box = svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary, tabindex: "0" },
    mark,
    ...parts,
  );
  if (id) box.id = id;
  const readout = el("p", { class: "chart-value quiet", role: "status" }, y);
  const show = (n) => {
    const column = columns[n];
    if (!column) return;
    shown = n;
    mark.setAttribute("d", `M${xOf(n)} ${TOP}h${wide}v${inner}h${-wide}z`);
    mark.setAttribute("visibility", "visible");
    readout.textContent = column.about;
  };
  let shown = -1;
  const hide = () => {
    shown = -1;
    mark.setAttribute("visibility", "hidden");
    readout.textContent = y;
  };
  box.addEventListener("pointermove", (event) => {
    const { left, width } = box.getBoundingClientRect();
    const at = ((event.clientX - left) / width) * WIDTH;
    show(Math.max(0, Math.min(columns.length - 1, Math.floor((at - LEFT) / wide))));
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const from = shown < 0 ? columns.length - 1 : shown;
    const to = {
      ArrowLeft: shown < 0 ? from : from - 1,
      ArrowRight: shown < 0 ? from : from + 1,
      Home: 0,
      End: columns.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(columns.length - 1, to)));
  });
  return el("figure", {}, readout, box);
}

// The panel “Attention recordings”: answers recorded with the attention of each token, drawn as a heat map.

import { api } from "./api.js";
import { count, el, time, toast } from "./dom.js";
import { isLight } from "./shade.js";
import { state } from "./state.js";

export function captures(panel) {
  const about = el("p", { class: "quiet", role: "status" });
  const list = el("div", {});
  const shown = el("div", {});
  const box = el("input", { id: "recording", type: "checkbox", onchange: () => setRecording() });
  const load = async () => {
    try {
      const found = await api.captures(state.name);
      box.checked = found.recording;
      box.disabled = !found.supported;
      about.textContent = found.supported
        ? "A recording keeps the attention of every token of an answer. Open it here, or replay it with `halo replay`."
        : "No attention data from this model, so there is nothing to record.";
      list.replaceChildren(...found.captures.map(row));
    } catch (error) {
      about.textContent = error.message;
      box.disabled = true;
      list.replaceChildren();
    }
  };
  const setRecording = async () => {
    try {
      await api.setRecording(state.name, box.checked);
      toast(box.checked ? "Answers are recorded from now on." : "Recording is off.");
    } catch (error) {
      toast(error.message, { error: true });
      load();
    }
  };
  const row = (capture) =>
    el(
      "div",
      { class: "row" },
      el("p", {}, `message ${capture.turn + 1} · ${count(capture.steps, "token")} · ${time(capture.at)}`),
      el("p", { class: "quiet" }, `${capture.model} · halo replay ${capture.path}`),
      el("div", { class: "bar" }, el("button", { type: "button", onclick: () => open(capture) }, "Open")),
    );
  const open = async (capture) => {
    shown.replaceChildren(el("p", { class: "quiet", role: "status" }, "Loading…"));
    try {
      shown.replaceChildren(heatMap(capture, await api.capture(state.name, capture.id)));
      shown.scrollIntoView({ block: "nearest" });
    } catch (error) {
      shown.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  panel.append(
    el("div", { class: "bar" }, box, el("label", { for: "recording" }, "Record the answers of this chat")),
    about,
    shown,
    list,
  );
  load();
  return {
    event: (event) => {
      if (["done", "changed"].includes(event.type)) load();
    },
  };
}

// A column for each token, a row for each segment of the context; the brighter a cell, the larger the share of attention.
function heatMap(capture, { segments, steps }) {
  const title = (segment, n) => segment.chunk || (n === 0 ? "system prompt" : "this answer");
  const sums = segments.map((_, n) => steps.reduce((sum, step) => sum + (step.shares[n] ?? 0), 0));
  const rows = segments.map((_, n) => n).filter((n) => sums[n] > 0);
  if (!rows.length) return el("p", { class: "quiet" }, "This recording has no attention data.");
  // The first segment is left out of the scale: it holds the attention sink, which would outshine everything else.
  const most = Math.max(1e-6, ...steps.flatMap((step) => rows.filter((n) => n > 0).map((n) => step.shares[n] ?? 0)));
  const wide = Math.max(2, Math.min(14, Math.floor(1200 / steps.length))),
    high = 14;
  const canvas = el("canvas", {
    width: steps.length * wide,
    height: rows.length * high,
    class: "heat",
    tabindex: "0",
    role: "img",
    "aria-label": `attention of message ${capture.turn + 1}: ${[...rows]
      .sort((a, b) => sums[b] - sums[a])
      .slice(0, 5)
      .map((n) => `${title(segments[n], n)} ${((sums[n] / steps.length) * 100).toFixed(0)} percent`)
      .join(", ")}`,
  });
  const paint = canvas.getContext("2d");
  const ground = isLight() ? [243, 239, 224] : [28, 26, 20],
    full = isLight() ? [117, 91, 0] : [255, 220, 100];
  steps.forEach((step, x) =>
    rows.forEach((n, y) => {
      const brightness = Math.sqrt(Math.min(1, (step.shares[n] ?? 0) / most));
      paint.fillStyle = `rgb(${ground.map((from, c) => Math.round(from + (full[c] - from) * brightness)).join(",")})`;
      paint.fillRect(x * wide, y * high, wide, high - 1);
    }),
  );
  const cell = el("p", { class: "quiet", role: "status" }, "Point at a cell, or use the arrow keys.");
  const at = { x: 0, y: 0 };
  const showCell = () => {
    const n = rows[at.y],
      step = steps[at.x];
    cell.replaceChildren(
      el("b", {}, step.text.trim() || "·"),
      `: ${((step.shares[n] ?? 0) * 100).toFixed(1)} % of its attention on ${title(segments[n], n)}: `,
      segments[n].text.trim().slice(0, 160),
    );
  };
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    at.x = within(Math.floor(((event.clientX - box.left) / box.width) * steps.length), steps.length);
    at.y = within(Math.floor(((event.clientY - box.top) / box.height) * rows.length), rows.length);
    showCell();
  });
  canvas.addEventListener("keydown", (event) => {
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (dx === undefined) return;
    event.preventDefault();
    at.x = within(at.x + dx, steps.length);
    at.y = within(at.y + dy, rows.length);
    showCell();
  });
  const labels = el(
    "ol",
    { class: "heat-rows" },
    ...rows.map((n) =>
      el(
        "li",
        { title: segments[n].text.trim() },
        `${title(segments[n], n)} ${((sums[n] / steps.length) * 100).toFixed(1)} % ${segments[n].chunk ? segments[n].text.trim().slice(0, 14) : ""}`,
      ),
    ),
  );
  return el(
    "div",
    { class: "row" },
    el("h3", {}, `Attention of message ${capture.turn + 1}, token by token`),
    el("div", { class: "heat-box" }, labels, el("div", { class: "heat-scroll" }, canvas)),
    cell,
  );
}

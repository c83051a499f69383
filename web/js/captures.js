// Captures: answers that are recorded with what each of their words looked at, and a picture of each.

import { api } from "./api.js";
import { count, el, time, toast } from "./dom.js";
import { isLight } from "./shade.js";
import { state } from "./state.js";

export function captures(panel) {
  const about = el("p", { class: "quiet", role: "status" });
  const list = el("div", {});
  const shown = el("div", {});
  const box = el("input", { id: "recording", type: "checkbox", onchange: () => record() });
  const load = async () => {
    try {
      const known = await api.captures(state.name);
      box.checked = known.recording;
      box.disabled = !known.possible;
      about.textContent = known.possible
        ? "A recorded answer keeps what each of its words looked at, to be looked at again here or by `halo replay`."
        : "This model does not tell what it looks at, so there is nothing to record.";
      list.replaceChildren(...known.captures.map(row));
    } catch (error) {
      about.textContent = error.message;
      box.disabled = true;
      list.replaceChildren();
    }
  };
  const record = async () => {
    try {
      await api.record(state.name, box.checked);
      toast(box.checked ? "Answers are recorded from now on." : "Nothing more is recorded.");
    } catch (error) {
      toast(error.message, { wrong: true });
      load();
    }
  };
  const row = (kept) =>
    el(
      "div",
      { class: "row" },
      el("p", {}, `turn ${kept.turn} · ${count(kept.steps, "token")} · ${time(kept.at)}`),
      el("p", { class: "quiet" }, `${kept.model} · halo replay ${kept.place}`),
      el("div", { class: "bar" }, el("button", { type: "button", onclick: () => open(kept) }, "Look")),
    );
  const open = async (kept) => {
    shown.replaceChildren(el("p", { class: "quiet", role: "status" }, "Reading it …"));
    try {
      shown.replaceChildren(picture(kept, await api.captured(state.name, kept.capture)));
      shown.scrollIntoView({ block: "nearest" });
    } catch (error) {
      shown.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  };
  panel.append(
    el("div", { class: "bar" }, box, el("label", { for: "recording" }, "Record the answers of this conversation")),
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

// A column for each word, a row for each part that was looked at; the lighter a cell, the larger the share.
function picture(kept, { parts, steps }) {
  const title = (part, n) => part.chunk || (n === 0 ? "instructions" : "the answer itself");
  const sums = parts.map((_, n) => steps.reduce((sum, step) => sum + (step.shares[n] ?? 0), 0));
  const rows = parts.map((_, n) => n).filter((n) => sums[n] > 0);
  if (!rows.length) return el("p", { class: "quiet" }, "No attention was recorded with it.");
  // The first place of the window takes what is looked at nowhere else, and would outshine everything.
  const most = Math.max(1e-6, ...steps.flatMap((step) => rows.filter((n) => n > 0).map((n) => step.shares[n] ?? 0)));
  const wide = Math.max(2, Math.min(14, Math.floor(1200 / steps.length))),
    high = 14;
  const canvas = el("canvas", {
    width: steps.length * wide,
    height: rows.length * high,
    class: "heat",
    tabindex: "0",
    role: "img",
    "aria-label": `what turn ${kept.turn} looked at: ${[...rows]
      .sort((a, b) => sums[b] - sums[a])
      .slice(0, 5)
      .map((n) => `${title(parts[n], n)} ${((sums[n] / steps.length) * 100).toFixed(0)} percent`)
      .join(", ")}`,
  });
  const paint = canvas.getContext("2d");
  const ground = isLight() ? [243, 239, 224] : [28, 26, 20],
    full = isLight() ? [117, 91, 0] : [255, 220, 100];
  steps.forEach((step, x) =>
    rows.forEach((n, y) => {
      const light = Math.sqrt(Math.min(1, (step.shares[n] ?? 0) / most));
      paint.fillStyle = `rgb(${ground.map((from, c) => Math.round(from + (full[c] - from) * light)).join(",")})`;
      paint.fillRect(x * wide, y * high, wide, high - 1);
    }),
  );
  const said = el("p", { class: "quiet", role: "status" }, "Point at a cell, or walk with the arrow keys.");
  const at = { x: 0, y: 0 };
  const tellCell = () => {
    const n = rows[at.y],
      step = steps[at.x];
    said.replaceChildren(
      el("b", {}, step.text.trim() || "·"),
      ` looked ${((step.shares[n] ?? 0) * 100).toFixed(1)} % at ${title(parts[n], n)}: `,
      parts[n].text.trim().slice(0, 160),
    );
  };
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    at.x = within(Math.floor(((event.clientX - box.left) / box.width) * steps.length), steps.length);
    at.y = within(Math.floor(((event.clientY - box.top) / box.height) * rows.length), rows.length);
    tellCell();
  });
  canvas.addEventListener("keydown", (event) => {
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (dx === undefined) return;
    event.preventDefault();
    at.x = within(at.x + dx, steps.length);
    at.y = within(at.y + dy, rows.length);
    tellCell();
  });
  const labels = el(
    "ol",
    { class: "heat-rows" },
    ...rows.map((n) =>
      el(
        "li",
        { title: parts[n].text.trim() },
        `${title(parts[n], n)} ${((sums[n] / steps.length) * 100).toFixed(1)} % ${parts[n].chunk ? parts[n].text.trim().slice(0, 14) : ""}`,
      ),
    ),
  );
  return el(
    "div",
    { class: "row" },
    el("h3", {}, `What turn ${kept.turn} looked at, word by word`),
    el("div", { class: "heat-box" }, labels, el("div", { class: "heat-scroll" }, canvas)),
    said,
  );
}

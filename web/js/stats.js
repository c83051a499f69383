// The panel “Statistics”: tokens in the context, paragraphs removed and brought back, time by stage, brightness.

import { api } from "./api.js";
import { el, number, svg } from "./dom.js";
import { state } from "./state.js";

const STAGES = {
  store: "#7a8cff",
  preview: "#b07aff",
  recall: "#ffdc64",
  prefill: "#5fb7e0",
  generate: "#6f6a58",
  score: "#ff8f5a",
  prune: "#ff6b8b",
  index: "#7be08a",
  persist_kv: "#c8b450",
};
const STAGE_LABELS = {
  store: "store",
  preview: "preview",
  recall: "recall",
  prefill: "prefill",
  generate: "generate",
  score: "score",
  prune: "prune",
  index: "index",
  persist_kv: "save KV cache",
};
const W = 400,
  H = 130,
  PAD = 24;

export function stats(panel) {
  const body = el("div", {});
  const load = async () => {
    try {
      const [turns, { chunks }] = await Promise.all([api.turns(state.name), api.conversation(state.name)]);
      body.replaceChildren(...charts(turns.filter((turn) => turn.figures).slice(-120), chunks));
    } catch (error) {
      body.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  panel.append(body);
  load();
  return {
    event: (event) => {
      if (["done", "forgetting_cycle"].includes(event.type)) load();
    },
  };
}

function charts(turns, chunks) {
  if (!turns.length) return [el("p", { class: "quiet" }, "No answer yet.")];
  const last = turns.at(-1).figures;
  const all = Object.values(last.ms).reduce((a, b) => a + b, 0);
  return [
    el(
      "dl",
      {},
      ...pair("last turn", `${number(all / 1000)} s, of which ${number(last.overhead_ms)} ms outside of the model`),
      ...pair("first token", `${number(last.first_token_ms / 1000)} s after the message`),
      ...(last.pressure === null ? [] : pair("context pressure", percent(last.pressure))),
      ...forgetting(turns.findLast((turn) => turn.forgetting)?.forgetting),
    ),
    el("h3", {}, "Tokens in the context after each turn"),
    line(turns, (turn) => turn.figures.live, state.snapshot?.limit),
    el("h3", {}, "Paragraphs removed from the context (down) and brought back (up)"),
    bars(turns),
    el("h3", {}, "Time by stage, in seconds"),
    stacked(turns),
    el(
      "div",
      { class: "legend" },
      ...Object.entries(STAGES).map(([name, colour]) => {
        const mark = el("i", {});
        mark.style.background = colour;
        return el("span", {}, mark, STAGE_LABELS[name]);
      }),
    ),
    el("h3", {}, "Brightness of the paragraphs in the context"),
    histogram(chunks),
    ...attention(turns),
  ];
}

const percent = (share) => `${Math.round(share * 100)} %`;

// The last forgetting cycle, if one ran.
const forgetting = (cycle) =>
  cycle
    ? pair(
        "forgetting cycles",
        `${cycle.runs}, the last from ${percent(cycle.initial_pressure)} to ${percent(cycle.final_pressure)}: ` +
          `${cycle.pruned} removed from the context, ${cycle.erased} erased, ` +
          `${cycle.disabled_memories.length} memories turned off`,
      )
    : [];

// The distribution at the last step that was traced, of the last turn that has one.
function attention(turns) {
  const turn = turns.findLast((one) => one.figures.attention.at(-1)?.histogram.length);
  if (!turn) return [];
  const { step, histogram: bins, mean, median, max } = turn.figures.attention.at(-1);
  const tall = Math.log2(Math.max(...bins) + 1),
    wide = (W - PAD) / bins.length;
  const parts = bins.map((n, bin) => {
    const height = (Math.log2(n + 1) / tall) * (H - 30);
    return svg("rect", { x: PAD + bin * wide, y: H - 16 - height, width: wide - 2, height, class: "chart-gold" });
  });
  const about = `turn ${turn.turn}, step ${step}: mean ${mean.toFixed(5)}, median ${median.toFixed(5)}, most ${max.toFixed(3)}`;
  const drawn = chart(
    `tokens by attention: ${bins.join(", ")}`,
    ...parts,
    label(PAD, H - 3, "under 1/32768"),
    label(W - 60, H - 3, "over 1/2"),
  );
  drawn.id = "attention-histogram";
  return [el("h3", {}, "Tokens by the attention that they received"), el("p", { class: "quiet" }, about), drawn];
}

const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
const chart = (label, ...children) =>
  svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    ...children,
  );
const label = (x, y, text) => {
  const node = svg("text", { x, y });
  node.textContent = text;
  return node;
};
const xOf = (n, total) => PAD + (total < 2 ? 0 : (n / (total - 1)) * (W - PAD - 8));

function line(turns, value, limit) {
  const most = Math.max(limit ?? 0, ...turns.map(value), 1);
  const y = (v) => H - 16 - (v / most) * (H - 30);
  const points = turns.map((turn, n) => `${xOf(n, turns.length)},${y(value(turn))}`).join(" ");
  const parts = [svg("polyline", { points, class: "chart-line" })];
  if (limit)
    parts.push(
      svg("line", { x1: PAD, x2: W - 8, y1: y(limit), y2: y(limit), class: "chart-axis", "stroke-dasharray": "4 4" }),
    );
  return chart(
    `from ${value(turns[0])} to ${value(turns.at(-1))} tokens, the limit is ${limit}`,
    ...parts,
    label(2, y(most) + 4, number(most)),
    label(2, H - 16, "0"),
  );
}

function bars(turns) {
  const most = Math.max(1, ...turns.flatMap((turn) => [turn.figures.pruned, turn.figures.resurrected]));
  const middle = H / 2,
    wide = Math.max(1, (W - PAD) / turns.length - 1);
  const parts = turns.flatMap((turn, n) => {
    const up = (turn.figures.resurrected / most) * (middle - 8),
      down = (turn.figures.pruned / most) * (middle - 8);
    const x = PAD + n * ((W - PAD) / turns.length);
    return [
      svg("rect", { x, y: middle - up, width: wide, height: up, class: "chart-gold" }),
      svg("rect", { x, y: middle, width: wide, height: down, class: "chart-blue" }),
    ];
  });
  const sum = (key) => turns.reduce((total, turn) => total + turn.figures[key], 0);
  return chart(
    `${sum("pruned")} removed, ${sum("resurrected")} brought back`,
    ...parts,
    svg("line", { x1: PAD, x2: W, y1: middle, y2: middle, class: "chart-axis" }),
    label(2, 12, String(most)),
  );
}

function stacked(turns) {
  const sum = (turn) => Object.values(turn.figures.ms).reduce((a, b) => a + b, 0);
  const most = Math.max(1, ...turns.map(sum)),
    wide = Math.max(1, (W - PAD) / turns.length - 1);
  const parts = turns.flatMap((turn, n) => {
    let y = H - 4;
    return Object.entries(STAGES).map(([name, fill]) => {
      const height = ((turn.figures.ms[name] ?? 0) / most) * (H - 18);
      y -= height;
      return svg("rect", { x: PAD + n * ((W - PAD) / turns.length), y, width: wide, height, fill });
    });
  });
  return chart(`up to ${number(most / 1000)} seconds a turn`, ...parts, label(2, 12, number(most / 1000)));
}

function histogram(chunks) {
  const peaks = chunks.map((chunk) => chunk.peak);
  if (!peaks.length) return el("p", { class: "quiet" }, "The context is empty.");
  const least = Math.min(...peaks),
    most = Math.max(...peaks),
    bins = new Array(20).fill(0);
  for (const peak of peaks)
    bins[most > least ? Math.min(19, Math.floor(((peak - least) / (most - least)) * 20)) : 19] += 1;
  const tall = Math.max(...bins),
    wide = (W - PAD) / 20;
  const parts = bins.map((n, bin) =>
    svg("rect", {
      x: PAD + bin * wide,
      y: H - 16 - (n / tall) * (H - 30),
      width: wide - 2,
      height: (n / tall) * (H - 30),
      class: "chart-gold",
    }),
  );
  return chart(
    `${peaks.length} paragraphs between ${number(least)} and ${number(most)}`,
    ...parts,
    label(PAD, H - 3, number(least)),
    label(W - 60, H - 3, number(most)),
    label(2, 12, String(tall)),
  );
}

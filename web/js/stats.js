// The view “Statistics”: tokens in the context, paragraphs removed and brought back, what returned for which question and whether
// the answer attended to it, time by stage, and how attention is distributed.

import { api } from "./api.js";
import { emit } from "./bus.js";
import { chart } from "./charts.js";
import { count, el, number } from "./dom.js";
import { plainText } from "./markdown.js";
import { state } from "./state.js";

const STAGES = {
  store: "store",
  preview: "preview",
  recall: "search",
  prefill: "read the context",
  generate: "generate",
  score: "score",
  prune: "prune",
  index: "index",
  persist_kv: "save KV cache",
};

/** The bounds of the bins of attention, in ‰ per token: three for each power of ten. */
export const ATTENTION_BOUNDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50];

const MAX_TURNS = 120;
const MAX_RETURNS = 12;

export function stats(panel) {
  const body = el("div", {});
  const load = async () => {
    try {
      const [turns, { chunks }] = await Promise.all([api.turns(state.name), api.conversation(state.name)]);
      const measured = turns.filter((turn) => turn.figures).slice(-MAX_TURNS);
      body.replaceChildren(...views(measured, chunks));
      // Before the first answer there are no figures.
      const returns = body.querySelector("#returns");
      if (returns) loadReturns(measured, returns);
    } catch (error) {
      // A chat without messages has no statistics.
      const text = error.status === 404 ? "No answer yet." : error.message;
      body.replaceChildren(el("p", { class: error.status === 404 ? "quiet" : "error" }, text));
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

const seconds = (ms) => (ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`);
const percent = (share) => `${Math.round(share * 100)} %`;
const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
const total = (figures) => Object.values(figures.ms).reduce((a, b) => a + b, 0);
const turnName = (turn) => number(turn.turn + 1);

function views(turns, chunks) {
  if (!turns.length) return [el("p", { class: "quiet" }, "No answer yet.")];
  const last = turns.at(-1).figures;
  return [
    el(
      "dl",
      {},
      ...pair("last answer", `${seconds(total(last))}, of which ${number(last.overhead_ms)} ms outside of the model`),
      ...pair("first token", `${seconds(last.first_token_ms)} after the message`),
      ...(last.pressure === null ? [] : pair("context pressure", percent(last.pressure))),
      ...cooled(turns),
      ...forgetting(turns.findLast((turn) => turn.forgetting)?.forgetting),
    ),
    el("h3", {}, "Context after each answer"),
    contextChart(turns),
    el("h3", {}, "Paragraphs brought back and removed"),
    movesChart(turns),
    el("h3", {}, "What came back, and for which question"),
    el("div", { id: "returns" }, el("p", { class: "quiet" }, "…")),
    el("h3", {}, "Attention to the paragraphs in the context"),
    attentionChart(chunks),
    el("h3", {}, "Time of each answer"),
    timeChart(turns),
    el(
      "div",
      { class: "legend" },
      ...Object.entries(STAGES).map(([name, label]) => el("span", {}, el("i", { class: `stage-${name}` }), label)),
    ),
    ...lastStep(turns),
    ...extract(),
  ];
}

function contextChart(turns) {
  const limit = state.snapshot?.limit;
  return chart({
    id: "context-chart",
    summary: `from ${turns[0].figures.live} to ${turns.at(-1).figures.live} tokens, the limit is ${limit}`,
    x: "message",
    y: "tokens in the context",
    whole: true,
    line: true,
    limit,
    limitLabel: limit ? `limit ${number(limit)}` : undefined,
    columns: turns.map((turn) => ({
      name: turnName(turn),
      parts: [{ value: turn.figures.live, className: "chart-gold" }],
      about: `message ${turnName(turn)}: ${number(turn.figures.live)} tokens`,
    })),
  });
}

function movesChart(turns) {
  const sum = (key) => turns.reduce((all, turn) => all + turn.figures[key], 0);
  return chart({
    id: "moves-chart",
    summary: `${sum("pruned")} removed, ${sum("resurrected")} brought back`,
    x: "message",
    y: "paragraphs brought back (up, gold) and removed (down, blue)",
    whole: true,
    columns: turns.map((turn) => ({
      name: turnName(turn),
      parts: [
        { value: turn.figures.resurrected, className: "chart-gold" },
        { value: -turn.figures.pruned, className: "chart-blue" },
      ],
      about: `message ${turnName(turn)}: ${turn.figures.resurrected} brought back, ${turn.figures.pruned} removed`,
    })),
  });
}

function timeChart(turns) {
  const most = Math.max(...turns.map((turn) => total(turn.figures)));
  return chart({
    id: "time-chart",
    summary: `up to ${number(most / 1000)} seconds an answer`,
    x: "message",
    y: "seconds, by stage",
    columns: turns.map((turn) => {
      const stages = Object.keys(STAGES).filter((name) => turn.figures.ms[name]);
      const longest = [...stages].sort((a, b) => turn.figures.ms[b] - turn.figures.ms[a]).slice(0, 3);
      const parts = longest.map((name) => `${STAGES[name]} ${seconds(turn.figures.ms[name])}`).join(", ");
      return {
        name: turnName(turn),
        parts: stages.map((name) => ({ value: turn.figures.ms[name] / 1000, className: `stage-${name}` })),
        about: `message ${turnName(turn)}: ${seconds(total(turn.figures))} (${parts})`,
      };
    }),
  });
}

/** How many values are below the first bound, between each two bounds, and above the last. */
export function attentionBins(values) {
  const bins = new Array(ATTENTION_BOUNDS.length + 1).fill(0);
  for (const value of values) {
    const above = ATTENTION_BOUNDS.findIndex((bound) => value < bound);
    bins[above < 0 ? ATTENTION_BOUNDS.length : above] += 1;
  }
  return bins;
}

function attentionChart(chunks) {
  const values = chunks.map((chunk) => chunk.attention).filter((value) => value !== null && value !== undefined);
  if (!values.length) return el("p", { class: "quiet" }, "No attention has been measured yet.");
  const bins = attentionBins(values);
  const range = (n) =>
    n === 0
      ? `under ${ATTENTION_BOUNDS[0]} ‰`
      : n === ATTENTION_BOUNDS.length
        ? `over ${ATTENTION_BOUNDS.at(-1)} ‰`
        : `${ATTENTION_BOUNDS[n - 1]} to ${ATTENTION_BOUNDS[n]} ‰`;
  return chart({
    id: "brightness-chart",
    summary: `paragraphs by attention: ${bins.map((n, bin) => `${n} ${range(bin)}`).join(", ")}`,
    x: "attention that a token of it received from a generated token, in ‰ (logarithmic)",
    y: "paragraphs",
    whole: true,
    columns: bins.map((n, bin) => ({
      name: bin === 0 ? `<${ATTENTION_BOUNDS[0]}` : String(ATTENTION_BOUNDS[bin - 1]),
      parts: [{ value: n, className: "chart-gold" }],
      about: `${count(n, "paragraph")}: ${range(bin)}`,
    })),
  });
}

// The sentences that received the most attention, word for word, once they are asked for.
function extract() {
  const list = el("ol", { id: "extract" });
  const load = async () => {
    const { name } = state;
    try {
      const sentences = await api.extract(name);
      if (name !== state.name) return;
      const item = ({ chunk, text }) =>
        el(
          "li",
          {},
          el(
            "button",
            {
              type: "button",
              class: "link",
              onclick: () => emit("jump", { turn: Number(/\d+/.exec(chunk)[0]), chunk }),
            },
            text.trim(),
          ),
        );
      list.replaceChildren(...sentences.map(item));
    } catch (error) {
      list.replaceChildren(el("li", { class: "error" }, error.message));
    }
  };
  return [
    el("h3", {}, "The sentences with the most attention"),
    el("button", { type: "button", onclick: load }, "Extract"),
    list,
  ];
}

// Earlier answers that were shortened in prompts, if any were.
function cooled(turns) {
  const sum = turns.reduce((all, turn) => all + turn.figures.cooled_messages, 0);
  return sum ? pair("shortened in prompts", count(sum, "earlier answer")) : [];
}

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
function lastStep(turns) {
  const turn = turns.findLast((one) => one.figures.attention.at(-1)?.histogram.length);
  if (!turn) return [];
  const { step, histogram: bins, mean, median, max } = turn.figures.attention.at(-1);
  const about =
    `message ${turnName(turn)}, token ${step + 1}: mean ${number(mean * 1000)} ‰, median ${number(median * 1000)} ‰, ` +
    `most ${number(max * 1000)} ‰`;
  const bound = (bin) => `1/${number(2 ** (bins.length - bin))}`;
  return [
    el("h3", {}, "Tokens by the attention of one generated token"),
    chart({
      id: "attention-histogram",
      summary: `tokens by attention: ${bins.join(", ")}`,
      x: "share of the attention (logarithmic)",
      y: about,
      log: true,
      columns: bins.map((n, bin) => ({
        name: bin === 0 ? `<${bound(1)}` : bound(bin),
        parts: [{ value: n, className: "chart-gold" }],
        about: `${count(n, "token")} with a share of ${bin === 0 ? "less than" : "about"} ${bound(Math.max(1, bin))}`,
      })),
    }),
  ];
}

// ---- what came back

/** How an answer attended to a paragraph, against the average of the context. */
export function attendedText(attention, live) {
  if (attention === null || attention === undefined) return "attention was not measured";
  const times = attention / (1000 / Math.max(1, live));
  const verdict =
    times >= 1.5 ? "attended to it" : times >= 0.5 ? "attended to it as to the rest" : "hardly attended to it";
  return `the answer ${verdict}: ${number(Number(attention.toPrecision(2)))} ‰ per token, ${number(times)} × the average`;
}

// The latest answers for which something came back, each with its question. Their texts are in the transcript.
async function loadReturns(turns, box) {
  const { name } = state;
  const answers = turns
    .filter((turn) => turn.figures.resurrected > 0)
    .slice(-MAX_RETURNS)
    .reverse();
  if (!answers.length) {
    box.replaceChildren(el("p", { class: "quiet" }, "Nothing has come back yet."));
    return;
  }
  const rows = [];
  for (const turn of answers) {
    const { messages } = await api.transcript(name, { around: turn.turn, limit: 4 });
    const answer = messages.find((message) => message.turn === turn.turn);
    const question = messages.findLast((message) => message.role === "user" && message.turn < turn.turn);
    if (answer) rows.push(returnRow(turn, question, answer));
  }
  if (name === state.name) box.replaceChildren(...rows);
}

function returnRow(turn, question, answer) {
  const text = question?.chunks.map((chunk) => chunk.text).join("") ?? "";
  const attention = new Map(
    (turn.figures.resurrected_chunks ?? []).map(({ chunk, attention: value }) => [chunk, value]),
  );
  return el(
    "div",
    { class: "row return" },
    el("p", {}, el("b", {}, text.trim().replace(/\s+/g, " ").slice(0, 120) || `message ${turnName(turn)}`)),
    el(
      "ul",
      {},
      ...answer.used.map((used) =>
        el(
          "li",
          {},
          el(
            "button",
            { type: "button", class: "link", onclick: () => emit("jump", { turn: used.turn, chunk: used.id }) },
            plainText(used.text).slice(0, 80),
          ),
          el("span", { class: "quiet" }, ` ${attendedText(attention.get(used.id), turn.figures.live)}`),
        ),
      ),
    ),
  );
}

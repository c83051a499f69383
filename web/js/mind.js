// An agent's mind: what it knows, what it did, and what it sees, in every format.

import { api } from "./api.js";
import { ask, count, el, number, render, time } from "./dom.js";

// Whose was shown last, in which format, what was told of it, and what went wrong since.
let shown = { whose: null, format: null, told: null, wrong: null, loading: false };

export function mind(panel, page, agent, hands) {
  const whose = `${page.name}/${agent.id}`;
  if (shown.whose !== whose) shown = { whose, format: null, told: null, wrong: null, loading: false };
  draw(panel, page, agent, hands);
  load(panel, page, agent, hands);
}

// One at a time. Whoever has gone elsewhere meanwhile is not called back.
async function load(panel, page, agent, hands, format = shown.format) {
  const mine = shown;
  if (mine.loading && format === mine.format) return;
  Object.assign(mine, { loading: true, format });
  let told = mine.told;
  let wrong = null;
  try {
    told = await api.hud(page.name, agent.id, format ?? undefined);
  } catch (error) {
    wrong = error.message;
  }
  if (mine.format !== format) return;
  Object.assign(mine, { loading: false, told, wrong });
  if (shown === mine && page.agent === agent.id && page.world) draw(panel, page, agent, hands);
}

function draw(panel, page, agent, hands) {
  const { told, wrong } = shown;
  const { wish, think, pulse, close } = hands;
  const button = (label, act) => el("button", { type: "button", data: { key: label }, onclick: act }, label);
  const retire = async () => {
    if (
      await ask(`Retire ${agent.name} for good?`, {
        go: "Retire",
        about: "What was said stays; nobody thinks as this one any more, and its room is closed.",
      })
    ) {
      close();
      wish({ wish: "retire", agent: agent.id });
    }
  };
  const thought = page.thoughts.get(agent.id);
  render(
    panel,
    el(
      "div",
      { class: "mind", data: { mind: agent.id, key: `mind-${page.name}-${agent.id}` } },
      el(
        "h2",
        {},
        el("span", {}, pulse(agent), " ", agent.name),
        el("button", { type: "button", "aria-label": "Close", onclick: close }, "×"),
      ),
      el(
        "p",
        { class: "quiet" },
        `${agent.kind} ${agent.id} · thinks with ${agent.model} · every ${number(agent.interval)} s · ${count(agent.beats, "beat")}`,
      ),
      thought
        ? el(
            "p",
            { class: "quiet thought" },
            `Last heartbeat: ${number(thought.shown)} tokens seen${anew(thought)}, ${number(thought.answered)} answered`,
          )
        : null,
      el("p", {}, agent.prompt),
      el(
        "div",
        { class: "bar" },
        agent.paused
          ? button("Go on", () => wish({ wish: "resume", agent: agent.id }))
          : button("Pause", () => wish({ wish: "pause", agent: agent.id })),
        button("Think now", () => think(agent)),
        button("Retire", retire),
      ),
      agent.asleep ? el("p", { class: "quiet" }, `asleep until ${time(agent.asleep)}`) : null,
      wrong || told?.wrong
        ? el("p", { class: "wrong", role: "status", data: { key: "wrong" } }, wrong ?? told.wrong)
        : null,
      told
        ? parts(told, (format) => load(panel, page, agent, hands, format))
        : wrong
          ? null
          : el("p", { class: "quiet" }, "…"),
    ),
  );
}

// How much had to be read; a model elsewhere does not tell.
const anew = ({ shown: all, read }) =>
  read ? `, ${number(read)} of them read anew (${number((100 * read) / all)} %)` : "";

function parts({ seen, known, recent, by_format: formats, own_format: own }, load) {
  const baseline = formats.compact_json || 1;
  const did = [...recent].reverse().map((one) => {
    const { type, timestamp, refused, ...rest } = one;
    const values = Object.entries(rest)
      .map(([name, value]) => `${name}: ${value}`)
      .join(", ");
    return el(
      "tr",
      {},
      el("td", {}, timestamp.slice(11)),
      el("td", {}, type),
      el("td", {}, values),
      el("td", { class: refused ? "wrong" : "" }, refused ?? "done"),
    );
  });
  const label = (format, tokens) =>
    `${format}${format === own ? " ★" : ""}: ${tokens === null ? "does not fit" : number(tokens)}`;
  return [
    seen?.notice ? el("p", { class: "quiet" }, seen.notice) : null,
    el(
      "h3",
      {},
      seen ? `What it knows (${number(seen.knowledge[0])} of ${number(seen.knowledge[1])} tokens)` : "What it knows",
    ),
    el("pre", { class: "known", tabindex: "0", data: { key: "known" } }, JSON.stringify(known, null, 2)),
    el("h3", {}, "What it did last"),
    did.length ? el("table", { class: "did" }, el("tbody", {}, did)) : el("p", { class: "quiet" }, "Nothing yet."),
    el("h3", {}, seen ? `What it sees (${number(seen.tokens)} of ${number(seen.budget)} tokens)` : "What it sees"),
    seen?.recalled.length
      ? el("p", { class: "quiet" }, `brought back because they matter now: #${seen.recalled.join(", #")}`)
      : null,
    el(
      "div",
      { class: "bar", role: "group", "aria-label": "Format", data: { key: "formats" } },
      Object.entries(formats).map(([format, tokens]) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(format === seen?.format),
            data: { format },
            title: tokens === null ? "" : `${number((100 * tokens) / baseline)} % of compact JSON`,
            onclick: () => load(format),
          },
          label(format, tokens),
        ),
      ),
    ),
    seen ? el("pre", { class: "hud", tabindex: "0", data: { key: "hud" } }, seen.text) : null,
  ];
}

// An agent's mind: what it knows, what it did, and what it sees, in every format.

import { api } from "./api.js";
import { count, el, number, time } from "./dom.js";

const shown = { agent: null, format: null, told: null };

export function mind(panel, page, agent, { wish, close }) {
  if (shown.agent !== agent.id) Object.assign(shown, { agent: agent.id, format: null, told: null });
  const draw = () => {
    const { told } = shown;
    const scrolled = panel.querySelector("pre")?.scrollTop ?? 0;
    const button = (label, values) => el("button", { type: "button", onclick: () => wish(values) }, label);
    panel.replaceChildren(el("div", { class: "mind", data: { mind: agent.id } },
      el("h2", {}, agent.name, el("button", { type: "button", "aria-label": "Close", onclick: close }, "×")),
      el("p", { class: "quiet" }, `${agent.kind} ${agent.id} · thinks with ${agent.model} · every ${number(agent.interval)} s · ${count(agent.beats, "beat")}`),
      el("p", {}, agent.prompt),
      el("div", { class: "bar" },
        agent.paused ? button("Go on", { wish: "resume", agent: agent.id }) : button("Pause", { wish: "pause", agent: agent.id }),
        button("Think now", { wish: "wake", agent: agent.id }),
        el("button", { type: "button", onclick: () => { if (confirm(`Retire ${agent.name} for good?`)) { wish({ wish: "retire", agent: agent.id }); close(); } } }, "Retire")),
      agent.asleep ? el("p", { class: "quiet" }, `asleep until ${time(agent.asleep)}`) : "",
      ...(told ? parts(told, page, load) : [el("p", { class: "quiet", role: "status" }, "…")])));
    const text = panel.querySelector("pre");
    if (text) text.scrollTop = scrolled;
  };
  const load = async (format = shown.format) => {
    shown.format = format;
    try {
      const told = await api.hud(page.name, agent.id, format ?? undefined);
      if (shown.agent === agent.id) { shown.told = told; draw(); }
    } catch (error) {
      panel.querySelector("[role=status]")?.replaceChildren(error.message);
    }
  };
  draw();
  load();
}

function parts(told, page, load) {
  const [used, most] = told.knowledge;
  const baseline = told.by_format.compact_json || 1;
  const did = [...told.recent].reverse().map((one) => {
    const { type, timestamp, refused, ...rest } = one;
    const values = Object.entries(rest).map(([name, value]) => `${name}: ${value}`).join(", ");
    return el("tr", {}, el("td", {}, timestamp.slice(11)), el("td", {}, type), el("td", {}, values), el("td", { class: refused ? "wrong" : "" }, refused ?? "done"));
  });
  return [
    told.notice ? el("p", { class: "quiet" }, told.notice) : "",
    el("h3", {}, `What it knows (${number(used)} of ${number(most)} tokens)`),
    el("pre", { class: "known" }, JSON.stringify(told.known, null, 2)),
    el("h3", {}, "What it did last"),
    did.length ? el("table", { class: "did" }, el("tbody", {}, did)) : el("p", { class: "quiet" }, "Nothing yet."),
    el("h3", {}, `What it sees (${number(told.tokens)} of ${number(told.budget)} tokens)`),
    told.recalled.length ? el("p", { class: "quiet" }, `brought back because they matter now: #${told.recalled.join(", #")}`) : "",
    el("div", { class: "bar", role: "tablist" }, Object.entries(told.by_format).map(([format, tokens]) =>
      el("button", { type: "button", role: "tab", "aria-selected": String(format === told.format), "aria-pressed": String(format === told.format), data: { format }, title: `${number(100 * tokens / baseline)} % of compact JSON`, onclick: () => load(format) }, `${format}${format === told.own_format ? " ★" : ""}: ${number(tokens)}`))),
    el("pre", { class: "hud" }, told.text),
  ];
}

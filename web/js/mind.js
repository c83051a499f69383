// The panel of one agent: its knowledge, its recent actions, and its HUD in every format.

import { api } from "./api.js";
import { ask, count, el, number, render, time } from "./dom.js";
import { pulse } from "./members.js";
import { loadTelemetry, telemetryParts } from "./telemetry.js";

// The agent that was shown last, its format, the last response, and the last error.
let shown = emptyState(null);

function emptyState(key) {
  return { key, format: null, mind: null, telemetry: null, error: null, loading: false };
}

export function showMind(panel, page, agent, actions) {
  const key = `${page.name}/${agent.id}`;
  if (shown.key !== key) shown = emptyState(key);
  draw(panel, page, agent, actions);
  load(panel, page, agent, actions);
}

// One request at a time. A response that arrives after the user opened another agent is not drawn.
async function load(panel, page, agent, actions, format = shown.format) {
  const current = shown;
  if (current.loading && format === current.format) return;
  Object.assign(current, { loading: true, format });
  let { mind, telemetry } = current;
  let message = null;
  try {
    mind = await api.agentMind(page.name, agent.id, format ?? undefined);
    telemetry = await loadTelemetry(page.name, agent.id);
  } catch (error) {
    message = error.message;
  }
  if (current.format !== format) return;
  Object.assign(current, { loading: false, mind, telemetry, error: message });
  if (shown === current && page.agent === agent.id && page.world) draw(panel, page, agent, actions);
}

function draw(panel, page, agent, actions) {
  const { mind, telemetry, error } = shown;
  const { runCommand, editAgent, wake, close } = actions;
  const button = (label, onClick) => el("button", { type: "button", data: { key: label }, onclick: onClick }, label);
  const retire = async () => {
    if (
      await ask(`Retire ${agent.name} for good?`, {
        confirm: "Retire",
        about: "Its messages stay. The agent never thinks again, and its room is closed.",
      })
    ) {
      close();
      runCommand({ command: "retire", agent: agent.id });
    }
  };
  const usage = page.usage.get(agent.id);
  const message = error ?? mind?.error;
  render(
    panel,
    el(
      "div",
      { class: "mind", data: { mind: agent.id, key: `mind-${page.name}-${agent.id}` } },
      el(
        "h2",
        {},
        el("span", {}, pulse(page, agent), " ", agent.name),
        el("button", { type: "button", "aria-label": "Close", onclick: close }, "×"),
      ),
      el(
        "p",
        { class: "quiet" },
        `${agent.kind} ${agent.id} · model ${agent.model} · every ${number(agent.interval)} s · ${count(agent.beats, "heartbeat")}`,
      ),
      usage
        ? el(
            "p",
            { class: "quiet usage" },
            `Last heartbeat: ${number(usage.prompt_tokens)} prompt tokens${prefillText(usage)}, ${number(usage.completion_tokens)} completion tokens`,
          )
        : null,
      el("p", {}, agent.prompt),
      el(
        "div",
        { class: "bar" },
        agent.paused
          ? button("Resume", () => runCommand({ command: "resume", agent: agent.id }))
          : button("Pause", () => runCommand({ command: "pause", agent: agent.id })),
        button("Think now", () => wake(agent)),
        button("Change…", () => editAgent(agent)),
        button("Retire", retire),
      ),
      agent.can_create_agents
        ? el("p", { class: "quiet", data: { key: "rights" } }, "May create, change and retire agents.")
        : null,
      agent.asleep ? el("p", { class: "quiet" }, `asleep until ${time(agent.asleep)}`) : null,
      message ? el("p", { class: "error", role: "status", data: { key: "error" } }, message) : null,
      mind
        ? [...mindParts(mind, (format) => load(panel, page, agent, actions, format)), ...telemetryParts(telemetry)]
        : error
          ? null
          : el("p", { class: "quiet" }, "…"),
    ),
  );
}

// A remote model does not report how much of the prompt it prefilled.
const prefillText = ({ prompt_tokens, prefilled_tokens }) =>
  prefilled_tokens
    ? `, ${number(prefilled_tokens)} of them prefilled (${number((100 * prefilled_tokens) / prompt_tokens)} %)`
    : "";

function mindParts({ hud, knowledge, recent_actions, tokens_by_format: formats, own_format }, load) {
  const baseline = formats.compact_json || 1;
  const actionRows = [...recent_actions].reverse().map((action) => {
    const { type, timestamp, refused, ...rest } = action;
    const values = Object.entries(rest)
      .map(([name, value]) => `${name}: ${value}`)
      .join(", ");
    return el(
      "tr",
      {},
      el("td", {}, timestamp.slice(11)),
      el("td", {}, type),
      el("td", {}, values),
      el("td", { class: refused ? "error" : "" }, refused ?? "done"),
    );
  });
  const label = (format, tokens) =>
    `${format}${format === own_format ? " ★" : ""}: ${tokens === null ? "does not fit" : number(tokens)}`;
  return [
    hud?.notice ? el("p", { class: "quiet" }, hud.notice) : null,
    el("h3", {}, hud ? `Knowledge (${number(hud.knowledge[0])} of ${number(hud.knowledge[1])} tokens)` : "Knowledge"),
    el("pre", { class: "knowledge", tabindex: "0", data: { key: "knowledge" } }, JSON.stringify(knowledge, null, 2)),
    el("h3", {}, "Recent actions"),
    actionRows.length
      ? el("table", { class: "recent-actions" }, el("tbody", {}, actionRows))
      : el("p", { class: "quiet" }, "None yet."),
    el(
      "h3",
      {},
      hud ? `What it sees: HUD (${number(hud.tokens)} of ${number(hud.budget)} tokens)` : "What it sees (HUD)",
    ),
    hud?.recalled.length
      ? el("p", { class: "quiet" }, `Recalled because they are relevant now: #${hud.recalled.join(", #")}`)
      : null,
    el(
      "div",
      { class: "bar", role: "group", "aria-label": "Format", data: { key: "formats" } },
      Object.entries(formats).map(([format, tokens]) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(format === hud?.format),
            data: { format },
            title: tokens === null ? "" : `${number((100 * tokens) / baseline)} % of compact JSON`,
            onclick: () => load(format),
          },
          label(format, tokens),
        ),
      ),
    ),
    hud ? el("pre", { class: "hud", tabindex: "0", data: { key: "hud" } }, hud.text) : null,
  ];
}

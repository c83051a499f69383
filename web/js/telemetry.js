// The tokens of an agent's heartbeats over time: a bar for each heartbeat by section of the HUD, and a table by format.

import { api } from "./api.js";
import { count, el, number, svg, time } from "./dom.js";

const SECTIONS = {
  shared: "system and meta",
  self: "self",
  recent_actions: "recent actions",
  rooms: "rooms",
};
// Heartbeats that are drawn.
const SHOWN = 60;
const HEIGHT = 80;
const BAR = 5;

export const loadTelemetry = (world, agent) => api.telemetry(world, agent, SHOWN);

export function telemetryParts(telemetry) {
  const heading = el("h3", {}, "Tokens over time");
  if (!telemetry?.heartbeats.length)
    return [heading, el("p", { class: "quiet", data: { key: "no-telemetry" } }, "No heartbeats recorded yet.")];
  const { heartbeats, formats } = telemetry;
  const last = heartbeats.at(-1);
  return [
    heading,
    el(
      "figure",
      { class: "telemetry", data: { key: "telemetry", beats: heartbeats.length } },
      chart(heartbeats),
      el(
        "figcaption",
        { class: "quiet" },
        Object.entries(SECTIONS).map(([name, label]) =>
          el("span", { class: `section-${name}` }, `${label} ${number(last.sections[name])}`),
        ),
      ),
    ),
    managed(heartbeats),
    el(
      "table",
      { class: "formats", data: { key: "telemetry-formats" } },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["Format", "Tokens (mean)", "Saved"].map((text) => el("th", {}, text)),
        ),
      ),
      el(
        "tbody",
        {},
        Object.entries(formats).map(([format, total]) =>
          el(
            "tr",
            { data: { key: format, measured: format } },
            el("td", {}, format),
            el("td", {}, number(total.mean_tokens)),
            el("td", {}, `${number(total.saved_percent)} %`),
          ),
        ),
      ),
    ),
  ];
}

// How full the HUDs were, and what the settings rooms.cooling_tokens and rooms.summaries shortened.
function managed(heartbeats) {
  const sum = (key) => heartbeats.reduce((all, beat) => all + beat[key], 0);
  const parts = [
    `The last HUD filled ${number(heartbeats.at(-1).pressure_percent)} % of its budget.`,
    sum("cooled_messages") ? `${count(sum("cooled_messages"), "message")} shortened in HUDs.` : "",
    sum("summarized_messages") ? `${count(sum("summarized_messages"), "own message")} summarized under pressure.` : "",
  ];
  return el("p", { class: "quiet managed", data: { key: "managed" } }, parts.filter(Boolean).join(" "));
}

function chart(heartbeats) {
  const most = Math.max(...heartbeats.map((beat) => beat.tokens), 1);
  const bars = heartbeats.map((beat, n) => {
    let top = HEIGHT;
    const parts = Object.keys(SECTIONS).map((name) => {
      const height = (HEIGHT * beat.sections[name]) / most;
      top -= height;
      return svg("rect", { class: `section-${name}`, x: n * BAR, y: top, width: BAR - 1, height });
    });
    const title = svg("title");
    title.textContent = `${time(beat.at)}: ${number(beat.tokens)} tokens in ${beat.format}`;
    return svg("g", {}, title, ...parts);
  });
  const width = SHOWN * BAR;
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      role: "img",
      "aria-label": `Tokens of the last ${heartbeats.length} heartbeats, up to ${number(most)}`,
    },
    ...bars,
  );
}

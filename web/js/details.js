// The view of one paragraph: why it left or came back, its tokens, and what they attended to.

import { editChunks } from "./actions.js";
import { api } from "./api.js";
import { emit } from "./bus.js";
import { count, el, number, svg, time } from "./dom.js";
import { explainHistory } from "./reasons.js";
import { normalize, shadeStyle } from "./shade.js";
import { state } from "./state.js";

export function chunkDetails(panel, { chunk: id }) {
  const body = el("div", {});
  panel.append(body);
  const load = async () => {
    try {
      const details = await api.chunk(state.name, id);
      const tokens = details.tokens.filter((token) => !token.template);
      const values = tokens.map((token) => token.brightness);
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const tokenNodes = tokens.map((token) => {
        const node = el(
          "span",
          {
            class: "token",
            data: { position: token.position },
            title: `${JSON.stringify(token.text)} · id ${token.id} · brightness ${number(token.brightness)}${token.live ? "" : " · out of context"}`,
          },
          token.text,
        );
        const { colour, ground } = shadeStyle(normalize(token.brightness, least, most));
        Object.assign(node.style, { color: colour, background: ground });
        return node;
      });
      const text = el("div", { class: "tokens" }, ...tokenNodes);
      const attention = el("div", {});
      if (details.chunk.role === "assistant") {
        attention.append(el("p", { class: "quiet" }, "Click a token to see what it attended to."));
        for (const node of tokenNodes) {
          node.tabIndex = 0;
          node.setAttribute("role", "button");
        }
        const show = (event) => {
          const node = event.target.closest(".token");
          if (node) showTokenAttention(attention, node.dataset.position);
        };
        text.addEventListener("click", show);
        text.addEventListener("keydown", (event) => {
          if (event.key === "Enter") show(event);
        });
      }
      body.replaceChildren(
        el(
          "p",
          {},
          details.chunk.live ? "In the context" : "Out of context",
          details.chunk.pinned ? ", pinned" : "",
          `, ${count(details.chunk.tokens, "token")}.`,
        ),
        text,
        attention,
        el("h3", {}, "History"),
        details.history.length
          ? el("ol", {}, ...details.history.map((entry) => el("li", {}, `${time(entry.at)}: ${explainHistory(entry)}`)))
          : el("p", { class: "quiet" }, "It has always been in the context."),
        figures(id, details),
        el(
          "div",
          { class: "bar" },
          details.chunk.live
            ? null
            : el(
                "button",
                { type: "button", onclick: () => editChunks("resurrect", [id], details.chunk.text) },
                "Bring back",
              ),
          el(
            "button",
            { type: "button", onclick: () => emit("jump", { turn: details.chunk.turn, chunk: id }) },
            "Show in the chat",
          ),
          el(
            "button",
            {
              type: "button",
              onclick: () => editChunks(details.chunk.pinned ? "unpin" : "pin", [id], details.chunk.text),
            },
            details.chunk.pinned ? "Unpin" : "Pin",
          ),
        ),
      );
    } catch (error) {
      body.replaceChildren(el("p", { class: "error" }, error.message));
    }
  };
  load();
  return {
    event: (event) => {
      if (["done", "changed"].includes(event.type)) load();
    },
  };
}

function figures(id, details) {
  const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
  return el(
    "details",
    {},
    el("summary", {}, "Details"),
    el(
      "dl",
      {},
      ...pair("id", id),
      ...pair("brightest token", number(details.chunk.peak)),
      ...pair("votes", number(details.votes)),
      ...pair("attention in total", details.attention.toFixed(3)),
      ...pair(
        "share per token",
        details.share === null ? "not measured yet" : `${(details.share * 1000).toFixed(3)} ‰ per step`,
      ),
      ...(details.pair ? pair("belongs to", details.pair) : []),
    ),
    details.history.some((entry) => entry.reason)
      ? el("ol", {}, ...details.history.map((entry) => el("li", {}, `${entry.action}: ${entry.reason}`)))
      : null,
  );
}

// The attention of one token as a chart: a bar for each paragraph, and the tokens with the largest shares.
async function showTokenAttention(box, position) {
  let attention;
  try {
    attention = await api.tokenAttention(state.name, position);
  } catch (error) {
    box.replaceChildren(el("p", { class: "quiet" }, error.message));
    return;
  }
  const rows = [
    ["system prompt", attention.system_prompt],
    ["this answer", attention.answer],
    ...attention.chunks.slice(0, 10),
  ];
  const most = Math.max(...rows.map(([, share]) => share), 1e-6),
    rowHeight = 16;
  const bars = rows.flatMap(([name, share], n) => {
    const label = svg("text", { x: 2, y: n * rowHeight + 12 });
    label.textContent = name;
    const value = svg("text", { x: 96 + (share / most) * 240, y: n * rowHeight + 12 });
    value.textContent = `${(share * 100).toFixed(1)} %`;
    return [
      label,
      svg("rect", {
        x: 92,
        y: n * rowHeight + 3,
        width: (share / most) * 240,
        height: rowHeight - 5,
        class: "chart-gold",
      }),
      value,
    ];
  });
  const chart = svg(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 400 ${rows.length * rowHeight + 4}`,
      role: "img",
      "aria-label": `attention of ${JSON.stringify(attention.text)}: ${rows.map(([name, share]) => `${name} ${(share * 100).toFixed(0)} percent`).join(", ")}`,
    },
    ...bars,
  );
  chart.style.height = `${rows.length * 1.1}rem`;
  box.replaceChildren(
    el("h3", {}, `Attention of “${attention.text.trim()}”`),
    chart,
    el(
      "p",
      { class: "quiet" },
      "Largest shares: ",
      ...attention.tokens
        .slice(0, 8)
        .flatMap((token) => [
          el("b", {}, token.text.trim() || "·"),
          ` (${(token.share * 100).toFixed(1)} %, ${token.chunk}) `,
        ]),
    ),
  );
}

// The members of a room: their attention, requests to join, and who may be invited.

import { count, el, number, time } from "./dom.js";

const ARCHITECT = 0;

export function membersPanel(page, room, actions) {
  const { runCommand, editAgent } = actions;
  return el(
    "div",
    { data: { key: "members" } },
    el("h2", {}, "Members"),
    room.requests.map((request) =>
      el(
        "div",
        { class: "row request", data: { request: request.id, key: `request-${request.id}` } },
        el("p", {}, `${request.name} asks to join with the key “${request.key}”.`),
        el(
          "div",
          { class: "bar" },
          el(
            "button",
            { type: "button", onclick: () => runCommand({ command: "grant", room: room.id, request: request.id }) },
            "Accept",
          ),
          el(
            "button",
            { type: "button", onclick: () => runCommand({ command: "deny", room: room.id, request: request.id }) },
            "Reject",
          ),
        ),
      ),
    ),
    room.members.map((member) => memberRow(page, member, room, actions)),
    room.keys.length ? el("p", { class: "quiet", data: { key: "keys" } }, `Keys: ${room.keys.join(", ")}`) : null,
    el(
      "div",
      { class: "bar", data: { key: "new-agent" } },
      el("button", { type: "button", id: "new-agent", onclick: () => editAgent() }, "New agent here"),
      inviteList(page, room, actions),
    ),
  );
}

// The agents that are not in the room; choosing one puts it there.
function inviteList(page, room, { runCommand }) {
  const members = new Set(room.members.map((member) => member.id));
  const others = page.world.agents.filter((agent) => !members.has(agent.id));
  if (!others.length) return null;
  return el(
    "select",
    {
      id: "invite",
      "aria-label": "Invite an agent to this room",
      data: { key: "invite" },
      onchange: (event) => {
        const agent = Number(event.target.value);
        event.target.value = "";
        runCommand({ command: "invite", agent, room: room.id });
      },
    },
    el("option", { value: "" }, "Invite…"),
    others.map((agent) => el("option", { value: agent.id }, agent.name)),
  );
}

function memberRow(page, member, room, { runCommand, setAttention, openAgent }) {
  const key = `${member.id}-${room.id}`;
  if (member.id === ARCHITECT)
    return el("div", { class: "agent", data: { key } }, el("span", {}, "The Architect (you)"));
  const agent = page.world.agents.find((other) => other.id === member.id);
  if (!agent) return el("div", { class: "agent", data: { key } }, member.name);
  /** @type {HTMLInputElement | null} */
  const dragged = document.querySelector(`input[data-of="${key}"]:active`);
  const set = Number.parseInt(dragged?.value ?? page.pendingAttention.get(key) ?? "", 10);
  const share =
    set >= 0
      ? `${set} %`
      : member.attention === "%*"
        ? `${number(member.share)} % (auto)`
        : `${number(member.share)} %`;
  const slider = el("input", {
    type: "range",
    min: "0",
    max: "100",
    step: "5",
    value: String(set >= 0 ? set : Math.round(member.share)),
    data: { of: key },
    "aria-label": `Attention of ${agent.name} to this room`,
    oninput: (event) => {
      event.target.previousElementSibling.textContent = `${event.target.value} %`;
    },
    onchange: (event) =>
      setAttention({ command: "attend", agent: agent.id, room: room.id, value: `${event.target.value}%` }, key),
  });
  return el(
    "div",
    { class: "agent", data: { agent: agent.id, key } },
    el(
      "button",
      {
        type: "button",
        title: `${agent.name}'s mind`,
        onclick: () => openAgent(agent.id),
      },
      pulse(page, agent),
      el("span", {}, agent.name),
      el("small", { class: "quiet" }, agentStatus(agent)),
    ),
    el("label", {}, "attention", el("output", {}, share), slider),
    member.attention === "%*"
      ? null
      : el(
          "button",
          {
            type: "button",
            class: "link",
            onclick: () => runCommand({ command: "attend", agent: agent.id, room: room.id, value: "%*" }),
          },
          "Auto",
        ),
    agent.id === room.id
      ? null
      : el(
          "button",
          {
            type: "button",
            class: "link remove",
            data: { key: `remove-${key}` },
            onclick: () => runCommand({ command: "remove", agent: agent.id, room: room.id }),
          },
          "Remove from this room",
        ),
  );
}

export function pulse(page, agent) {
  const thinking = page.world.thinking === agent.id;
  return el("i", { class: thinking ? "pulse beats" : "pulse", data: { pulse: agent.id }, "aria-hidden": "true" });
}

function agentStatus(agent) {
  if (agent.paused) return "paused";
  if (agent.asleep) return `asleep until ${time(agent.asleep)}`;
  return `every ${number(agent.interval)} s, ${count(agent.beats, "heartbeat")}`;
}

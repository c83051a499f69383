// The dialog that creates or changes an agent: who it is, its model, and what it may do.

import { $, el } from "./dom.js";

// Opens the dialog. `save` sends the command and returns an error message, or null when the command was executed.
export function openAgentForm(world, room, agent, save) {
  const dialog = $("ask");
  const name = el("input", { id: "agent-name", type: "text", value: agent?.name ?? "", required: true, maxlength: 50 });
  const kind = select("agent-kind", { persona: "Persona: a character", bot: "Bot: a task" }, agent?.kind ?? "persona");
  const prompt = el("textarea", { id: "agent-prompt", rows: 4, maxlength: 2000 }, agent?.prompt ?? "");
  const model = select(
    "agent-model",
    Object.fromEntries(world.models.map((name) => [name, name])),
    agent?.model ?? world.models[0],
  );
  const interval = el("input", {
    id: "agent-interval",
    type: "number",
    min: 1,
    max: 10,
    step: 0.1,
    value: agent?.interval ?? 10,
  });
  const manages = el("input", { id: "agent-manages", type: "checkbox", checked: agent?.can_create_agents ?? false });
  const message = el("p", { class: "error", role: "alert", hidden: true });
  const field = (label, input) => el("label", { for: input.id }, label, input);
  const form = el(
    "form",
    { method: "dialog", class: "agent-form" },
    el("strong", {}, agent ? `Change ${agent.name}` : "New agent"),
    field("Name", name),
    agent ? null : field("Kind", kind),
    field("Background of a persona, or task of a bot", prompt),
    field("Model", model),
    agent ? field("Seconds between heartbeats", interval) : null,
    el("label", { class: "check", for: manages.id }, manages, "May create, change and retire agents"),
    message,
    el(
      "div",
      { class: "bar" },
      el("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
      el("button", { type: "submit" }, agent ? "Save" : "Create"),
    ),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const error = await save(agent ? changes() : creation());
    if (error === null) dialog.close("yes");
    message.textContent = error ?? "";
    message.hidden = error === null;
  });
  const creation = () => ({
    command: "create",
    name: name.value,
    prompt: prompt.value,
    kind: kind.value,
    room,
    model: model.value,
    can_create_agents: manages.checked,
  });
  // Only what the user changed is sent: an agent may have changed its name meanwhile.
  const changes = () => {
    const values = {
      name: name.value,
      prompt: prompt.value,
      model: model.value,
      interval: Number(interval.value),
      can_create_agents: manages.checked,
    };
    const changed = Object.entries(values).filter(([key, value]) => value !== agent[key]);
    return changed.length ? { command: "alter", agent: agent.id, ...Object.fromEntries(changed) } : null;
  };
  dialog.replaceChildren(form);
  dialog.onclose = null;
  dialog.showModal();
  name.select();
}

function select(id, options, value) {
  return el(
    "select",
    { id },
    Object.entries(options).map(([key, label]) => el("option", { value: key, selected: key === value }, label)),
  );
}

// The view “Model”: which model this chat uses, the files of this machine, the catalogue, and servers of other programs.

import { copyText } from "./actions.js";
import { api } from "./api.js";
import { el, number, toast } from "./dom.js";
import { refresh, state } from "./state.js";

// The usual addresses of other programs on this machine.
const SERVERS = {
  KoboldCPP: "http://127.0.0.1:5001",
  Ollama: "http://127.0.0.1:11434",
  "LM Studio": "http://127.0.0.1:1234",
  "llama-server": "http://127.0.0.1:8080",
  vLLM: "http://127.0.0.1:8000",
};

export function bytes(n) {
  if (n >= 1e9) return `${number(n / 1e9)} GB`;
  if (n >= 1e6) return `${Math.round(n / 1e6)} MB`;
  return `${Math.max(1, Math.round(n / 1e3))} kB`;
}

const fitText = (fits) =>
  fits === null || fits === undefined ? "" : fits ? "fits this machine" : "too large for the memory of this machine";

const pendingKey = (name) => `model:${name}`;

/** The model of a chat that is not stored yet, under its final name: it is chosen before the first message. */
export async function sendPendingModel(from, name) {
  const model = localStorage.getItem(pendingKey(from));
  if (!model) return;
  await api.chooseModel(name, model);
  localStorage.removeItem(pendingKey(from));
}

/** @param {HTMLElement} panel */
export function models(panel) {
  const local = el("div", {}, el("p", { class: "quiet" }, "…"));
  const catalogue = el("div", {});
  const reload = () => load(local, catalogue);
  panel.append(local, remoteSection(reload), catalogue);
  reload();
  return {
    download: (event) => {
      drawDownload(catalogue, event);
      if (event.finished && !event.error) reload();
    },
  };
}

const downloads = new Map(); // the last event of each download, by model

// The progress of a download at its row, or why it has failed.
function drawDownload(catalogue, event) {
  if (event.finished && !event.error) downloads.delete(event.name);
  else downloads.set(event.name, event);
  const row = [...catalogue.querySelectorAll(".row")].find((one) => one.dataset.model === event.name);
  row?.querySelector(".download")?.replaceChildren(...downloadParts(event.name));
}

function downloadParts(name) {
  const event = downloads.get(name);
  if (event && !event.finished) {
    const share = event.all ? event.done / event.all : 0;
    return [
      el("progress", { max: "1", value: String(share), "aria-label": `Download of ${name}` }),
      el("span", { class: "quiet", role: "status" }, ` ${bytes(event.done)} of ${bytes(event.all)}`),
    ];
  }
  const button = el("button", { type: "button", class: "outlined" }, event ? "Try again" : "Download");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await api.downloadModel(name);
      downloads.set(name, { name, done: 0, all: 0, finished: false, error: null });
      button.parentElement?.replaceChildren(...downloadParts(name));
    } catch (error) {
      button.disabled = false;
      toast(error.message, { error: true });
    }
  });
  return [button, event ? el("p", { class: "error", role: "alert" }, event.error) : null].filter(Boolean);
}

async function load(box, catalogue) {
  const { name } = state;
  try {
    const [choices, { model }, status] = await Promise.all([api.models(), api.options(name), api.status()]);
    const own = model ?? localStorage.getItem(pendingKey(name));
    box.replaceChildren(...localSections(choices, own, abilities(status), () => load(box, catalogue)));
    catalogue.replaceChildren(...downloadSection(choices));
  } catch (error) {
    box.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

// Sets the model of the open chat; null is the one that the server was started with.
async function use(model, button, done) {
  const { name } = state;
  const label = button.textContent;
  button.disabled = true;
  button.textContent = "Loading…";
  try {
    if (state.snapshot?.fresh) {
      if (model === null) localStorage.removeItem(pendingKey(name));
      else localStorage.setItem(pendingKey(name), model);
    } else await api.chooseModel(name, model);
    toast(model === null ? "This chat uses the model of the server again." : `This chat uses ${model}.`);
    await refresh();
    done();
  } catch (error) {
    toast(error.message, { error: true });
  } finally {
    button.disabled = false;
    button.textContent = label;
  }
}

function useButton(model, done, label = "Use in this chat") {
  const button = el("button", { type: "button", class: "outlined use" }, label);
  button.addEventListener("click", () => use(model, button, done));
  return button;
}

/** What the model of the server can do, as far as that is not everything. */
function abilities({ attention, kv_edit, kv_edit_reason }) {
  return [
    attention ? null : "It reports no attention, so the oldest paragraphs leave first.",
    kv_edit === false
      ? `After a paragraph leaves or comes back, the rest of the context is read again: ${kv_edit_reason}.`
      : null,
  ]
    .filter(Boolean)
    .join(" ");
}

function localSections({ current, installed, memory_bytes }, own, limits, done) {
  const memory = memory_bytes ? ` A model can use ${bytes(memory_bytes)} of memory here.` : "";
  const isUsed = (model) => (own === null ? model.current : own === model.name);
  return [
    el("h3", {}, "This chat"),
    el(
      "div",
      { class: "row", id: "model-current" },
      el("b", {}, own ?? current),
      el(
        "p",
        { class: "quiet" },
        own === null ? "The model that the server was started with." : `The server was started with ${current}. `,
        own === null ? null : useButton(null, done, `Use ${current}`),
      ),
      limits && own === null ? el("p", { class: "quiet", id: "model-abilities" }, limits) : null,
      el(
        "p",
        { class: "quiet" },
        `A chat keeps its text when its model changes: it is tokenized for the new one with the next message.${memory}`,
      ),
    ),
    el("h3", {}, "On this machine"),
    ...installed.map((model) =>
      row(
        model.name,
        [
          bytes(model.bytes),
          model.quantization,
          model.context && `${number(model.context)} tokens`,
          model.problem ? null : `needs ${bytes(model.memory_bytes)} of memory`,
          fitText(model.fits),
        ],
        isUsed(model)
          ? el("span", { class: "badge" }, "in use")
          : model.problem
            ? el("p", { class: "error" }, `It cannot be used: ${model.problem}`)
            : useButton(model.current ? null : model.name, done),
      ),
    ),
    installed.length ? null : el("p", { class: "quiet" }, "No model files yet."),
  ].filter(Boolean);
}

function downloadSection({ downloadable, pull_command }) {
  return [
    downloadable.length ? el("h3", {}, "To download") : null,
    ...downloadable.map((model) =>
      row(
        model.name,
        [`${bytes(model.download_bytes)} to download`, fitText(model.fits), model.license],
        el("p", { class: "quiet" }, model.about),
        el("div", { class: "bar download" }, ...downloadParts(model.name)),
        el("details", {}, el("summary", {}, "By a command"), commands([pull_command.replace("MODEL", model.name)])),
      ),
    ),
  ].filter(Boolean);
}

const row = (name, facts, ...more) =>
  el(
    "div",
    { class: "row", data: { model: name } },
    el("b", {}, name),
    el("span", { class: "quiet" }, ` ${facts.filter(Boolean).join(" · ")}`),
    ...more,
  );

const commands = (lines) =>
  el(
    "div",
    { class: "command" },
    el("code", {}, lines.join("\n")),
    el("button", { type: "button", onclick: () => copyText(lines.join("\n"), "Command copied.") }, "Copy"),
  );

function remoteSection(done) {
  const result = el("div", { role: "status", id: "test-result" });
  const input = el("input", {
    id: "model-address",
    placeholder: "http://127.0.0.1:11434",
    autocomplete: "off",
    spellcheck: "false",
  });
  const button = el("button", { type: "submit", class: "outlined" }, "Test connection");
  const test = async (event) => {
    event.preventDefault();
    const address = input.value.trim();
    if (!address) {
      input.focus();
      return;
    }
    button.disabled = true;
    result.replaceChildren(el("p", { class: "quiet" }, "Testing…"));
    try {
      result.replaceChildren(...report(await api.testModelServer(address), done));
    } catch (error) {
      const program = Object.keys(SERVERS).find((name) => SERVERS[name] === address) ?? "the program";
      const about = `Nothing answers at ${address}. Does ${program} run there?`;
      result.replaceChildren(
        ...(error.status === 503
          ? [
              el("p", { class: "error" }, about),
              el(
                "details",
                {},
                el("summary", { class: "quiet" }, "Details"),
                el("p", { class: "quiet" }, error.message),
              ),
            ]
          : [el("p", { class: "error" }, error.message)]),
      );
    } finally {
      button.disabled = false;
    }
  };
  return el(
    "section",
    {},
    el("h3", {}, "On another server"),
    el(
      "p",
      { class: "quiet" },
      "Click a program or type an address, test the connection, then choose one of its models. Addresses of other machines " +
        "are allowed by the setting model.servers.",
    ),
    el(
      "div",
      { class: "bar" },
      ...Object.entries(SERVERS).map(([name, address]) =>
        el(
          "button",
          {
            type: "button",
            class: "outlined",
            onclick: () => {
              input.value = address;
              input.focus();
            },
          },
          name,
        ),
      ),
    ),
    el(
      "form",
      { class: "bar", onsubmit: test },
      el("label", { class: "hidden", for: "model-address" }, "Address of the server"),
      input,
      button,
    ),
    result,
  );
}

function report({ kind, milliseconds, models: found }, done) {
  const about = `${kind} answered in ${number(milliseconds)} ms${found.length ? "." : ", but it has no models."}`;
  return [
    el("p", {}, el("b", {}, "Connected. "), about),
    ...found.map(({ name, address }) => row(name, [], useButton(address, done))),
  ];
}

// The HTTP client. Every call returns the response's value, or throws an Error whose message can be shown.

import { ask } from "./dom.js";

const BASE = "/api/halo/v1";

function headers(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

let keyPrompt = null;

// Asks for the key once, however many calls need it.
async function askForKey() {
  keyPrompt ??= ask("This server needs an API key.", {
    label: "Key",
    kind: "password",
    about: "The browser forgets it when this window is closed.",
  });
  const key = await keyPrompt;
  keyPrompt = null;
  if (key) sessionStorage.setItem("key", key);
  return key;
}

// Sends a request, with the key if the server asks for one.
async function request(method, path, body, type) {
  for (;;) {
    let response;
    try {
      response = await fetch(BASE + path, { method, headers: headers(type ? { "content-type": type } : {}), body });
    } catch {
      throw new ServerUnreachable();
    }
    if (response.status === 401 && (await askForKey())) continue;
    return response;
  }
}

// Sends a file. `fetch` does not tell how much of a body has been sent.
async function send(path, file, onProgress) {
  for (;;) {
    const response = await new Promise((resolve, reject) => {
      const sending = new XMLHttpRequest();
      sending.open("POST", BASE + path);
      for (const [name, value] of Object.entries(headers({ "content-type": "application/octet-stream" })))
        sending.setRequestHeader(name, value);
      sending.upload.onprogress = ({ loaded, total }) => onProgress(loaded, total);
      sending.onerror = () => reject(new ServerUnreachable());
      sending.onload = () => resolve(new Response(sending.response, { status: sending.status }));
      sending.send(file);
    });
    if (response.status === 401 && (await askForKey())) continue;
    return readJson(response);
  }
}

async function download(path) {
  const response = await request("GET", path);
  return response.ok ? response.blob() : readJson(response);
}

async function call(method, path, body) {
  const json = body === undefined ? undefined : JSON.stringify(body);
  return readJson(await request(method, path, json, json && "application/json"));
}

// The value of a response; throws the error that it reports.
async function readJson(response) {
  if (response.status === 204) return null;
  const text = await response.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    /* A body that is not JSON: the status below is all there is to report. */
  }
  if (!response.ok) throw new ApiError(response.status, value?.error ?? `the server answered ${response.status}`);
  return value;
}

// The server answered with an error.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class ServerUnreachable extends Error {
  constructor() {
    super("the server cannot be reached");
  }
}

const chat = (name) => `/conversations/${encodeURIComponent(name)}`;
const world = (name) => `/worlds/${encodeURIComponent(name)}`;
const query = (values) => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== undefined));

export const api = {
  status: () => call("GET", "/status"),
  conversations: () => call("GET", "/conversations"),
  conversation: (name) => call("GET", chat(name)),
  chatState: (name) => call("GET", `${chat(name)}/state`),
  transcript: (name, values) => call("GET", `${chat(name)}/transcript?${query(values)}`),
  outline: (name, parts) => call("GET", `${chat(name)}/outline?${query({ parts })}`),
  searchAll: (q, offset = 0) => call("GET", `/search?${query({ q, offset })}`),
  exportConversation: (name, format) => download(`${chat(name)}/export?${query({ format })}`),
  importFile: (file, name, id, onProgress) =>
    send(`/import?${query({ file_name: file.name, name, id })}`, file, onProgress),
  deletedConversations: () => call("GET", "/deleted_conversations"),
  restoreConversation: (name) => call("POST", `${chat(name)}/forget/cancel`, {}),
  pendingForgets: (name) => call("GET", `${chat(name)}/forget`),
  forget: (name, selection) => call("POST", `${chat(name)}/forget`, selection),
  cancelForget: (name, selection) => call("POST", `${chat(name)}/forget/cancel`, selection),
  sendMessage: (name, text, id) => call("POST", `${chat(name)}/messages`, { text, id }),
  editLast: (name, text) => call("POST", `${chat(name)}/edit_last`, { text }),
  continueAnswer: (name) => call("POST", `${chat(name)}/continue`),
  replaceAnswer: (name, text) => call("PUT", `${chat(name)}/answer`, { text }),
  options: (name) => call("GET", `${chat(name)}/options`),
  setOptions: (name, options) => call("PUT", `${chat(name)}/options`, options),
  chooseModel: (name, model) => call("PUT", `${chat(name)}/model`, { model }),
  models: () => call("GET", "/models"),
  downloadModel: (name) => call("POST", "/models/download", { name }),
  testModelServer: (address) => call("POST", "/models/test", { address }),
  regenerate: (name) => call("POST", `${chat(name)}/regenerate`),
  deleted: (name, values) => call("GET", `${chat(name)}/deleted?${query(values)}`),
  variants: (name) => call("GET", `${chat(name)}/variants`),
  chooseVariant: (name, turn) => call("POST", `${chat(name)}/variants`, { turn }),
  stop: (name) => call("POST", `${chat(name)}/stop`),
  editChunks: (name, edit, chunks) => call("POST", `${chat(name)}/edits`, { edit, chunks }),
  undo: (name, undo) => call("POST", `${chat(name)}/undo`, { undo }),
  branch: (name, to, turn) => call("POST", `${chat(name)}/branch`, { name: to, turn }),
  rename: (name, to) => call("POST", `${chat(name)}/rename`, { name: to }),
  chunk: (name, chunk) => call("GET", `${chat(name)}/chunks/${chunk}`),
  graveyard: (name, values) => call("GET", `${chat(name)}/graveyard?${query(values)}`),
  search: (name, q, limit = 20) => call("GET", `${chat(name)}/search?${query({ q, limit })}`),
  turns: (name) => call("GET", `${chat(name)}/turns`),
  tokenAttention: (name, position) => call("GET", `${chat(name)}/attention/${position}`),
  stats: (name) => call("GET", `${chat(name)}/stats`),
  extract: (name) => call("GET", `${chat(name)}/extract`),
  deleteConversation: (name) => call("DELETE", `${chat(name)}?${query({ confirm: name })}`),
  brightness: (name) => call("GET", `${chat(name)}/brightness`),
  contextAtTurn: (name, turn) => call("GET", `${chat(name)}/turns/${turn}/context`),
  notes: (name) => call("GET", `${chat(name)}/notes`),
  writeNotes: (name, file, text) => call("PUT", `${chat(name)}/notes`, { file, text }),
  captures: (name) => call("GET", `${chat(name)}/captures`),
  capture: (name, id) => call("GET", `${chat(name)}/captures/${id}`),
  setRecording: (name, recording) => call("PUT", `${chat(name)}/recording`, { recording }),
  memories: (name, q) => call("GET", `${chat(name)}/memories?${query({ q })}`),
  updateMemory: (name, id, values) => call("PUT", `${chat(name)}/memories/${id}`, values),
  deleteMemory: (name, id) => call("DELETE", `${chat(name)}/memories/${id}`),
  worlds: () => call("GET", "/worlds"),
  createWorld: (name, file) => call("POST", "/worlds", { name, file }),
  deleteWorld: (name) => call("DELETE", world(name)),
  world: (name) => call("GET", world(name)),
  roomMessages: (name, room, before) => call("GET", `${world(name)}/rooms/${room}/messages?${query({ before })}`),
  agentMind: (name, agent, format) => call("GET", `${world(name)}/agents/${agent}/hud?${query({ format })}`),
  telemetry: (name, agent, limit) => call("GET", `${world(name)}/telemetry?${query({ agent, limit })}`),
  worldCommand: (name, command) => call("POST", `${world(name)}/commands`, command),
  setClock: (name, values) => call("PUT", `${world(name)}/clock`, values),
  memoryOrigins: (name, id) => call("GET", `/conversations/${encodeURIComponent(name)}/memories/${id}/origins`),
  carryMemories: (name, memories) =>
    call("POST", `/conversations/${encodeURIComponent(name)}/memories/carry`, { memories }),
  memoryConflicts: (name) => call("GET", `/conversations/${encodeURIComponent(name)}/memories/conflicts`),
  resolveConflict: (name, decision) =>
    call("POST", `/conversations/${encodeURIComponent(name)}/memories/conflicts`, decision),
  settings: () => call("GET", "/settings"),
  updateSetting: (key, value) => call("PUT", `/settings/${encodeURIComponent(key)}`, { value }),
};

// Reads the event stream and reconnects for ever. `onEvent` gets each event, `onConnection` whether the stream is connected.
export async function subscribe(onEvent, onConnection) {
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    try {
      const response = await fetch(`${BASE}/events`, { headers: headers(), cache: "no-store" });
      if (response.status === 401) {
        await askForKey();
        continue;
      }
      if (!response.ok) throw new Error();
      onConnection(true);
      wait = 250;
      await readEvents(response.body, onEvent);
    } catch {
      /* Reported by `onConnection` below. */
    }
    onConnection(false);
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) onEvent(JSON.parse(line.slice(6)));
    }
  }
}

// The server, and nothing else. Every call answers with what was asked for, or throws an Error that can be shown.

import { ask } from "./dom.js";

const BASE = "/api/halo/v1";

function headers(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

let asking = null;

// Asks for the key once, however many calls need it.
async function newKey() {
  asking ??= ask("This server asks for its key.", {
    label: "Key",
    kind: "password",
    about: "It is kept until this window is closed.",
  });
  const key = await asking;
  asking = null;
  if (key) sessionStorage.setItem("key", key);
  return key;
}

async function call(method, path, body) {
  for (;;) {
    let response;
    try {
      response = await fetch(BASE + path, {
        method,
        headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch {
      throw new Away();
    }
    if (response.status === 401 && (await newKey())) continue;
    if (response.status === 204) return null;
    const text = await response.text();
    let value = null;
    try {
      value = text ? JSON.parse(text) : null;
    } catch {
      /* told below */
    }
    if (!response.ok) throw new Refused(response.status, value?.error ?? `the server answered ${response.status}`);
    return value;
  }
}

// The server says no, and why.
export class Refused extends Error {
  constructor(status, why) {
    super(why);
    this.status = status;
  }
}

// The server cannot be reached.
export class Away extends Error {
  constructor() {
    super("the server cannot be reached");
  }
}

const of = (name) => `/conversations/${encodeURIComponent(name)}`;
const world = (name) => `/worlds/${encodeURIComponent(name)}`;
const query = (values) => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== undefined));

export const api = {
  status: () => call("GET", "/status"),
  conversations: () => call("GET", "/conversations"),
  state: (name) => call("GET", of(name)),
  say: (name, text, id) => call("POST", `${of(name)}/say`, { text, id }),
  instead: (name, text) => call("POST", `${of(name)}/instead`, { text }),
  again: (name) => call("POST", `${of(name)}/again`),
  deleted: (name, values) => call("GET", `${of(name)}/deleted?${query(values)}`),
  variants: (name) => call("GET", `${of(name)}/variants`),
  chooseVariant: (name, turn) => call("POST", `${of(name)}/variants`, { turn }),
  stop: (name) => call("POST", `${of(name)}/stop`),
  signal: (name, signal, chunks) => call("POST", `${of(name)}/signals`, { signal, chunks }),
  undo: (name, undo) => call("POST", `${of(name)}/undo`, { undo }),
  branch: (name, to, turn) => call("POST", `${of(name)}/branch`, { name: to, turn }),
  rename: (name, to) => call("POST", `${of(name)}/rename`, { name: to }),
  chunk: (name, chunk) => call("GET", `${of(name)}/chunks/${chunk}`),
  graveyard: (name, values) => call("GET", `${of(name)}/graveyard?${query(values)}`),
  search: (name, q, most = 20) => call("GET", `${of(name)}/search?${query({ q, most })}`),
  turns: (name) => call("GET", `${of(name)}/turns`),
  looks: (name, position) => call("GET", `${of(name)}/looks/${position}`),
  past: (name, turn) => call("GET", `${of(name)}/past/${turn}`),
  notes: (name) => call("GET", `${of(name)}/notes`),
  writeNote: (name, file, text) => call("PUT", `${of(name)}/notes`, { file, text }),
  captures: (name) => call("GET", `${of(name)}/captures`),
  captured: (name, capture) => call("GET", `${of(name)}/captures/${capture}`),
  record: (name, recording) => call("PUT", `${of(name)}/recording`, { recording }),
  memories: (name, q) => call("GET", `${of(name)}/memories?${query({ q })}`),
  changeMemory: (name, id, values) => call("PUT", `${of(name)}/memories/${id}`, values),
  deleteMemory: (name, id) => call("DELETE", `${of(name)}/memories/${id}`),
  worlds: () => call("GET", "/worlds"),
  newWorld: (name, file) => call("POST", "/worlds", { name, file }),
  endWorld: (name) => call("DELETE", world(name)),
  world: (name) => call("GET", world(name)),
  roomMessages: (name, room, before) => call("GET", `${world(name)}/rooms/${room}/messages?${query({ before })}`),
  hud: (name, agent, format) => call("GET", `${world(name)}/agents/${agent}/hud?${query({ format })}`),
  wish: (name, wish) => call("POST", `${world(name)}/wishes`, wish),
  pace: (name, values) => call("PUT", `${world(name)}/pace`, values),
  settings: () => call("GET", "/settings"),
  set: (key, value) => call("PUT", `/settings/${encodeURIComponent(key)}`, { value }),
};

// All that happens, for ever: `heard` gets each event, `connected` is told when it begins and when it breaks off.
export async function listen(heard, connected) {
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    try {
      const response = await fetch(`${BASE}/events`, { headers: headers(), cache: "no-store" });
      if (response.status === 401) {
        await newKey();
        continue;
      }
      if (!response.ok) throw new Error();
      connected(true);
      wait = 250;
      await read(response.body, heard);
    } catch {
      /* told below */
    }
    connected(false);
    await new Promise((again) => setTimeout(again, wait));
  }
}

async function read(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) heard(JSON.parse(line.slice(6)));
    }
  }
}

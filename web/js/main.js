// Starts the page: sets up the modules, then subscribes to the server's events.

import { api, subscribe } from "./api.js";
import { emit } from "./bus.js";
import * as chat from "./chat.js";
import * as pageConsole from "./console.js";
import { $, number, time, toast } from "./dom.js";
import * as light from "./light.js";
import * as panels from "./panels.js";
import * as state from "./state.js";

panels.applyAppearance();
chat.init();
chat.initKeys();
light.init();
pageConsole.init();
panels.init();
panels.initTabs();
// One step per task, so that the page can be used from the first moment.
const nextTask = () => new Promise((resolve) => setTimeout(resolve));
await nextTask();
time(0);
await nextTask();
state.init();
addEventListener("hashchange", () => {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name && name !== state.state.name) state.openConversation(name);
});

let wasConnected = false;
subscribe(state.handleEvent, (connected) => {
  state.state.connected = connected;
  const offline = $("offline");
  offline.hidden = connected;
  offline.textContent = connected ? "" : "Server unreachable; reconnecting… Your draft is kept in this browser.";
  // Events that were missed while the stream was down are in the conversation that is loaded now.
  if (connected) {
    if (wasConnected) toast("Connected again.");
    wasConnected = true;
    state.refresh();
    api
      .status()
      .then((status) => {
        document.title = `Halo · ${status.model}`;
        $("model").textContent = status.model;
        $("model").title = `The model, with a context of ${number(status.context)} tokens`;
      })
      .catch(() => {});
  }
  emit("connected", connected);
});
$("message").focus();

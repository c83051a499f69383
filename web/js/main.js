// The beginning: parts are told of each other, and then it is all events.

import { api, listen } from "./api.js";
import { tell } from "./bus.js";
import * as chat from "./chat.js";
import { $, time, toast } from "./dom.js";
import * as panels from "./panels.js";
import * as state from "./state.js";

panels.appearance();
chat.begin();
chat.keys();
panels.begin();
panels.tabs();
// One thing after the other, so that the page can be used from the first moment.
const rest = () => new Promise((go) => setTimeout(go));
await rest();
time(0);
await rest();
state.begin();
addEventListener("hashchange", () => {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name && name !== state.state.name) state.show(name);
});

let before = false;
listen(state.heard, (connected) => {
  state.state.connected = connected;
  const away = $("away");
  away.hidden = connected;
  away.textContent = connected
    ? ""
    : "The server is away. What you write stays here; the page goes on by itself when the server is back.";
  // Whatever happened while nobody listened is in the state.
  if (connected) {
    if (before) toast("The server is back.");
    before = true;
    state.refresh();
    api
      .status()
      .then((status) => {
        document.title = `Halo · ${status.model}`;
      })
      .catch(() => {});
  }
  tell("connected", connected);
});
$("message").focus();

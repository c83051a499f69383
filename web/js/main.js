// Starts the page: sets up the modules, then subscribes to the server's events.

import { api, subscribe } from "./api.js";
import { applyAppearance } from "./appearance.js";
import { emit } from "./bus.js";
import * as composer from "./composer.js";
import * as pageConsole from "./console.js";
import { $, time, toast } from "./dom.js";
import * as folds from "./folds.js";
import * as header from "./header.js";
import * as hover from "./hover.js";
import * as inspect from "./inspect.js";
import * as keys from "./keys.js";
import * as light from "./light.js";
import * as menu from "./menu.js";
import * as notices from "./notices.js";
import * as rail from "./rail.js";
import * as returnLine from "./return_line.js";
import * as sidebar from "./sidebar.js";
import * as speech from "./speech.js";
import * as state from "./state.js";
import * as transcript from "./transcript.js";

applyAppearance();
for (const part of [
  menu,
  header,
  notices,
  transcript,
  folds,
  composer,
  keys,
  light,
  hover,
  rail,
  returnLine,
  inspect,
  pageConsole,
  speech,
])
  part.init();
// One step per task, so that the page can be used from the first moment.
const nextTask = () => new Promise((resolve) => setTimeout(resolve));
await nextTask();
time(0);
await nextTask();
state.init();
sidebar.init();

let wasConnected = false;
subscribe(state.handleEvent, (connected) => {
  const offline = $("offline");
  offline.hidden = connected;
  offline.textContent = connected ? "" : "Server unreachable; reconnecting… Your draft is kept in this browser.";
  state.setConnected(connected);
  if (!connected) return;
  if (wasConnected) toast("Connected again.");
  wasConnected = true;
  // Events that were missed while the stream was down are in the chat that is loaded now.
  state.refresh();
  api
    .status()
    .then((status) => emit("status", status))
    .catch(() => {});
});
// A view that was opened meanwhile keeps the focus.
if (document.activeElement === document.body) $("message").focus();

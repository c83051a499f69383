// The header: the title of the chat and the model.

import { on } from "./bus.js";
import { $, number } from "./dom.js";
import { setStatus } from "./first_start.js";
import { rename } from "./sidebar.js";
import { state } from "./state.js";

export function init() {
  on("conversation", draw);
  on("state", draw);
  on("status", (status) => {
    setStatus(status);
    $("model").textContent = status.model;
    $("model").title = `The model, with a context of ${number(status.context)} tokens`;
    draw();
  });
  $("title").addEventListener("dblclick", () => {
    if (state.snapshot && !state.snapshot.fresh) rename(state.name);
  });
}

function draw() {
  const name = state.name ?? "Halo";
  $("title").textContent = name;
  $("title").title = name;
  document.title = `${name} · Halo`;
}

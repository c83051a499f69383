// The header: the title of the chat and the model.

import { on } from "./bus.js";
import { $, number } from "./dom.js";
import { setStatus } from "./first_start.js";
import { rename } from "./sidebar.js";
import { state } from "./state.js";

/** @type {{ model: string, context: number } | null} */
let serverModel = null;

export function init() {
  on("conversation", draw);
  on("state", draw);
  on("status", (status) => {
    setStatus(status);
    serverModel = status;
    draw();
  });
  const renameChat = () => {
    if (state.snapshot && !state.snapshot.fresh) rename(state.name);
  };
  $("title").addEventListener("click", renameChat);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "F2") return;
    event.preventDefault();
    renameChat();
  });
}

function draw() {
  const name = state.name ?? "Halo";
  $("title").textContent = name;
  $("title").title = `${name}: rename (F2)`;
  $("title").disabled = !state.snapshot || !!state.snapshot.fresh;
  document.title = `${name} · Halo`;
  const model = state.snapshot?.model || serverModel?.model || "";
  $("model").textContent = model;
  const context = model === serverModel?.model ? `, with a context of ${number(serverModel.context)} tokens` : "";
  $("model").title = `The model of this chat${context}. Choose another one`;
}

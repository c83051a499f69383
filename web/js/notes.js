// The view “Notes”: what the model has noted with its tools.

import { api } from "./api.js";
import { el, toast } from "./dom.js";
import { state } from "./state.js";

export function notes(panel) {
  const box = el("textarea", { id: "note", spellcheck: "false" });
  const about = el("p", { class: "quiet", role: "status" });
  let file = "notes.json";
  const load = async () => {
    try {
      const [note] = await api.notes(state.name);
      file = note?.file ?? file;
      box.value = note?.text ?? "";
      about.textContent = note
        ? `${file}: the model writes it when tools.enabled is set.`
        : "The notes are empty. The model writes them when tools.enabled is set. What you write here must be JSON.";
    } catch (error) {
      about.textContent = error.message;
    }
  };
  panel.append(
    about,
    el("label", { class: "hidden", for: "note" }, "Notes"),
    box,
    el(
      "div",
      { class: "bar" },
      el(
        "button",
        {
          type: "button",
          onclick: async () => {
            try {
              await api.writeNotes(state.name, file, box.value);
              toast("Saved.");
            } catch (error) {
              toast(error.message, { error: true });
            }
          },
        },
        "Save",
      ),
    ),
  );
  load();
  return {
    event: (event) => {
      if (event.type === "tool_called") load();
    },
  };
}

// How the page looks: theme and text size, kept in this browser.

import { emit } from "./bus.js";
import { el } from "./dom.js";

export function pageSettings() {
  const theme = el(
    "select",
    {
      id: "theme",
      onchange: () => {
        localStorage.setItem("theme", theme.value);
        applyAppearance();
        emit("theme");
      },
    },
    ...["system", "dark", "light"].map((name) =>
      el("option", { value: name, selected: name === (localStorage.getItem("theme") ?? "system") }, name),
    ),
  );
  const size = el(
    "select",
    {
      id: "size",
      onchange: () => {
        localStorage.setItem("size", size.value);
        applyAppearance();
      },
    },
    ...["13", "14", "16", "18", "20", "24"].map((px) =>
      el("option", { value: px, selected: px === (localStorage.getItem("size") ?? "16") }, `${px} px`),
    ),
  );
  return el(
    "div",
    { class: "bar" },
    el("label", { for: "theme" }, "Theme"),
    theme,
    el("label", { for: "size" }, "Text size"),
    size,
  );
}

export function applyAppearance() {
  const theme = localStorage.getItem("theme") ?? "system";
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.documentElement.style.setProperty("--size", `${localStorage.getItem("size") ?? 16}px`);
}

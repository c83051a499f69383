// The view “Help”: shortcuts and words.

import { el } from "./dom.js";

export function help(panel) {
  const keys = [
    ["Enter", "send"],
    ["Shift+Enter", "new line"],
    ["Esc", "stop the answer, or leave editing"],
    ["Ctrl+Shift+O", "new chat"],
    ["F2", "rename this chat"],
    ["Ctrl+K", "search all chats"],
    ["Alt+1 … Alt+7", "open a view of Inspect"],
    ["Alt+8, Alt+9", "settings, this list"],
    ["?", "this list, when no text is being written"],
    ["↓ ↑, j k", "next or previous paragraph"],
    [".", "menu of the paragraph"],
    ["c", "copy"],
    ["e", "edit"],
    ["r", "regenerate the last answer"],
    ["b", "branch from here"],
    ["p", "pin or unpin"],
    ["x", "remove from context, or bring back"],
    ["m", "merge with the paragraph above"],
    ["Del", "delete"],
    ["Enter on a paragraph", "why it left or came back"],
  ];
  const terms = [
    [
      "bar at a paragraph",
      "how much attention each of its words got from a word of an answer; the scale is the same in every chat",
    ],
    ["out of context", "the model does not see it now; it is brought back when a message is about it, or by you"],
    ["pinned", "is never removed from the context"],
    [
      "deleted",
      "removed from the context and from search; it is listed and can be restored until it is forgotten for good",
    ],
  ];
  panel.append(
    el(
      "p",
      {},
      el("a", { href: "docs.html" }, "Documentation"),
      ": how to begin, connect clients, and what every setting does.",
    ),
    el("h3", {}, "Shortcuts"),
    el("dl", {}, ...keys.flatMap(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)])),
    el("h3", {}, "Words"),
    el("dl", {}, ...terms.flatMap(([term, meaning]) => [el("dt", {}, term), el("dd", {}, meaning)])),
  );
}

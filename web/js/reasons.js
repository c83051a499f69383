// The reasons of the server in the words of the page, by their kind. The figures stay in the inspector.

const PRUNED = {
  full_dimmest: "Left because the context was full and the model paid it least attention",
  full_oldest: "Left because the context was full and it was the oldest",
  full_random: "Left because the context was full; it was chosen at random",
  full_pair: "Left together with the message that it belongs to, because the context was full",
  user: "You removed it from the context",
  user_dependent: "It depends on a paragraph that you removed from the context",
  client: "The program that you chat with no longer sends it",
  import: "It was out of context when the chat was imported",
  undo: "Bringing it back was undone",
};

const RESURRECTED = {
  search: "Came back: related to your message",
  opens_turn: "Came back with a later paragraph of the same message",
  pair: "Came back with the message that it belongs to",
  user: "You brought it back",
  merged: "Merged with a paragraph in the context",
  undo: "Removing it was undone",
};

const OTHERS = {
  pinned: "You pinned it",
  unpinned: "You unpinned it",
  deleted: "Deleted",
  undeleted: "Restored",
  merged: "Merged into the paragraph above",
  split: "Split off",
};

/**
 * What happened to a paragraph, in a sentence.
 * @param {{ action: string, reason_kind: string, reason: string }} entry
 */
export function explainHistory({ action, reason_kind: kind, reason }) {
  const known = { pruned: PRUNED, resurrected: RESURRECTED }[action];
  return known ? (known[kind] ?? reason) : (OTHERS[action] ?? action);
}

// Who wants to know what: parts of the page hear of changes here and know nothing of each other.

const heard = new Map();

export function on(what, act) {
  if (!heard.has(what)) heard.set(what, []);
  heard.get(what).push(act);
}

export function tell(what, value) {
  for (const act of heard.get(what) ?? []) act(value);
}

// Topics and their handlers, so that the modules of the page do not import each other.

const handlers = new Map();

export function on(topic, handler) {
  if (!handlers.has(topic)) handlers.set(topic, []);
  handlers.get(topic).push(handler);
}

export function emit(topic, value) {
  for (const handler of handlers.get(topic) ?? []) handler(value);
}

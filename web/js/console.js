// `window.halo`: the open chat for the console of the browser. Each function returns plain data or a promise of it; without a name
// it is about the open chat. `halo.help()` lists them.

import { stop } from "./actions.js";
import { api } from "./api.js";
import { refresh, state } from "./state.js";

const open = (name) => name ?? state.name;

const commands = {
  getStats: {
    about: "live and dead tokens, index entries, next position and turn",
    run: (name) => api.stats(open(name)),
  },
  getMetadata: { about: "the chats with their models, times and sizes", run: () => api.conversations() },
  getSentences: {
    about: "the paragraphs in the context, in order",
    run: async (name) => (await api.conversation(open(name))).chunks,
  },
  isChunkAlive: {
    about: "whether a paragraph of the loaded messages is in the context: isChunkAlive('u4.0')",
    run: (id) => state.chunks.has(id),
  },
  checkPruning: {
    about: "how full the context is, and what pruning leaves of it",
    run: () => {
      const { live, limit, budget_after_turn } = state.snapshot ?? {};
      return { live, limit, budget_after_turn };
    },
  },
  search: { about: "search in the chat: search('bees')", run: (query, name) => api.search(open(name), query) },
  extract: { about: "the sentences with the most attention, word for word", run: (name) => api.extract(open(name)) },
  exportState: {
    about:
      "the chat as data: context, turns and paragraphs out of context; `halo export` writes a file that can be imported",
    run: async (name) => {
      const [conversation, turns, pruned] = await Promise.all([
        api.conversation(open(name)),
        api.turns(open(name)),
        allPages((offset) => api.graveyard(open(name), { offset, limit: 200 })),
      ]);
      return { conversation, turns, pruned };
    },
  },
  exportAll: {
    about: "all chats as data",
    run: async () => {
      const all = [];
      for (const { name } of await api.conversations()) all.push(await commands.exportState.run(name));
      return all;
    },
  },
  clearAll: {
    about: "delete a chat after the grace period: clearAll('name'); the name must be given",
    run: (name) => {
      if (!name) throw new Error("Give the name of the chat that is to be deleted: halo.clearAll('name').");
      return api.deleteConversation(name);
    },
  },
  rebuild: { about: "load the chat from the server again", run: () => refresh() },
  abort: { about: "stop the running answer", run: () => stop() },
};

async function allPages(load) {
  const chunks = [];
  for (;;) {
    const page = await load(chunks.length);
    chunks.push(...page.chunks);
    if (!page.chunks.length || chunks.length >= page.total) return chunks;
  }
}

export function init() {
  /** @type {Record<string, any>} */
  const halo = Object.fromEntries(Object.entries(commands).map(([name, { run }]) => [name, run]));
  halo.help = () => Object.fromEntries(Object.entries(commands).map(([name, { about }]) => [name, about]));
  // The names of the first Halo.
  halo._checkPruning = halo.checkPruning;
  const store = async (name) => {
    const stats = await api.stats(open(name));
    return {
      liveTokens: stats.live_tokens,
      deadTokens: stats.dead_tokens,
      semanticEntries: stats.semantic_entries,
      nextPosition: stats.next_position,
      nextTurn: stats.next_turn,
    };
  };
  const semanticIndex = async (name) => ({ entries: (await store(name)).semanticEntries });
  Object.assign(halo, { store: { getStats: store }, semanticIndex: { getStats: semanticIndex } });
  Object.assign(window, { halo: Object.freeze(halo) });
}

//! Rendered texts with their token counts: what does not change is rendered and counted once.

use crate::hud::{self, HudMessage, HudMeta, HudRoom, HudSystem};
use crate::hud_format::HudFormat;
use crate::world::{AgentId, AgentState, RecentAction, RoomMessage};
use halo_agents::token_counter::TokenCounter;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Entries of a map; a full map is cleared.
const MAX_CACHED_ITEMS: usize = 1 << 18;

/// Entries with whole texts, which are long: every change of an agent's knowledge adds one.
const MAX_CACHED_TEXTS: usize = 1 << 13;

/// Headers of rooms, one per member.
const MAX_CACHED_ROOM_HEADERS: usize = 1 << 15;

/// A text with its number of tokens.
#[derive(Clone, Debug)]
pub(super) struct CountedText {
    pub(super) text: Arc<str>,
    pub(super) tokens: usize,
}

/// The system and meta sections that agents of a kind share.
pub(super) type SharedPrompt = (Arc<HudSystem>, Arc<HudMeta>);

/// A message as a value and as text.
pub(super) type RenderedMessage = (Arc<HudMessage>, CountedText);

pub(super) struct RenderCache {
    counter: Arc<dyn TokenCounter>,
    entries: Mutex<RenderCacheEntries>,
}

#[derive(Default)]
struct RenderCacheEntries {
    /// Token counts by the hash of the text.
    tokens: BTreeMap<u64, usize>,
    /// Recent actions by agent and number.
    actions: CachedRows<(AgentId, u64), Map<String, Value>>,
    /// Messages by number and number of reactions.
    messages: CachedRows<(u64, usize), HudMessage>,
    /// By the hash of the header's fields.
    room_headers: BTreeMap<(HudFormat, u64), CountedText>,
    /// By the hash of what they depend on.
    shared_prompts: BTreeMap<u64, SharedPrompt>,
    /// Shared sections and knowledge entries as text, by the hash of their content.
    texts: BTreeMap<(HudFormat, u64), Arc<[CountedText]>>,
}

impl RenderCacheEntries {
    fn actions_mut(&mut self) -> &mut CachedRows<(AgentId, u64), Map<String, Value>> {
        clear_if_full(&mut self.actions, MAX_CACHED_ITEMS)
    }

    fn messages_mut(&mut self) -> &mut CachedRows<(u64, usize), HudMessage> {
        clear_if_full(&mut self.messages, MAX_CACHED_ITEMS)
    }
}

type CachedRows<K, T> = BTreeMap<K, CachedRow<T>>;

/// Selects a map of rows.
type CachedRowsAccessor<K, T> = fn(&mut RenderCacheEntries) -> &mut CachedRows<K, T>;

/// An immutable row, and its text in each format.
struct CachedRow<T> {
    view: Arc<T>,
    texts: [Option<CountedText>; HudFormat::ALL.len()],
}

impl<T> CachedRow<T> {
    fn new(view: T) -> Self {
        Self { view: Arc::new(view), texts: [const { None }; HudFormat::ALL.len()] }
    }
}

impl RenderCache {
    pub(super) fn new(counter: Arc<dyn TokenCounter>) -> Self {
        Self { counter, entries: Mutex::default() }
    }

    pub(super) fn counter(&self) -> &dyn TokenCounter {
        &*self.counter
    }

    pub(super) fn count_tokens(&self, text: &str) -> usize {
        self.count_tokens_cached(text, 0, || self.counter.count_tokens(text))
    }

    /// The tokens of something that depends on a text only; `kind` separates different counts of the same text.
    pub(super) fn count_tokens_cached(&self, text: &str, kind: u64, count: impl FnOnce() -> usize) -> usize {
        let key = xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), kind);
        if let Some(&tokens) = self.entries.lock().tokens.get(&key) {
            return tokens;
        }
        let tokens = count();
        clear_if_full(&mut self.entries.lock().tokens, MAX_CACHED_ITEMS).insert(key, tokens);
        tokens
    }

    /// A text that is likely to be rendered again.
    pub(super) fn counted_text(&self, text: impl Into<Arc<str>>) -> CountedText {
        let text = text.into();
        CountedText { tokens: self.count_tokens(&text), text }
    }

    /// A text whose count the caller caches, or that is used once.
    pub(super) fn counted_text_uncached(&self, text: impl Into<Arc<str>>) -> CountedText {
        let text = text.into();
        CountedText { tokens: self.counter.count_tokens(&text), text }
    }

    /// An immutable row as a value and as text.
    fn cached_row<K: Ord + Copy, T>(
        &self,
        format: HudFormat,
        (rows, key): (CachedRowsAccessor<K, T>, K),
        view: impl FnOnce() -> T,
        write: impl FnOnce(&T) -> String,
    ) -> (Arc<T>, CountedText) {
        let (view, text) = {
            let mut entries = self.entries.lock();
            let row = rows(&mut entries).entry(key).or_insert_with(|| CachedRow::new(view()));
            (Arc::clone(&row.view), row.texts[format as usize].clone())
        };
        let text = text.unwrap_or_else(|| {
            let text = self.counted_text_uncached(write(&view));
            if let Some(row) = rows(&mut self.entries.lock()).get_mut(&key) {
                row.texts[format as usize] = Some(text.clone());
            }
            text
        });
        (view, text)
    }

    pub(super) fn message(
        &self,
        format: HudFormat,
        message: &RoomMessage,
        write: impl FnOnce(&HudMessage) -> String,
    ) -> RenderedMessage {
        let reactions = message.reactions.values().map(BTreeSet::len).sum();
        self.cached_row(
            format,
            (RenderCacheEntries::messages_mut, (message.id, reactions)),
            || HudMessage::from(message),
            write,
        )
    }

    pub(super) fn action_text(
        &self,
        format: HudFormat,
        (agent, number): (AgentId, u64),
        action: &Map<String, Value>,
        write: impl FnOnce(&Map<String, Value>) -> String,
    ) -> CountedText {
        self.cached_row(format, (RenderCacheEntries::actions_mut, (agent, number)), || action.clone(), write)
            .1
    }

    pub(super) fn recent_actions(&self, agent: &AgentState) -> Vec<Arc<Map<String, Value>>> {
        let first = agent.action_count.saturating_sub(agent.recent_actions.len() as u64);
        let mut entries = self.entries.lock();
        let actions = entries.actions_mut();
        let view = |(recent, number): (&RecentAction, u64)| {
            let row = actions
                .entry((agent.id, number))
                .or_insert_with(|| CachedRow::new(hud::recent_action_fields(recent)));
            Arc::clone(&row.view)
        };
        agent.recent_actions.iter().zip(first..).map(view).collect()
    }

    /// The header of the `n`-th room of a HUD.
    pub(super) fn room_header(
        &self,
        format: HudFormat,
        (room, n): (&HudRoom, usize),
        write: impl FnOnce() -> String,
    ) -> CountedText {
        let key = (format, hash_room_header(room, n));
        if let Some(text) = self.entries.lock().room_headers.get(&key) {
            return text.clone();
        }
        let text = self.counted_text_uncached(write());
        clear_if_full(&mut self.entries.lock().room_headers, MAX_CACHED_ROOM_HEADERS)
            .insert(key, text.clone());
        text
    }

    /// Texts that depend only on `parts`.
    pub(super) fn cached_texts(
        &self,
        format: HudFormat,
        parts: &[&str],
        write: impl FnOnce() -> Vec<String>,
    ) -> Arc<[CountedText]> {
        let key = (format, hash_parts(parts));
        if let Some(texts) = self.entries.lock().texts.get(&key) {
            return Arc::clone(texts);
        }
        let texts: Arc<[CountedText]> = write().into_iter().map(|text| self.counted_text(text)).collect();
        clear_if_full(&mut self.entries.lock().texts, MAX_CACHED_TEXTS).insert(key, Arc::clone(&texts));
        texts
    }

    /// The shared prompt, which depends only on `parts`.
    pub(super) fn shared_prompt(
        &self,
        parts: &[&str],
        create: impl FnOnce() -> (HudSystem, HudMeta),
    ) -> SharedPrompt {
        let key = hash_parts(parts);
        if let Some(prompt) = self.entries.lock().shared_prompts.get(&key) {
            return prompt.clone();
        }
        let (system, meta) = create();
        let prompt = (Arc::new(system), Arc::new(meta));
        clear_if_full(&mut self.entries.lock().shared_prompts, MAX_CACHED_ITEMS).insert(key, prompt.clone());
        prompt
    }
}

fn clear_if_full<K: Ord, V>(map: &mut BTreeMap<K, V>, limit: usize) -> &mut BTreeMap<K, V> {
    if map.len() >= limit {
        map.clear();
    }
    map
}

fn hash_parts(parts: &[&str]) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for part in parts {
        hash.update(&part.len().to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.digest()
}

fn hash_room_header(room: &HudRoom, n: usize) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let has = [room.billboard.is_some(), room.my_keys.is_some(), room.pending_access_requests.is_some()];
    hash.update(&[u8::from(room.is_self_room), u8::from(has[0]), u8::from(has[1]), u8::from(has[2])]);
    hash.update(&(n as u64).to_le_bytes());
    hash.update(&room.id.0.to_le_bytes());
    hash.update(&room.you.0.to_le_bytes());
    hash.update(&room.attention_pct.to_le_bytes());
    for member in &room.members {
        hash.update(&member.len().to_le_bytes());
        hash.update(member.as_bytes());
    }
    hash.digest()
}

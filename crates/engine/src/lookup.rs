//! Finds the stored conversation that a client's history belongs to, by the index of message keys: only the few candidates
//! are loaded.

use crate::align::{
    self, AlignCandidate, Alignment, KnownMessage, SentMessage, align, is_similar_prompt, lookup_hashes,
    message_key, prefix_hashes,
};
use crate::conversation::{SYSTEM_PROMPT_KEY, load_setting, turn_text};
use crate::variant;
use halo_core::Error;
use halo_core::store::{Access, MessageKey, MessageLookup, ORIGINAL_OF_KEY, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Role, TurnId};
use std::collections::BTreeSet;

/// The most messages of a conversation that are compared, the latest ones.
const MAX_COMPARED_MESSAGES: usize = 4096;

/// The most conversations that one hash finds, the newest ones.
const MAX_CANDIDATES: usize = 8;

/// The most messages that are looked up one by one.
const MAX_LOOKUPS: usize = 4;

/// The most messages without a stored key that are hashed while a conversation is compared.
const MAX_UNKEYED_MESSAGES: usize = 64;

/// The conversation that a request belongs to, and how it continues it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationMatch {
    pub name: String,
    pub alignment: Alignment,
}

/// The conversation that a request belongs to, if there is one. `system` is the system prompt of the request, if it has one;
/// `default_system` that of conversations without one of their own.
pub fn find_conversation(
    store: &mut dyn Store,
    sent: &[SentMessage],
    system: Option<&str>,
    default_system: &str,
) -> Result<Option<ConversationMatch>, Error> {
    let (mut names, mut unique): (BTreeSet<String>, BTreeSet<u64>) = Default::default();
    let prefixes: Vec<u64> = prefix_hashes(sent);
    let matched = longest_known_prefix(store, &prefixes)?;
    // The longest stored prefix, and the one before it: its last message may have been edited.
    for prefix in prefixes[..matched].iter().rev().take(2) {
        names.extend(find_candidates(store, MessageLookup::Prefix(*prefix))?);
    }
    if matched + 1 < sent.len() {
        for hash in lookup_hashes(sent, MAX_LOOKUPS) {
            let found = find_candidates(store, MessageLookup::Loose(hash))?;
            if found.len() == 1 {
                unique.insert(hash);
            }
            names.extend(found);
        }
    }
    let mut best: Option<((align::AlignScore, i64), ConversationMatch)> = None;
    for name in names {
        let options = AlignOptions { system, default_system, unique_hashes: &unique, named: false };
        let Some(alignment) = align_with_conversation(store, &name, sent, options)? else { continue };
        let updated = store.find_conversation(&name)?.map_or(0, |summary| summary.updated);
        let score = (alignment.score, updated);
        if best.as_ref().is_none_or(|(other, _)| *other < score) {
            best = Some((score, ConversationMatch { name, alignment }));
        }
    }
    Ok(best.map(|(_, best)| best))
}

/// The conversations with a message, once for each message. Those that were kept when they were retokenized have the messages of
/// the one in their place, and are left out beside it.
fn find_candidates(store: &mut dyn Store, lookup: MessageLookup) -> Result<Vec<String>, Error> {
    let found = store.find_messages(lookup, MAX_CANDIDATES)?;
    let mut names: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
    let distinct: BTreeSet<String> = names.iter().cloned().collect();
    if distinct.len() < 2 {
        return Ok(names);
    }
    let (mut ids, mut originals): (BTreeSet<String>, Vec<(String, String)>) = Default::default();
    for name in distinct {
        ids.extend(store.find_conversation(&name)?.map(|summary| summary.id));
        let successor = store.record(&name, RecordKind::Setting, ORIGINAL_OF_KEY)?;
        originals.extend(successor.map(|successor| (name, successor.value)));
    }
    originals.retain(|(_, successor)| ids.contains(successor));
    names.retain(|name| !originals.iter().any(|(original, _)| original == name));
    Ok(names)
}

/// The length of the longest prefix that some conversation has, by binary search: it has every shorter one too.
fn longest_known_prefix(store: &mut dyn Store, prefixes: &[u64]) -> Result<usize, Error> {
    let (mut known, mut unknown) = (0, prefixes.len() + 1);
    while known + 1 < unknown {
        let middle = (known + unknown) / 2;
        match store.find_messages(MessageLookup::Prefix(prefixes[middle - 1]), 1)?.is_empty() {
            true => unknown = middle,
            false => known = middle,
        }
    }
    Ok(known)
}

/// What identifies a conversation beside the messages of the request.
#[derive(Clone, Copy, Debug)]
pub struct AlignOptions<'a> {
    /// The system prompt of the request, if it has one.
    pub system: Option<&'a str>,
    /// The system prompt of conversations without one of their own.
    pub default_system: &'a str,
    /// Hashes of messages that only one conversation has.
    pub unique_hashes: &'a BTreeSet<u64>,
    /// Whether the client has named the conversation: then its messages need not identify it.
    pub named: bool,
}

/// How a request continues a conversation; none where it belongs to another one.
pub fn align_with_conversation(
    store: &mut dyn Store,
    name: &str,
    sent: &[SentMessage],
    options: AlignOptions<'_>,
) -> Result<Option<Alignment>, Error> {
    let AlignOptions { system, default_system, unique_hashes, named } = options;
    let mut timeline = store.load(name, Access::Read)?;
    let messages = load_known_messages(store, name, &mut timeline)?;
    let variants = variant::load_variants(store, name, &timeline)?;
    let own_system = load_setting(store, name, SYSTEM_PROMPT_KEY)?;
    let own_system = own_system.as_deref().unwrap_or(default_system);
    let candidate = AlignCandidate {
        messages: &messages,
        variants: &variants,
        from_start: messages.len() < MAX_COMPARED_MESSAGES,
        same_system: is_similar_prompt(system.unwrap_or(default_system), own_system),
        unique_hashes,
        named,
    };
    let mut failed = None;
    let aligned = align(&candidate, sent, &mut |turn| match turn_text(store, name, &mut timeline, turn) {
        Ok(text) => Some(text),
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    failed.map_or(Ok(aligned), Err)
}

/// The latest messages of a conversation, including those without a stored key: the program ended before it was written.
fn load_known_messages(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
) -> Result<Vec<KnownMessage>, Error> {
    let mut keys = store.message_keys(name, MAX_COMPARED_MESSAGES)?;
    let last = keys.last().map(|key| key.turn);
    let new: Vec<(TurnId, Role)> = (timeline.turns().iter().rev())
        .take_while(|turn| last.is_none_or(|last| turn.id > last))
        .take(MAX_UNKEYED_MESSAGES)
        .map(|turn| (turn.id, turn.role))
        .collect();
    for (turn, role) in new.into_iter().rev() {
        let text = turn_text(store, name, timeline, turn)?;
        if !text.trim().is_empty() {
            keys.push(message_key(turn, role, &text, 0));
        }
    }
    let is_on_path = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
    Ok(keys.into_iter().map(|key| KnownMessage { key, on_path: is_on_path(key.turn) }).collect())
}

/// Stores the keys of messages without one: of an imported conversation, all of them.
pub fn write_message_keys(store: &mut dyn Store, name: &str) -> Result<(), Error> {
    let mut timeline = store.load(name, Access::Read)?;
    let last = store.message_keys(name, 1)?.pop();
    let (prefix, last) = last.map_or((0, None), |key| (key.prefix_hash, Some(key.turn)));
    let keys = compute_message_keys(store, name, &mut timeline, last, prefix)?;
    store.put_message_keys(name, &keys)
}

/// The keys of the messages after a turn; `prefix` is the hash of the messages before the first of them.
pub(crate) fn compute_message_keys(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    last: Option<TurnId>,
    mut prefix: u64,
) -> Result<Vec<MessageKey>, Error> {
    let new = timeline.turns().iter().rev().take_while(|turn| last.is_none_or(|last| turn.id > last));
    let new: Vec<(TurnId, Role)> = new.map(|turn| (turn.id, turn.role)).collect();
    let mut keys = Vec::with_capacity(new.len());
    for (turn, role) in new.into_iter().rev() {
        let text = turn_text(store, name, timeline, turn)?;
        if text.trim().is_empty() {
            continue;
        }
        let key = message_key(turn, role, &text, prefix);
        let is_on_path = timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
        prefix = if is_on_path { key.prefix_hash } else { prefix };
        keys.push(key);
        // A long conversation does not fit into memory.
        if keys.len().is_multiple_of(1024) {
            timeline.unload_pruned();
        }
    }
    timeline.unload_pruned();
    Ok(keys)
}

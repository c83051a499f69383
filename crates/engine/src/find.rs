//! Finds the stored conversation that a client's history belongs to, by the index of message keys: it reads the few
//! conversations that may be it, and no others.

use crate::align::{
    self, Alignment, Candidate, KnownMessage, SentMessage, align, message_key, prefixes, similar, telling,
};
use crate::session::SYSTEM;
use crate::variant;
use halo_core::seams::{Access, Kind, MessageKey, MessageLookup, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use std::collections::BTreeSet;

/// The latest messages of a conversation that are compared.
const COMPARED: usize = 4096;

/// Conversations that one hash is looked up in, the newest of them.
const LOOKED_AT: usize = 8;

/// Messages that are looked up one by one.
const LOOKED_UP: usize = 4;

/// Messages without a key that are given one while a conversation is compared.
const UNKEYED: usize = 64;

/// A conversation that a request belongs to, and what it means there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundConversation {
    /// Its name.
    pub name: String,
    /// What the request means there.
    pub alignment: Alignment,
}

/// The conversation that a request belongs to, if there is one. `system` is the system prompt that was sent, if any, and
/// `usual` that of conversations that have none of their own.
///
/// # Errors
/// When the store fails.
pub fn find_conversation(
    store: &mut dyn Store,
    sent: &[SentMessage],
    system: Option<&str>,
    usual: &str,
) -> Result<Option<FoundConversation>, SeamError> {
    let (mut names, mut unique): (BTreeSet<String>, BTreeSet<u64>) = Default::default();
    let paths: Vec<u64> = prefixes(sent);
    let known = longest_known(store, &paths)?;
    // The longest path that is known, and the one before it: its last message may have been edited.
    for path in paths[..known].iter().rev().take(2) {
        let found = store.find_messages(MessageLookup::Prefix(*path), LOOKED_AT)?;
        names.extend(found.into_iter().map(|(name, _)| name));
    }
    if known + 1 < sent.len() {
        for hash in telling(sent, LOOKED_UP) {
            let found = store.find_messages(MessageLookup::Loose(hash), LOOKED_AT)?;
            if found.len() == 1 {
                unique.insert(hash);
            }
            names.extend(found.into_iter().map(|(name, _)| name));
        }
    }
    let mut best: Option<((align::Fit, i64), FoundConversation)> = None;
    for name in names {
        let how = Comparison { system, usual, unique: &unique, named: false };
        let Some(alignment) = align_with(store, &name, sent, how)? else { continue };
        let used = store.find(&name)?.map_or(0, |known| known.used);
        let fit = (alignment.fit, used);
        if best.as_ref().is_none_or(|(other, _)| *other < fit) {
            best = Some((fit, FoundConversation { name, alignment }));
        }
    }
    Ok(best.map(|(_, found)| found))
}

/// How many messages of a path some conversation has: if it has a path, it has every shorter one.
fn longest_known(store: &mut dyn Store, paths: &[u64]) -> Result<usize, SeamError> {
    let (mut known, mut unknown) = (0, paths.len() + 1);
    while known + 1 < unknown {
        let middle = (known + unknown) / 2;
        match store.find_messages(MessageLookup::Prefix(paths[middle - 1]), 1)?.is_empty() {
            true => unknown = middle,
            false => known = middle,
        }
    }
    Ok(known)
}

/// What a request is compared by, beside its messages.
#[derive(Clone, Copy, Debug)]
pub struct Comparison<'a> {
    /// The system prompt that was sent, if any.
    pub system: Option<&'a str>,
    /// That of conversations that have none of their own.
    pub usual: &'a str,
    /// Hashes of messages that only one conversation has.
    pub unique: &'a BTreeSet<u64>,
    /// Whether the client has named the conversation: then it need not be known by what was said.
    pub named: bool,
}

/// What a request means in a conversation.
///
/// # Errors
/// When the store fails.
pub fn align_with(
    store: &mut dyn Store,
    name: &str,
    sent: &[SentMessage],
    how: Comparison<'_>,
) -> Result<Option<Alignment>, SeamError> {
    let Comparison { system, usual, unique, named } = how;
    let mut timeline = store.load(name, Access::Read)?;
    let messages = known_messages(store, name, &mut timeline)?;
    let variants = variant::variants(store, name, &timeline)?;
    let own = store.records(name, Kind::Setting)?.into_iter().find(|record| record.key == SYSTEM);
    let own = own.map_or_else(|| usual.to_owned(), |record| record.value);
    let candidate = Candidate {
        messages: &messages,
        variants: &variants,
        from_start: messages.len() < COMPARED,
        same_system: similar(system.unwrap_or(usual), &own),
        unique,
        named,
    };
    let mut failed = None;
    let aligned = align(&candidate, sent, &mut |turn| match text_of(store, name, &mut timeline, turn) {
        Ok(text) => Some(text),
        Err(why) => {
            failed = Some(why);
            None
        }
    });
    failed.map_or(Ok(aligned), Err)
}

/// The latest messages of a conversation, with those that have no key yet: the program ended before it was written.
fn known_messages(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
) -> Result<Vec<KnownMessage>, SeamError> {
    let mut keys = store.message_keys(name, COMPARED)?;
    let last = keys.last().map(|key| key.turn);
    let new: Vec<(TurnId, Role)> = (timeline.turns().iter().rev())
        .take_while(|turn| last.is_none_or(|last| turn.id > last))
        .take(UNKEYED)
        .map(|turn| (turn.id, turn.role))
        .collect();
    for (turn, role) in new.into_iter().rev() {
        let text = text_of(store, name, timeline, turn)?;
        if !text.trim().is_empty() {
            keys.push(message_key(turn, role, &text, 0));
        }
    }
    let stands = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_withdrawn());
    Ok(keys.into_iter().map(|key| KnownMessage { key, stands: stands(key.turn) }).collect())
}

/// Writes the keys of a conversation's messages that have none: of one that was imported, all of them.
///
/// # Errors
/// When the store fails.
pub fn write_message_keys(store: &mut dyn Store, name: &str) -> Result<(), SeamError> {
    let mut timeline = store.load(name, Access::Read)?;
    let last = store.message_keys(name, 1)?.pop();
    let (path, last) = last.map_or((0, None), |key| (key.prefix, Some(key.turn)));
    let keys = new_keys(store, name, &mut timeline, last, path)?;
    store.put_message_keys(name, &keys)
}

/// The keys of the messages behind a turn; `path` is the hash of the path that the first of them goes on from.
pub(crate) fn new_keys(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    last: Option<TurnId>,
    mut path: u64,
) -> Result<Vec<MessageKey>, SeamError> {
    let new = timeline.turns().iter().rev().take_while(|turn| last.is_none_or(|last| turn.id > last));
    let new: Vec<(TurnId, Role)> = new.map(|turn| (turn.id, turn.role)).collect();
    let mut keys = Vec::with_capacity(new.len());
    for (turn, role) in new.into_iter().rev() {
        let text = text_of(store, name, timeline, turn)?;
        if text.trim().is_empty() {
            continue;
        }
        let key = message_key(turn, role, &text, path);
        let stands = timeline.turn_chunks(turn).any(|chunk| !chunk.is_withdrawn());
        path = if stands { key.prefix } else { path };
        keys.push(key);
        // A long conversation is not held in memory for this.
        if keys.len().is_multiple_of(1024) {
            timeline.release_dead();
        }
    }
    timeline.release_dead();
    Ok(keys)
}

/// What was said in a turn, live or not.
pub(crate) fn text_of(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    turn: TurnId,
) -> Result<String, SeamError> {
    let away = timeline.turn_chunks(turn).filter(|chunk| !chunk.is_here());
    let away: Vec<ChunkId> = away.map(|chunk| chunk.id()).collect();
    store.bring(name, timeline, &away)?;
    Ok(timeline.turn_chunks(turn).map(|chunk| chunk.text().into_owned()).collect())
}

//! Hashes of messages, by which a history that is sent again is recognized.

use halo_core::store::MessageKey;
use halo_core::token::{Role, TurnId};
use std::collections::BTreeSet;
use unicode_normalization::UnicodeNormalization;
use xxhash_rust::xxh3::Xxh3;

/// A message of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentMessage {
    pub role: Role,
    pub text: String,
    /// Its hashes. The turn is 0: it is not known yet.
    pub key: MessageKey,
}

impl SentMessage {
    #[must_use]
    pub fn new(role: Role, text: String) -> Self {
        let key = message_key(TurnId(0), role, &text, 0);
        Self { role, text, key }
    }
}

/// The hashes of a message; `before` is the prefix hash of the messages before it.
#[must_use]
pub fn message_key(turn: TurnId, role: Role, text: &str, before: u64) -> MessageKey {
    let (name, rest) = split_speaker_name(text.trim());
    let loose = normalize_text(rest);
    let key = MessageKey {
        turn,
        role,
        exact_hash: hash_text(role, text.trim()),
        loose_hash: hash_text(role, &loose),
        name_hash: if name.is_empty() { 0 } else { hash_text(role, &normalize_text(name)).max(1) },
        length: u32::try_from(loose.chars().count()).unwrap_or(u32::MAX),
        prefix_hash: 0,
    };
    MessageKey { prefix_hash: extend_prefix(before, &key), ..key }
}

/// The prefix hash that includes a message. System messages come and go, so they do not count.
#[must_use]
pub fn extend_prefix(before: u64, key: &MessageKey) -> u64 {
    if key.role == Role::System {
        return before;
    }
    let mut hash = Xxh3::new();
    hash.update(&before.to_le_bytes());
    hash.update(&key.loose_hash.to_le_bytes());
    hash.digest()
}

/// The prefix hash of each message.
#[must_use]
pub fn prefix_hashes(sent: &[SentMessage]) -> Vec<u64> {
    let prefixes = sent.iter().scan(0, |prefix, message| {
        *prefix = extend_prefix(*prefix, &message.key);
        Some(*prefix)
    });
    prefixes.collect()
}

fn hash_text(role: Role, text: &str) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(role.name().as_bytes());
    hash.update(b"\0");
    hash.update(text.as_bytes());
    hash.digest()
}

/// A text in Unicode NFC, with each run of white space as one space.
pub(super) fn normalize_text(text: &str) -> String {
    let normal: String = text.nfc().filter(|c| !matches!(c, '\u{200b}' | '\u{feff}')).collect();
    normal.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The speaker's name in front of a text, as in "Anna: hello", and the rest.
pub(super) fn split_speaker_name(text: &str) -> (&str, &str) {
    let is_name = |name: &str| {
        let is_name_char = |c: char| c.is_alphanumeric() || matches!(c, ' ' | '.' | '_' | '-' | '\'');
        let count = name.chars().count();
        (1..=40).contains(&count)
            && name.starts_with(char::is_alphanumeric)
            && name.chars().all(is_name_char)
            && name.split(' ').count() <= 4
    };
    match text.split_once(':') {
        Some((name, rest)) if is_name(name) && rest.starts_with([' ', '\n']) && !rest.trim().is_empty() => {
            (name, rest.trim_start())
        }
        _ => ("", text),
    }
}

/// Whether two messages are the same, as far as clients keep them the same: white space may differ, and a name in front may
/// be missing in one. With different names they are different messages.
pub(super) fn is_same_message(a: &MessageKey, b: &MessageKey) -> bool {
    a.role == b.role
        && (a.exact_hash == b.exact_hash
            || (a.loose_hash == b.loose_hash
                && (a.name_hash == b.name_hash || a.name_hash == 0 || b.name_hash == 0)))
}

/// Whether two system prompts are versions of one: at least half of the longer one is a common head and tail.
#[must_use]
pub fn is_similar_prompt(a: &str, b: &str) -> bool {
    let (a, b) = (normalize_text(a), normalize_text(b));
    if a == b {
        return true;
    }
    let longer = a.len().max(b.len());
    let shorter = a.len().min(b.len());
    let head = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let tail = a.bytes().rev().zip(b.bytes().rev()).take_while(|(a, b)| a == b).count();
    2 * (head + tail).min(shorter) >= longer
}

/// The hashes that are looked up one by one where no prefix of the history is stored: those of the latest messages without
/// system messages, each once.
#[must_use]
pub fn lookup_hashes(sent: &[SentMessage], max: usize) -> Vec<u64> {
    let mut seen = BTreeSet::new();
    let history = sent.iter().rev().skip(1).filter(|message| message.role != Role::System);
    history.map(|message| message.key.loose_hash).filter(|&hash| seen.insert(hash)).take(max).collect()
}

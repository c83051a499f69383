//! Hashes of messages, by which a history that is sent again is recognized.

use halo_core::answer_parser::AnswerMarkers;
use halo_core::store::MessageKey;
use halo_core::token::{Role, TurnId};
use halo_core::tool_call::{CallFormat, FunctionCall, MessagePart, ReasoningFormat, compact_json};
use std::borrow::Cow;
use std::collections::BTreeSet;
use unicode_normalization::UnicodeNormalization;
use xxhash_rust::xxh3::Xxh3;

/// A message of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentMessage {
    pub role: Role,
    pub text: String,
    /// The functions that it calls, if it is the assistant's.
    pub calls: Vec<FunctionCall>,
    /// The ids of its calls, or that of the call whose result it is. A client chooses them, so they are no part of its identity.
    pub call_ids: Vec<String>,
    /// Its hashes. The turn is 0: it is not known yet.
    pub key: MessageKey,
}

impl SentMessage {
    #[must_use]
    pub fn new(role: Role, text: String) -> Self {
        let key = message_key(TurnId(0), role, &text, 0);
        Self { role, text, calls: Vec::new(), call_ids: Vec::new(), key }
    }

    /// An answer that calls functions.
    #[must_use]
    pub fn with_calls(text: String, calls: Vec<FunctionCall>) -> Self {
        let key = message_key(TurnId(0), Role::Assistant, &answer_text(&text, &calls), 0);
        Self { role: Role::Assistant, text, calls, call_ids: Vec::new(), key }
    }

    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.trim().is_empty() && self.calls.is_empty()
    }
}

/// An answer with its calls as text, in the general format.
#[must_use]
pub fn answer_text(text: &str, calls: &[FunctionCall]) -> String {
    let parts = CallFormat::default().render(text.trim(), calls).into_iter();
    parts
        .map(|part| match part {
            MessagePart::Frame(text) | MessagePart::Content(text) => text,
        })
        .collect()
}

/// An answer without its reasoning, and with its calls in one format: models write calls in different formats, and clients
/// send them apart from the text and without the reasoning.
fn comparable_answer(text: &str) -> Cow<'_, str> {
    const REASONING: [(&str, &str); 4] = [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("[THINK]", "[/THINK]"),
        ("<reasoning>", "</reasoning>"),
    ];
    const CALLS: [&str; 2] = ["<tool_call>", "[TOOL_CALLS]"];
    let reasoning = REASONING.iter().find(|(_, close)| text.contains(close));
    let marker = CALLS.iter().find(|marker| text.contains(*marker));
    if reasoning.is_none() && marker.is_none() && !text.starts_with(['{', '[', '`']) {
        return Cow::Borrowed(text);
    }
    let calls = CallFormat { open: marker.map_or("", |marker| marker).to_owned(), ..CallFormat::default() };
    let format = reasoning.map(|(open, close)| ReasoningFormat {
        open: (*open).to_owned(),
        close: (*close).to_owned(),
        prompt: String::new(),
        skip: None,
    });
    // The template may have written the first marker.
    let starts_in_reasoning = reasoning.is_some_and(|(open, _)| !text.contains(open));
    let markers =
        AnswerMarkers { reasoning: format, starts_in_reasoning, calls: Some(calls), functions: None };
    let mut answer = markers.parse(text);
    answer.calls.iter_mut().for_each(|call| call.arguments = compact_json(&call.arguments));
    Cow::Owned(answer_text(&answer.text, &answer.calls))
}

/// The hashes of a message; `before` is the prefix hash of the messages before it.
#[must_use]
pub fn message_key(turn: TurnId, role: Role, text: &str, before: u64) -> MessageKey {
    let text = match role {
        Role::Assistant => comparable_answer(text.trim()),
        Role::System | Role::User | Role::Tool => Cow::Borrowed(text.trim()),
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_key_is_the_same_for_every_format_of_a_call() {
        let calls = vec![FunctionCall { name: "clock".into(), arguments: "{\"zone\": \"CET\"}".into() }];
        let sent = SentMessage::with_calls(String::new(), calls.clone());
        let key = |text: &str| message_key(TurnId(0), Role::Assistant, text, 0).exact_hash;
        let written = [
            "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>",
            "<think>\nHm.\n</think>\n\n<tool_call>{\"name\":\"clock\",\"arguments\":{\"zone\":\"CET\"}}</tool_call>",
            "{\"name\": \"clock\", \"parameters\": {\"zone\": \"CET\"}}",
            "```json\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}\n```",
            "[TOOL_CALLS] [{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}]",
        ];
        for text in written {
            assert_eq!(key(text), sent.key.exact_hash, "{text}");
        }
        assert_ne!(
            key("<tool_call>{\"name\": \"clock\", \"arguments\": {}}</tool_call>"),
            sent.key.exact_hash
        );
        let with_text = SentMessage::with_calls("I look.".into(), calls);
        assert_eq!(
            key(
                "I look.\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>"
            ),
            with_text.key.exact_hash
        );
        assert_eq!(key("Hm.</think>Yes."), key("Yes."));
        let block = "```json\n{\"name\": \"Otto\"}\n```";
        assert_eq!(key(block), hash_text(Role::Assistant, block));
        assert_eq!(key("{\"name\": \"Otto\"}"), hash_text(Role::Assistant, "{\"name\": \"Otto\"}"));
    }
}

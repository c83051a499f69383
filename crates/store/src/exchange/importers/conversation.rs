//! A conversation of another program, in the one form that all importers produce.

use super::error::ImportError;
use super::losses::{ImportLosses, loss_kind};
use halo_core::token::Role;
use serde_json::Value;
use std::collections::HashSet;
use std::hash::Hash;

/// Takes one conversation after the other; an error ends the import.
pub(super) type ConversationCallback<'a> = &'a mut dyn FnMut(ForeignConversation) -> Result<(), ImportError>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForeignConversation {
    /// Its title, or the name of its character.
    pub name: Option<String>,
    /// The model that wrote the answers, as the other program calls it.
    pub model: Option<String>,
    /// When it began, in milliseconds since 1970.
    pub created: Option<i64>,
    /// Its messages in order; none, if the file has an empty conversation.
    pub turns: Vec<ForeignTurn>,
    /// Notes of the model.
    pub notes: Option<Value>,
    /// Its search index. Every entry names another chunk of `turns`.
    pub index: Vec<ForeignIndexEntry>,
    /// What was not imported.
    pub losses: ImportLosses,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ForeignTurn {
    /// Its number in the other program. Numbers rise; a system prompt that is not one of the turns comes first and has
    /// no number.
    pub number: Option<u32>,
    pub role: Role,
    /// The name of the speaker, if the file has one beside the role.
    pub speaker: Option<String>,
    /// When, in milliseconds since 1970. A date without a time zone is read as UTC.
    pub at: Option<i64>,
    pub content: ForeignContent,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ForeignContent {
    Text(String),
    /// Tokens with their state, at least one.
    Tokens(Vec<ForeignToken>),
}

/// A token of Halo Weave.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignToken {
    /// Its number in the vocabulary of the model that wrote it.
    pub id: Option<u32>,
    /// Its text; empty for a control token.
    pub text: String,
    /// The chunk of the turn; never falls within a turn.
    pub chunk_index: u32,
    /// Its brightness, or the one that it was pruned with; finite.
    pub brightness: f32,
    pub pruned: bool,
    pub pinned: bool,
    /// Whether it is part of a tool's result.
    pub tool: bool,
}

/// A chunk in the search index of Halo Weave.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignIndexEntry {
    /// The turn of the chunk, as in [`ForeignTurn::number`].
    pub turn: u32,
    /// The chunk of the turn.
    pub chunk_index: u32,
    pub role: Role,
    /// The text of the chunk when it was indexed.
    pub text: String,
    /// How often it was resurrected.
    pub references: u64,
    /// Its embedding, if the file has it; every number is finite.
    pub embedding: Option<Vec<f32>>,
}

impl ForeignConversation {
    /// Adds a message, unless it is empty.
    pub(super) fn push_turn(&mut self, role: Role, speaker: &str, at: Option<i64>, text: String) {
        if !text.is_empty() {
            let (speaker, content) = (non_blank(speaker), ForeignContent::Text(text));
            self.turns.push(ForeignTurn { number: None, role, speaker, at, content });
        }
    }
}

/// A text with more than white space.
pub(super) fn non_blank(text: &str) -> Option<String> {
    (!text.trim().is_empty()).then(|| text.to_owned())
}

/// Appends a part of a message, after `separator` unless it is the first.
pub(super) fn append_with_separator(message: &mut String, separator: &str, part: &str) {
    if !message.is_empty() && !part.is_empty() {
        message.push_str(separator);
    }
    message.push_str(part);
}

/// Appends the text of an attached file under its name: the model has read it as part of the message.
pub(super) fn append_attachment(message: &mut String, name: &str, content: &str) {
    let name = if name.is_empty() { "attachment" } else { name };
    append_with_separator(message, "\n\n", &format!("[{name}]\n{content}"));
}

/// Follows the links from the last message back to the first, and returns the messages from the first on. A link to a
/// message that was visited already, or to none (an error of `parent`), ends the path and is counted as a loss.
pub(super) fn path_from_root<K: Copy + Eq + Hash>(
    last: Option<K>,
    parent: impl Fn(K) -> Result<Option<K>, ()>,
    losses: &mut ImportLosses,
) -> Vec<K> {
    let mut path = Vec::new();
    let mut visited = HashSet::new();
    let mut next = Ok(last);
    while let Ok(Some(message)) = next {
        if !visited.insert(message) {
            next = Err(());
            break;
        }
        path.push(message);
        next = parent(message);
    }
    losses.add(loss_kind::BROKEN_LINKS, usize::from(next.is_err()));
    path.reverse();
    path
}

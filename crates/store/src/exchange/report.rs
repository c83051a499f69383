//! What an import has created.

use super::importers::ImportLosses;
use crate::names;
use halo_core::timeline::Timeline;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportReport {
    /// The conversations in the order of the file.
    pub conversations: Vec<ImportedConversation>,
    /// What was not imported.
    pub losses: ImportLosses,
    /// The format of the file, in words.
    pub format: String,
}

/// A conversation, or a world, that was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedConversation {
    pub name: String,
    /// Whether it is a world of rooms.
    pub is_namespace: bool,
    pub turns: usize,
    pub tokens: usize,
    /// Tokens in the context window.
    pub live: usize,
}

impl ImportedConversation {
    pub(super) fn new(name: &str, timeline: &Timeline) -> Self {
        let (turns, tokens) = (timeline.turns().len(), timeline.len());
        let namespace = names::namespace_of(name);
        let (name, is_namespace) = (namespace.unwrap_or(name).to_owned(), namespace.is_some());
        Self { name, is_namespace, turns, tokens, live: timeline.live_len() }
    }
}

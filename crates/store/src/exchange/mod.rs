//! Conversations that leave and arrive: the lossless form of our own, and what other programs write.

mod import;
pub mod importers;
mod native;

pub use import::{ImportRequest, RowValidator, UNTOKENIZED};

use crate::row_store;
use crate::sql::SqlError;
use halo_core::timeline::Timeline;
use importers::ImportLosses;

/// What came of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportReport {
    /// The conversations, in order.
    pub conversations: Vec<ImportedConversation>,
    /// What could not be kept.
    pub losses: ImportLosses,
    /// What the file was.
    pub format: String,
}

/// A conversation or a namespace of rows that was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedConversation {
    pub name: String,
    /// Whether it is a namespace of rows and not a conversation.
    pub is_namespace: bool,
    pub turns: usize,
    pub tokens: usize,
    /// Tokens in the window.
    pub live: usize,
}

impl ImportedConversation {
    fn new(name: &str, timeline: &Timeline) -> Self {
        let (turns, tokens) = (timeline.turns().len(), timeline.len());
        let namespace = row_store::namespace_of(name);
        let (name, is_namespace) = (namespace.unwrap_or(name).to_owned(), namespace.is_some());
        Self { name, is_namespace, turns, tokens, live: timeline.live_len() }
    }
}

fn name_taken(name: &str) -> SqlError {
    let (what, name) = row_store::namespace_of(name).map_or(("conversation", name), |world| ("world", world));
    SqlError::invalid_input(format!("there is a {what} '{name}' already: give this one another name with -c"))
}

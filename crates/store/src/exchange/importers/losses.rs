//! What an import leaves out, counted by kind.

use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportLosses(BTreeMap<&'static str, u64>);

impl ImportLosses {
    /// Counts `n` more of a kind.
    pub fn add(&mut self, kind: &'static str, n: usize) {
        if n > 0 {
            let count = self.0.entry(kind).or_default();
            *count = count.saturating_add(n as u64);
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The kinds in alphabetical order, each with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(kind, count)| (*kind, *count))
    }

    /// Adds the losses of another conversation.
    pub fn merge(&mut self, other: &ImportLosses) {
        for (kind, n) in other.iter() {
            let count = self.0.entry(kind).or_default();
            *count = count.saturating_add(n);
        }
    }
}

/// The kinds that more than one importer counts.
pub(super) mod loss_kind {
    pub const ATTACHMENTS: &str = "attachments";
    pub const AUDIO: &str = "audio";
    pub const BRANCHES: &str = "messages on other branches";
    pub const BROKEN_LINKS: &str = "links that lead to no earlier message";
    pub const UNREADABLE_DATES: &str = "unreadable dates";
    pub const HIDDEN_MESSAGES: &str = "hidden messages";
    pub const IMAGES: &str = "images";
    pub const UNKNOWN_PARTS: &str = "parts of an unknown kind";
    pub const UNKNOWN_ROLES: &str = "messages of an unknown role";
    pub const REASONING: &str = "reasoning of the model";
    pub const TOOL_CALLS: &str = "tool calls";
    pub const TOOL_RESULTS: &str = "tool results";
}

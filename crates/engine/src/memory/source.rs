//! Where a memory comes from: what its writer saw, and from which conversation it was carried.

use serde::{Deserialize, Serialize};

/// What the writer of a memory saw, by the names of blocks, turns and facets. It holds no text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySource {
    /// The context at the end of the range, in order.
    pub segments: Vec<SourceSegment>,
    /// Tokens of pruned chunks whose KV cells came from the archive, not from reading their text again.
    #[serde(default)]
    pub restored_tokens: usize,
}

/// A segment of that context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSegment {
    pub block: String,
    pub turns: Vec<u32>,
    pub facets: Vec<String>,
    pub tokens: usize,
}

/// The memory of another conversation that a memory was carried from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedFrom {
    /// The id of the conversation. Its name is text that may be forgotten, so it is not stored here.
    pub conversation: String,
    pub memory: u64,
    /// The first turn of its range there.
    pub from: u32,
    pub to: u32,
}

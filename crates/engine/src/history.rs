//! The history of a chunk, from the log.

use halo_core::Error;
use halo_core::change::Change;
use halo_core::store::{LogEntry, Store};
use halo_core::token::ChunkId;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkHistoryEntry {
    /// In milliseconds since 1970.
    pub at: i64,
    /// The sequence number of the log entry.
    pub seq: u64,
    pub action: ChunkAction,
    /// Empty where the log has none.
    pub reason: String,
    /// The kind of the reason of a pruning or a resurrection; empty for other actions.
    pub reason_kind: &'static str,
}

/// What happened to a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkAction {
    Pruned,
    Resurrected,
    Pinned,
    Unpinned,
    Deleted,
    Undeleted,
    Merged,
    Split,
}

impl ChunkAction {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ChunkAction::Pruned => "pruned",
            ChunkAction::Resurrected => "resurrected",
            ChunkAction::Pinned => "pinned",
            ChunkAction::Unpinned => "unpinned",
            ChunkAction::Deleted => "deleted",
            ChunkAction::Undeleted => "undeleted",
            ChunkAction::Merged => "merged",
            ChunkAction::Split => "split",
        }
    }
}

impl ChunkHistoryEntry {
    #[must_use]
    pub fn describe(&self) -> String {
        if self.reason.is_empty() {
            self.action.as_str().to_owned()
        } else {
            format!("{}: {}", self.action.as_str(), self.reason)
        }
    }
}

/// The history of a chunk, the oldest entry first.
pub fn chunk_history(
    store: &mut dyn Store,
    conversation: &str,
    chunk: ChunkId,
) -> Result<Vec<ChunkHistoryEntry>, Error> {
    Ok(store
        .chunk_history(conversation, chunk)?
        .iter()
        .flat_map(|entry| entries_for_chunk(entry, chunk))
        .collect())
}

/// What one log entry did to a chunk.
#[must_use]
pub fn entries_for_chunk(entry: &LogEntry, chunk: ChunkId) -> Vec<ChunkHistoryEntry> {
    let mut entries = Vec::new();
    let mut add = |action: ChunkAction, reason: String, reason_kind: &'static str| {
        let (at, seq) = (entry.committed_at, entry.seq);
        entries.push(ChunkHistoryEntry { at, seq, action, reason, reason_kind });
    };
    for change in entry.change.flatten() {
        match change {
            Change::Prune(pruned) => {
                let of_chunk = pruned.iter().filter(|p| p.chunk == chunk);
                of_chunk.for_each(|p| {
                    add(ChunkAction::Pruned, p.reason.to_string(), p.reason.kind());
                });
            }
            Change::Resurrect(resurrected) => {
                let of_chunk = resurrected.iter().filter(|r| r.chunk == chunk);
                of_chunk.for_each(|r| {
                    add(ChunkAction::Resurrected, r.reason.to_string(), r.reason.kind());
                });
            }
            Change::Pin { chunk: c, pinned } if *c == chunk => {
                add(if *pinned { ChunkAction::Pinned } else { ChunkAction::Unpinned }, String::new(), "");
            }
            Change::Delete { chunks, reason } if chunks.iter().any(|c| c.chunk == chunk) => {
                add(ChunkAction::Deleted, reason.to_string(), "");
            }
            Change::Undelete(chunks) if chunks.iter().any(|c| c.chunk == chunk) => {
                add(ChunkAction::Undeleted, "the deletion was undone".into(), "");
            }
            Change::Merge { chunk: c, .. } if *c == chunk => {
                add(ChunkAction::Merged, "merged into the chunk before it in its turn".into(), "");
            }
            Change::Split { chunk: c, at, .. } if *c == chunk => {
                add(
                    ChunkAction::Split,
                    format!("the tokens from position {} on became a chunk of their own", at.0),
                    "",
                );
            }
            Change::Split { chunk: c, tail_index, .. }
                if *tail_index == chunk.index && c.turn == chunk.turn =>
            {
                add(ChunkAction::Split, format!("it was the tail of {c}"), "");
            }
            _ => {}
        }
    }
    entries
}

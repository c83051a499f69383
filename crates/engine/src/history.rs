//! What happened to a chunk, as the log tells it.

use halo_core::change::Change;
use halo_core::seams::{Entry, SeamError, Store};
use halo_core::token::ChunkId;

/// Something that happened to a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happened {
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// The entry of the log that tells it.
    pub seq: u64,
    /// What.
    pub what: &'static str,
    /// Why; empty where there is nothing to say.
    pub why: String,
}

impl Happened {
    /// What, and why.
    #[must_use]
    pub fn text(&self) -> String {
        if self.why.is_empty() { self.what.to_owned() } else { format!("{}: {}", self.what, self.why) }
    }
}

/// What happened to a chunk, the oldest first.
///
/// # Errors
/// When the store cannot be read.
pub fn of(store: &mut dyn Store, conversation: &str, chunk: ChunkId) -> Result<Vec<Happened>, SeamError> {
    Ok(store.history(conversation, chunk)?.iter().flat_map(|entry| told(entry, chunk)).collect())
}

/// What an entry of the log tells of a chunk.
#[must_use]
pub fn told(entry: &Entry, chunk: ChunkId) -> Vec<Happened> {
    let mut told = Vec::new();
    let mut add =
        |what: &'static str, why: String| told.push(Happened { at: entry.at, seq: entry.seq, what, why });
    for change in entry.change.parts() {
        match change {
            Change::Prune(leaves) => {
                leaves.iter().filter(|l| l.chunk == chunk).for_each(|l| add("left", l.why.to_string()));
            }
            Change::Resurrect(returns) => {
                returns.iter().filter(|r| r.chunk == chunk).for_each(|r| add("returned", r.why.to_string()));
            }
            Change::Pin { chunk: c, pinned } if *c == chunk => {
                add(if *pinned { "pinned" } else { "unpinned" }, String::new());
            }
            Change::Withdraw { parts, reason } if parts.iter().any(|p| p.chunk == chunk) => {
                add("deleted", reason.to_string());
            }
            Change::Restore(parts) if parts.iter().any(|p| p.chunk == chunk) => {
                add("restored", "its deletion was taken back".into());
            }
            Change::Merge { chunk: c, .. } if *c == chunk => {
                add("merged", "joined the chunk before it in its turn".into());
            }
            Change::Split { chunk: c, at, .. } if *c == chunk => {
                add("cut", format!("from position {} on it is a chunk of its own", at.0));
            }
            Change::Split { chunk: c, sentence, .. }
                if *sentence == chunk.sentence && c.turn == chunk.turn =>
            {
                add("cut", format!("it was the tail of {c}"));
            }
            _ => {}
        }
    }
    told
}

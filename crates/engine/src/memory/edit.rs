//! Edits of memories by the user, and search in them.

use super::conflict::{remove_conflicts, update_conflicts};
use super::record::{Memory, memory_key, store_memory};
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use halo_core::token::ChunkId;
use std::collections::BTreeSet;

/// An edit of a memory by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryEdit {
    SetText(String),
    /// Places it before others, or no longer.
    Pin(bool),
    /// Stops placing it, or allows it again.
    Disable(bool),
    /// Deletes it. The messages that it summarizes stay.
    Delete,
}

/// The longest text of an edited memory in bytes: about two thousand tokens, as many as a memory may be formed with.
const MAX_MEMORY_BYTES: usize = 8_192;

/// Applies an edit to one of a conversation's memories, in the list and in the store.
pub fn apply_memory_edit(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut Vec<Memory>,
    id: u64,
    edit: MemoryEdit,
) -> Result<(), Error> {
    let operation = "editing a memory";
    let at = memories.iter().position(|memory| memory.id == id);
    let at = at.ok_or_else(|| Error::not_found(operation, format!("there is no memory {id}")))?;
    match edit {
        MemoryEdit::Delete => {
            store.put_record(conversation, RecordKind::Memory, &memory_key(id), None)?;
            memories.remove(at);
            return remove_conflicts(store, conversation, memories, id);
        }
        MemoryEdit::SetText(text) => {
            let text = text.trim();
            if text.is_empty() || text.len() > MAX_MEMORY_BYTES {
                let message =
                    format!("the text must have 1 to {MAX_MEMORY_BYTES} bytes; this one has {}", text.len());
                return Err(Error::invalid_input(operation, message));
            }
            (memories[at].text, memories[at].edited) = (text.to_owned(), true);
            // Decisions were about the text before.
            memories[at].retracted.clear();
            memories[at].settled.clear();
        }
        MemoryEdit::Pin(pinned) => memories[at].pinned = pinned,
        MemoryEdit::Disable(disabled) => memories[at].disabled = disabled,
    }
    store_memory(store, conversation, &memories[at])?;
    update_conflicts(store, conversation, memories, id)
}

/// Memories by relevance to a query: the share of its words that they contain, plus the best score of a hit in their range.
/// Those without either are left out.
pub fn rank_memories(memories: &[Memory], query: &str, hits: &[(ChunkId, f64)]) -> Vec<(f64, Memory)> {
    let words = |text: &str| -> BTreeSet<String> {
        let lower = text.to_lowercase();
        lower
            .split(|c: char| !c.is_alphanumeric())
            .filter(|w| w.chars().count() > 2)
            .map(str::to_owned)
            .collect()
    };
    let query_words = words(query);
    let best_hit = hits.iter().map(|(_, score)| *score).fold(0.0, f64::max);
    let score = |memory: &Memory| {
        let shared = words(&memory.current_text()).intersection(&query_words).count();
        let by_words = if query_words.is_empty() { 0.0 } else { shared as f64 / query_words.len() as f64 };
        let in_range = hits.iter().filter(|(chunk, _)| memory.range.contains(*chunk));
        let by_hits = in_range.map(|(_, score)| *score).fold(0.0, f64::max);
        by_words + if best_hit > 0.0 { by_hits / best_hit } else { 0.0 }
    };
    let mut ranked: Vec<(f64, Memory)> =
        memories.iter().map(|memory| (score(memory), memory.clone())).collect();
    ranked.retain(|(score, _)| *score > 0.0);
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.id.cmp(&a.1.id)));
    ranked
}

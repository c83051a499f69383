//! Memories that span conversations: a memory of one conversation, or of several, is carried into another. It is part of the
//! system prompt there, and is forgotten with the text that it comes from.

use super::conflict::update_conflicts;
use super::range::MemoryRange;
use super::record::{Memory, load_all_memories, load_memories, memory_key, store_memory};
use super::source::CarriedFrom;
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use halo_core::token::TurnId;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// A memory of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryReference {
    pub conversation: String,
    pub memory: u64,
}

/// Whether several memories become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarryMode {
    /// Each becomes a memory of its own.
    Separate,
    /// All become one memory, which spans their conversations.
    Joined,
}

/// The memories that are carried, with new ids from `first_id`.
pub(crate) fn prepare_carried(
    store: &mut dyn Store,
    references: &[MemoryReference],
    mode: CarryMode,
    first_id: u64,
) -> Result<Vec<Memory>, Error> {
    let operation = "carrying memories";
    if references.is_empty() {
        return Err(Error::invalid_input(operation, "no memory is named"));
    }
    let mut carried = Vec::new();
    for MemoryReference { conversation, memory } in references {
        let missing = || {
            let message = format!("there is no memory {memory} in the conversation '{conversation}'");
            Error::not_found(operation, message)
        };
        let summary = store.find_conversation(conversation)?.ok_or_else(missing)?;
        let memories = load_memories(store, conversation)?;
        let original = memories.into_iter().find(|other| other.id == *memory).ok_or_else(missing)?;
        let mut sources = original.carried_from.clone();
        if sources.is_empty() {
            sources.push(CarriedFrom {
                conversation: summary.id,
                memory: *memory,
                from: original.range.from.0,
                to: original.range.to.0,
            });
        }
        carried.push(Memory {
            range: MemoryRange::NONE,
            reflection: false,
            text: original.current_text(),
            formed_after: TurnId(0),
            pinned: false,
            disabled: false,
            conflicts: BTreeSet::new(),
            pruned_chunks: BTreeSet::new(),
            source: None,
            overlap_from: None,
            carried_from: sources,
            retracted: BTreeSet::new(),
            settled: BTreeSet::new(),
            ..original
        });
    }
    if mode == CarryMode::Joined {
        let mut parts = carried.into_iter();
        let mut joined = parts.next().ok_or_else(|| Error::internal(operation, "there is no memory"))?;
        for part in parts {
            joined.text = format!("{}\n{}", joined.text.trim(), part.text.trim());
            joined.operations.extend(part.operations);
            joined.carried_from.extend(part.carried_from);
        }
        carried = vec![joined];
    }
    for (memory, id) in carried.iter_mut().zip(first_id..) {
        memory.id = id;
    }
    Ok(carried)
}

/// The next free id of a conversation's memories. Ids of those that are to be forgotten are not used again.
pub(crate) fn next_memory_id(store: &mut dyn Store, conversation: &str) -> Result<u64, Error> {
    let stored = store.records(conversation, RecordKind::Memory)?;
    let ids = stored.iter().filter_map(|record| record.key.parse::<u64>().ok());
    Ok(ids.max().unwrap_or(0) + 1)
}

/// Carries memories into a conversation that exists. Returns the new memories.
pub fn carry_memories(
    store: &mut dyn Store,
    to: &str,
    references: &[MemoryReference],
    mode: CarryMode,
) -> Result<Vec<Memory>, Error> {
    let first_id = next_memory_id(store, to)?;
    let carried = prepare_carried(store, references, mode, first_id)?;
    let mut memories = load_memories(store, to)?;
    for memory in &carried {
        store_memory(store, to, memory)?;
        memories.push(memory.clone());
        update_conflicts(store, to, &mut memories, memory.id)?;
    }
    Ok(memories.into_iter().filter(|memory| memory.id >= first_id).collect())
}

/// The carried memories as a part of the system prompt, pinned ones first, then the latest, in at most so many bytes.
#[must_use]
pub(crate) fn carried_text(memories: &[Memory], max_bytes: usize) -> String {
    let mut carried: Vec<&Memory> =
        memories.iter().filter(|memory| memory.is_carried() && !memory.disabled).collect();
    carried.sort_by_key(|memory| (!memory.pinned, Reverse(memory.id)));
    let mut text = String::new();
    for memory in carried {
        let mut block = format!("<memory>\n{}", memory.current_text());
        memory.operations.iter().for_each(|operation| block += &format!("\nStill so: {operation}"));
        block += "\n</memory>\n";
        if text.len() + block.len() <= max_bytes {
            text += &block;
        }
    }
    if text.is_empty() {
        text
    } else {
        format!("What you remember of earlier conversations:\n{}", text.trim())
    }
}

/// Deletes what was carried out of a conversation from all others: some of its memories, or without any named, all. Text that
/// is forgotten there must not stay elsewhere.
pub(crate) fn delete_carried_copies(
    store: &mut dyn Store,
    conversation_id: &str,
    memories: Option<&[u64]>,
) -> Result<usize, Error> {
    let mut deleted = 0;
    for summary in store.list_conversations()? {
        for memory in load_all_memories(store, &summary.name)? {
            let is_copy = memory.carried_from.iter().any(|source| {
                source.conversation == conversation_id
                    && memories.is_none_or(|ids| ids.contains(&source.memory))
            });
            if is_copy {
                store.put_record(&summary.name, RecordKind::Memory, &memory_key(memory.id), None)?;
                deleted += 1;
            }
        }
    }
    Ok(deleted)
}

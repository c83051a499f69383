//! Contradictions between memories. A later value of the same thing replaces the earlier one by rule; whatever else
//! contradicts is put to the user, who decides which memory is right.

use super::record::{Memory, SENTENCE_ENDS, store_memory};
use halo_agents::contradiction::{ContradictionReason, find_contradiction};
use halo_core::Error;
use halo_core::store::Store;
use std::collections::BTreeSet;

/// Two sentences of two memories that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryConflict {
    /// The memory that was formed first.
    pub first: u64,
    pub second: u64,
    pub first_sentence: String,
    pub second_sentence: String,
    pub reason: ContradictionReason,
}

/// Which memory the user believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictDecision {
    KeepFirst,
    KeepSecond,
    KeepBoth,
}

fn sentences(text: &str) -> Vec<String> {
    let sentences = text.split_inclusive(SENTENCE_ENDS).map(|sentence| sentence.trim().to_owned());
    sentences.filter(|sentence| !sentence.is_empty()).collect()
}

/// The contradictions between two memories, the older one first.
fn conflicts_between(one: &Memory, other: &Memory) -> Vec<MemoryConflict> {
    let (first, second) = if one.id < other.id { (one, other) } else { (other, one) };
    if first.settled.contains(&second.id) || second.settled.contains(&first.id) {
        return Vec::new();
    }
    let seconds = sentences(&second.current_text());
    let mut conflicts = Vec::new();
    for first_sentence in sentences(&first.current_text()) {
        for second_sentence in &seconds {
            if let Some(reason) = find_contradiction(&first_sentence, second_sentence) {
                conflicts.push(MemoryConflict {
                    first: first.id,
                    second: second.id,
                    first_sentence: first_sentence.clone(),
                    second_sentence: second_sentence.clone(),
                    reason,
                });
            }
        }
    }
    conflicts
}

/// The conflicts that wait for a decision of the user.
#[must_use]
pub fn open_conflicts(memories: &[Memory]) -> Vec<MemoryConflict> {
    let pairs = memories.iter().enumerate().flat_map(|(n, one)| {
        memories[n + 1..]
            .iter()
            .filter(|other| one.conflicts.contains(&other.id))
            .map(move |other| (one, other))
    });
    pairs.flat_map(|(one, other)| conflicts_between(one, other)).collect()
}

/// Looks for contradictions with a memory that is new or has changed. The rule resolves what it can; the rest is marked on
/// both memories.
pub(crate) fn update_conflicts(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut [Memory],
    id: u64,
) -> Result<(), Error> {
    let Some(at) = memories.iter().position(|memory| memory.id == id) else { return Ok(()) };
    let mut open = BTreeSet::new();
    for other in (0..memories.len()).filter(|&other| other != at) {
        for conflict in conflicts_between(&memories[at], &memories[other]) {
            let first = if memories[at].id == conflict.first { at } else { other };
            // A value may change; what the user pinned or wrote is not overruled.
            let is_update = conflict.reason == ContradictionReason::DifferentValue;
            if is_update && !memories[first].pinned && !memories[first].edited {
                memories[first].retracted.insert(conflict.first_sentence);
                store_memory(store, conversation, &memories[first])?;
            } else {
                open.insert(memories[other].id);
            }
        }
    }
    memories[at].conflicts.clone_from(&open);
    store_memory(store, conversation, &memories[at])?;
    mark_others(store, conversation, memories, id, &open)
}

/// Removes the marks of a memory that was deleted.
pub(crate) fn remove_conflicts(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut [Memory],
    id: u64,
) -> Result<(), Error> {
    mark_others(store, conversation, memories, id, &BTreeSet::new())
}

/// Marks a contradiction on the other memories, and removes marks that no longer hold.
fn mark_others(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut [Memory],
    id: u64,
    conflicts: &BTreeSet<u64>,
) -> Result<(), Error> {
    for other in memories.iter_mut().filter(|other| other.id != id) {
        let changed = if conflicts.contains(&other.id) {
            other.conflicts.insert(id)
        } else {
            other.conflicts.remove(&id)
        };
        if changed {
            store_memory(store, conversation, other)?;
        }
    }
    Ok(())
}

/// Applies the decision of the user: what the other memory says against the one that is kept is left out from now on. With
/// both kept, the two are not compared again.
pub fn resolve_conflict(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut [Memory],
    (first, second): (u64, u64),
    decision: ConflictDecision,
) -> Result<(), Error> {
    let operation = "resolving a conflict";
    let position = |id: u64| {
        let at = memories.iter().position(|memory| memory.id == id);
        at.ok_or_else(|| Error::not_found(operation, format!("there is no memory {id}")))
    };
    let (one, other) = (position(first)?, position(second)?);
    if !memories[one].conflicts.contains(&second) {
        let message = format!("memory {first} and memory {second} have no open conflict");
        return Err(Error::not_found(operation, message));
    }
    for conflict in conflicts_between(&memories[one], &memories[other]) {
        // `first` of the caller need not be the older memory.
        let sentence_of = |id: u64| {
            if conflict.first == id {
                conflict.first_sentence.clone()
            } else {
                conflict.second_sentence.clone()
            }
        };
        match decision {
            ConflictDecision::KeepFirst => {
                memories[other].retracted.insert(sentence_of(second));
            }
            ConflictDecision::KeepSecond => {
                memories[one].retracted.insert(sentence_of(first));
            }
            ConflictDecision::KeepBoth => {}
        }
    }
    if decision == ConflictDecision::KeepBoth {
        memories[one].settled.insert(second);
        memories[other].settled.insert(first);
    }
    memories[one].conflicts.remove(&second);
    memories[other].conflicts.remove(&first);
    store_memory(store, conversation, &memories[one])?;
    store_memory(store, conversation, &memories[other])
}

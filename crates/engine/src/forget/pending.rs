//! What is to be forgotten at the end of its grace period. It is hidden at once, and until then it can be cancelled.

use super::record_text::RecordText;
use crate::memory::record::{self, Memory};
use halo_core::Error;
use halo_core::store::{RecordChange, RecordKind, Store};
use halo_core::token::ChunkId;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Setting: what is to be forgotten in a conversation.
const PENDING_KEY: &str = halo_core::store::PENDING_FORGET_KEY;

/// What one request is to forget in one conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PendingForget {
    /// The end of the grace period, in milliseconds since 1970.
    pub due_at: i64,
    pub chunks: Vec<ChunkId>,
    /// The chunks that this request deleted; the others were deleted before.
    pub newly_hidden: Vec<ChunkId>,
    /// Memories that may mention the chunks.
    pub memories: Vec<u64>,
    /// Memories that are forgotten for their own text.
    pub named_memories: Vec<u64>,
    /// Texts beside the timeline.
    pub records: Vec<RecordText>,
    /// Whether the name of the conversation is forgotten.
    pub name: bool,
    pub whole_conversation: bool,
    /// Whether forgetting has begun: it can only be finished, not cancelled.
    pub started: bool,
}

impl PendingForget {
    fn to_value(&self) -> Value {
        let names = |chunks: &[ChunkId]| chunks.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "due": self.due_at, "chunks": names(&self.chunks), "hidden": names(&self.newly_hidden),
            "memories": self.memories, "named": self.named_memories, "all": self.whole_conversation, "begun": self.started,
            "records": self.records.iter().map(RecordText::to_value).collect::<Vec<_>>(), "name": self.name,
        })
    }

    fn from_value(value: &Value) -> Option<Self> {
        let list = |key: &str| value[key].as_array().cloned().unwrap_or_default();
        let chunks = |key: &str| {
            list(key).iter().filter_map(|name| name.as_str()?.parse().ok()).collect::<Vec<ChunkId>>()
        };
        let numbers = |key: &str| list(key).iter().filter_map(Value::as_u64).collect();
        Some(Self {
            due_at: value["due"].as_i64()?,
            chunks: chunks("chunks"),
            newly_hidden: chunks("hidden"),
            memories: numbers("memories"),
            named_memories: numbers("named"),
            records: list("records").iter().filter_map(RecordText::from_value).collect(),
            name: value["name"].as_bool().unwrap_or(false),
            whole_conversation: value["all"].as_bool().unwrap_or(false),
            started: value["begun"].as_bool().unwrap_or(false),
        })
    }

    /// All memories that it forgets.
    #[must_use]
    pub fn all_memories(&self) -> Vec<u64> {
        [self.memories.as_slice(), &self.named_memories].concat()
    }

    fn is_empty(&self) -> bool {
        let no_memories = self.memories.is_empty() && self.named_memories.is_empty();
        self.chunks.is_empty() && no_memories && self.records.is_empty() && !self.name
    }
}

/// What is to be forgotten in a conversation.
pub fn load_pending(store: &mut dyn Store, name: &str) -> Result<Vec<PendingForget>, Error> {
    let records = store.records(name, RecordKind::Setting)?;
    let record = records.into_iter().find(|record| record.key == PENDING_KEY);
    let values: Vec<Value> =
        record.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default();
    Ok(values.iter().filter_map(PendingForget::from_value).collect())
}

pub(super) fn save_pending(
    store: &mut dyn Store,
    name: &str,
    pending: &[PendingForget],
) -> Result<(), Error> {
    store.put_record(name, RecordKind::Setting, PENDING_KEY, pending_value(pending).as_deref())
}

fn pending_value(pending: &[PendingForget]) -> Option<String> {
    let values = || Value::Array(pending.iter().map(PendingForget::to_value).collect());
    (!pending.is_empty()).then(|| values().to_string())
}

/// The chunks that are to be forgotten, and when: their text is shown to nobody.
pub fn pending_chunks(store: &mut dyn Store, name: &str) -> Result<BTreeMap<ChunkId, i64>, Error> {
    let pending = load_pending(store, name)?;
    let due =
        |entry: &PendingForget| entry.chunks.iter().map(|&chunk| (chunk, entry.due_at)).collect::<Vec<_>>();
    Ok(pending.iter().flat_map(due).collect())
}

/// The same requests without some chunks and memories.
#[must_use]
pub(super) fn remove_from_pending(
    pending: Vec<PendingForget>,
    chunks: &[ChunkId],
    memories: &[u64],
) -> Vec<PendingForget> {
    let without = |entry: PendingForget| {
        let other_chunks = |list: Vec<ChunkId>| list.into_iter().filter(|id| !chunks.contains(id)).collect();
        let other_memories = |list: Vec<u64>| list.into_iter().filter(|id| !memories.contains(id)).collect();
        let entry = PendingForget {
            chunks: other_chunks(entry.chunks),
            newly_hidden: other_chunks(entry.newly_hidden),
            memories: other_memories(entry.memories),
            named_memories: other_memories(entry.named_memories),
            ..entry
        };
        (!entry.is_empty()).then_some(entry)
    };
    pending.into_iter().filter_map(without).collect()
}

/// The same requests without some texts beside the timeline, and without the name where that is erased.
#[must_use]
pub(super) fn remove_texts_from_pending(
    mut pending: Vec<PendingForget>,
    records: &[RecordText],
    name: bool,
) -> Vec<PendingForget> {
    for entry in &mut pending {
        entry.records.retain(|text| !records.contains(text));
        entry.name &= !name;
    }
    pending.retain(|entry| !entry.is_empty());
    pending
}

/// Cancels the forgetting of some chunks, or of everything. Memories that were to be forgotten only because of these chunks
/// are kept too; those that were to be forgotten for their own text only if everything is cancelled. Returns how many
/// memories are kept. The caller undeletes the chunks.
pub(crate) fn cancel_pending(
    store: &mut dyn Store,
    name: &str,
    only: Option<&[ChunkId]>,
) -> Result<usize, Error> {
    let (started, cancellable): (Vec<PendingForget>, Vec<PendingForget>) =
        load_pending(store, name)?.into_iter().partition(|entry| entry.started);
    if cancellable.is_empty() {
        return Ok(0);
    }
    let remaining = match only {
        Some(only) => remove_from_pending(cancellable.clone(), only, &[]),
        None => Vec::new(),
    };
    let is_still_pending = |memory: &Memory| {
        remaining
            .iter()
            .any(|entry| entry.named_memories.contains(&memory.id) || memory.may_mention(&entry.chunks))
    };
    let was_pending = |id: u64| cancellable.iter().any(|entry| entry.all_memories().contains(&id));
    let kept: Vec<u64> = record::load_all_memories(store, name)?
        .iter()
        .filter(|memory| was_pending(memory.id) && !is_still_pending(memory))
        .map(|memory| memory.id)
        .collect();
    record::set_pending_forget(store, name, &kept, false)?;
    save_pending(store, name, &[started, remove_from_pending(remaining, &[], &kept)].concat())?;
    Ok(kept.len())
}

/// The record of a branch without pending requests for text after its last turn, and for memories that it does not have;
/// none where nothing is pending.
pub(crate) fn pending_of_branch(
    store: &mut dyn Store,
    parent: &str,
    last_turn: u32,
    without: &BTreeSet<u64>,
) -> Result<Option<RecordChange>, Error> {
    let pending = load_pending(store, parent)?;
    if pending.is_empty() {
        return Ok(None);
    }
    let memories = record::load_all_memories(store, parent)?;
    let is_gone = |id: &u64| without.contains(id) || !memories.iter().any(|memory| memory.id == *id);
    let chunks: Vec<ChunkId> = (pending.iter())
        .flat_map(|entry| entry.chunks.clone())
        .filter(|chunk| chunk.turn.0 > last_turn)
        .collect();
    let memories: Vec<u64> = pending.iter().flat_map(PendingForget::all_memories).filter(is_gone).collect();
    let value = pending_value(&remove_from_pending(pending, &chunks, &memories));
    Ok(Some(RecordChange { kind: RecordKind::Setting, key: PENDING_KEY.to_owned(), value }))
}

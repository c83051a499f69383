//! A memory as it is stored, and the records of a conversation's memories.

use super::range::MemoryRange;
use super::source::{CarriedFrom, MemorySource};
use halo_core::Error;
use halo_core::store::{Record, RecordChange, RecordKind, Store};
use halo_core::token::{ChunkId, TurnId};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// What the model wrote down about a range of the timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    pub id: u64,
    /// The part of the timeline that it summarizes.
    pub range: MemoryRange,
    /// Whether it is a reflection on the whole conversation; a reflection is never placed in the window.
    pub reflection: bool,
    pub text: String,
    /// The model that wrote it.
    pub model: String,
    /// The turn after which it was formed.
    pub formed_after: TurnId,
    /// When it was formed, in milliseconds since 1970.
    pub formed_at: i64,
    /// Whether it is placed before others.
    pub pinned: bool,
    /// Whether it is never placed.
    pub disabled: bool,
    /// Whether the user has changed its text.
    pub edited: bool,
    /// Whether it is to be forgotten at the end of the grace period: it is neither listed nor used.
    pub pending_forget: bool,
    /// Memories that contradict it.
    pub conflicts: BTreeSet<u64>,
    /// What tools did in its range: the net result.
    pub operations: Vec<String>,
    /// The chunks of its range that were pruned since: if one of them is resurrected, the memory is hidden.
    pub pruned_chunks: BTreeSet<ChunkId>,
    /// What its writer saw; none for memories of earlier versions and for carried ones.
    pub source: Option<MemorySource>,
    /// Where the text before its range begins that its writer summarized too, as an overlap.
    pub overlap_from: Option<(u32, u32)>,
    /// Memories of other conversations that it was carried from.
    pub carried_from: Vec<CarriedFrom>,
    /// Sentences that another memory contradicts and that are left out where it is used.
    pub retracted: BTreeSet<String>,
    /// Memories that it may contradict: the user has decided so.
    pub settled: BTreeSet<u64>,
}

/// The characters that end a sentence.
pub(crate) const SENTENCE_ENDS: [char; 5] = ['.', '!', '?', '\n', ';'];

/// Setting: how far memories have been formed.
const FORMED_UNTIL_KEY: &str = "memory.formed";

impl Memory {
    #[must_use]
    pub fn record_key(&self) -> String {
        memory_key(self.id)
    }

    /// Whether it was carried from another conversation: it has no range in this one.
    #[must_use]
    pub fn is_carried(&self) -> bool {
        !self.carried_from.is_empty()
    }

    /// Its text without the sentences that were retracted.
    #[must_use]
    pub fn current_text(&self) -> String {
        if self.retracted.is_empty() {
            return self.text.clone();
        }
        let sentences = self.text.split_inclusive(SENTENCE_ENDS);
        let kept: String = sentences.filter(|s| !self.retracted.contains(s.trim())).collect();
        kept.trim().to_owned()
    }

    /// Whether it may mention one of some chunks: its writer saw everything up to the end of its range. A carried memory
    /// mentions those of another conversation.
    #[must_use]
    pub fn may_mention(&self, chunks: &[ChunkId]) -> bool {
        !self.is_carried() && chunks.iter().any(|chunk| (chunk.turn.0, chunk.index) <= self.range.to)
    }

    pub(crate) fn to_record(&self) -> String {
        let names = |chunks: &BTreeSet<ChunkId>| chunks.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "from": self.range.from, "to": self.range.to, "reflection": self.reflection, "text": self.text,
            "model": self.model, "formed": self.formed_after.0, "at": self.formed_at, "pinned": self.pinned,
            "resting": self.disabled, "edited": self.edited, "leaving": self.pending_forget, "conflicts": self.conflicts,
            "operations": self.operations, "left": names(&self.pruned_chunks), "source": self.source,
            "overlap": self.overlap_from, "carried": self.carried_from, "retracted": self.retracted,
            "settled": self.settled,
        })
        .to_string()
    }

    /// A stored memory; none if the record cannot be parsed.
    #[must_use]
    pub fn from_record(record: &Record) -> Option<Self> {
        let value: Value = serde_json::from_str(&record.value).ok()?;
        let place = |key: &str| {
            Some((value[key][0].as_u64()?.try_into().ok()?, value[key][1].as_u64()?.try_into().ok()?))
        };
        let flag = |key: &str| value[key].as_bool().unwrap_or(false);
        let list = |key: &str| value[key].as_array().cloned().unwrap_or_default();
        let texts =
            |key: &str| list(key).iter().filter_map(|v| v.as_str().map(str::to_owned)).collect::<Vec<_>>();
        Some(Self {
            id: record.key.parse().ok()?,
            range: MemoryRange { from: place("from")?, to: place("to")? },
            reflection: flag("reflection"),
            text: value["text"].as_str()?.to_owned(),
            model: value["model"].as_str().unwrap_or_default().to_owned(),
            formed_after: TurnId(value["formed"].as_u64()?.try_into().ok()?),
            formed_at: value["at"].as_i64().unwrap_or(record.updated_at),
            pinned: flag("pinned"),
            disabled: flag("resting"),
            edited: flag("edited"),
            pending_forget: flag("leaving"),
            conflicts: list("conflicts").iter().filter_map(Value::as_u64).collect(),
            operations: texts("operations"),
            pruned_chunks: texts("left").iter().filter_map(|name| name.parse().ok()).collect(),
            source: serde_json::from_value(value["source"].clone()).ok().flatten(),
            overlap_from: place("overlap"),
            carried_from: serde_json::from_value(value["carried"].clone()).unwrap_or_default(),
            retracted: texts("retracted").into_iter().collect(),
            settled: list("settled").iter().filter_map(Value::as_u64).collect(),
        })
    }
}

/// The memories of a conversation, the oldest first, without those that are to be forgotten.
pub fn load_memories(store: &mut dyn Store, conversation: &str) -> Result<Vec<Memory>, Error> {
    let mut memories = load_all_memories(store, conversation)?;
    memories.retain(|memory| !memory.pending_forget);
    Ok(memories)
}

/// The same, with those that are to be forgotten.
pub fn load_all_memories(store: &mut dyn Store, conversation: &str) -> Result<Vec<Memory>, Error> {
    let records = store.records(conversation, RecordKind::Memory)?;
    let mut memories: Vec<Memory> = records.iter().filter_map(Memory::from_record).collect();
    memories.sort_by_key(|memory| memory.id);
    Ok(memories)
}

/// Marks memories as to be forgotten, or removes that mark.
pub fn set_pending_forget(
    store: &mut dyn Store,
    conversation: &str,
    ids: &[u64],
    pending: bool,
) -> Result<(), Error> {
    let memories = load_all_memories(store, conversation)?.into_iter();
    for memory in memories.filter(|memory| ids.contains(&memory.id) && memory.pending_forget != pending) {
        store_memory(store, conversation, &Memory { pending_forget: pending, ..memory })?;
    }
    Ok(())
}

/// Lets memories be formed again from a chunk on, after those of its range were forgotten.
pub fn lower_formed_until(store: &mut dyn Store, conversation: &str, first: (u32, u32)) -> Result<(), Error> {
    let first = load_formed_until(store, conversation)?.min(first);
    store_formed_until(store, conversation, first)
}

pub(crate) fn store_formed_until(
    store: &mut dyn Store,
    conversation: &str,
    first: (u32, u32),
) -> Result<(), Error> {
    let value = formed_until_value(first);
    store.put_record(conversation, RecordKind::Setting, FORMED_UNTIL_KEY, value.as_deref())
}

fn formed_until_value(first: (u32, u32)) -> Option<String> {
    (first != (0, 0)).then(|| format!("{}.{}", first.0, first.1))
}

/// The first chunk that no memory covers yet, as turn and index.
pub(crate) fn load_formed_until(store: &mut dyn Store, conversation: &str) -> Result<(u32, u32), Error> {
    let records = store.records(conversation, RecordKind::Setting)?;
    let record = records.into_iter().find(|record| record.key == FORMED_UNTIL_KEY);
    let place = record.as_ref().and_then(|record| record.value.split_once('.'));
    Ok(place.and_then(|(turn, index)| Some((turn.parse().ok()?, index.parse().ok()?))).unwrap_or((0, 0)))
}

/// The records of a branch without the memories of turns after its last one: the branch does not have those turns. Returns
/// the ids of these memories, too.
pub(crate) fn memories_of_branch(
    store: &mut dyn Store,
    parent: &str,
    last_turn: u32,
) -> Result<(Vec<RecordChange>, BTreeSet<u64>), Error> {
    let memories = load_all_memories(store, parent)?.into_iter();
    let mut first = load_formed_until(store, parent)?.min((last_turn + 1, 0));
    let (mut changes, mut deleted) = (Vec::new(), BTreeSet::new());
    for memory in memories.filter(|memory| memory.range.to.0 > last_turn) {
        let key = memory_key(memory.id);
        changes.push(RecordChange { kind: RecordKind::Memory, key, value: None });
        deleted.insert(memory.id);
        first = if memory.reflection { first } else { first.min(memory.range.from) };
    }
    let (kind, key, value) = (RecordKind::Setting, FORMED_UNTIL_KEY.to_owned(), formed_until_value(first));
    changes.push(RecordChange { kind, key, value });
    Ok((changes, deleted))
}

/// Zero-padded, so that the store returns memories in the order of their ids.
pub(crate) fn memory_key(id: u64) -> String {
    format!("{id:08}")
}

pub(crate) fn store_memory(store: &mut dyn Store, conversation: &str, memory: &Memory) -> Result<(), Error> {
    store.put_record(conversation, RecordKind::Memory, &memory_key(memory.id), Some(&memory.to_record()))
}

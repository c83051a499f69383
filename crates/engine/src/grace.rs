//! The time of grace: what is to be forgotten is out of sight at once, and gone later; until then it can be taken back. Here is
//! what waits; whoever forgets in the end does so elsewhere.

use crate::memory::{self, Memory};
use halo_core::seams::{Kind, SeamError, Store};
use halo_core::token::ChunkId;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where it is noted what waits to be forgotten.
const PENDING: &str = "lethe.pending";

/// What waits in one conversation, by one wish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// When it goes, in milliseconds since 1970.
    pub due: i64,
    /// The chunks.
    pub chunks: Vec<ChunkId>,
    /// Those of them that were taken out of sight by this wish, and by nothing before.
    pub hidden: Vec<ChunkId>,
    /// The memories that may tell of them.
    pub memories: Vec<u64>,
    /// Memories that go for what they say themselves.
    pub named: Vec<u64>,
    /// Whether that is the whole conversation.
    pub all: bool,
    /// Whether it is being forgotten, and only has to be finished: it cannot be taken back any more.
    pub begun: bool,
}

impl Wait {
    fn to_value(&self) -> Value {
        let names = |chunks: &[ChunkId]| chunks.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "due": self.due, "chunks": names(&self.chunks), "hidden": names(&self.hidden),
            "memories": self.memories, "named": self.named, "all": self.all, "begun": self.begun,
        })
    }

    fn from_value(value: &Value) -> Option<Self> {
        let list = |key: &str| value[key].as_array().cloned().unwrap_or_default();
        let chunks = |key: &str| {
            list(key).iter().filter_map(|name| name.as_str()?.parse().ok()).collect::<Vec<ChunkId>>()
        };
        let numbers = |key: &str| list(key).iter().filter_map(Value::as_u64).collect();
        Some(Self {
            due: value["due"].as_i64()?,
            chunks: chunks("chunks"),
            hidden: chunks("hidden"),
            memories: numbers("memories"),
            named: numbers("named"),
            all: value["all"].as_bool().unwrap_or(false),
            begun: value["begun"].as_bool().unwrap_or(false),
        })
    }

    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.memories.is_empty() && self.named.is_empty()
    }
}

/// What waits in a conversation.
///
/// # Errors
/// When the store fails.
pub fn waits(store: &mut dyn Store, name: &str) -> Result<Vec<Wait>, SeamError> {
    let records = store.records(name, Kind::Setting)?;
    let found = records.into_iter().find(|record| record.key == PENDING);
    let noted: Vec<Value> =
        found.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default();
    Ok(noted.iter().filter_map(Wait::from_value).collect())
}

/// Notes what waits.
///
/// # Errors
/// When the store fails.
pub fn put(store: &mut dyn Store, name: &str, waits: &[Wait]) -> Result<(), SeamError> {
    let noted = Value::Array(waits.iter().map(Wait::to_value).collect()).to_string();
    store.put_record(name, Kind::Setting, PENDING, (!waits.is_empty()).then_some(noted.as_str()))
}

/// The chunks of a conversation that wait, and until when: nobody is shown what they say.
///
/// # Errors
/// When the store fails.
pub fn hidden(store: &mut dyn Store, name: &str) -> Result<BTreeMap<ChunkId, i64>, SeamError> {
    let waits = waits(store, name)?;
    Ok(waits.iter().flat_map(|wait| wait.chunks.iter().map(|&chunk| (chunk, wait.due))).collect())
}

/// What waits, without some of it.
#[must_use]
pub fn without(waits: Vec<Wait>, chunks: &[ChunkId], memories: &[u64]) -> Vec<Wait> {
    let rest = |wait: Wait| {
        let left = |list: Vec<ChunkId>| list.into_iter().filter(|id| !chunks.contains(id)).collect();
        let kept = |list: Vec<u64>| list.into_iter().filter(|id| !memories.contains(id)).collect();
        let wait = Wait {
            chunks: left(wait.chunks),
            hidden: left(wait.hidden),
            memories: kept(wait.memories),
            named: kept(wait.named),
            ..wait
        };
        (!wait.is_empty()).then_some(wait)
    };
    waits.into_iter().filter_map(rest).collect()
}

/// Chunks are not to be forgotten after all: some of them, or with none all that waits. The memories that waited only because of
/// them are back; those that wait for what they say themselves are back only with all of it. Returns how many memories that
/// were. The chunks themselves are for the caller to restore.
///
/// # Errors
/// When the store fails.
pub fn strike(store: &mut dyn Store, name: &str, only: Option<&[ChunkId]>) -> Result<usize, SeamError> {
    let (begun, noted): (Vec<Wait>, Vec<Wait>) = waits(store, name)?.into_iter().partition(|wait| wait.begun);
    if noted.is_empty() {
        return Ok(0);
    }
    let rest = match only {
        Some(only) => without(noted.clone(), only, &[]),
        None => Vec::new(),
    };
    let known = memory::all(store, name)?;
    let still = |memory: &Memory| {
        rest.iter().any(|wait| wait.named.contains(&memory.id) || memory.tells(&wait.chunks))
    };
    let waited = |id: u64| noted.iter().any(|wait| wait.memories.contains(&id) || wait.named.contains(&id));
    let back: Vec<u64> =
        known.iter().filter(|memory| waited(memory.id) && !still(memory)).map(|memory| memory.id).collect();
    memory::hide(store, name, &back, false)?;
    put(store, name, &[begun, without(rest, &[], &back)].concat())?;
    Ok(back.len())
}

/// What waits in a branch that ends behind a turn: only what is there too.
pub(crate) fn cut(store: &mut dyn Store, name: &str, last: u32) -> Result<(), SeamError> {
    let noted = waits(store, name)?;
    if noted.is_empty() {
        return Ok(());
    }
    let known = memory::all(store, name)?;
    let later =
        |ids: &[u64]| ids.iter().copied().filter(|id| !known.iter().any(|m| m.id == *id)).collect::<Vec<_>>();
    let chunks: Vec<ChunkId> =
        noted.iter().flat_map(|wait| wait.chunks.clone()).filter(|chunk| chunk.turn.0 > last).collect();
    let memories: Vec<u64> =
        noted.iter().flat_map(|wait| [later(&wait.memories), later(&wait.named)].concat()).collect();
    put(store, name, &without(noted, &chunks, &memories))
}

//! Memories: what the model itself, in the very state that lived it, keeps of a part of the conversation.
//!
//! When enough has been said, a fork of the model's state at the end of that range is told to write down what matters. The
//! memory is stored at once and used later: once its range has left the window, it stands where the range was. The words of
//! people are quoted in it, never put in others; everything stays on the timeline, and when any of it comes back, the memory
//! steps aside.
//!
//! [`segment`] is what the model sees, in parts that know where they come from; [`range`] is what is to be remembered;
//! [`form`] forms it; [`stand`] decides what stands where.

pub mod form;
pub mod range;
pub mod segment;
pub mod stand;

use crate::event::Event;
use crate::session::Session;
use halo_agents::forgetting::{Active, Memories};
use halo_agents::judge::contradiction;
use halo_core::seams::{Kind, Record, SeamError, Store};
use halo_core::token::{ChunkId, TurnId};
use range::Span;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// How memories are formed and used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryRules {
    /// A range is remembered when it has so many tokens.
    pub range: usize,
    /// One memory is of no more tokens than these.
    pub most: usize,
    /// A memory has no more tokens than these.
    pub tokens: usize,
    /// It is used after so many further answers.
    pub delay: usize,
    /// Memories take no more of the window than this share.
    pub share: f64,
    /// Whether the model also looks back over all of it when it has been quiet for a while.
    pub reflect: Option<Quiet>,
}

/// When the model looks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quiet {
    /// Nothing was said for so long.
    pub after: Duration,
    /// So many messages came since it last did.
    pub messages: usize,
}

impl Default for Quiet {
    fn default() -> Self {
        Self { after: Duration::from_secs(300), messages: 5 }
    }
}

impl Default for MemoryRules {
    fn default() -> Self {
        Self { range: 500, most: 2000, tokens: 200, delay: 3, share: 0.25, reflect: None }
    }
}

/// A memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// Its number.
    pub id: u64,
    /// What it is of.
    pub span: Span,
    /// Whether it looks back over all of it, and so stands in nothing's place.
    pub reflection: bool,
    /// What it says.
    pub text: String,
    /// Which model wrote it.
    pub model: String,
    /// The turn after which it was formed.
    pub formed: TurnId,
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// Whether it stands before others.
    pub pinned: bool,
    /// Whether it is kept and not used.
    pub resting: bool,
    /// Whether the user has changed it.
    pub edited: bool,
    /// Whether it waits to be forgotten: nobody sees or uses it any more.
    pub leaving: bool,
    /// Memories that it contradicts, or that contradict it.
    pub conflicts: BTreeSet<u64>,
    /// What the agent did in its range: the net result of its tools.
    pub operations: Vec<String>,
    /// Which chunks of its range have left since: if one of them is back, the memory steps aside.
    pub left: BTreeSet<ChunkId>,
}

/// The most bytes that a memory may be changed to: some two thousand tokens, as many as one may be formed with.
const LONGEST: usize = 8_192;

/// Where it is noted how far memories have been formed.
const FORMED: &str = "memory.formed";

impl Memory {
    /// The key that it is kept under.
    #[must_use]
    pub fn key(&self) -> String {
        key(self.id)
    }

    /// Whether it may tell of any of some chunks: it was formed by who had everything before its end in sight.
    #[must_use]
    pub fn tells(&self, chunks: &[ChunkId]) -> bool {
        chunks.iter().any(|chunk| (chunk.turn.0, chunk.sentence) <= self.span.to)
    }

    fn to_record(&self) -> String {
        let names = |chunks: &BTreeSet<ChunkId>| chunks.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "from": self.span.from, "to": self.span.to, "reflection": self.reflection, "text": self.text,
            "model": self.model, "formed": self.formed.0, "at": self.at, "pinned": self.pinned,
            "resting": self.resting, "edited": self.edited, "leaving": self.leaving, "conflicts": self.conflicts,
            "operations": self.operations, "left": names(&self.left),
        })
        .to_string()
    }

    /// A memory as it was kept; none if it cannot be read.
    #[must_use]
    pub fn from_record(record: &Record) -> Option<Self> {
        let told: Value = serde_json::from_str(&record.value).ok()?;
        let place = |key: &str| {
            Some((told[key][0].as_u64()?.try_into().ok()?, told[key][1].as_u64()?.try_into().ok()?))
        };
        let flag = |key: &str| told[key].as_bool().unwrap_or(false);
        let list = |key: &str| told[key].as_array().cloned().unwrap_or_default();
        let texts =
            |key: &str| list(key).iter().filter_map(|v| v.as_str().map(str::to_owned)).collect::<Vec<_>>();
        Some(Self {
            id: record.key.parse().ok()?,
            span: Span { from: place("from")?, to: place("to")? },
            reflection: flag("reflection"),
            text: told["text"].as_str()?.to_owned(),
            model: told["model"].as_str().unwrap_or_default().to_owned(),
            formed: TurnId(told["formed"].as_u64()?.try_into().ok()?),
            at: told["at"].as_i64().unwrap_or(record.at),
            pinned: flag("pinned"),
            resting: flag("resting"),
            edited: flag("edited"),
            leaving: flag("leaving"),
            conflicts: list("conflicts").iter().filter_map(Value::as_u64).collect(),
            operations: texts("operations"),
            left: texts("left").iter().filter_map(|name| name.parse().ok()).collect(),
        })
    }
}

/// The memories of a conversation, the oldest first, without those that wait to be forgotten.
///
/// # Errors
/// When the store fails.
pub fn memories(store: &mut dyn Store, conversation: &str) -> Result<Vec<Memory>, SeamError> {
    let mut memories = all(store, conversation)?;
    memories.retain(|memory| !memory.leaving);
    Ok(memories)
}

/// The same, with those that wait to be forgotten.
///
/// # Errors
/// When the store fails.
pub fn all(store: &mut dyn Store, conversation: &str) -> Result<Vec<Memory>, SeamError> {
    let records = store.records(conversation, Kind::Memory)?;
    let mut memories: Vec<Memory> = records.iter().filter_map(Memory::from_record).collect();
    memories.sort_by_key(|memory| memory.id);
    Ok(memories)
}

/// Takes memories out of sight because they are to be forgotten, or brings them back.
///
/// # Errors
/// When the store fails.
pub fn hide(store: &mut dyn Store, conversation: &str, ids: &[u64], leaving: bool) -> Result<(), SeamError> {
    let known = all(store, conversation)?.into_iter();
    for memory in known.filter(|memory| ids.contains(&memory.id) && memory.leaving != leaving) {
        keep(store, conversation, &Memory { leaving, ..memory })?;
    }
    Ok(())
}

/// What is left of a range whose memories were forgotten may be remembered anew.
///
/// # Errors
/// When the store fails.
pub fn form_again(store: &mut dyn Store, conversation: &str, first: (u32, u32)) -> Result<(), SeamError> {
    let first = formed_until(store, conversation)?.min(first);
    put_formed(store, conversation, first)
}

fn put_formed(store: &mut dyn Store, conversation: &str, first: (u32, u32)) -> Result<(), SeamError> {
    let noted = format!("{}.{}", first.0, first.1);
    store.put_record(conversation, Kind::Setting, FORMED, (first != (0, 0)).then_some(noted.as_str()))
}

/// How far memories have been formed: the first chunk of which there are none.
pub(crate) fn formed_until(store: &mut dyn Store, conversation: &str) -> Result<(u32, u32), SeamError> {
    let records = store.records(conversation, Kind::Setting)?;
    let noted = records.into_iter().find(|record| record.key == FORMED);
    let place = noted.as_ref().and_then(|noted| noted.value.split_once('.'));
    Ok(place
        .and_then(|(turn, sentence)| Some((turn.parse().ok()?, sentence.parse().ok()?)))
        .unwrap_or((0, 0)))
}

/// Drops the memories of what comes behind a turn: in a branch that ends there, it was never said.
pub(crate) fn forget_later(store: &mut dyn Store, conversation: &str, last: u32) -> Result<(), SeamError> {
    let later = all(store, conversation)?.into_iter().filter(|memory| memory.span.to.0 > last);
    let formed = formed_until(store, conversation)?;
    let mut first = formed.min((last + 1, 0));
    for memory in later {
        store.put_record(conversation, Kind::Memory, &key(memory.id), None)?;
        first = if memory.reflection { first } else { first.min(memory.span.from) };
    }
    put_formed(store, conversation, first)
}

/// What the user wants done to a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// It says something else from now on.
    Edit(String),
    /// It stands before others, or no longer.
    Pin(bool),
    /// It is kept and not used, or used again.
    Rest(bool),
    /// It is gone. What it is of is not.
    Delete,
}

impl Session {
    /// The memories that there are, the oldest first.
    #[must_use]
    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    /// Does what the user wants done to a memory.
    ///
    /// # Errors
    /// As [`order`].
    pub fn order_memory(&mut self, id: u64, wanted: Order) -> Result<(), SeamError> {
        order(&mut *self.store, &self.name, &mut self.memories, id, wanted)?;
        // What it says may have changed, and whether it may stand.
        self.stands.retain(|stand| stand.id != id);
        self.follow_memories();
        self.show();
        Ok(())
    }

    /// The memories that have to do with some words, the best first: by their own words, and by what they are of.
    ///
    /// # Errors
    /// When the search fails.
    pub fn find_memories(&mut self, query: &str) -> Result<Vec<(f64, Memory)>, SeamError> {
        let hits = self.recall.search(query, None, self.rules.recall)?;
        let hits: Vec<(ChunkId, f64)> = hits.iter().map(|found| (found.hit.chunk, found.hit.score)).collect();
        Ok(rank(&self.memories, query, &hits))
    }

    /// Writes down one that has changed.
    pub(crate) fn keep_memory(&mut self, at: usize) -> Result<(), SeamError> {
        keep(&mut *self.store, &self.name, &self.memories[at])
    }

    pub(crate) fn note_formed(&mut self, place: (u32, u32)) -> Result<(), SeamError> {
        self.formed = place;
        put_formed(&mut *self.store, &self.name, place)
    }

    /// What is done while nobody wants anything: the next memory is formed, and what is due takes its place. `wanted` tells
    /// whether somebody does after all; then it is left, and begun again another time. Returns whether there was anything
    /// to do.
    ///
    /// # Errors
    /// When a part fails.
    pub fn quiet(
        &mut self,
        wanted: &dyn Fn() -> bool,
        listen: &mut dyn FnMut(Event),
    ) -> Result<bool, SeamError> {
        if wanted() || self.memory_rules().is_none() {
            return Ok(false);
        }
        if let Some(span) = self.memory_due() {
            return self.form(span, wanted, listen);
        }
        self.hand_over(wanted, listen)
    }

    /// How memories are formed here; none: they are not. Where nothing ever leaves, or tokens leave one by one, nothing
    /// could stand for what has left.
    pub(crate) fn memory_rules(&self) -> Option<MemoryRules> {
        let leaves = self.rules.context.max_tokens > 0;
        let whole = matches!(self.rules.context.strategy, halo_core::brightness::Strategy::Magnitude(_));
        self.rules.memory.filter(|_| leaves && whole)
    }
}

/// In step with a window and with Lethe, memories that matter little rest.
impl Memories for Session {
    async fn list_active(&mut self) -> Result<Vec<Active>, SeamError> {
        let active = self.memories.iter().filter(|memory| !memory.resting && !memory.pinned);
        Ok(active.map(|memory| Active { id: memory.id, text: memory.text.clone() }).collect())
    }

    async fn deactivate(&mut self, id: u64) -> Result<(), SeamError> {
        self.order_memory(id, Order::Rest(true))
    }
}

/// The key of the memory of a number: they are kept in order.
fn key(id: u64) -> String {
    format!("{id:08}")
}

fn keep(store: &mut dyn Store, conversation: &str, memory: &Memory) -> Result<(), SeamError> {
    store.put_record(conversation, Kind::Memory, &key(memory.id), Some(&memory.to_record()))
}

/// Does what the user wants done to one of a conversation's memories.
///
/// # Errors
/// When there is none of that number, the text is empty or far too long, or the store fails.
pub fn order(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut Vec<Memory>,
    id: u64,
    order: Order,
) -> Result<(), SeamError> {
    let what = "changing a memory";
    let at = memories.iter().position(|memory| memory.id == id);
    let at = at.ok_or_else(|| {
        let why = format!("there is no memory {id}; `halo memories` lists those that there are");
        SeamError::asked(what, why)
    })?;
    match order {
        Order::Delete => {
            store.put_record(conversation, Kind::Memory, &key(id), None)?;
            memories.remove(at);
            return mark_conflicts(store, conversation, memories, id, &BTreeSet::new());
        }
        Order::Edit(text) => {
            let text = text.trim();
            if text.is_empty() || text.len() > LONGEST {
                let why = format!("it must have 1 to {LONGEST} bytes of text; this has {}", text.len());
                return Err(SeamError::asked(what, why));
            }
            (memories[at].text, memories[at].edited) = (text.to_owned(), true);
        }
        Order::Pin(on) => memories[at].pinned = on,
        Order::Rest(on) => memories[at].resting = on,
    }
    let others: Vec<&Memory> = memories.iter().filter(|other| other.id != id).collect();
    let conflicts = conflicts(&memories[at].text, &others);
    memories[at].conflicts.clone_from(&conflicts);
    keep(store, conversation, &memories[at])?;
    mark_conflicts(store, conversation, memories, id, &conflicts)
}

/// Both of two that contradict each other are marked, and nobody else.
pub(crate) fn mark_conflicts(
    store: &mut dyn Store,
    conversation: &str,
    memories: &mut [Memory],
    id: u64,
    with: &BTreeSet<u64>,
) -> Result<(), SeamError> {
    for other in memories.iter_mut().filter(|other| other.id != id) {
        let changed =
            if with.contains(&other.id) { other.conflicts.insert(id) } else { other.conflicts.remove(&id) };
        if changed {
            keep(store, conversation, other)?;
        }
    }
    Ok(())
}

/// Those whose sentences cannot be so if these are.
pub(crate) fn conflicts(text: &str, others: &[&Memory]) -> BTreeSet<u64> {
    let sentences = |text: &str| -> Vec<String> {
        text.split_inclusive(['.', '!', '?', '\n', ';'])
            .map(|s| s.trim().to_owned())
            .filter(|s| !s.is_empty())
            .collect()
    };
    let said = sentences(text);
    let conflicts = |other: &&&Memory| {
        sentences(&other.text)
            .iter()
            .any(|there| said.iter().any(|here| contradiction(here, there).is_some()))
    };
    others.iter().filter(conflicts).map(|other| other.id).collect()
}

/// Memories by how much they have to do with a query: what share of its words they have, and how well what they are of was
/// found. Those that have nothing to do with it are left out.
pub fn rank(memories: &[Memory], query: &str, hits: &[(ChunkId, f64)]) -> Vec<(f64, Memory)> {
    let words = |text: &str| -> BTreeSet<String> {
        let lower = text.to_lowercase();
        lower
            .split(|c: char| !c.is_alphanumeric())
            .filter(|w| w.chars().count() > 2)
            .map(str::to_owned)
            .collect()
    };
    let asked = words(query);
    let best = hits.iter().map(|(_, score)| *score).fold(0.0, f64::max);
    let score = |memory: &Memory| {
        let shared = words(&memory.text).intersection(&asked).count();
        let said = if asked.is_empty() { 0.0 } else { shared as f64 / asked.len() as f64 };
        let within = hits.iter().filter(|(chunk, _)| memory.span.contains(*chunk));
        let of = within.map(|(_, score)| *score).fold(0.0, f64::max);
        said + if best > 0.0 { of / best } else { 0.0 }
    };
    let mut ranked: Vec<(f64, Memory)> =
        memories.iter().map(|memory| (score(memory), memory.clone())).collect();
    ranked.retain(|(score, _)| *score > 0.0);
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.id.cmp(&a.1.id)));
    ranked
}

//! The time of grace: what is to be forgotten is out of sight at once, and gone later; until then it can be taken back.

use super::{Goes, Options, Target, USER, Wish, away, counted, day, excerpt, forget, selected, told};
use crate::commands::show::existing;
use crate::commands::{print, print_json};
use crate::{Common, printable, say};
use anyhow::{Result, bail};
use halo_core::change::{Change, Extent, Part};
use halo_core::seams::{Access, Durability, Kind, Record, Store};
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use halo_engine::memory::{self, Memory};
use halo_store::database::Database;
use halo_store::forget::tells;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where it is noted what waits to be forgotten.
const PENDING: &str = "lethe.pending";

/// What waits in one conversation, by one wish.
#[derive(Clone, Debug)]
pub struct Wait {
    /// When it goes, in milliseconds since 1970.
    pub due: i64,
    /// The chunks.
    pub chunks: Vec<ChunkId>,
    /// Those of them that were taken out of sight by this wish, and by nothing before.
    pub hidden: Vec<ChunkId>,
    /// The memories.
    pub memories: Vec<u64>,
    /// Whether that is the whole conversation.
    pub all: bool,
}

impl Wait {
    fn to_value(&self) -> Value {
        let names = |chunks: &[ChunkId]| chunks.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "due": self.due, "chunks": names(&self.chunks), "hidden": names(&self.hidden),
            "memories": self.memories, "all": self.all,
        })
    }

    fn from_value(value: &Value) -> Option<Self> {
        let list = |key: &str| value[key].as_array().cloned().unwrap_or_default();
        let chunks = |key: &str| {
            list(key).iter().filter_map(|name| name.as_str()?.parse().ok()).collect::<Vec<ChunkId>>()
        };
        Some(Self {
            due: value["due"].as_i64()?,
            chunks: chunks("chunks"),
            hidden: chunks("hidden"),
            memories: list("memories").iter().filter_map(Value::as_u64).collect(),
            all: value["all"].as_bool().unwrap_or(false),
        })
    }
}

/// What waits in a conversation.
pub fn waits(store: &mut dyn Store, name: &str) -> Result<Vec<Wait>> {
    let records = store.records(name, Kind::Setting)?;
    let found = records.into_iter().find(|record| record.key == PENDING);
    let noted: Vec<Value> =
        found.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default();
    Ok(noted.iter().filter_map(Wait::from_value).collect())
}

/// The chunks of a conversation that wait, and until when: nobody is shown what they say.
pub fn hidden(store: &mut dyn Store, name: &str) -> Result<BTreeMap<ChunkId, i64>> {
    let waits = waits(store, name)?;
    Ok(waits.iter().flat_map(|wait| wait.chunks.iter().map(|&chunk| (chunk, wait.due))).collect())
}

/// What to say instead of what one of them says.
pub fn instead(due: i64) -> String {
    format!("[to be forgotten, on {}; `halo forget --keep` takes it back]", day(due))
}

pub(super) fn put(store: &mut Database, name: &str, waits: &[Wait]) -> Result<()> {
    let noted = Value::Array(waits.iter().map(Wait::to_value).collect()).to_string();
    Ok(store.put_record(name, Kind::Setting, PENDING, (!waits.is_empty()).then_some(noted.as_str()))?)
}

/// What waits, without some of it.
pub(super) fn without(waits: Vec<Wait>, chunks: &[ChunkId], memories: &[u64]) -> Vec<Wait> {
    let rest = |wait: Wait| {
        let left = |list: Vec<ChunkId>| list.into_iter().filter(|id| !chunks.contains(id)).collect();
        let kept = wait.memories.into_iter().filter(|id| !memories.contains(id)).collect();
        let wait = Wait { chunks: left(wait.chunks), hidden: left(wait.hidden), memories: kept, ..wait };
        (!wait.chunks.is_empty() || !wait.memories.is_empty()).then_some(wait)
    };
    waits.into_iter().filter_map(rest).collect()
}

/// Out of sight now, gone later.
pub(super) fn begin(common: &Common, target: &Target, due: i64) -> Result<()> {
    let name = &target.name;
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let (chunks, memories) = target.parts(&mut store, &timeline)?;
    let hidden: Vec<ChunkId> =
        chunks.iter().copied().filter(|&id| timeline.chunk(id).is_some_and(|c| !c.is_withdrawn())).collect();
    if !hidden.is_empty() {
        store.transact(name, &mut timeline, &Change::Withdraw(whole(&hidden)), Durability::Now)?;
    }
    let memories: Vec<u64> = memories.iter().filter(|memory| !memory.leaving).map(|m| m.id).collect();
    // Noted before they are hidden: what is hidden and not noted would be lost.
    let mut noted = waits(&mut store, name)?;
    noted.push(Wait {
        due,
        chunks,
        hidden,
        memories: memories.clone(),
        all: matches!(target.what, Goes::Everything),
    });
    put(&mut store, name, &noted)?;
    Ok(memory::hide(&mut store, name, &memories, true)?)
}

fn whole(chunks: &[ChunkId]) -> Vec<Part> {
    chunks.iter().map(|&chunk| Part { chunk, extent: Extent::Whole }).collect()
}

/// Those of some chunks that are there, out of sight, and not forgotten yet: others were restored, or are gone.
fn waiting(
    store: &mut Database,
    name: &str,
    timeline: &mut Timeline,
    chunks: Vec<ChunkId>,
) -> Result<Vec<ChunkId>> {
    let missing = away(timeline, &chunks);
    store.bring(name, timeline, &missing)?;
    let waits = |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| c.is_withdrawn() && !c.is_forgotten());
    Ok(chunks.into_iter().filter(waits).collect())
}

/// Takes back what waits: all of it, or what is named.
pub(super) fn take_back(options: &Options, common: &Common, names: &[String]) -> Result<()> {
    let (mut paragraphs, mut memories) = (0, 0);
    for name in names {
        let (store, timeline) = existing(common, name, Access::Read)?;
        let named = selected(options, name, &timeline)?;
        drop(store);
        let kept = keep(common, name, named.as_deref())?;
        if let (Some(named), 0) = (&named, kept.0) {
            let list: Vec<String> = named.iter().take(5).map(ToString::to_string).collect();
            bail!(
                "nothing of {} waits to be forgotten in '{}': --waiting lists what does",
                list.join(", "),
                printable(name)
            );
        }
        (paragraphs, memories) = (paragraphs + kept.0, memories + kept.1);
    }
    told(
        common,
        &json!({ "kept": paragraphs, "memories": memories }),
        &format!("{} taken back\n", counted(paragraphs, memories)),
    )
}

/// Takes back what waits in a conversation. Returns how many paragraphs and memories that were.
fn keep(common: &Common, name: &str, only: Option<&[ChunkId]>) -> Result<(usize, usize)> {
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let noted = waits(&mut store, name)?;
    let wanted = |id: &ChunkId| only.is_none_or(|only| only.contains(id));
    let taken: Vec<ChunkId> = noted.iter().flat_map(|wait| &wait.chunks).copied().filter(wanted).collect();
    let hidden = noted.iter().flat_map(|wait| &wait.hidden).copied().filter(wanted).collect();
    let chunks = waiting(&mut store, name, &mut timeline, hidden)?;
    if !chunks.is_empty() {
        store.transact(name, &mut timeline, &Change::Restore(whole(&chunks)), Durability::Now)?;
    }
    // A memory comes back when nothing that it may tell of waits any more.
    let mut rest = without(noted.clone(), &taken, &[]);
    let still: Vec<ChunkId> = rest.iter().flat_map(|wait| wait.chunks.clone()).collect();
    let records = store.records(name, Kind::Memory)?;
    let known = records.iter().filter_map(|record| Some((record, Memory::from_record(record)?)));
    let known = known.filter(|(_, memory)| noted.iter().any(|wait| wait.memories.contains(&memory.id)));
    let back: Vec<u64> = known
        .filter(|(record, _)| only.is_none() || !tells(record, &still))
        .map(|(_, memory)| memory.id)
        .collect();
    memory::hide(&mut store, name, &back, false)?;
    rest = if only.is_none() { Vec::new() } else { without(rest, &[], &back) };
    put(&mut store, name, &rest)?;
    Ok((chunks.len(), back.len()))
}

/// Lists what waits.
pub(super) fn list(common: &Common, names: &[String]) -> Result<()> {
    let (mut rows, mut out) = (Vec::new(), String::new());
    for name in names {
        let (mut store, mut timeline) = existing(common, name, Access::Read)?;
        for wait in waits(&mut store, name)? {
            let chunks = waiting(&mut store, name, &mut timeline, wait.chunks.clone())?;
            let texts: Vec<(ChunkId, String)> =
                chunks.iter().filter_map(|&id| Some((id, timeline.chunk(id)?.text().into_owned()))).collect();
            if texts.is_empty() && wait.memories.is_empty() {
                continue;
            }
            let names: Vec<String> = texts.iter().map(|(id, _)| id.to_string()).collect();
            rows.push(json!({
                "conversation": name, "due": wait.due, "chunks": names, "memories": wait.memories, "all": wait.all,
            }));
            let what = counted(texts.len(), wait.memories.len());
            out += &format!("{}: {what} until {}\n", printable(name), day(wait.due));
            for (id, text) in texts.iter().take(20) {
                out += &format!("    {id}  {}\n", excerpt(text, None));
            }
        }
    }
    match (common.json, out.is_empty()) {
        (true, _) => print_json(&Value::Array(rows)),
        (false, true) => print("nothing waits to be forgotten\n"),
        (false, false) => print(&out),
    }
}

/// Forgets what has come to the end of its time of grace, everywhere. What cannot be done in one conversation keeps no other.
pub(super) fn due(common: &Common, now: i64) -> Result<usize> {
    let Some(mut store) = common.look_at_store()? else { return Ok(0) };
    let names: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
    let (mut done, mut failed) = (0, None);
    for name in names {
        let ripe: Vec<Wait> = waits(&mut store, &name)?.into_iter().filter(|wait| wait.due <= now).collect();
        for wait in ripe {
            match ripen(common, &name, &wait, now) {
                Ok(gone) => done += gone,
                Err(why) => failed = Some(why),
            }
        }
    }
    match failed {
        Some(why) if done == 0 => Err(why),
        Some(why) => {
            say(&format!("not all that was to be forgotten could be: {why:#}"));
            Ok(done)
        }
        None => Ok(done),
    }
}

/// Forgets what waited in one conversation and still does.
fn ripen(common: &Common, name: &str, wait: &Wait, now: i64) -> Result<usize> {
    let wish = Wish { by: USER, now };
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let begun = wait.hidden.is_empty();
    let there = wait.chunks.iter().copied().filter(|&id| timeline.chunk(id).is_some()).collect();
    // What was begun is finished; what only waited may have been restored since.
    let chunks = if begun { there } else { waiting(&mut store, name, &mut timeline, there)? };
    // Where something was said since, or taken back, the rest is no longer the whole conversation.
    if wait.all && chunks.len() == timeline.chunks().count() {
        drop(store);
        return forget(common, &Target { name: name.to_owned(), what: Goes::Everything }, &wish);
    }
    // Where what they may tell of was taken back, memories are too.
    let gone = |record: &&Record| wait.chunks.is_empty() || begun || tells(record, &chunks);
    let records = store.records(name, Kind::Memory)?;
    let memories: Vec<u64> =
        records.iter().filter(gone).filter_map(Memory::from_record).map(|m| m.id).collect();
    let (goes, stays): (Vec<u64>, Vec<u64>) = wait.memories.iter().partition(|id| memories.contains(id));
    memory::hide(&mut store, name, &stays, false)?;
    if chunks.is_empty() && goes.is_empty() {
        let rest = without(waits(&mut store, name)?, &wait.chunks, &wait.memories);
        put(&mut store, name, &rest)?;
        return Ok(0);
    }
    drop(store);
    forget(common, &Target { name: name.to_owned(), what: Goes::Some(chunks, goes) }, &wish)
}

//! Forgetting by age: each turn passes the stages of [`Policy`], and leaves a heap of figures behind for a while.

use super::{Goes, POLICY, Target, Wish, forget, print, print_json, remove_capture};
use crate::settings::Settings;
use crate::{Common, commands::count, printable};
use anyhow::{Context, Result, bail};
use halo_agents::lethe::{Compost, Policy, Stage};
use halo_agents::sketch::Sketch;
use halo_core::seams::{Access, Kind, Store};
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::memory::{self, Memory};
use halo_llama::graveyard;
use halo_store::database::Database;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Where what remains of forgotten turns is kept, month by month.
const COMPOST: &str = "lethe.compost";

/// What is due in one conversation.
#[derive(Default)]
struct Due {
    /// Nothing of it is younger: what the model has saved of it goes.
    all_warm: bool,
    /// Recordings of turns that are no longer hot.
    captures: Vec<String>,
    /// Turns whose words go.
    turns: Vec<TurnId>,
    /// Months of which nothing remains.
    months: Vec<String>,
}

fn policy(settings: &Settings) -> Result<Policy> {
    let days = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
    let policy = Policy {
        hot: days(settings.lethe_hot.0),
        warm: days(settings.lethe_warm.0),
        compost: days(settings.lethe_compost.0),
    };
    if !policy.is_in_order() {
        bail!("lethe.hot_days, lethe.warm_days and lethe.compost_days must follow each other");
    }
    Ok(policy)
}

/// Forgets what is due by age.
pub fn run(settings: &Settings, common: &Common, now: i64) -> Result<()> {
    let gone = apply(settings, common, now)?;
    match common.json {
        true => print_json(&json!({ "forgotten": gone })),
        false => print(&format!("{} forgotten for good\n", count(gone as u64, "paragraph"))),
    }
}

/// Shows what is due by age.
pub fn show(settings: &Settings, common: &Common, now: i64) -> Result<()> {
    let policy = policy(settings)?;
    let mut rows = Vec::new();
    let Some(mut store) = common.look_at_store()? else {
        return if common.json {
            print_json(&Value::Array(rows))
        } else {
            print("nothing was ever kept here\n")
        };
    };
    for known in store.conversations()? {
        let due = due(&mut store, &known.name, &policy, now)?;
        let timeline = store.load(&known.name, Access::Read)?;
        let chunks: Vec<ChunkId> =
            due.turns.iter().flat_map(|&turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id()).collect();
        let memories = old(memory::all(&mut store, &known.name)?, &chunks).len();
        rows.push(json!({
            "conversation": known.name, "turns": due.turns.iter().map(|turn| turn.0).collect::<Vec<_>>(),
            "recordings": due.captures.len(), "saved_memory": due.all_warm, "months": due.months,
            "memories": memories,
        }));
    }
    if common.json {
        return print_json(&Value::Array(rows));
    }
    for row in rows {
        let turns = row["turns"].as_array().map_or(0, Vec::len);
        let name = printable(row["conversation"].as_str().unwrap_or_default());
        let memories = match row["memories"].as_u64().unwrap_or(0) {
            0 => String::new(),
            1 => " and 1 memory".to_owned(),
            n => format!(" and {n} memories"),
        };
        print(&format!(
            "{name}: the words of {}{memories} would be forgotten\n",
            count(turns as u64, "turn")
        ))?;
    }
    Ok(())
}

/// Takes everything to the stage of its age. Returns how many paragraphs were forgotten for good.
pub fn apply(settings: &Settings, common: &Common, now: i64) -> Result<usize> {
    let policy = policy(settings)?;
    let data = common.data_folder().context("this system names no data folder: give one with --data")?;
    let Some(mut store) = common.look_at_store()? else { return Ok(0) };
    let mut gone = 0;
    for known in store.conversations()? {
        let name = &known.name;
        let due = due(&mut store, name, &policy, now)?;
        if due.all_warm {
            let keys = super::saved_but_for(&mut store, Some(name), None)?;
            graveyard::keep_only(&data.join("kv"), &keys)?;
        }
        if due.captures.is_empty() && due.turns.is_empty() && due.months.is_empty() {
            continue;
        }
        let mut writes = common.open_store()?;
        let mut timeline = writes.load(name, Access::Write)?;
        for capture in &due.captures {
            remove_capture(Path::new(capture));
            writes.put_record(name, Kind::Capture, capture, None)?;
        }
        let times: BTreeMap<TurnId, i64> = writes.times(name)?.into_iter().collect();
        let chunks: Vec<ChunkId> =
            due.turns.iter().flat_map(|&turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id()).collect();
        let missing = super::away(&timeline, &chunks);
        writes.bring(name, &mut timeline, &missing)?;
        let mut heaps = read_heaps(&mut writes, name)?;
        for month in &due.months {
            heaps.remove(month);
        }
        for &turn in &due.turns {
            let at = times.get(&turn).copied().unwrap_or(now);
            let (latest, heap) = heaps.entry(month(at)).or_default();
            *latest = (*latest).max(at);
            let mut tokens = 0;
            for chunk in timeline.turn_chunks(turn) {
                tokens += chunk.len() as u64;
                heap.length.add(chunk.len() as f64);
                heap.peak.add(f64::from(chunk.peak().0));
            }
            heap.tokens += tokens;
            match timeline.turns().iter().find(|known| known.id == turn).map(|known| known.role) {
                Some(Role::User) => heap.user += 1,
                _ => heap.assistant += 1,
            }
        }
        // What is older than a sketch lasts leaves none.
        heaps.retain(|_, (latest, _)| policy.stage(now - *latest) < Stage::Forgotten);
        drop(writes);
        if !chunks.is_empty() {
            let tell = old(memory::all(&mut store, name)?, &chunks);
            let target = Target { name: name.clone(), what: Goes::Some { chunks, tell, named: Vec::new() } };
            gone += forget(common, &target, &Wish { by: POLICY, now })?;
        }
        let mut writes = common.open_store()?;
        writes.load(name, Access::Write)?;
        write_heaps(&mut writes, name, &heaps)?;
    }
    Ok(gone)
}

fn due(store: &mut Database, name: &str, policy: &Policy, now: i64) -> Result<Due> {
    let mut timeline = store.load(name, Access::Read)?;
    let times: BTreeMap<TurnId, i64> = store.times(name)?.into_iter().collect();
    let age = |turn: TurnId| times.get(&turn).map_or(0, |at| now - at);
    let turns: Vec<TurnId> = timeline.turns().iter().map(|turn| turn.id).collect();
    let old: Vec<TurnId> =
        turns.iter().copied().filter(|&t| policy.stage(age(t)) >= Stage::Compost).collect();
    let chunks: Vec<ChunkId> =
        old.iter().flat_map(|&turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id()).collect();
    let missing = super::away(&timeline, &chunks);
    store.bring(name, &mut timeline, &missing)?;
    let still = |turn: &TurnId| timeline.turn_chunks(*turn).any(|chunk| !chunk.is_forgotten());
    let captures = store.records(name, Kind::Capture)?.into_iter().filter(|record| {
        let told: Value = serde_json::from_str(&record.value).unwrap_or_default();
        let turn = told["turn"].as_u64().and_then(|n| u32::try_from(n).ok()).map(TurnId);
        turn.is_some_and(|turn| policy.stage(age(turn)) >= Stage::Warm)
    });
    let captures = captures.map(|record| record.key).collect();
    let months = read_heaps(store, name)?.into_iter();
    let months = months.filter(|(_, (latest, _))| policy.stage(now - latest) == Stage::Forgotten);
    Ok(Due {
        all_warm: !turns.is_empty() && turns.iter().all(|&turn| policy.stage(age(turn)) >= Stage::Warm),
        captures,
        turns: old.into_iter().filter(still).collect(),
        months: months.map(|(month, _)| month).collect(),
    })
}

/// The memories that grow old with chunks: those that are of them. One of later turns is not old yet, even if its writer had these
/// in sight, and one that is pinned is to stay.
fn old(memories: Vec<Memory>, chunks: &[ChunkId]) -> Vec<Memory> {
    let of = |memory: &Memory| chunks.iter().any(|&chunk| memory.span.contains(chunk));
    memories.into_iter().filter(|memory| !memory.pinned && of(memory)).collect()
}

fn month(at: i64) -> String {
    jiff::Timestamp::from_millisecond(at).map(|at| at.strftime("%Y-%m").to_string()).unwrap_or_default()
}

type Heaps = BTreeMap<String, (i64, Compost)>;

fn read_heaps(store: &mut Database, name: &str) -> Result<Heaps> {
    let records = store.records(name, Kind::Setting)?;
    let Some(record) = records.into_iter().find(|record| record.key == COMPOST) else {
        return Ok(Heaps::new());
    };
    let told: Map<String, Value> = serde_json::from_str(&record.value).unwrap_or_default();
    let heap = |told: &Value| {
        let sketch = |key: &str| told[key].as_str().and_then(Sketch::parse).unwrap_or_default();
        let number = |key: &str| told[key].as_u64().unwrap_or(0);
        let compost = Compost {
            user: number("user"),
            assistant: number("assistant"),
            tokens: number("tokens"),
            length: sketch("length"),
            peak: sketch("peak"),
        };
        (told["latest"].as_i64().unwrap_or(0), compost)
    };
    Ok(told.iter().map(|(month, told)| (month.clone(), heap(told))).collect())
}

fn write_heaps(store: &mut Database, name: &str, heaps: &Heaps) -> Result<()> {
    let heap = |(latest, compost): &(i64, Compost)| {
        json!({
            "latest": latest, "user": compost.user, "assistant": compost.assistant, "tokens": compost.tokens,
            "length": compost.length.to_line(), "peak": compost.peak.to_line(),
        })
    };
    let told: Map<String, Value> = heaps.iter().map(|(month, kept)| (month.clone(), heap(kept))).collect();
    let value = (!told.is_empty()).then(|| Value::Object(told).to_string());
    Ok(store.put_record(name, Kind::Setting, COMPOST, value.as_deref())?)
}

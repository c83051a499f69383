//! Forgetting by age: each turn passes the stages of a [`RetentionPolicy`]. For a while, statistics of forgotten turns are
//! kept by month.

use super::backend::{CaptureDeletion, ForgetBackend};
use super::erase::erase_now;
use super::scheduled_report::ScheduledForgetReport;
use super::target::{ForgetItems, ForgetRequest, ForgetScope, ForgetTarget};
use crate::conversation::{load_setting, unloaded_chunks};
use crate::memory::record::{Memory, load_all_memories};
use halo_agents::lethe::{CompostStats, RetentionPolicy, RetentionStage};
use halo_agents::sketch::QuantileSketch;
use halo_core::Error;
use halo_core::store::{Access, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Setting: the statistics of forgotten turns by month.
const COMPOST_KEY: &str = "lethe.compost";

/// What is too old in one conversation.
#[derive(Clone, Debug, Default)]
pub struct RetentionPreview {
    pub conversation: String,
    /// Turns whose text is forgotten.
    pub turns: Vec<TurnId>,
    /// How many recordings are deleted.
    pub captures: usize,
    /// Whether the saved KV cells are deleted.
    pub saved_kv: bool,
    /// Months whose statistics are deleted.
    pub months: Vec<String>,
    /// How many memories are forgotten.
    pub memories: usize,
}

/// What is too old in one conversation.
#[derive(Default)]
struct RetentionPlan {
    /// Whether every turn is so old that saved KV cells are deleted.
    kv_expired: bool,
    expired_captures: Vec<String>,
    /// The keys of the stored attention of old answers.
    expired_attention: Vec<String>,
    expired_turns: Vec<TurnId>,
    expired_months: Vec<String>,
}

impl RetentionPlan {
    /// Whether text, recordings or statistics are too old.
    fn is_expired(&self) -> bool {
        let is_any_recording = !self.expired_captures.is_empty() || !self.expired_attention.is_empty();
        is_any_recording || !self.expired_turns.is_empty() || !self.expired_months.is_empty()
    }

    fn expired_chunks(&self, timeline: &Timeline) -> Vec<ChunkId> {
        let chunks = self.expired_turns.iter().flat_map(|&turn| timeline.turn_chunks(turn));
        chunks.map(|chunk| chunk.id()).collect()
    }
}

type CompostByMonth = BTreeMap<String, (i64, CompostStats)>;

fn check_policy(policy: &RetentionPolicy) -> Result<(), Error> {
    if policy.is_ordered() {
        return Ok(());
    }
    let message = "the ages of hot, warm and compost must not decrease: set lethe.hot_days, lethe.warm_days and \
                   lethe.compost_days in that order";
    Err(Error::invalid_input("forgetting by age", message))
}

/// What is too old, in all conversations.
pub(super) fn preview_by_age(
    backend: &dyn ForgetBackend,
    policy: &RetentionPolicy,
    now: i64,
) -> Result<Vec<RetentionPreview>, Error> {
    check_policy(policy)?;
    let Some(mut store) = backend.open_reader()? else { return Ok(Vec::new()) };
    let mut previews = Vec::new();
    for summary in store.list_conversations()? {
        let plan = plan_retention(&mut *store, &summary.name, policy, now)?;
        let timeline = store.load(&summary.name, Access::Read)?;
        let memories = load_all_memories(&mut *store, &summary.name)?;
        previews.push(RetentionPreview {
            memories: memories_of_chunks(memories, &plan.expired_chunks(&timeline)).len(),
            conversation: summary.name,
            turns: plan.expired_turns,
            captures: plan.expired_captures.len(),
            saved_kv: plan.kv_expired,
            months: plan.expired_months,
        });
    }
    Ok(previews)
}

/// Applies a policy to all conversations.
pub(super) fn forget_by_age(
    backend: &dyn ForgetBackend,
    policy: &RetentionPolicy,
    now: i64,
) -> Result<ScheduledForgetReport, Error> {
    check_policy(policy)?;
    let mut report = ScheduledForgetReport::default();
    let Some(mut store) = backend.open_reader()? else { return Ok(report) };
    for summary in store.list_conversations()? {
        forget_by_age_in(backend, &mut *store, &summary.name, policy, now, &mut report)?;
    }
    Ok(report)
}

/// Whether something of a conversation is too old.
pub(super) fn has_expired(
    store: &mut dyn Store,
    name: &str,
    policy: &RetentionPolicy,
    now: i64,
) -> Result<bool, Error> {
    check_policy(policy)?;
    let plan = plan_retention(store, name, policy, now)?;
    Ok(plan.kv_expired || plan.is_expired())
}

/// Applies a policy to one conversation.
pub(super) fn forget_by_age_in(
    backend: &dyn ForgetBackend,
    store: &mut dyn Store,
    name: &str,
    policy: &RetentionPolicy,
    now: i64,
    report: &mut ScheduledForgetReport,
) -> Result<(), Error> {
    check_policy(policy)?;
    let plan = plan_retention(store, name, policy, now)?;
    if plan.kv_expired {
        backend.delete_saved_kv(name)?;
    }
    if !plan.is_expired() {
        return Ok(());
    }
    let (chunks, compost) = prepare_compost(backend, name, &plan, policy, now)?;
    let mut new_name = None;
    if !chunks.is_empty() {
        let memories = load_all_memories(store, name)?;
        let items = ForgetItems {
            derived_memories: memories_of_chunks(memories, &chunks),
            chunks,
            ..ForgetItems::default()
        };
        let target = ForgetTarget { conversation: name.to_owned(), scope: ForgetScope::Selected(items) };
        let done = erase_now(backend, &target, &ForgetRequest::by_age(now))?;
        new_name = done.new_name.clone();
        report.add(name, done);
    }
    let name = new_name.as_deref().unwrap_or(name);
    let mut writer = backend.open_writer()?;
    writer.load(name, Access::Write)?;
    write_compost(&mut *writer, name, &compost)
}

/// Deletes old recordings. Returns the chunks to forget, and the statistics with those of these chunks.
fn prepare_compost(
    backend: &dyn ForgetBackend,
    name: &str,
    plan: &RetentionPlan,
    policy: &RetentionPolicy,
    now: i64,
) -> Result<(Vec<ChunkId>, CompostByMonth), Error> {
    let mut writer = backend.open_writer()?;
    let mut timeline = writer.load(name, Access::Write)?;
    for capture in &plan.expired_captures {
        if backend.delete_capture(capture)? == CaptureDeletion::Deleted {
            writer.put_record(name, RecordKind::Capture, capture, None)?;
        }
    }
    for key in &plan.expired_attention {
        writer.put_record(name, RecordKind::Attention, key, None)?;
    }
    let times: BTreeMap<TurnId, i64> = writer.turn_times(name)?.into_iter().collect();
    let chunks = plan.expired_chunks(&timeline);
    let missing = unloaded_chunks(&timeline, &chunks);
    writer.load_bodies(name, &mut timeline, &missing)?;
    let mut compost = read_compost(&mut *writer, name)?;
    compost.retain(|month, _| !plan.expired_months.contains(month));
    for &turn in &plan.expired_turns {
        let at = times.get(&turn).copied().unwrap_or(now);
        let (latest, stats) = compost.entry(format_month(at)).or_default();
        *latest = (*latest).max(at);
        add_turn(stats, &timeline, turn);
    }
    compost.retain(|_, (latest, _)| policy.stage_for_age(now - *latest) < RetentionStage::Forgotten);
    Ok((chunks, compost))
}

fn add_turn(stats: &mut CompostStats, timeline: &Timeline, turn: TurnId) {
    for chunk in timeline.turn_chunks(turn) {
        stats.tokens += chunk.len() as u64;
        stats.lengths.add(chunk.len() as f64);
        stats.peak_brightness.add(f64::from(chunk.peak().0));
    }
    match timeline.turns().iter().find(|other| other.id == turn).map(|turn| turn.role) {
        Some(Role::User) => stats.user_messages += 1,
        _ => stats.assistant_messages += 1,
    }
}

fn plan_retention(
    store: &mut dyn Store,
    name: &str,
    policy: &RetentionPolicy,
    now: i64,
) -> Result<RetentionPlan, Error> {
    let mut timeline = store.load(name, Access::Read)?;
    let times: BTreeMap<TurnId, i64> = store.turn_times(name)?.into_iter().collect();
    let stage = |turn: TurnId| policy.stage_for_age(times.get(&turn).map_or(0, |at| now - at));
    let turns: Vec<TurnId> = timeline.turns().iter().map(|turn| turn.id).collect();
    let old: Vec<TurnId> =
        turns.iter().copied().filter(|&turn| stage(turn) >= RetentionStage::Compost).collect();
    let chunks = old.iter().flat_map(|&turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id());
    let missing = unloaded_chunks(&timeline, &chunks.collect::<Vec<ChunkId>>());
    store.load_bodies(name, &mut timeline, &missing)?;
    let has_text = |turn: &TurnId| timeline.turn_chunks(*turn).any(|chunk| !chunk.is_forgotten());
    let is_expired = |value: &str| {
        let capture: Value = serde_json::from_str(value).unwrap_or_default();
        let turn = capture["turn"].as_u64().and_then(|n| u32::try_from(n).ok()).map(TurnId);
        turn.is_some_and(|turn| stage(turn) >= RetentionStage::Warm)
    };
    let captures = store.records(name, RecordKind::Capture)?.into_iter();
    let captures = captures.filter(|record| is_expired(&record.value)).map(|record| record.key);
    let captures = captures.collect();
    let attention = store.records(name, RecordKind::Attention)?.into_iter().map(|record| record.key);
    let is_old = |key: &String| key.parse().is_ok_and(|turn| stage(TurnId(turn)) >= RetentionStage::Warm);
    let expired_attention = attention.filter(is_old).collect();
    let months = read_compost(store, name)?.into_iter();
    let months =
        months.filter(|(_, (latest, _))| policy.stage_for_age(now - latest) == RetentionStage::Forgotten);
    Ok(RetentionPlan {
        kv_expired: !turns.is_empty() && turns.iter().all(|&turn| stage(turn) >= RetentionStage::Warm),
        expired_captures: captures,
        expired_attention,
        expired_turns: old.into_iter().filter(has_text).collect(),
        expired_months: months.map(|(month, _)| month).collect(),
    })
}

/// The memories of a range with these chunks. A memory of later turns is not old yet, even if its writer saw these; a pinned
/// one is kept.
fn memories_of_chunks(memories: Vec<Memory>, chunks: &[ChunkId]) -> Vec<Memory> {
    let is_of = |memory: &Memory| chunks.iter().any(|&chunk| memory.range.contains(chunk));
    memories.into_iter().filter(|memory| !memory.pinned && is_of(memory)).collect()
}

fn format_month(at: i64) -> String {
    jiff::Timestamp::from_millisecond(at).map(|at| at.strftime("%Y-%m").to_string()).unwrap_or_default()
}

fn read_compost(store: &mut dyn Store, name: &str) -> Result<CompostByMonth, Error> {
    let Some(text) = load_setting(store, name, COMPOST_KEY)? else { return Ok(CompostByMonth::new()) };
    let months: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
    let parse = |value: &Value| {
        let sketch = |key: &str| value[key].as_str().and_then(QuantileSketch::parse).unwrap_or_default();
        let number = |key: &str| value[key].as_u64().unwrap_or(0);
        let stats = CompostStats {
            user_messages: number("user"),
            assistant_messages: number("assistant"),
            tokens: number("tokens"),
            lengths: sketch("length"),
            peak_brightness: sketch("peak"),
        };
        (value["latest"].as_i64().unwrap_or(0), stats)
    };
    Ok(months.iter().map(|(month, value)| (month.clone(), parse(value))).collect())
}

fn write_compost(store: &mut dyn Store, name: &str, compost: &CompostByMonth) -> Result<(), Error> {
    let to_value = |(latest, stats): &(i64, CompostStats)| {
        json!({
            "latest": latest, "user": stats.user_messages, "assistant": stats.assistant_messages, "tokens": stats.tokens,
            "length": stats.lengths.to_line(), "peak": stats.peak_brightness.to_line(),
        })
    };
    let months: Map<String, Value> =
        compost.iter().map(|(month, stats)| (month.clone(), to_value(stats))).collect();
    let value = (!months.is_empty()).then(|| Value::Object(months).to_string());
    store.put_record(name, RecordKind::Setting, COMPOST_KEY, value.as_deref())
}

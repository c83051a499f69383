//! The tokens of agents' heartbeats over time.

use halo_worlds::telemetry::{FormatTotal, HeartbeatRecord, totals_by_format};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The stored heartbeats of a world, oldest first, and what the formats of HUDs would have taken.
#[derive(Serialize, ToSchema)]
#[schema(as = HeartbeatTelemetry)]
pub(crate) struct ApiHeartbeatTelemetry {
    heartbeats: Vec<ApiHeartbeatRecord>,
    /// By format: json, compact_json, toon, toon_positional. Empty without heartbeats.
    formats: BTreeMap<&'static str, ApiFormatTotal>,
}

impl ApiHeartbeatTelemetry {
    pub fn new(records: &[HeartbeatRecord]) -> Self {
        let totals = totals_by_format(records).into_iter();
        Self {
            heartbeats: records.iter().map(ApiHeartbeatRecord::new).collect(),
            formats: totals.map(|(format, total)| (format.name(), ApiFormatTotal::new(total))).collect(),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = FormatTotal)]
struct ApiFormatTotal {
    /// Tokens of a HUD in this format, on average over the heartbeats.
    mean_tokens: f64,
    /// What the format saves against JSON, in percent.
    saved_percent: f64,
}

impl ApiFormatTotal {
    fn new(total: FormatTotal) -> Self {
        let rounded = |number: f64| (number * 10.0).round() / 10.0;
        Self { mean_tokens: rounded(total.mean_tokens), saved_percent: rounded(total.saved_percent) }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = HeartbeatRecord)]
struct ApiHeartbeatRecord {
    agent: u32,
    /// The number of the heartbeat among those of the agent.
    beat: u64,
    /// In milliseconds since 1970.
    at: i64,
    /// The format of the HUD.
    format: &'static str,
    /// Tokens of the HUD.
    tokens: usize,
    /// Tokens of each section: shared (system and meta), self, recent_actions, rooms.
    sections: BTreeMap<&'static str, usize>,
    /// Tokens of the knowledge, a part of self.
    knowledge: usize,
    /// Tokens of each room, by the id of the room.
    rooms: BTreeMap<u32, usize>,
    /// Tokens of the same HUD in each format.
    formats: BTreeMap<&'static str, usize>,
    prompt_tokens: usize,
    /// Tokens of the prompt that were not found in the KV cache.
    prefilled_tokens: usize,
    completion_tokens: usize,
    /// Tokens of the HUD in percent of its budget; 0 for heartbeats of earlier versions.
    pressure_percent: usize,
    /// Messages of other agents that were shortened in the HUD (`rooms.cooling_tokens`).
    cooled_messages: usize,
    /// Messages of the agent that were shortened under pressure (`rooms.summaries`).
    summarized_messages: usize,
}

impl ApiHeartbeatRecord {
    fn new(record: &HeartbeatRecord) -> Self {
        let usage = &record.hud;
        let sections = [
            ("shared", usage.shared),
            ("self", usage.me),
            ("recent_actions", usage.recent_actions),
            ("rooms", usage.rooms.values().sum()),
        ];
        Self {
            agent: record.agent.0,
            beat: record.beat,
            at: record.at,
            format: record.format.name(),
            tokens: usage.total,
            sections: sections.into_iter().collect(),
            knowledge: usage.knowledge,
            rooms: usage.rooms.iter().map(|(room, tokens)| (room.0, *tokens)).collect(),
            formats: record.formats.iter().map(|(format, tokens)| (format.name(), *tokens)).collect(),
            prompt_tokens: record.prompt_tokens,
            prefilled_tokens: record.prefill_tokens,
            completion_tokens: record.answer_tokens,
            pressure_percent: record.pressure_percent,
            cooled_messages: record.cooled_messages,
            summarized_messages: record.summarized_messages,
        }
    }
}

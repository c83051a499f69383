//! The tokens of heartbeats over time: how much each section of a HUD takes, and what each format would have taken.

use crate::agent_model::AgentGeneration;
use crate::format::{self, HudFormat};
use crate::heartbeat::Millis;
use crate::hud_renderer::{HudRenderer, HudTokenUsage, RenderedHud};
use crate::world::AgentId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One heartbeat of an agent. The serde names are part of the stored format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatRecord {
    pub agent: AgentId,
    /// The number of the heartbeat among those of the agent.
    pub beat: u64,
    pub at: Millis,
    /// The format of the HUD.
    pub format: HudFormat,
    pub hud: HudTokenUsage,
    /// The tokens of the same HUD in every format.
    pub formats: BTreeMap<HudFormat, usize>,
    /// The tokens of the prompt: the HUD within its chat template.
    pub prompt_tokens: usize,
    /// Those that were computed, not found in the KV cache.
    pub prefill_tokens: usize,
    pub answer_tokens: usize,
    /// How full the HUD was: its tokens divided by its budget. 0 in records of earlier versions.
    #[serde(default)]
    pub pressure_percent: usize,
    /// Messages of other agents that were shortened in the HUD.
    #[serde(default)]
    pub cooled_messages: usize,
    /// Messages of the agent that were shortened under pressure.
    #[serde(default)]
    pub summarized_messages: usize,
}

/// The tokens of a HUD, counted before the model answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HudMeasurement {
    format: HudFormat,
    hud: HudTokenUsage,
    formats: BTreeMap<HudFormat, usize>,
}

impl HudMeasurement {
    pub(crate) fn new(renderer: &HudRenderer, format: HudFormat, rendered: &RenderedHud) -> Self {
        let tokens = |other: HudFormat| match other == format {
            true => rendered.token_usage.total,
            false => renderer.count_tokens(&format::render(&rendered.hud, other)),
        };
        let formats = HudFormat::ALL.into_iter().map(|other| (other, tokens(other))).collect();
        Self { format, hud: rendered.token_usage.clone(), formats }
    }

    pub(crate) fn into_record(
        self,
        agent: AgentId,
        (beat, at): (u64, Millis),
        generation: &AgentGeneration,
    ) -> HeartbeatRecord {
        HeartbeatRecord {
            agent,
            beat,
            at,
            format: self.format,
            hud: self.hud,
            formats: self.formats,
            prompt_tokens: generation.prompt_tokens,
            prefill_tokens: generation.prefill_tokens,
            answer_tokens: generation.answer_tokens,
            pressure_percent: (generation.pressure * 100.0).round() as usize,
            cooled_messages: generation.cooled_messages,
            summarized_messages: generation.summarized_messages,
        }
    }
}

/// The tokens of a format over some heartbeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FormatTotal {
    /// The mean of the HUDs, in tokens.
    pub mean_tokens: f64,
    /// What it saves against JSON, in percent; negative if it takes more.
    pub saved_percent: f64,
}

/// What each format takes on average, and saves against JSON.
#[must_use]
pub fn totals_by_format(records: &[HeartbeatRecord]) -> BTreeMap<HudFormat, FormatTotal> {
    let sum = |format: HudFormat| -> usize {
        records.iter().map(|record| record.formats.get(&format).copied().unwrap_or(0)).sum()
    };
    let json = sum(HudFormat::Json).max(1) as f64;
    let total = |format: HudFormat| FormatTotal {
        mean_tokens: sum(format) as f64 / records.len().max(1) as f64,
        saved_percent: 100.0 * (1.0 - sum(format) as f64 / json),
    };
    let formats = HudFormat::ALL.into_iter().filter(|_| !records.is_empty());
    formats.map(|format| (format, total(format))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(beat: u64, formats: [usize; 4]) -> HeartbeatRecord {
        HeartbeatRecord {
            agent: AgentId(1),
            beat,
            at: 0,
            format: HudFormat::Json,
            hud: HudTokenUsage::default(),
            formats: HudFormat::ALL.into_iter().zip(formats).collect(),
            prompt_tokens: 0,
            prefill_tokens: 0,
            answer_tokens: 0,
            pressure_percent: 0,
            cooled_messages: 0,
            summarized_messages: 0,
        }
    }

    #[test]
    fn telemetry_totals_compare_formats_with_json() {
        let records = [record(1, [1_000, 800, 700, 1_100]), record(2, [3_000, 2_200, 2_300, 3_300])];
        let totals = totals_by_format(&records);
        let of = |format: HudFormat| (totals[&format].mean_tokens, totals[&format].saved_percent.round());
        assert_eq!(of(HudFormat::Json), (2_000.0, 0.0));
        assert_eq!(of(HudFormat::CompactJson), (1_500.0, 25.0));
        assert_eq!(of(HudFormat::Toon), (1_500.0, 25.0));
        assert_eq!(of(HudFormat::ToonPositional), (2_200.0, -10.0));
        assert!(totals_by_format(&[]).is_empty());
    }
}

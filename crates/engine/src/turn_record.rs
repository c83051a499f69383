//! The record of a turn: how it ended, what was pruned and resurrected, and how long each stage took. It is stored beside
//! the timeline. The names in the stored JSON are those of the first version; every reader goes through this type.

use crate::event::{TurnStage, TurnSummary};
use crate::forgetting_record::ForgettingRecord;
use halo_core::Error;
use halo_core::budget::pressure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnRecord {
    /// A finish reason, `failed` or `interrupted`.
    pub finish: String,
    #[serde(rename = "why", default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// None if the program ended during the turn.
    #[serde(flatten)]
    pub figures: Option<TurnFigures>,
    /// Why the premise of the message is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub premise: Option<String>,
    /// The forgetting cycle that ran after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgetting: Option<ForgettingRecord>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnFigures {
    /// Tokens of the answer.
    pub tokens: usize,
    #[serde(rename = "returned")]
    pub resurrected: usize,
    /// The resurrected chunks; empty in records of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resurrected_chunks: Vec<String>,
    /// For each of them, the mean attention per token that it received from the answer, in ‰.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resurrected_attention: Vec<Option<f64>>,
    #[serde(rename = "left")]
    pub pruned: usize,
    /// Earlier answers that were shortened in the prompt of a model behind an API.
    #[serde(rename = "cooled", default, skip_serializing_if = "is_zero")]
    pub cooled_messages: usize,
    /// Tokens in the context window after the turn.
    #[serde(rename = "live")]
    pub live_tokens: usize,
    /// The most tokens in the context window; none in records of earlier versions.
    #[serde(rename = "limit", default, skip_serializing_if = "Option::is_none")]
    pub token_limit: Option<usize>,
    #[serde(rename = "ms")]
    pub stages: StageTimes,
    /// Statistics of the attention at some steps of the answer.
    #[serde(default)]
    pub attention: Vec<AttentionSample>,
    /// The best hits of the search that stayed pruned, because their relevance is below the relevance floor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below_floor: Vec<SkippedHit>,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Milliseconds by stage. Names of stages that this version does not know are ignored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, f64>", into = "BTreeMap<String, f64>")]
pub struct StageTimes(pub BTreeMap<TurnStage, f64>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SkippedHit {
    pub chunk: String,
    pub score: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSample {
    pub step: u64,
    pub mean: f64,
    pub median: f64,
    pub max: f64,
    pub min: f64,
    pub std: f64,
    /// Slots by their attention, see [`AttentionHistogram`](halo_core::attention::AttentionHistogram). Empty in records of
    /// versions that did not store it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<u32>,
}

impl TurnRecord {
    #[must_use]
    pub fn new(summary: &TurnSummary, error: Option<&Error>, premise: Option<String>) -> Self {
        let ms = |duration: Duration| (duration.as_secs_f64() * 1e4).round() / 10.0;
        Self {
            finish: if error.is_some() { "failed" } else { summary.finish.name() }.to_owned(),
            error: error.map(ToString::to_string),
            premise,
            forgetting: None,
            figures: Some(TurnFigures {
                tokens: summary.tokens,
                resurrected: summary.resurrected,
                resurrected_chunks: summary.resurrected_chunks.iter().map(ToString::to_string).collect(),
                resurrected_attention: summary.resurrected_attention.clone(),
                pruned: summary.pruned,
                cooled_messages: summary.cooled_messages,
                live_tokens: summary.live_tokens,
                token_limit: Some(summary.token_limit),
                stages: StageTimes(summary.stages.iter().map(|(stage, time)| (*stage, ms(*time))).collect()),
                attention: summary.traces.iter().map(AttentionSample::from).collect(),
                below_floor: (summary.below_floor.iter())
                    .map(|hit| SkippedHit { chunk: hit.chunk.to_string(), score: hit.score })
                    .collect(),
            }),
        }
    }

    /// The record of a turn during which the program ended.
    #[must_use]
    pub fn interrupted() -> Self {
        Self { finish: "interrupted".into(), error: None, premise: None, forgetting: None, figures: None }
    }

    /// None if the record cannot be read.
    #[must_use]
    pub fn from_json(stored: &str) -> Option<Self> {
        serde_json::from_str(stored).ok()
    }

    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_value(self).unwrap_or_default().to_string()
    }

    /// Whether the answer is complete: the model ended it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        ["end", "stop"].contains(&self.finish.as_str())
    }
}

impl StageTimes {
    #[must_use]
    pub fn ms(&self, stage: TurnStage) -> f64 {
        self.0.get(&stage).copied().unwrap_or(0.0)
    }

    /// The sum over all stages.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.0.values().sum()
    }

    /// From the message to the first token.
    #[must_use]
    pub fn first_token_ms(&self) -> f64 {
        TurnStage::BEFORE_ANSWER.iter().map(|stage| self.ms(*stage)).sum()
    }

    /// Time outside of the model.
    #[must_use]
    pub fn overhead_ms(&self) -> f64 {
        let in_model = [TurnStage::Prefill, TurnStage::Generate, TurnStage::Preview];
        self.total_ms() - in_model.iter().map(|stage| self.ms(*stage)).sum::<f64>()
    }

    /// By the public names of the stages.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<&'static str, f64> {
        self.0.iter().map(|(stage, ms)| (stage.name(), *ms)).collect()
    }
}

impl TurnFigures {
    /// How full the context window was after the turn.
    #[must_use]
    pub fn pressure(&self) -> Option<f64> {
        self.token_limit.map(|limit| pressure(self.live_tokens, limit))
    }

    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        let ms = self.stages.ms(TurnStage::Generate) + self.stages.ms(TurnStage::Score);
        if ms > 0.0 { self.tokens as f64 * 1e3 / ms } else { 0.0 }
    }
}

impl From<BTreeMap<String, f64>> for StageTimes {
    fn from(stored: BTreeMap<String, f64>) -> Self {
        let known = stored.iter().filter_map(|(name, ms)| {
            TurnStage::ALL.into_iter().find(|stage| stored_name(*stage) == name).map(|stage| (stage, *ms))
        });
        Self(known.collect())
    }
}

impl From<StageTimes> for BTreeMap<String, f64> {
    fn from(times: StageTimes) -> Self {
        times.0.into_iter().map(|(stage, ms)| (stored_name(stage).to_owned(), ms)).collect()
    }
}

impl From<&(u64, halo_core::attention::AttentionStats)> for AttentionSample {
    fn from((step, stats): &(u64, halo_core::attention::AttentionStats)) -> Self {
        let halo_core::attention::AttentionStats { mean, median, max, min, std, histogram } = *stats;
        Self { step: *step, mean, median, max, min, std, histogram: histogram.0.to_vec() }
    }
}

/// The name of a stage in stored records.
fn stored_name(stage: TurnStage) -> &'static str {
    match stage {
        TurnStage::Prefill => "read",
        TurnStage::Generate => "speak",
        TurnStage::Score => "attend",
        TurnStage::PersistKv => "settle",
        TurnStage::Store | TurnStage::Preview | TurnStage::Recall | TurnStage::Prune | TurnStage::Index => {
            stage.name()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_record_reads_and_writes_the_stored_names() {
        let stored = r#"{"attention":[{"max":0.5,"mean":0.25,"median":0.2,"min":0.1,"std":0.1,"step":5},{"histogram":[0,2,1],"max":0.5,"mean":0.25,"median":0.2,"min":0.1,"std":0.1,"step":10}],"below_floor":[{"chunk":"u4.0","score":0.25}],"finish":"end","left":2,"limit":2000,"live":300,"ms":{"attend":0.4,"read":3.0,"settle":1.5,"speak":20.0,"store":0.5},"premise":"“tea”: it was coffee","resurrected_chunks":["u4.0"],"returned":1,"tokens":41,"why":"the disk is full"}"#;
        let record = TurnRecord::from_json(stored).expect("a record");
        let value = |json: &str| serde_json::from_str::<serde_json::Value>(json).expect("JSON");
        assert_eq!(value(&record.to_json()), value(stored));
        let figures = record.figures.as_ref().expect("figures");
        assert_eq!((figures.resurrected, figures.pruned, figures.live_tokens), (1, 2, 300));
        assert_eq!(figures.stages.by_name()["generate"], 20.0);
        assert_eq!(figures.stages.by_name()["prefill"], 3.0);
        assert_eq!(figures.stages.first_token_ms(), 3.5);
        assert!((figures.stages.overhead_ms() - 2.4).abs() < 1e-9);
        assert!((figures.tokens_per_second() - 41.0 * 1e3 / 20.4).abs() < 1e-9);
        assert!(record.is_complete());
    }

    #[test]
    fn turn_record_of_an_interrupted_turn_has_no_figures() {
        for stored in [r#"{"finish":"interrupted"}"#, r#"{"finish":"interrupted","why":null,"premise":null}"#]
        {
            assert_eq!(TurnRecord::from_json(stored), Some(TurnRecord::interrupted()));
        }
        let record = TurnRecord::interrupted();
        assert_eq!(record.to_json(), r#"{"finish":"interrupted"}"#);
        assert!(!record.is_complete());
        assert_eq!(TurnRecord::from_json("{"), None);
    }
}

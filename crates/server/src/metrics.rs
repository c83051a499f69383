//! Metrics in the registry of `prometheus-client`: counters and histograms of requests and turns.

use crate::api_name::ApiName;
use axum::http::StatusCode;
use halo_agents::forgetting::ForgettingResult;
use halo_core::Error;
use halo_core::attention::AttentionStats;
use halo_engine::event::{TurnStage, TurnSummary};
use halo_worlds::agent_model::AgentGeneration;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    api: &'static str,
    /// The class of the status, such as `2xx`.
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiLabel {
    api: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

/// A statistic of an attention row.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatisticLabel {
    statistic: &'static str,
}

/// From 1 ms to about 2 minutes; each bucket is twice as wide as the one before.
fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

#[derive(Clone)]
pub(crate) struct Metrics(Arc<MetricSet>);

struct MetricSet {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Family<ApiLabel, Histogram>,
    turns: Counter,
    failed_turns: Counter,
    generated_tokens: Counter,
    resurrected: Counter,
    pruned: Counter,
    turn_seconds: Histogram,
    first_token_seconds: Histogram,
    stage_seconds: Family<StageLabel, Histogram>,
    forgetting_cycles: Counter,
    erased_chunks: Counter,
    disabled_memories: Counter,
    cooled_messages: Counter,
    cooled_answers: Counter,
    summarized_messages: Counter,
    attention: Family<StatisticLabel, Gauge<f64, AtomicU64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut set = MetricSet {
            registry: Registry::with_prefix("halo"),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(latency_histogram),
            turns: Counter::default(),
            failed_turns: Counter::default(),
            generated_tokens: Counter::default(),
            resurrected: Counter::default(),
            pruned: Counter::default(),
            turn_seconds: latency_histogram(),
            first_token_seconds: latency_histogram(),
            stage_seconds: Family::new_with_constructor(latency_histogram),
            forgetting_cycles: Counter::default(),
            erased_chunks: Counter::default(),
            disabled_memories: Counter::default(),
            cooled_messages: Counter::default(),
            cooled_answers: Counter::default(),
            summarized_messages: Counter::default(),
            attention: Family::default(),
        };
        let registry = &mut set.registry;
        registry.register("requests", "Requests answered, by API and status class", set.requests.clone());
        let help = "Time until the response begins, by API";
        registry.register("request_seconds", help, set.request_seconds.clone());
        registry.register("turns", "Turns completed", set.turns.clone());
        registry.register("turns_failed", "Turns that failed", set.failed_turns.clone());
        registry.register("tokens", "Tokens generated", set.generated_tokens.clone());
        registry.register("chunks_resurrected", "Chunks resurrected", set.resurrected.clone());
        registry.register("chunks_pruned", "Chunks pruned", set.pruned.clone());
        registry.register("turn_seconds", "Duration of a turn", set.turn_seconds.clone());
        let help = "Time from the message to the first token";
        registry.register("first_token_seconds", help, set.first_token_seconds.clone());
        registry.register("stage_seconds", "Duration of a stage of a turn", set.stage_seconds.clone());
        let help = "Forgetting cycles under context pressure";
        registry.register("forgetting_cycles", help, set.forgetting_cycles.clone());
        registry.register("chunks_erased", "Chunks erased by retention", set.erased_chunks.clone());
        let help = "Memories disabled by forgetting cycles";
        registry.register("memories_disabled", help, set.disabled_memories.clone());
        let help = "Messages shortened in the HUDs of agents";
        registry.register("agent_messages_cooled", help, set.cooled_messages.clone());
        let help = "Earlier answers shortened in the prompts of a model behind an API";
        registry.register("answers_cooled", help, set.cooled_answers.clone());
        let help = "Messages of agents shortened under context pressure";
        registry.register("agent_messages_summarized", help, set.summarized_messages.clone());
        let help = "Attention of the latest traced step over the slots of the window, by statistic";
        registry.register("attention", help, set.attention.clone());
        Self(Arc::new(set))
    }
}

impl Metrics {
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    pub fn record_request(&self, api: ApiName, status: StatusCode, time: Duration) {
        let class = match status.as_u16() {
            100..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        self.0.requests.get_or_create(&RequestLabels { api: api.name(), status: class }).inc();
        self.0.request_seconds.get_or_create(&ApiLabel { api: api.name() }).observe(time.as_secs_f64());
    }

    pub fn record_turn(&self, result: &Result<TurnSummary, Error>) {
        let Ok(summary) = result else {
            self.0.failed_turns.inc();
            return;
        };
        self.0.turns.inc();
        self.0.generated_tokens.inc_by(summary.tokens as u64);
        self.0.resurrected.inc_by(summary.resurrected as u64);
        self.0.pruned.inc_by(summary.pruned as u64);
        self.0.cooled_answers.inc_by(summary.cooled_messages as u64);
        let seconds = |stages: &[TurnStage]| -> f64 {
            stages.iter().map(|stage| summary.stage_duration(*stage).as_secs_f64()).sum()
        };
        self.0.turn_seconds.observe(seconds(&TurnStage::ALL));
        self.0.first_token_seconds.observe(seconds(&TurnStage::BEFORE_ANSWER));
        for stage in TurnStage::ALL {
            let label = StageLabel { stage: stage.name() };
            self.0.stage_seconds.get_or_create(&label).observe(seconds(&[stage]));
        }
        if let Some((_, stats)) = summary.traces.last() {
            let AttentionStats { mean, median, max, min, std, .. } = *stats;
            for (statistic, value) in
                [("mean", mean), ("median", median), ("max", max), ("min", min), ("std", std)]
            {
                self.0.attention.get_or_create(&StatisticLabel { statistic }).set(value);
            }
        }
    }

    pub fn record_forgetting_cycle(&self, result: &ForgettingResult) {
        self.0.forgetting_cycles.inc();
        self.0.disabled_memories.inc_by(result.deactivated().len() as u64);
    }

    pub fn record_retention(&self, erased_chunks: usize) {
        self.0.erased_chunks.inc_by(erased_chunks as u64);
    }

    pub fn record_heartbeat(&self, generation: &AgentGeneration) {
        self.0.cooled_messages.inc_by(generation.cooled_messages as u64);
        self.0.summarized_messages.inc_by(generation.summarized_messages as u64);
    }

    /// Counts the tokens of a completion outside of any conversation.
    pub fn record_generated_tokens(&self, tokens: usize) {
        self.0.generated_tokens.inc_by(tokens as u64);
    }
}

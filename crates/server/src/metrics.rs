//! Counters of requests and turns.

use halo_core::Error;
use halo_engine::event::{TurnStage, TurnSummary};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Default)]
pub(crate) struct Metrics(Arc<MetricCounters>);

#[derive(Default)]
struct MetricCounters {
    requests: [AtomicU64; 6],
    turns: AtomicU64,
    failed_turns: AtomicU64,
    generated_tokens: AtomicU64,
    resurrected: AtomicU64,
    pruned: AtomicU64,
    stage_micros: [AtomicU64; TurnStage::ALL.len()],
}

/// The counters at one moment.
pub(crate) struct MetricValues {
    /// By the first digit of the status.
    pub requests: [u64; 6],
    pub turns: u64,
    pub failed_turns: u64,
    pub generated_tokens: u64,
    pub resurrected: u64,
    pub pruned: u64,
    pub stage_seconds: Vec<(TurnStage, f64)>,
}

impl Metrics {
    pub fn record_request(&self, status: u16) {
        add(&self.0.requests[usize::from(status / 100).min(5)], 1);
    }

    pub fn record_turn(&self, result: &Result<TurnSummary, Error>) {
        let Ok(summary) = result else { return add(&self.0.failed_turns, 1) };
        add(&self.0.turns, 1);
        add(&self.0.generated_tokens, summary.tokens as u64);
        add(&self.0.resurrected, summary.resurrected as u64);
        add(&self.0.pruned, summary.pruned as u64);
        for (stage, micros) in TurnStage::ALL.iter().zip(&self.0.stage_micros) {
            add(micros, u64::try_from(summary.stage_duration(*stage).as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// Counts the tokens of a completion outside of any conversation.
    pub fn record_generated_tokens(&self, tokens: usize) {
        add(&self.0.generated_tokens, tokens as u64);
    }

    pub fn values(&self) -> MetricValues {
        let counters = &self.0;
        let stages = TurnStage::ALL.iter().zip(&counters.stage_micros);
        MetricValues {
            requests: counters.requests.each_ref().map(read),
            turns: read(&counters.turns),
            failed_turns: read(&counters.failed_turns),
            generated_tokens: read(&counters.generated_tokens),
            resurrected: read(&counters.resurrected),
            pruned: read(&counters.pruned),
            stage_seconds: stages.map(|(stage, micros)| (*stage, read(micros) as f64 / 1e6)).collect(),
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

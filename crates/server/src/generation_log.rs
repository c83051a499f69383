//! Figures of the last generation, of a completion or of a chat, for `/api/extra/perf`.

use halo_core::model::FinishReason;
use halo_engine::event::{TurnStage, TurnSummary};
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// The last generation, and how many there were.
pub(crate) struct GenerationLog {
    started: Instant,
    state: Mutex<LogState>,
}

struct LogState {
    count: u64,
    last: Option<FinishedGeneration>,
    last_end: Instant,
}

/// A generation that has ended.
#[derive(Clone, Debug)]
pub(crate) struct FinishedGeneration {
    pub prompt_tokens: usize,
    pub tokens: usize,
    pub prefill: Duration,
    pub decode: Duration,
    /// None where it failed.
    pub finish: Option<FinishReason>,
    /// None where it follows from the settings.
    pub seed: Option<u64>,
}

/// The figures at a moment.
pub(crate) struct GenerationFigures {
    pub count: u64,
    pub last: Option<FinishedGeneration>,
    pub uptime: Duration,
    pub since_last: Duration,
}

impl Default for GenerationLog {
    fn default() -> Self {
        let now = Instant::now();
        Self { started: now, state: Mutex::new(LogState { count: 0, last: None, last_end: now }) }
    }
}

impl GenerationLog {
    pub fn record(&self, generation: FinishedGeneration) {
        let mut state = self.state.lock();
        state.count += 1;
        state.last = Some(generation);
        state.last_end = Instant::now();
    }

    /// Records the answer of a conversation.
    pub fn record_turn(&self, summary: &TurnSummary) {
        self.record(FinishedGeneration {
            prompt_tokens: summary.live_tokens.saturating_sub(summary.tokens),
            tokens: summary.tokens,
            prefill: summary.stage_duration(TurnStage::Prefill),
            decode: summary.stage_duration(TurnStage::Generate) + summary.stage_duration(TurnStage::Score),
            finish: Some(summary.finish),
            seed: None,
        });
    }

    pub fn figures(&self) -> GenerationFigures {
        let state = self.state.lock();
        GenerationFigures {
            count: state.count,
            last: state.last.clone(),
            uptime: self.started.elapsed(),
            since_last: state.last_end.elapsed(),
        }
    }
}

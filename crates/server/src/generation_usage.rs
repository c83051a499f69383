//! What a generation cost: tokens read, tokens reused from the KV cache, tokens generated, and the times of both.

use halo_core::model::{CacheStats, ModelStep};
use halo_engine::event::{TurnStage, TurnSummary};
use std::time::{Duration, Instant};

/// The tokens and times of one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GenerationUsage {
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose KV cells were in the cache or in the archive.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    pub prefill_time: Duration,
    pub generate_time: Duration,
}

impl GenerationUsage {
    /// The sum of two generations.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            completion_tokens: self.completion_tokens + other.completion_tokens,
            prefill_time: self.prefill_time + other.prefill_time,
            generate_time: self.generate_time + other.generate_time,
        }
    }

    /// The usage of a turn in a conversation. `stats` are those of its prefill; of a model that reports none, the tokens in the
    /// window count.
    pub fn of_turn(stats: &CacheStats, summary: &TurnSummary) -> Self {
        let reported = stats.reused + stats.restored + stats.recomputed + stats.prefilled;
        let in_window = summary.live_tokens.saturating_sub(summary.tokens);
        Self {
            prompt_tokens: if reported > 0 { reported } else { in_window },
            cached_tokens: stats.reused + stats.restored,
            completion_tokens: summary.tokens,
            prefill_time: summary.stage_duration(TurnStage::Prefill),
            generate_time: summary.stage_duration(TurnStage::Generate),
        }
    }
}

/// Measures a completion outside of a conversation, step by step.
pub(crate) struct UsageMeter {
    usage: GenerationUsage,
    started: Instant,
    prefilled: Option<Instant>,
}

impl UsageMeter {
    pub fn new(prompt_tokens: usize) -> Self {
        let usage = GenerationUsage { prompt_tokens, ..GenerationUsage::default() };
        Self { usage, started: Instant::now(), prefilled: None }
    }

    /// The request is still queued: the prefill has not begun.
    pub fn restart(&mut self) {
        self.started = Instant::now();
    }

    pub fn observe(&mut self, step: &ModelStep<'_>) {
        match step {
            ModelStep::PrefillDone(stats) => {
                let now = Instant::now();
                self.prefilled = Some(now);
                self.usage.prefill_time = now.duration_since(self.started);
                self.usage.cached_tokens = (stats.reused + stats.restored).min(self.usage.prompt_tokens);
            }
            ModelStep::Token(..) => {
                self.usage.completion_tokens += 1;
                self.usage.generate_time = self.prefilled.unwrap_or(self.started).elapsed();
            }
            ModelStep::Prefill { .. }
            | ModelStep::Cooled(_)
            | ModelStep::PromptAttention(_)
            | ModelStep::Logprobs(_) => {}
        }
    }

    pub fn usage(&self) -> GenerationUsage {
        self.usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::model::ModelToken;
    use halo_core::token::TokenId;

    #[test]
    fn usage_counts_cached_and_generated_tokens() {
        let mut meter = UsageMeter::new(10);
        let stats = CacheStats { reused: 6, restored: 1, prefilled: 3, ..CacheStats::default() };
        meter.observe(&ModelStep::Prefill { done: 1, total: 3 });
        meter.observe(&ModelStep::PrefillDone(stats));
        let token = ModelToken { id: TokenId(1), text: "a".into() };
        meter.observe(&ModelStep::Token(&token, None));
        meter.observe(&ModelStep::Token(&token, None));
        let usage = meter.usage();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (10, 7, 2));
    }

    /// The window of an ephemeral prompt can reuse more cells than the client sent tokens.
    #[test]
    fn usage_reports_no_more_cached_tokens_than_prompt_tokens() {
        let mut meter = UsageMeter::new(2);
        meter.observe(&ModelStep::PrefillDone(CacheStats { reused: 9, ..CacheStats::default() }));
        assert_eq!(meter.usage().cached_tokens, 2);
    }
}

//! A real model with a sample in its memory: what it looked at, and what it guesses when some of it is gone.

use halo_llama::attention::{ReducedAttention, TapConfig};
use halo_llama::ffi::{BatchToken, LlamaContext, LlamaError, LlamaPos, LlamaToken, SeqId};
use std::ops::Range;

/// All of the sample.
const FULL_SEQ: SeqId = SeqId(0);
/// What is left of it.
const PRUNED_SEQ: SeqId = SeqId(1);

/// Tokens that are read at once while all of them are watched.
const OBSERVED_BATCH: usize = 16;

/// A real model with a sample in its memory.
pub(super) struct AblationRun<'a> {
    context: &'a mut LlamaContext,
    len: usize,
    next: &'a [LlamaToken],
    /// What it guesses with all of it in memory, as logarithms, one row a token of what came next.
    full_logprobs: Vec<f32>,
}

/// What letting some of a window go has cost.
#[derive(Clone, Debug, Default)]
pub(super) struct PruneCost {
    /// By token of what came next: how far the guess is from that of the full window, in nats.
    pub(super) kl: Vec<f64>,
    /// By token: how unlikely the guess thinks what really came, in nats.
    pub(super) nll: Vec<f64>,
}

/// Who hears of each row of attention: what a token looked at, one after the other.
pub(super) type OnAttentionRow<'a> = dyn FnMut(&ReducedAttention) + 'a;

impl<'a> AblationRun<'a> {
    /// Reads a window; the rows of the tokens from `watched` on are told.
    pub(super) fn start(
        context: &'a mut LlamaContext,
        window: &[LlamaToken],
        watched: usize,
        next: &'a [LlamaToken],
        want: &TapConfig,
        looked: &mut OnAttentionRow<'_>,
    ) -> Result<Self, LlamaError> {
        for seq in [FULL_SEQ, PRUNED_SEQ] {
            let _ = context.seq_rm(seq, -1, -1);
        }
        let batch = context.params().batch as usize;
        for (start, part) in batches(&window[..watched], batch) {
            context.tap().configure(TapConfig::off());
            context.decode(FULL_SEQ, &batch_items(part, start, false))?;
        }
        for (start, part) in batches(&window[watched..], OBSERVED_BATCH) {
            let start = watched + start;
            context.tap().configure(TapConfig { cells: true, ..want.clone() });
            context.decode(FULL_SEQ, &batch_items(part, start, false))?;
            let cells: Vec<i64> = (start..start + part.len()).map(|n| n as i64).collect();
            assert_eq!(context.tap().batch_cells(), cells, "an empty memory is filled from its beginning");
            context.tap().take_rows().iter().for_each(&mut *looked);
        }
        let mut trial = Self { context, len: window.len(), next, full_logprobs: Vec::new() };
        trial.full_logprobs = trial.logprobs_without(&[])?;
        Ok(trial)
    }

    /// What it costs to let these slots go.
    pub(super) fn cost_without(&mut self, gone: &[Range<usize>]) -> Result<PruneCost, LlamaError> {
        let guesses = self.logprobs_without(gone)?;
        let size = self.context.weights().vocab_size();
        let mut cost = PruneCost::default();
        // The guess behind a token is at the one that follows it.
        let following = self.next.iter().skip(1);
        for ((full, rest), &came) in self.full_logprobs.chunks(size).zip(guesses.chunks(size)).zip(following)
        {
            cost.kl.push(full.iter().zip(rest).map(|(f, r)| f64::from(f.exp() * (f - r))).sum());
            cost.nll.push(-f64::from(rest[came as usize]));
        }
        Ok(cost)
    }

    /// The guesses at what came next with some slots gone: the logarithms of probabilities.
    fn logprobs_without(&mut self, gone: &[Range<usize>]) -> Result<Vec<f32>, LlamaError> {
        let end = self.len as LlamaPos;
        self.context.seq_cp(FULL_SEQ, PRUNED_SEQ, 0, end);
        for range in gone {
            let _ = self.context.seq_rm(PRUNED_SEQ, range.start as LlamaPos, range.end as LlamaPos);
        }
        let batch = self.context.params().batch as usize;
        let mut guesses = Vec::with_capacity(self.next.len() * self.context.weights().vocab_size());
        for (start, part) in batches(self.next, batch) {
            self.context.tap().configure(TapConfig::off());
            self.context.decode(PRUNED_SEQ, &batch_items(part, self.len + start, true))?;
            for n in 0..part.len() {
                let from = guesses.len();
                guesses.extend_from_slice(self.context.logits_at(n));
                log_softmax(&mut guesses[from..]);
            }
        }
        let _ = self.context.seq_rm(PRUNED_SEQ, -1, -1);
        Ok(guesses)
    }
}

fn batches(tokens: &[LlamaToken], size: usize) -> impl Iterator<Item = (usize, &[LlamaToken])> {
    tokens.chunks(size).enumerate().map(move |(n, part)| (n * size, part))
}

fn batch_items(tokens: &[LlamaToken], start: usize, logits: bool) -> Vec<BatchToken> {
    let item =
        |(n, &token): (usize, &LlamaToken)| BatchToken { token, position: (start + n) as LlamaPos, logits };
    tokens.iter().enumerate().map(item).collect()
}

/// Scores become logarithms of probabilities.
fn log_softmax(scores: &mut [f32]) {
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = scores.chunks(1024).map(|part| part.iter().map(|s| (s - top).exp()).sum::<f32>()).sum();
    let less = top + sum.ln();
    scores.iter_mut().for_each(|s| *s -= less);
}

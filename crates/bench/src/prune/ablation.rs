//! A real model with a sample in its KV cache: its attention, and its predictions without some of the tokens.

use halo_llama::attention::{LayerHeads, ReducedAttention, TapConfig};
use halo_llama::ffi::{BatchToken, LlamaContext, LlamaError, LlamaPos, LlamaToken, SeqId};
use std::ops::Range;

/// The sequence with the whole sample.
const FULL_SEQ: SeqId = SeqId(0);
/// The sequence with what is left of it.
const PRUNED_SEQ: SeqId = SeqId(1);

/// Batch size while attention of all tokens is captured.
const OBSERVED_BATCH: usize = 16;

pub(super) struct AblationRun<'a> {
    context: &'a mut LlamaContext,
    len: usize,
    next: &'a [LlamaToken],
    /// Log probabilities with the whole sample in the cache, one row per token of the continuation.
    full_logprobs: Vec<f32>,
}

/// The cost of removing some of a window.
#[derive(Clone, Debug, Default)]
pub(super) struct PruneCost {
    /// By token of the continuation: KL divergence from the full window, in nats.
    pub(super) kl: Vec<f64>,
    /// By token: loss on the actual token, in nats.
    pub(super) nll: Vec<f64>,
}

/// What is known of a watched token.
pub(super) struct ObservedToken<'a> {
    pub(super) row: &'a ReducedAttention,
    /// All heads of each layer; empty unless [`TapConfig::full`].
    pub(super) heads: Vec<&'a LayerHeads>,
    /// The probability of the token after it.
    pub(super) probability: Option<f32>,
}

/// Receives what is known of each watched token.
pub(super) type OnObservedToken<'a> = dyn FnMut(&ObservedToken<'_>) + 'a;

impl<'a> AblationRun<'a> {
    /// Prefills a window; rows of tokens from `watched` on are passed to `listener`.
    pub(super) fn start(
        context: &'a mut LlamaContext,
        window: &[LlamaToken],
        watched: usize,
        next: &'a [LlamaToken],
        want: &TapConfig,
        listener: &mut OnObservedToken<'_>,
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
            context.decode(FULL_SEQ, &batch_items(part, start, true))?;
            let probabilities: Vec<Option<f32>> = (0..part.len())
                .map(|n| {
                    let next = *window.get(start + n + 1)?;
                    let mut scores = context.logits_at(n).to_vec();
                    log_softmax(&mut scores);
                    scores.get(next as usize).map(|score| score.exp())
                })
                .collect();
            let cells: Vec<i64> = (start..start + part.len()).map(|n| n as i64).collect();
            assert_eq!(context.tap().batch_cells(), cells, "an empty cache is filled from its beginning");
            let (rows, heads) = (context.tap().take_rows(0), context.tap().take_heads(0));
            for (n, (row, probability)) in rows.iter().zip(probabilities).enumerate() {
                let heads = heads.iter().filter(|heads| heads.token == n).collect();
                listener(&ObservedToken { row, heads, probability });
            }
        }
        let mut trial = Self { context, len: window.len(), next, full_logprobs: Vec::new() };
        trial.full_logprobs = trial.logprobs_without(&[])?;
        Ok(trial)
    }

    /// The cost of removing these slots.
    pub(super) fn cost_without(&mut self, gone: &[Range<usize>]) -> Result<PruneCost, LlamaError> {
        let guesses = self.logprobs_without(gone)?;
        let size = self.context.weights().vocab_size();
        let mut cost = PruneCost::default();
        // The logits of a token predict the one after it.
        let following = self.next.iter().skip(1);
        for ((full, rest), &came) in self.full_logprobs.chunks(size).zip(guesses.chunks(size)).zip(following)
        {
            cost.kl.push(full.iter().zip(rest).map(|(f, r)| f64::from(f.exp() * (f - r))).sum());
            cost.nll.push(-f64::from(rest[came as usize]));
        }
        Ok(cost)
    }

    /// Log probabilities of the continuation without some slots.
    fn logprobs_without(&mut self, gone: &[Range<usize>]) -> Result<Vec<f32>, LlamaError> {
        let end = self.len as LlamaPos;
        self.context.seq_cp(FULL_SEQ, PRUNED_SEQ, 0, end);
        self.context.copy_recurrent(FULL_SEQ, PRUNED_SEQ);
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

/// Logits to log probabilities.
fn log_softmax(scores: &mut [f32]) {
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = scores.chunks(1024).map(|part| part.iter().map(|s| (s - top).exp()).sum::<f32>()).sum();
    let less = top + sum.ln();
    scores.iter_mut().for_each(|s| *s -= less);
}

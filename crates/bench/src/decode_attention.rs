//! The cost of attention rows at the speed of llama.cpp itself: with flash attention and without a callback, as others run it.
//!
//! One context per way of reading attention holds the same prompt. Rounds of tokens are decoded in forks, one way after the
//! other, so that a change in the machine's speed affects all of them.

use crate::kv::{build_window, median};
use halo_core::attention::LayerReduction;
use halo_core::model::StepFlow;
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{
    AttentionSource, BatchToken, ContextParams, KvKeyType, LlamaContext, ModelWeights, SeqId,
};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheError, KvCacheMode, sequence_count};
use halo_llama::token_key::token_keys;
use std::sync::Arc;
use std::time::Instant;

/// A way of reading attention while tokens are generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeCase {
    pub source: AttentionSource,
    /// Every so many tokens a row is read; 0: never.
    pub stride: usize,
    /// The layers that a row is the mean of, evenly spaced; None: all.
    pub layers: Option<usize>,
}

/// The result for one way.
#[derive(Clone, Debug)]
pub struct DecodeFigures {
    pub case: DecodeCase,
    pub ms_per_token: f64,
    /// The speed as a share of that of llama.cpp itself: the median over the rounds.
    pub share: f64,
    /// The mean sum of the rows, which is 1 unless a part goes to attention sinks.
    pub row_sum: f64,
}

/// The model, the prompt and the cases of one measurement.
pub struct DecodeBench<'a> {
    pub weights: &'a Arc<ModelWeights>,
    pub context: usize,
    pub threads: u32,
    pub key_type: KvKeyType,
    pub rounds: usize,
    pub cases: &'a [DecodeCase],
}

/// Tokens of a round that are not timed: the graph is built and captured in them.
const WARM_TOKENS: usize = 8;
/// Timed tokens of a round, a multiple of every stride.
const ROUND_TOKENS: usize = 64;
/// Tokens of one batch of the prompt.
const PREFILL_BATCH: usize = 512;

/// `count` of `all` layers at equal distances, with the last one; none of none.
#[must_use]
pub fn spaced_layers(all: usize, count: usize) -> Vec<usize> {
    let count = count.max(1).min(all);
    (1..=count).map(|n| n * all / count - 1).collect()
}

impl DecodeBench<'_> {
    pub fn measure(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<DecodeFigures>, KvCacheError> {
        let window = build_window(self.weights, self.context);
        let keys = token_keys(&window).unwrap_or_default();
        let prompt: Vec<InputToken> =
            window.iter().zip(&keys).map(|(token, key)| InputToken::new(*key, token)).collect();
        let mut plain = LlamaContext::new(self.weights, self.params(AttentionSource::Nowhere))?;
        let mut position = 0;
        for batch in prompt.chunks(PREFILL_BATCH) {
            let items: Vec<BatchToken> = (position..)
                .zip(batch)
                .map(|(position, token)| BatchToken { token: token.id, position, logits: false })
                .collect();
            position += items.len() as i32;
            plain.decode(SeqId(0), &items)?;
            progress(batch.len() as u64);
        }
        let mut caches: Vec<(AttentionSource, KvCache)> = Vec::new();
        for case in self.cases {
            if caches.iter().any(|(source, _)| *source == case.source) {
                continue;
            }
            let context = LlamaContext::new(self.weights, self.params(case.source))?;
            let archive = KvArchive::open(KvArchiveLimits::disabled(), 1);
            let mut cache = KvCache::new(context, archive, KvCacheMode::EditCells);
            cache.sync_window("bench", &window, 1, &mut |_, _| StepFlow::Continue)?;
            for batch in prompt.chunks(PREFILL_BATCH) {
                cache.decode(batch, TapConfig::off())?;
                progress(batch.len() as u64);
            }
            caches.push((case.source, cache));
        }
        let mut times = vec![Vec::new(); self.cases.len()];
        let mut shares = vec![Vec::new(); self.cases.len()];
        let mut sums = vec![(0.0, 0usize); self.cases.len()];
        for _ in 0..self.rounds {
            let before = self.plain_round(&mut plain, position)?;
            for (n, case) in self.cases.iter().enumerate() {
                let Some((_, cache)) = caches.iter_mut().find(|(source, _)| *source == case.source) else {
                    continue;
                };
                let time = self.round(cache, &window, case, &mut sums[n])?;
                times[n].push(time);
                shares[n].push(time);
            }
            // The reference is measured on both sides of the others.
            let after = self.plain_round(&mut plain, position)?;
            let reference = (before + after) / 2.0;
            for (shares, times) in shares.iter_mut().zip(&times) {
                if let (Some(share), Some(time)) = (shares.last_mut(), times.last()) {
                    *share = reference / time;
                }
            }
        }
        let figures = self.cases.iter().zip(times.iter_mut().zip(shares.iter_mut())).zip(sums);
        Ok(figures
            .map(|((case, (times, shares)), (sum, rows))| DecodeFigures {
                case: case.clone(),
                ms_per_token: median(times) * 1e3,
                share: median(shares),
                row_sum: sum / rows.max(1) as f64,
            })
            .collect())
    }

    fn params(&self, attention: AttentionSource) -> ContextParams {
        ContextParams {
            tokens: (self.context + WARM_TOKENS + ROUND_TOKENS + 64) as u32,
            batch: PREFILL_BATCH as u32,
            threads: self.threads.cast_signed(),
            sequences: sequence_count(1),
            key_type: self.key_type,
            attention,
        }
    }

    /// Seconds per token of llama.cpp itself.
    fn plain_round(&self, context: &mut LlamaContext, position: i32) -> Result<f64, KvCacheError> {
        let mut started = Instant::now();
        for n in 0..WARM_TOKENS + ROUND_TOKENS {
            if n == WARM_TOKENS {
                started = Instant::now();
            }
            let item = BatchToken {
                token: next_token(self.weights, n),
                position: position + n as i32,
                logits: true,
            };
            context.decode(SeqId(0), &[item])?;
            std::hint::black_box(context.logits().first());
        }
        let seconds = started.elapsed().as_secs_f64() / ROUND_TOKENS as f64;
        let _ = context.seq_rm(SeqId(0), position, -1);
        Ok(seconds)
    }

    /// Seconds per token of one way, in a fork of the conversation.
    fn round(
        &self,
        cache: &mut KvCache,
        window: &[halo_core::model::WindowToken],
        case: &DecodeCase,
        sums: &mut (f64, usize),
    ) -> Result<f64, KvCacheError> {
        let layers = case.layers.map_or(LayerReduction::Mean, |count| {
            LayerReduction::Selected(spaced_layers(self.weights.layer_count(), count))
        });
        let row = TapConfig { rows: TapRows::Last, layers, cells: true, ..TapConfig::off() };
        let no_row = TapConfig { cells: case.stride > 0, ..TapConfig::off() };
        // The fork ends before the last token of the window, which is decoded again.
        let fork = cache.fork("bench", window, WARM_TOKENS + ROUND_TOKENS)?;
        let keys = token_keys(window).unwrap_or_default();
        let mut key = *keys.get(fork.prefill_from).unwrap_or(&keys[keys.len() - 1]);
        let mut started = Instant::now();
        for n in 0..WARM_TOKENS + ROUND_TOKENS {
            if n == WARM_TOKENS {
                started = Instant::now();
            }
            let token = InputToken { key, id: next_token(self.weights, n), chunk_start: false };
            let wanted = case.stride > 0 && n % case.stride == 0;
            let rows = cache.decode(&[token], if wanted { row.clone() } else { no_row.clone() })?;
            std::hint::black_box(cache.context().logits().first());
            if wanted {
                sums.0 += rows.iter().flat_map(|row| &row.mean).map(|&a| f64::from(a)).sum::<f64>();
                sums.1 += 1;
            }
            key = key.plus(1);
        }
        let seconds = started.elapsed().as_secs_f64() / ROUND_TOKENS as f64;
        cache.drop_fork();
        Ok(seconds)
    }
}

/// The tokens do not matter: they are ordinary ones of the vocabulary.
fn next_token(weights: &ModelWeights, n: usize) -> i32 {
    let size = weights.vocab_size().max(600);
    (300 + n * 31_337 % (size - 300)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spaced_evenly_and_the_last_is_among_them() {
        assert_eq!(spaced_layers(30, 1), [29]);
        assert_eq!(spaced_layers(32, 4), [7, 15, 23, 31]);
        assert_eq!(spaced_layers(4, 9), [0, 1, 2, 3]);
        assert!(spaced_layers(0, 2).is_empty());
    }
}

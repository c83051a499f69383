//! Restoring the KV cells of a resurrected chunk on a real model, compared with prefilling the context again.

use crate::synthetic_text;
use halo_core::model::{StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::{Position, TokenId};
use halo_llama::attention::TapConfig;
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext, ModelWeights};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheError, KvCacheMode, sequence_count};
use halo_llama::token_key::token_keys;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Results for one context length.
#[derive(Clone, Debug)]
pub struct KvBenchReport {
    /// Tokens in the context window.
    pub context: usize,
    /// Prefilling all of it, up to the logits of the next token.
    pub prefill_first_token_ms: f64,
    /// A chunk is pruned and resurrected while the program runs, and its cells are saved for it.
    pub running: KvBenchFigures,
    /// The same with cells that were saved before, as the cells of a turn are at its end.
    pub saved_before: KvBenchFigures,
    /// The same after a restart: the cells come from disk.
    pub after_restart: KvBenchFigures,
    /// Opening the conversation: all live cells from disk, up to the logits of the next token.
    pub open_ms: f64,
    /// A chunk is resurrected after compaction: it and everything behind it is shifted to new positions.
    pub after_compaction: KvBenchFigures,
    /// Numerical noise of the model: largest difference and divergence of the logits after decoding the last sixteen
    /// tokens one by one and in one batch.
    pub noise: (f32, f64),
    /// Bytes per token of the cells on disk.
    pub bytes_per_token: f64,
}

/// Times of pruning, resurrecting and decoding the next token, and the distance of the logits from those of an
/// unchanged window.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvBenchFigures {
    /// Pruning: the cells are saved, if they are not yet, and freed.
    pub prune_ms: f64,
    pub resurrect_ms: f64,
    pub first_token_ms: f64,
    /// The largest difference of any logit.
    pub max_logit_diff: f32,
    /// The KL divergence of the distributions, in nats.
    pub kl: f64,
    /// Whether the most likely token is the same.
    pub top1: bool,
}

impl KvBenchFigures {
    /// Whether the logits are those of a window that was never changed, to the last bit.
    #[must_use]
    pub fn is_bit_identical(&self) -> bool {
        self.max_logit_diff == 0.0
    }

    /// How many times faster than prefilling again.
    #[must_use]
    pub fn speedup(&self, reread_ms: f64) -> f64 {
        reread_ms / (self.prune_ms + self.resurrect_ms + self.first_token_ms)
    }
}

/// How many chunks are pruned and resurrected, one after the other; the median counts.
const ROUNDS: usize = 9;
const CHUNK_TOKENS: usize = 64;

pub fn measure(
    weights: &Arc<ModelWeights>,
    context: usize,
    threads: u32,
    key_type: KvKeyType,
    attention: AttentionSource,
    progress: &mut dyn FnMut(u64),
) -> Result<KvBenchReport, KvCacheError> {
    let folder = tempfile::tempdir().map_err(|_| KvCacheError::UnorderedWindow)?;
    let trained = weights.trained_context();
    let shape = ContextParams {
        tokens: (context as u32 + 1024).min(trained).max(context as u32 + 1),
        batch: 256,
        threads: threads.cast_signed(),
        sequences: sequence_count(1),
        key_type,
        attention,
    };
    let open = |folder: &Path| -> Result<KvCache, KvCacheError> {
        let room = KvArchiveLimits { ram: 4 << 30, disk: 16 << 30, folder: Some(folder.to_owned()) };
        Ok(KvCache::new(LlamaContext::new(weights, shape)?, KvArchive::open(room, 1), KvCacheMode::EditCells))
    };
    let window = build_window(weights, context);
    let mut kv_cache = open(folder.path())?;
    let (reread, expected) = time_ms(|| prefill_logits(&mut kv_cache, &window, progress))?;
    let leaving: Vec<usize> = (0..ROUNDS).map(|n| 1 + n * (context / CHUNK_TOKENS - 3) / ROUNDS).collect();

    // The first time the cells of a chunk are saved; the second time they are in the archive.
    let [running, saved_before] = [(); 2].map(|()| -> Result<KvBenchFigures, KvCacheError> {
        let (mut prune, mut back, mut next, mut last) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for &n in &leaving {
            let without = without_chunks(&window, &[n]);
            prune.push(time_ms(|| kv_cache.sync_without_prefill("bench", &without))?.0);
            back.push(time_ms(|| kv_cache.sync_without_prefill("bench", &window))?.0);
            let (ms, guess) = time_ms(|| prefill_logits(&mut kv_cache, &window, progress))?;
            next.push(ms);
            last = guess;
        }
        Ok(summarize(&mut prune, &mut back, &mut next, &expected, &last))
    });
    let (running, saved_before) = (running?, saved_before?);

    // All pruned chunks leave the process at its end; after the restart they are restored one by one from disk.
    let remaining = without_chunks(&window, &leaving);
    kv_cache.persist("bench", &remaining)?;
    kv_cache.save_and_clear();
    let bytes_per_token = kv_cache.archive().usage().1 as f64 / context as f64;
    drop(kv_cache);
    let mut kv_cache = open(folder.path())?;
    let (open_ms, _) = time_ms(|| prefill_logits(&mut kv_cache, &remaining, progress))?;
    let (mut prune, mut back, mut next) = (Vec::new(), Vec::new(), Vec::new());
    for &n in &leaving {
        let others: Vec<usize> = leaving.iter().copied().filter(|&o| o != n).collect();
        let with = without_chunks(&window, &others);
        back.push(time_ms(|| kv_cache.sync_without_prefill("bench", &with))?.0);
        next.push(time_ms(|| prefill_logits(&mut kv_cache, &with, progress))?.0);
        prune.push(time_ms(|| kv_cache.sync_without_prefill("bench", &remaining))?.0);
    }
    kv_cache.sync_without_prefill("bench", &window)?;
    let last = prefill_logits(&mut kv_cache, &window, progress)?;
    let after_restart = summarize(&mut prune, &mut back, &mut next, &expected, &last);

    let (mut prune, mut back, mut next, mut last) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for &n in leaving.iter().step_by(4) {
        let pruned = without_chunks(&window, &[n]);
        prune.push(time_ms(|| kv_cache.sync_without_prefill("bench", &pruned))?.0);
        kv_cache.compact()?;
        back.push(time_ms(|| kv_cache.sync_without_prefill("bench", &window))?.0);
        let (ms, guess) = time_ms(|| prefill_logits(&mut kv_cache, &window, progress))?;
        next.push(ms);
        last = guess;
    }
    let after_compaction = summarize(&mut prune, &mut back, &mut next, &expected, &last);
    let noise = measure_noise(&mut open(folder.path())?, &window)?;
    Ok(KvBenchReport {
        context,
        prefill_first_token_ms: reread,
        running,
        saved_before,
        after_restart,
        open_ms,
        after_compaction,
        noise,
        bytes_per_token,
    })
}

/// How much the logits depend on decoding the last sixteen tokens one by one or in one batch: smaller differences
/// mean nothing for this model.
fn measure_noise(kv_cache: &mut KvCache, window: &[WindowToken]) -> Result<(f32, f64), KvCacheError> {
    let names = token_keys(window).ok_or(KvCacheError::UnorderedWindow)?;
    let token = |n: usize| InputToken::new(names[n], &window[n]);
    let (n, mut guesses) = (window.len(), Vec::new());
    let last: Vec<_> = (n - 16..n).map(token).collect();
    for at_once in [1, 16] {
        prefill_logits(kv_cache, &window[..n - 16], &mut |_| {})?;
        for part in last.chunks(at_once) {
            kv_cache.decode(part, TapConfig::off())?;
        }
        guesses.push(kv_cache.context().logits().to_vec());
    }
    let (largest, kl, _) = compare_logits(&guesses[0], &guesses[1]);
    Ok((largest, kl))
}

/// A context window of so many tokens, in chunks.
pub(crate) fn build_window(weights: &ModelWeights, len: usize) -> Vec<WindowToken> {
    let text = synthetic_text::paragraphs(len / 50 + 1).concat();
    let tokens = weights.tokenize(&text, false);
    let window_token = |(n, &token): (usize, &i32)| WindowToken {
        position: Some(Position(n as u64)),
        offset: 0,
        id: TokenId(token.cast_unsigned()),
        chunk_start: n % CHUNK_TOKENS == 0,
    };
    tokens.iter().take(len).enumerate().map(window_token).collect()
}

/// The window without some of its chunks.
fn without_chunks(window: &[WindowToken], chunks: &[usize]) -> Vec<WindowToken> {
    let stays = |(n, _): &(usize, &WindowToken)| !chunks.contains(&(n / CHUNK_TOKENS));
    window.iter().enumerate().filter(stays).map(|(_, window_token)| *window_token).collect()
}

/// Prefills a window; returns the logits of the next token.
fn prefill_logits(
    kv_cache: &mut KvCache,
    window: &[WindowToken],
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<f32>, KvCacheError> {
    let ready = kv_cache.sync_window("bench", window, 1, &mut |_, _| StepFlow::Continue)?;
    let names = token_keys(window).ok_or(KvCacheError::UnorderedWindow)?;
    let token = |n: usize| InputToken::new(names[n], &window[n]);
    let tokens: Vec<_> = (ready.prefill_from..window.len() - 1).map(token).collect();
    for part in tokens.chunks(256) {
        kv_cache.decode(part, TapConfig::off())?;
        progress(part.len() as u64);
    }
    kv_cache.save_prompt_state();
    kv_cache.decode(&[token(window.len() - 1)], TapConfig::off())?;
    Ok(kv_cache.context().logits().to_vec())
}

fn time_ms<T>(work: impl FnOnce() -> Result<T, KvCacheError>) -> Result<(f64, T), KvCacheError> {
    let begin = Instant::now();
    let done = work()?;
    Ok((begin.elapsed().as_secs_f64() * 1000.0, done))
}

fn summarize(
    prune: &mut [f64],
    back: &mut [f64],
    next: &mut [f64],
    expected: &[f32],
    got: &[f32],
) -> KvBenchFigures {
    let (max_logit_diff, kl, top1) = compare_logits(expected, got);
    KvBenchFigures {
        prune_ms: median(prune),
        resurrect_ms: median(back),
        first_token_ms: median(next),
        max_logit_diff,
        kl,
        top1,
    }
}

pub(crate) fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

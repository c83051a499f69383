//! The KV cache of hybrid models, whose recurrent layers have a state instead of cells. Cells are compared as for other models.
//! The twin of a recurrent state is the state that was saved when the token was decoded: it has read the same tokens in the
//! same order, with the same chunks pruned, and was never lost.

use crate::common::{
    STORY, TinyModel, rounding_kl, same_bits, sync_and_decode, tap_last_row, tokenize_chunks,
};
use crate::kv_cache_property::unusual_model_steps;
use crate::kv_cache_property::{
    CELLS, KvPropertyConversation, MAIN_SEQ, check_against_fresh, chunk_cells, filler_states,
};
use halo_core::model::{StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::TokenId;
use halo_llama::attention::ReducedAttention;
use halo_llama::ffi::SeqId;
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheMode, WindowSync};
use halo_llama::token_key::{TokenKey, token_keys};
use std::collections::BTreeMap;
use std::path::Path;

const FORK_SEQ: SeqId = SeqId(2);
pub const HYBRIDS: [TinyModel; 3] = [TinyModel::Lfm2, TinyModel::GraniteHybrid, TinyModel::Qwen35];

fn open_cache(model: TinyModel, folder: &Path) -> KvCache {
    let limits = KvArchiveLimits { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.to_owned()) };
    KvCache::new(model.context(CELLS), KvArchive::open(limits, 1), KvCacheMode::EditCells)
}

/// A saved recurrent state without the sequence that it was saved from and without the position that llama.cpp keeps with it: Halo
/// sets it before each decode.
pub fn without_position(mut state: Vec<u8>) -> Vec<u8> {
    state[4..8].fill(0);
    state[12..16].fill(0);
    state
}

/// A KV cache, and the recurrent state after each token that was decoded.
struct HybridRun {
    cache: KvCache,
    states: BTreeMap<TokenKey, Vec<u8>>,
}

impl HybridRun {
    fn new(cache: KvCache) -> Self {
        Self { cache, states: BTreeMap::new() }
    }

    /// Ends the cache and opens another one on its archive.
    fn restart(&mut self, model: TinyModel, folder: &Path) {
        self.cache.save_and_clear();
        self.cache.archive().flush();
        self.cache = open_cache(model, folder);
    }

    fn sync(&mut self, window: &[WindowToken]) -> WindowSync {
        let sync = self.cache.sync_window("main", window, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        self.check_state(MAIN_SEQ, window, sync.prefill_from);
        sync
    }

    /// The state of a sequence is that of the last token before a slot, bit by bit.
    fn check_state(&mut self, seq: SeqId, window: &[WindowToken], slot: usize) {
        let Some(last) = slot.checked_sub(1) else { return };
        let key = token_keys(window).expect("the window is in order")[last];
        let state = without_position(self.cache.context().save_recurrent(seq));
        assert!(state == without_position(self.states[&key].clone()), "not the state after {key:?}");
    }

    fn record_state(&mut self) {
        if let Some(entry) = self.cache.sequence().entries.last() {
            self.states.insert(entry.key, self.cache.context().save_recurrent(MAIN_SEQ));
        }
    }

    /// Prefills a window from a slot on, as an answer does: the last token alone. Returns its attention row and the state
    /// before it.
    fn prefill(&mut self, window: &[WindowToken], from: usize) -> (ReducedAttention, Vec<u8>) {
        let keys = token_keys(window).expect("the window is in order");
        let token = |n: usize| InputToken::new(keys[n], &window[n]);
        let (last, others) = (window.len() - 1, (from..window.len() - 1).map(token).collect::<Vec<_>>());
        for batch in others.chunks(256) {
            self.cache.decode(batch, tap_last_row()).expect("decoded");
            self.record_state();
        }
        self.cache.save_prompt_state();
        let before = self.cache.context().save_recurrent(MAIN_SEQ);
        let row = self.cache.decode(&[token(last)], tap_last_row()).expect("decoded").pop().expect("a row");
        self.record_state();
        (row, before)
    }

    fn sync_and_prefill(&mut self, window: &[WindowToken]) -> (WindowSync, Vec<f32>) {
        let sync = self.sync(window);
        let (row, _) = self.prefill(window, sync.prefill_from);
        assert_eq!(row.mean.len(), window.len());
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        (sync, self.cache.context().logits().to_vec())
    }

    /// A fork decodes new tokens from the right state, and leaves cells and state of the main sequence as they are.
    fn check_fork(&mut self, window: &[WindowToken]) -> usize {
        let entries = self.cache.sequence().entries.clone();
        let state = self.cache.context().save_recurrent(MAIN_SEQ);
        let sync = self.cache.fork("main", window, 4).expect("forked");
        self.check_state(FORK_SEQ, window, sync.prefill_from);
        let keys = token_keys(window).expect("the window is in order");
        let rest: Vec<_> =
            (sync.prefill_from..window.len()).map(|n| InputToken::new(keys[n], &window[n])).collect();
        let row = self.cache.decode(&rest, tap_last_row()).expect("decoded").pop().expect("a row");
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5 && row.mean.len() == window.len());
        self.cache.drop_fork();
        assert_eq!(self.cache.sequence().entries, entries);
        let after = self.cache.context().save_recurrent(MAIN_SEQ);
        assert!(without_position(state) == without_position(after));
        sync.prefill_from
    }
}

fn check_random_steps(model: TinyModel, steps: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut conversation = KvPropertyConversation::new(11);
    let mut run = HybridRun::new(open_cache(model, folder.path()));
    let mut fresh = model.context(CELLS);
    let filler = filler_states(&mut fresh);
    let mut first_cells: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut compared, mut forks_from_end) = (0, 0);
    conversation.append(12, 0);
    for step in 0..steps {
        let before = conversation.window().last().copied();
        let operation = conversation.random_step();
        *counts.entry(operation).or_default() += 1;
        let window = conversation.window();
        if operation == "fork" && step > 0 {
            let forked = conversation.forked_window();
            let prefill_from = run.check_fork(&forked);
            forks_from_end += usize::from(prefill_from == forked.len() - 5);
        }
        if step % 3 == 0 {
            run.cache.persist("main", &window).expect("persisted");
        }
        if conversation.rng.usize(..5) == 0 {
            run.restart(model, folder.path());
            *counts.entry("restart").or_default() += 1;
        }
        let sync = run.sync(&window);
        // Nothing is read but new tokens, and the last token, whose logits are needed.
        let new = window.iter().filter(|t| before.is_none_or(|last| t.position > last.position)).count();
        let expected = if step == 0 { window.len() } else { new.max(1) };
        let stats = sync.stats;
        assert_eq!(
            (stats.shifted, stats.recomputed, stats.prefilled),
            (0, 0, expected),
            "step {step} ({operation}): {stats:?}"
        );
        let (row, state) = run.prefill(&window, sync.prefill_from);
        assert!(model.is_right_sum(&row) && row.mean.len() == window.len(), "step {step}");
        let cached = run.cache.sequence().entries.clone();
        let difference = check_against_fresh(&mut run.cache, &cached, &mut fresh, &filler, Some(&state));
        assert_eq!(difference, (0.0, 0.0), "step {step} ({operation}): not the logits of a fresh context");
        run.record_state();

        // The cells of a chunk never change after they were computed.
        let chunks = 0..conversation.chunks.len() - 1;
        let live: Vec<usize> = chunks.filter(|&n| conversation.live[n]).collect();
        if let Some(&n) = live.get(conversation.rng.usize(..live.len().max(1)))
            && let Some(cells) = chunk_cells(&mut run.cache, &cached, &conversation.chunks[n])
        {
            compared += usize::from(first_cells.contains_key(&n));
            let first = first_cells.entry(n).or_insert_with(|| cells.clone());
            assert!(*first == cells, "step {step}: the cells of chunk {n} changed");
        }
    }
    println!(
        "{model:?}: {counts:?}; {forks_from_end} forks read only new tokens; the cells of a chunk were compared {compared} times"
    );
    assert!(compared > steps / 10 && counts.values().all(|&n| n > steps / 8));
    assert!(forks_from_end > counts["fork"] / 2);
}

#[test]
fn kv_cache_of_hybrid_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::Lfm2, 1000);
}

#[test]
fn kv_cache_of_state_space_hybrid_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::GraniteHybrid, unusual_model_steps());
}

#[test]
fn kv_cache_of_hybrid_with_multi_rope_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::Qwen35, unusual_model_steps());
}

pub fn join_chunks(chunks: &[Vec<WindowToken>], which: &[usize]) -> Vec<WindowToken> {
    which.iter().flat_map(|&n| chunks[n].clone()).collect()
}

/// A chunk in the middle is pruned and resurrected: the next logits are those of a context that never lost it.
#[test]
fn kv_cache_of_hybrid_prune_and_resurrect_is_bit_exact() {
    for model in HYBRIDS {
        let chunks = tokenize_chunks(&STORY);
        let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
        let question = [all.clone(), chunks[6].clone()].concat();
        let mut untouched = HybridRun::new(model.kv_cache(512));
        untouched.sync_and_prefill(&all);
        let (_, expected) = untouched.sync_and_prefill(&question);

        let mut run = HybridRun::new(model.kv_cache(512));
        run.sync_and_prefill(&all);
        let pruned = run.cache.persist("main", &without).expect("pruned");
        assert_eq!(pruned.pruned, all.len() - without.len());
        let resurrected = run.cache.persist("main", &all).expect("resurrected");
        assert_eq!(
            (resurrected.restored, resurrected.shifted, resurrected.recomputed),
            (pruned.pruned, 0, 0)
        );
        let (sync, logits) = run.sync_and_prefill(&question);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[6].len(), all.len()));
        assert!(same_bits(&expected, &logits));
    }
}

/// The answer is regenerated, also after a restart: only the last token of the window is read again. An edit of the last
/// message goes back to the end of the turn before.
#[test]
fn kv_cache_of_hybrid_goes_back_to_earlier_states() {
    for model in HYBRIDS {
        let folder = tempfile::tempdir().expect("a folder");
        let chunks = tokenize_chunks(&STORY);
        let prompt = join_chunks(&chunks, &[0, 1, 2, 3]);
        let turn = join_chunks(&chunks, &[0, 1, 2, 3, 4]);
        let mut run = HybridRun::new(open_cache(model, folder.path()));
        let (_, expected) = run.sync_and_prefill(&prompt);
        let decode_answer = |run: &mut HybridRun| {
            let keys = token_keys(&turn).expect("in order");
            for n in prompt.len()..turn.len() {
                let token = InputToken::new(keys[n], &turn[n]);
                run.cache.decode(&[token], tap_last_row()).expect("decoded");
                run.record_state();
            }
            run.cache.persist("main", &turn).expect("persisted");
        };
        decode_answer(&mut run);
        let (sync, logits) = run.sync_and_prefill(&prompt);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (1, prompt.len() - 1));
        assert!(same_bits(&expected, &logits), "the same window, the same answer");
        decode_answer(&mut run);

        run.restart(model, folder.path());
        let (sync, logits) = run.sync_and_prefill(&prompt);
        assert_eq!((sync.stats.prefilled, sync.stats.restored), (1, prompt.len() - 1), "{:?}", sync.stats);
        assert!(same_bits(&expected, &logits), "after a restart");
        decode_answer(&mut run);

        let next = [turn.clone(), chunks[5].clone()].concat();
        let (sync, _) = run.sync_and_prefill(&next);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[5].len(), turn.len()));
        let mut edited = next.clone();
        edited[turn.len()].id = TokenId(edited[turn.len()].id.0 + 1);
        let (sync, _) = run.sync_and_prefill(&edited);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[5].len(), turn.len()));

        // A branch uses the states of its parent, as far as both share them.
        run.cache.archive().link_branch("branch", "main", turn.len() as u64);
        let sync = run.cache.sync_window("branch", &next, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        assert_eq!((sync.stats.prefilled, sync.stats.restored), (chunks[5].len(), turn.len()));
    }
}

/// After a restart all cells and the state come from disk, and the logits are the same. Without a state, or where a chunk is
/// lost, the rest of the window is read again.
#[test]
fn kv_cache_of_hybrid_restored_from_archive_after_restart() {
    for model in HYBRIDS {
        let folder = tempfile::tempdir().expect("a folder");
        let chunks = tokenize_chunks(&STORY);
        let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
        let question = [all.clone(), chunks[6].clone()].concat();
        let mut untouched = HybridRun::new(model.kv_cache(512));
        untouched.sync_and_prefill(&all);
        let (_, expected) = untouched.sync_and_prefill(&question);

        let mut run = HybridRun::new(open_cache(model, folder.path()));
        run.sync_and_prefill(&all);
        run.cache.persist("main", &without).expect("pruned");
        run.restart(model, folder.path());
        let (sync, logits) = run.sync_and_prefill(&question);
        let stats = sync.stats;
        assert_eq!((stats.restored, stats.recomputed, stats.prefilled), (all.len(), 0, chunks[6].len()));
        assert!(same_bits(&expected, &logits));

        // States alone are lost.
        drop(run);
        let mut cache = open_cache(model, folder.path());
        let states = cache.archive().state_keys("main");
        assert_eq!(states.len(), 3, "two prompts and the end of the first turn: {states:?}");
        states.into_iter().for_each(|key| cache.archive().discard_state("main", key));
        let mut run = HybridRun::new(cache);
        let (sync, logits) = run.sync_and_prefill(&question);
        assert_eq!((sync.stats.restored, sync.stats.prefilled), (0, question.len()));
        let (_, kl, same) = compare_logits(&expected, &logits);
        assert!(same && kl < rounding_kl(), "other batches, other rounding: {kl}");
    }
}

/// Without editing, a change of the window reads all of it again; new tokens at its end do not.
#[test]
fn kv_cache_of_hybrid_recompute_mode_reads_changed_window_again() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3]), join_chunks(&chunks, &[0, 1, 3]));
    let archive = KvArchive::open(KvArchiveLimits::disabled(), 1);
    let cache = KvCache::new(TinyModel::Lfm2.context(512), archive, KvCacheMode::Recompute);
    let mut run = HybridRun::new(cache);
    assert_eq!(run.sync_and_prefill(&all).0.stats.prefilled, all.len());
    let more = [all, chunks[4].clone()].concat();
    assert_eq!(run.sync_and_prefill(&more).0.stats.prefilled, chunks[4].len());
    let (sync, logits) = run.sync_and_prefill(&without);
    assert_eq!((sync.stats.prefilled, sync.stats.reused), (without.len(), 0));
    let mut fresh = HybridRun::new(TinyModel::Lfm2.kv_cache(512));
    assert!(same_bits(&fresh.sync_and_prefill(&without).1, &logits));
}

/// Cells of a hybrid with a sliding window are not edited: every change of the window but new tokens at its end reads all of it
/// again, and the logits are those of a fresh cache.
#[test]
fn kv_cache_of_hybrid_with_sliding_window_equals_fresh_cache_after_random_steps() {
    let model = TinyModel::Lfm2Sliding;
    assert!(model.weights().is_hybrid() && model.weights().sliding_window().is_some());
    let mut conversation = KvPropertyConversation::new(11);
    let mut cache = model.kv_cache(CELLS);
    assert_eq!(cache.mode(), KvCacheMode::Recompute);
    conversation.append(12, 0);
    let (mut before, mut read_again) = (Vec::new(), 0);
    for step in 0..150 {
        let operation = conversation.random_step();
        let window = conversation.window();
        let (sync, _, logits) = sync_and_decode(&mut cache, &window).expect("decoded");
        let expected = if window.len() > before.len() && window.starts_with(&before) {
            window.len() - before.len()
        } else {
            window.len()
        };
        assert_eq!(sync.stats.prefilled, expected, "step {step} ({operation}): {:?}", sync.stats);
        read_again += usize::from(expected == window.len());
        let (_, _, fresh) = sync_and_decode(&mut model.kv_cache(CELLS), &window).expect("decoded");
        let (_, kl, same) = compare_logits(&fresh, &logits);
        // Tokens are read in other batches, which round differently.
        assert!(same && kl < rounding_kl(), "step {step} ({operation}): {kl}");
        before = window;
    }
    assert!((75..150).contains(&read_again), "{read_again}");
}

/// A decode that fails or is cancelled loses the state; the next sync goes on from the state before.
#[test]
fn kv_cache_of_hybrid_recovers_from_cancelled_decode() {
    for model in HYBRIDS {
        let chunks = tokenize_chunks(&STORY);
        let (all, question) = (join_chunks(&chunks, &[0, 1, 2, 3]), join_chunks(&chunks, &[0, 1, 2, 3, 4]));
        let mut run = HybridRun::new(model.kv_cache(512));
        run.sync_and_prefill(&all);
        run.cache.persist("main", &all).expect("persisted");
        let canceller = std::sync::Arc::clone(run.cache.context().canceller());
        canceller.add_job(1);
        canceller.set_batch_jobs(vec![1]);
        canceller.cancel(1);
        let keys = token_keys(&question).expect("in order");
        let sync = run.sync(&question);
        let tokens: Vec<_> =
            (sync.prefill_from..question.len()).map(|n| InputToken::new(keys[n], &question[n])).collect();
        let cancelled = run.cache.decode(&tokens, tap_last_row());
        assert!(cancelled.is_err(), "cancelled");
        canceller.set_batch_jobs(Vec::new());
        assert_eq!(run.cache.sequence().entries.len(), all.len());
        assert_eq!(run.cache.context().cell_positions(MAIN_SEQ, all.len()).map(|p| p.len()), Some(all.len()));
        let (sync, logits) = run.sync_and_prefill(&question);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[4].len(), all.len()));
        let mut untouched = HybridRun::new(model.kv_cache(512));
        untouched.sync_and_prefill(&all);
        assert!(same_bits(&untouched.sync_and_prefill(&question).1, &logits));
    }
}

/// After a compaction the positions have no holes, and a resurrected chunk gets its position back. Keys that are not rotated are
/// the same as before.
#[test]
fn kv_cache_of_hybrid_resurrects_after_compaction() {
    for model in [TinyModel::Lfm2, TinyModel::GraniteHybrid] {
        let chunks = tokenize_chunks(&STORY);
        let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
        let question = [all.clone(), chunks[6].clone()].concat();
        let mut untouched = HybridRun::new(model.kv_cache(512));
        untouched.sync_and_prefill(&all);
        let (_, expected) = untouched.sync_and_prefill(&question);
        let mut run = HybridRun::new(model.kv_cache(512));
        run.sync_and_prefill(&all);
        run.cache.persist("main", &without).expect("pruned");
        run.cache.compact().expect("compacted");
        assert_eq!(run.cache.sequence().next_position() as usize, without.len(), "no holes");
        let resurrected = run.cache.persist("main", &all).expect("resurrected");
        assert_eq!((resurrected.restored, resurrected.shifted), (all.len() - without.len(), chunks[5].len()));
        let (sync, logits) = run.sync_and_prefill(&question);
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[6].len(), all.len()));
        let (max_diff, kl, same) = compare_logits(&expected, &logits);
        println!("{model:?} after a compaction: largest difference {max_diff}, KL {kl:e}");
        let limit = if model == TinyModel::GraniteHybrid { 1e-9 } else { 1e-3 };
        assert!(same && kl <= limit, "{model:?}: largest difference {max_diff}, KL {kl}");
    }
}

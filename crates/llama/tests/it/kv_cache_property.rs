//! Property test of the KV cache: a thousand random appends, prunes, resurrections and forks. After
//! each, the cell table agrees with llama.cpp, attention rows sum to 1 with nothing on freed cells, and the logits equal
//! those of a fresh context that is given the same cells.

use crate::common::{TinyModel, decode_from, sync_and_decode, tap_last_row, tokenize_chunks};
use halo_core::model::WindowToken;
use halo_core::testing::logits::compare_logits;
use halo_core::token::Position;
use halo_llama::cells::CellEntry;
use halo_llama::ffi::{BatchToken, LlamaContext, LlamaPos, SeqId};
use halo_llama::kv_cache::KvCache;
use std::collections::BTreeMap;

pub const CELLS: u32 = 512;
const MAX_WINDOW_TOKENS: usize = 260;
pub const MAIN_SEQ: SeqId = SeqId(0);
pub const SCRATCH_SEQ: SeqId = SeqId(1);
pub const FILLER_SEQ: SeqId = SeqId(2);
/// The most tokens of a saved state: the sliding window of the models that have one.
const MAX_STATE_TOKENS: usize = 48;

pub const SAMPLE_TEXT: &str = "the old gun on the wall above the fireplace was never fired before the last act of the play, and when the \
                     rain came the guests stood in the hall and spoke of the will, of the sea, of the brother who had gone, \
                     谢谢, naïve 🌱, fn main() { println!(\"{}\", 1 + 2); }, 3.1415 and 1789, one after the other";

/// A conversation with random chunks.
pub struct KvPropertyConversation {
    pub rng: fastrand::Rng,
    pub sample: Vec<WindowToken>,
    pub chunks: Vec<Vec<WindowToken>>,
    pub live: Vec<bool>,
}

impl KvPropertyConversation {
    pub fn new(seed: u64) -> Self {
        let sample = tokenize_chunks(&[SAMPLE_TEXT]).remove(0);
        let rng = fastrand::Rng::with_seed(seed);
        Self { rng, sample, chunks: Vec::new(), live: Vec::new() }
    }

    /// A chunk of sample tokens that follows the last chunk.
    fn new_chunk(&self, len: usize, from: usize) -> Vec<WindowToken> {
        let position = self.chunks.iter().map(Vec::len).sum::<usize>() as u64;
        let token = |n: usize| WindowToken {
            position: Some(Position(position + n as u64)),
            chunk_start: n == 0,
            ..self.sample[(from + n) % self.sample.len()]
        };
        (0..len).map(token).collect()
    }

    pub fn append(&mut self, len: usize, from: usize) {
        self.chunks.push(self.new_chunk(len, from));
        self.live.push(true);
    }

    fn live_tokens(&self) -> usize {
        self.window().len()
    }

    pub fn window(&self) -> Vec<WindowToken> {
        let live = self.chunks.iter().zip(&self.live).filter(|(_, live)| **live);
        live.flat_map(|(chunk, _)| chunk.clone()).collect()
    }

    /// A random chunk that is live or not, except the first one, which has the attention sink, and the last one.
    fn random_chunk(&mut self, live: bool) -> Option<usize> {
        let last = self.live.len().saturating_sub(1);
        let candidates: Vec<usize> = (1..last).filter(|&n| self.live[n] == live).collect();
        if candidates.is_empty() { None } else { Some(candidates[self.rng.usize(..candidates.len())]) }
    }

    /// Applies a random operation; returns its name.
    pub fn random_step(&mut self) -> &'static str {
        let live_tokens = self.live_tokens();
        match self.rng.usize(..4) {
            0 if live_tokens < MAX_WINDOW_TOKENS => {
                let (len, from) = (3 + self.rng.usize(..18), self.rng.usize(..self.sample.len()));
                self.append(len, from);
                "append"
            }
            1 => {
                for _ in 0..=self.rng.usize(..3) {
                    if let Some(n) = self.random_chunk(false)
                        && live_tokens + 3 * self.chunks[n].len() < MAX_WINDOW_TOKENS
                    {
                        self.live[n] = true;
                    }
                }
                "resurrect"
            }
            2 => "fork",
            _ => {
                for _ in 0..=self.rng.usize(..3) {
                    if let Some(n) = self.random_chunk(true) {
                        self.live[n] = false;
                    }
                }
                "prune"
            }
        }
    }

    /// The window with new tokens at the end and a random part left out.
    pub fn forked_window(&mut self) -> Vec<WindowToken> {
        let mut window = self.window();
        let from = self.rng.usize(..self.sample.len());
        window.extend(self.new_chunk(5, from));
        let (start, len) = (1 + self.rng.usize(..(window.len() / 2).max(1)), self.rng.usize(..9));
        window.drain(start..(start + len).min(window.len() - 2));
        window
    }
}

fn check_fork(model: TinyModel, cache: &mut KvCache, window: &[WindowToken], step: usize) {
    let before = cache.sequence().entries.clone();
    let sync = cache.fork("main", window, 4).expect("forked");
    let row = decode_from(cache, window, sync.prefill_from).expect("decoded");
    assert!(model.is_right_sum(&row) && row.mean.len() == window.len(), "step {step}");
    cache.drop_fork();
    assert_eq!(cache.sequence().entries, before);
}

/// Syncs the cache with the window and checks it; [`KvCache::decode`] itself checks the cell table and the rows in debug
/// builds.
fn check_sync(model: TinyModel, cache: &mut KvCache, window: &[WindowToken], step: usize) -> Vec<CellEntry> {
    let (sync, row, _) = sync_and_decode(cache, window).expect("decoded");
    let moved = (sync.stats.shifted, sync.stats.recomputed);
    assert_eq!(moved, (0, 0), "step {step}: there is room, and nothing is lost");
    assert!(model.is_right_sum(&row), "step {step}");
    let cached = cache.sequence().entries.clone();
    let same = |(entry, token): (&CellEntry, &WindowToken)| {
        entry.key.timeline_pos.cast_unsigned() == token.position.expect("a position").0
    };
    assert!(cached.len() == window.len() && cached.iter().zip(window).all(same));
    cached
}

/// The states of runs of tokens of a sequence, in the order of their cells. llama.cpp saves no cells of sliding layers
/// that the last token of a state does not attend to, so a run is no longer than the window.
pub fn save_states(context: &mut LlamaContext, seq: SeqId, cells: &[(i32, LlamaPos)]) -> Vec<Vec<u8>> {
    let mut by_cell = cells.to_vec();
    by_cell.sort_unstable();
    let positions: Vec<LlamaPos> = by_cell.iter().map(|(_, position)| *position).collect();
    let runs = positions.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(MAX_STATE_TOKENS));
    let mut save = |run: &[LlamaPos]| {
        context.seq_cp(seq, SCRATCH_SEQ, run[0], run[run.len() - 1] + 1);
        let state = context.save_state(SCRATCH_SEQ);
        assert!(context.seq_rm(SCRATCH_SEQ, -1, -1));
        state
    };
    runs.map(&mut save).collect()
}

/// Restores states into the first free cells.
pub fn restore_states(context: &mut LlamaContext, seq: SeqId, states: &[Vec<u8>]) {
    for state in states {
        context.restore_state(SCRATCH_SEQ, state).expect("the same context size");
        context.seq_cp(SCRATCH_SEQ, seq, -1, -1);
        assert!(context.seq_rm(SCRATCH_SEQ, -1, -1));
    }
}

/// States in which all cells are taken, the n-th by a token at position n.
pub fn filler_states(context: &mut LlamaContext) -> Vec<Vec<u8>> {
    let cells = context.params().tokens.cast_signed();
    let filler: Vec<BatchToken> =
        (0..cells).map(|n| BatchToken { token: 5, position: n, logits: false }).collect();
    filler.chunks(256).for_each(|batch| context.decode(FILLER_SEQ, batch).expect("decoded"));
    let cells: Vec<(i32, LlamaPos)> = (0..cells).map(|n| (n, n)).collect();
    save_states(context, FILLER_SEQ, &cells)
}

/// Decodes the last token again, in the cache and in a fresh context that is given the same cells, and compares the
/// logits. `filler` are the [`filler_states`] of the fresh context; `recurrent` is the recurrent state of a hybrid model
/// before the last token.
pub fn check_against_fresh(
    cache: &mut KvCache,
    cached: &[CellEntry],
    fresh: &mut LlamaContext,
    filler: &[Vec<u8>],
    recurrent: Option<&[u8]>,
) -> (f32, f64) {
    let seq = cache.sequence().seq;
    let highest_cell = cache.highest_cell().expect("tokens") as i32;
    let (last, others) = cached.split_last().expect("tokens");
    assert!(cache.context().seq_rm(seq, last.position, -1));
    let others: Vec<(i32, LlamaPos)> =
        others.iter().map(|t| (t.cell.expect("resolved") as i32, t.position)).collect();
    let states = save_states(cache.context(), seq, &others);
    // A hybrid model has read the last token; it reads it again from the state before it.
    let restore_recurrent = |context: &mut LlamaContext, seq: SeqId| match recurrent {
        Some(state) => context.restore_recurrent(seq, state).expect("the same model"),
        None => assert!(!context.has_recurrent_states()),
    };
    restore_recurrent(cache.context(), seq);
    let item = BatchToken { token: last.token, position: last.position, logits: true };
    cache.context().tap().configure(tap_last_row());
    cache.context().decode(seq, &[item]).expect("decoded");
    let last_cell = cache.context().tap().batch_cells()[0] as i32;
    // llama.cpp uses the first free cells. Only the cells that are taken in the cache are freed in the fresh context, so
    // each token gets the same cell, and sums are computed in the same order.
    assert!(fresh.seq_rm(MAIN_SEQ, -1, -1));
    assert!(fresh.seq_rm(FILLER_SEQ, -1, -1));
    restore_states(fresh, FILLER_SEQ, filler);
    let cells: Vec<i32> = others.iter().map(|(cell, _)| *cell).collect();
    cells.iter().for_each(|&cell| assert!(fresh.seq_rm(FILLER_SEQ, cell, cell + 1)));
    restore_states(fresh, MAIN_SEQ, &states);
    // Cells of other conversations stay taken: rows have the same length.
    let used = cells.iter().copied().fold(last_cell.max(highest_cell), i32::max);
    assert!(fresh.seq_rm(FILLER_SEQ, used + 1, -1));
    assert!(fresh.seq_rm(FILLER_SEQ, last_cell, last_cell + 1));
    restore_recurrent(fresh, MAIN_SEQ);
    fresh.tap().configure(tap_last_row());
    fresh.decode(MAIN_SEQ, &[item]).expect("decoded");
    assert_eq!(fresh.tap().batch_cells(), [i64::from(last_cell)]);
    let (max_diff, kl, _) = compare_logits(fresh.logits(), cache.context().logits());
    (max_diff, kl)
}

/// The cells of a chunk as bytes. None where the cells are not in the order of the tokens: llama.cpp writes them in cell
/// order, so their bytes cannot be compared.
pub fn chunk_cells(cache: &mut KvCache, cached: &[CellEntry], chunk: &[WindowToken]) -> Option<Vec<u8>> {
    let first = chunk[0].position.expect("a position").0.cast_signed();
    let slot = cached.iter().position(|t| t.key.timeline_pos == first).expect("the chunk is live");
    let (start, end) = (cached[slot].position, cached[slot].position + chunk.len() as i32);
    cache.context().seq_cp(MAIN_SEQ, SCRATCH_SEQ, start, end);
    let cells = cache.context().save_state(SCRATCH_SEQ);
    assert!(cache.context().seq_rm(SCRATCH_SEQ, -1, -1));
    // With M-RoPE a cell also has the other parts of its position and its token.
    let header_bytes = if cache.context().weights().has_multi_rope() { 24 } else { 12 };
    let position = |n: usize| {
        let start = 16 + n * header_bytes;
        i32::from_le_bytes(cells[start..start + 4].try_into().expect("four bytes"))
    };
    (1..chunk.len()).all(|n| position(n - 1) < position(n)).then_some(cells)
}

fn check_random_steps(model: TinyModel, steps: usize) {
    let mut conversation = KvPropertyConversation::new(11);
    let mut cache = model.kv_cache(CELLS);
    let mut fresh = model.context(CELLS);
    let filler = filler_states(&mut fresh);
    let mut first_cells: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut compared = 0;
    conversation.append(12, 0);
    for step in 0..steps {
        let operation = conversation.random_step();
        *counts.entry(operation).or_default() += 1;
        let window = conversation.window();
        if operation == "fork" {
            check_fork(model, &mut cache, &conversation.forked_window(), step);
        }
        if step % 3 == 0 {
            cache.persist("main", &window).expect("persisted");
        }
        let cached = check_sync(model, &mut cache, &window, step);
        let difference = check_against_fresh(&mut cache, &cached, &mut fresh, &filler, None);
        assert_eq!(difference, (0.0, 0.0), "step {step} ({operation}): not the logits of a fresh context");

        // The cells of a chunk never change after they were computed.
        let chunks = 0..conversation.chunks.len() - 1;
        let live: Vec<usize> = chunks.filter(|&n| conversation.live[n]).collect();
        if let Some(&n) = live.get(conversation.rng.usize(..live.len().max(1)))
            && let Some(cells) = chunk_cells(&mut cache, &cached, &conversation.chunks[n])
        {
            compared += usize::from(first_cells.contains_key(&n));
            let first = first_cells.entry(n).or_insert_with(|| cells.clone());
            assert!(*first == cells, "step {step}: the cells of chunk {n} changed");
        }
    }
    println!("{model:?}: {counts:?}; the cells of a chunk were compared {compared} times");
    assert!(compared > steps / 10 && counts.values().all(|&n| n > steps / 7));
}

#[test]
fn kv_cache_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::Llama, 1000);
}

/// The steps of models other than the usual ones: a thousand in `make soak`, which sets `HALO_TEST_THOROUGH`.
pub fn unusual_model_steps() -> usize {
    if std::env::var_os("HALO_TEST_THOROUGH").is_some() { 1000 } else { 250 }
}

#[test]
fn kv_cache_with_sliding_window_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::Gemma3, unusual_model_steps());
}

/// Positions of several parts cannot be shifted; where there is room, nothing is.
#[test]
fn kv_cache_with_multi_rope_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::Qwen2Vl, unusual_model_steps());
}

#[test]
fn kv_cache_with_sinks_and_experts_equals_fresh_cache_after_random_steps() {
    check_random_steps(TinyModel::GptOss, unusual_model_steps());
}

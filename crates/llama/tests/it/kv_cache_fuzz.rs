//! Fuzz test of the KV cache with few cells: chunks are appended, extended, pruned, resurrected, split, merged and undone;
//! memories and the system prompt change; the program restarts or is killed; other conversations, forks and cancelled
//! decodes come in between. After every step the KV cache equals the window.

use crate::common::{STORY, TinyModel, decode_from, sync_and_decode, tokenize_chunks};
use halo_core::model::{StepFlow, WindowToken};
use halo_core::token::{Position, TokenId};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{KvCache, KvCacheMode};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CELLS: u32 = 256;
const MAX_WINDOW_TOKENS: usize = 200;

struct KvFuzzChunk {
    start: u64,
    ids: Vec<u32>,
    live: bool,
}

struct KvFuzzConversation {
    state: u64,
    vocabulary: Vec<u32>,
    system: Vec<u32>,
    chunks: Vec<KvFuzzChunk>,
    /// How often the text of the memories changed.
    memory_edition: usize,
}

impl KvFuzzConversation {
    fn next_below(&mut self, limit: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % limit.max(1)
    }

    fn random_tokens(&mut self, count: usize) -> Vec<u32> {
        let start = self.next_below(self.vocabulary.len());
        (0..count).map(|n| self.vocabulary[(start + n) % self.vocabulary.len()]).collect()
    }

    fn live_tokens(&self) -> usize {
        self.system.len()
            + self.chunks.iter().filter(|chunk| chunk.live).map(|chunk| chunk.ids.len()).sum::<usize>()
    }

    fn next_position(&self) -> u64 {
        self.chunks.last().map_or(0, |chunk| chunk.start + chunk.ids.len() as u64)
    }

    /// Applies a random operation; returns its name.
    fn random_step(&mut self) -> &'static str {
        let live = self.live_tokens();
        self.memory_edition += usize::from(self.next_below(12) == 0);
        let n = self.next_below(self.chunks.len());
        match self.next_below(11) {
            0..=2 => {
                let count = 2 + self.next_below(25);
                let (start, ids) = (self.next_position(), self.random_tokens(count));
                if live + count < MAX_WINDOW_TOKENS {
                    self.chunks.push(KvFuzzChunk { start, ids, live: true });
                }
                "append"
            }
            3 | 4 => {
                for _ in 0..=self.next_below(3) {
                    let n = self.next_below(self.chunks.len());
                    self.chunks.get_mut(n).into_iter().for_each(|chunk| chunk.live = false);
                }
                "prune"
            }
            5 | 6 => {
                let fits = self.chunks.get(n).is_some_and(|chunk| live + chunk.ids.len() < MAX_WINDOW_TOKENS);
                self.chunks.get_mut(n).into_iter().for_each(|chunk| chunk.live |= fits);
                "resurrect"
            }
            7 if self.next_below(4) == 0 => {
                let count = 4 + self.next_below(12);
                self.system = self.random_tokens(count);
                "change system prompt"
            }
            8 => {
                // The positions of the chunk are used again.
                if self.chunks.len() > 1 {
                    self.chunks.pop();
                }
                "undo"
            }
            9 if self.chunks.get(n).is_some_and(|chunk| chunk.ids.len() > 4) => {
                let cut = 1 + self.next_below(self.chunks[n].ids.len() - 2);
                let ids = self.chunks[n].ids.split_off(cut);
                let (start, live) = (self.chunks[n].start + cut as u64, self.chunks[n].live);
                self.chunks.insert(n + 1, KvFuzzChunk { start, ids, live });
                "split"
            }
            9 | 7 => {
                if n + 1 < self.chunks.len() && self.chunks[n].live == self.chunks[n + 1].live {
                    let next = self.chunks.remove(n + 1);
                    self.chunks[n].ids.extend(next.ids);
                }
                "merge"
            }
            _ => {
                let count = 1 + self.next_below(5);
                let more = self.random_tokens(count);
                if live < MAX_WINDOW_TOKENS - 60 {
                    self.chunks.last_mut().into_iter().for_each(|chunk| {
                        chunk.ids.extend(&more);
                        chunk.live = true;
                    });
                }
                "extend"
            }
        }
    }

    fn window(&self) -> Vec<WindowToken> {
        let token = |position: Option<u64>, id: u32, chunk_start| WindowToken {
            position: position.map(Position),
            offset: 0,
            id: TokenId(id),
            chunk_start,
        };
        let system = self.system.iter().enumerate().map(|(n, &id)| token(None, id, n == 0));
        let mut memory_budget = 15;
        let chunks = self.chunks.iter().flat_map(move |chunk| {
            let chunk_token = move |(n, &id): (usize, &u32)| token(Some(chunk.start + n as u64), id, n == 0);
            // A memory is placed where some of the pruned chunks were; its third token changes with the edition.
            let has_memory = !chunk.live && chunk.start.is_multiple_of(3);
            let memory_len = if has_memory { chunk.ids.len().min(5).min(memory_budget) } else { 0 };
            memory_budget -= memory_len;
            let memory = (1..=memory_len).map(move |n| {
                let edition = if n == 3 { self.memory_edition } else { 0 };
                let id = self.vocabulary[(chunk.start as usize + n + edition) % self.vocabulary.len()];
                WindowToken { offset: n as u16, ..token(Some(chunk.start), id, n == 1) }
            });
            let live = if chunk.live { &chunk.ids[..] } else { &[] };
            live.iter().enumerate().map(chunk_token).chain(memory)
        });
        system.chain(chunks).collect()
    }
}

fn open_cache(model: TinyModel, folder: &Path, position_limit: i32) -> KvCache {
    let limits = KvArchiveLimits { ram: 2 << 20, disk: 60 << 20, folder: Some(folder.to_owned()) };
    KvCache::new(model.context(CELLS), KvArchive::open(limits, 1), KvCacheMode::EditCells)
        .with_position_limit(position_limit)
}

/// A cache under test, and how often each event happened.
struct KvFuzzRun {
    model: TinyModel,
    folder: tempfile::TempDir,
    position_limit: i32,
    conversation: KvFuzzConversation,
    cache: KvCache,
    counts: BTreeMap<String, usize>,
}

impl KvFuzzRun {
    fn count(&mut self, event: &str, n: usize) {
        *self.counts.entry(event.to_owned()).or_default() += n;
    }

    /// A random event between a change of the window and the sync with it.
    fn random_event(&mut self, step: usize, window: &[WindowToken]) {
        match self.conversation.next_below(16) {
            0 => {
                self.cache.save_and_clear();
                self.cache = open_cache(self.model, self.folder.path(), self.position_limit);
                self.count("restart", 1);
            }
            1 => {
                self.cache.archive().flush();
                let restarted = open_cache(self.model, self.folder.path(), self.position_limit);
                std::mem::forget(std::mem::replace(&mut self.cache, restarted));
                self.count("kill", 1);
            }
            2 => {
                let other = [WindowToken { position: None, offset: 0, id: TokenId(5), chunk_start: true }];
                let mut progress = |_, _| StepFlow::Continue;
                self.cache.sync_window("other", &other, 1, &mut progress).expect("synced");
                self.count("other conversation", 1);
            }
            3 | 4 => self.cancelled_decode(9 + step as u64, window),
            5 | 6 => self.fork(step, window),
            7..=9 => {
                self.cache.persist("main", window).expect("persisted");
            }
            _ => {}
        }
    }

    fn cancelled_decode(&mut self, job: u64, window: &[WindowToken]) {
        // Often without delay, so that some decodes are cancelled on a fast machine too.
        let immediate = self.conversation.next_below(2) == 0;
        let delay = if immediate { 0 } else { self.conversation.next_below(20_000) as u64 };
        let canceller = Arc::clone(self.cache.context().canceller());
        canceller.add_job(job);
        canceller.set_batch_jobs(vec![job]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(delay));
                canceller.cancel(job);
            });
            let cancelled = sync_and_decode(&mut self.cache, window).is_err();
            self.count("cancel", usize::from(cancelled));
        });
        canceller.set_batch_jobs(Vec::new());
    }

    /// A fork over the window with a hole and with new tokens at the end.
    fn fork(&mut self, step: usize, window: &[WindowToken]) {
        let mut forked = window.to_vec();
        let end = self.conversation.next_position();
        let appended = self.conversation.random_tokens(5).into_iter().zip(end + 100..);
        forked.extend(appended.map(|(id, position)| WindowToken {
            position: Some(Position(position)),
            offset: 0,
            id: TokenId(id),
            chunk_start: false,
        }));
        let (start, len) = (self.conversation.next_below(forked.len() - 6), self.conversation.next_below(8));
        forked.drain(start..(start + len).min(forked.len() - 5));
        let before = self.cache.sequence().entries.len();
        match self.cache.fork("main", &forked, 4) {
            Err(_) => self.count("fork refused", 1),
            Ok(sync) => {
                let row = decode_from(&mut self.cache, &forked, sync.prefill_from).expect("decoded");
                assert!(self.model.is_right_sum(&row), "step {step}");
                self.cache.drop_fork();
                self.count("fork", 1);
                assert!(before == 0 || self.cache.sequence().entries.len() >= before.min(1));
            }
        }
    }

    fn sync_and_check(&mut self, step: usize, window: &[WindowToken]) {
        let (sync, row, _) =
            sync_and_decode(&mut self.cache, window).unwrap_or_else(|error| panic!("step {step}: {error}"));
        let stats = sync.stats;
        assert!(self.model.is_right_sum(&row), "step {step}");
        assert_eq!(
            stats.reused + stats.restored + stats.recomputed + stats.prefilled,
            window.len(),
            "step {step}: {stats:?}"
        );
        for (event, n) in
            [("shifted", stats.shifted), ("restored", stats.restored), ("recomputed", stats.recomputed)]
        {
            self.count(event, usize::from(n > 0));
        }
        let cached = &self.cache.sequence().entries;
        assert!(
            cached.iter().map(|t| t.token.cast_unsigned()).eq(window.iter().map(|t| t.id.0)),
            "step {step}"
        );
        assert!(cached.windows(2).all(|two| two[0].key < two[1].key && two[0].position < two[1].position));
        assert!(cached.last().is_some_and(|t| t.position < self.position_limit), "step {step}");
    }
}

fn run_random_steps(
    model: TinyModel,
    seed: u64,
    steps: usize,
    position_limit: i32,
) -> BTreeMap<String, usize> {
    let folder = tempfile::tempdir().expect("a folder");
    let vocabulary: Vec<u32> = tokenize_chunks(&STORY).concat().iter().map(|t| t.id.0).collect();
    let system = vocabulary[..8].to_vec();
    let conversation =
        KvFuzzConversation { state: seed, vocabulary, system, chunks: Vec::new(), memory_edition: 0 };
    let cache = open_cache(model, folder.path(), position_limit);
    let mut run = KvFuzzRun { model, folder, position_limit, conversation, cache, counts: BTreeMap::new() };
    for step in 0..steps {
        let operation = run.conversation.random_step();
        run.count(operation, 1);
        let window = run.conversation.window();
        run.random_event(step, &window);
        run.sync_and_check(step, &window);
    }
    run.counts
}

fn check_random_steps(model: TinyModel) {
    for (seed, position_limit) in [(1, 8192), (2, 240), (3, 215)] {
        let counts = run_random_steps(model, seed, 200, position_limit);
        println!("{model:?}, {position_limit} positions: {counts:?}");
        assert!(counts["cancel"] > 0 && counts["fork"] > 5);
        // Where a hybrid has no state to go on from, it reads the rest of the window again, and restores nothing behind it.
        let is_hybrid = model.weights().is_hybrid();
        let [restored, shifted] = if is_hybrid { [10, 0] } else { [20, 5] };
        assert!(counts["restored"] > restored, "{}", counts["restored"]);
        if model.weights().has_multi_rope() {
            assert_eq!(counts["shifted"], 0, "llama.cpp cannot shift these positions");
        } else {
            assert!(position_limit == 8192 || counts["shifted"] > shifted, "few positions force shifts");
        }
    }
}

#[test]
fn kv_cache_equals_window_after_random_steps() {
    check_random_steps(TinyModel::Llama);
}

#[test]
fn kv_cache_with_sliding_window_equals_window_after_random_steps() {
    check_random_steps(TinyModel::Gemma3);
    check_random_steps(TinyModel::GptOss);
}

#[test]
fn kv_cache_of_hybrid_equals_window_after_random_steps() {
    check_random_steps(TinyModel::Lfm2);
    check_random_steps(TinyModel::GraniteHybrid);
}

/// With few positions the rest of the window is prefilled again in place of a shift.
#[test]
fn kv_cache_with_multi_rope_equals_window_after_random_steps() {
    check_random_steps(TinyModel::Qwen2Vl);
    check_random_steps(TinyModel::Qwen35);
}

//! The KV cache of the real model: pruning, resurrecting, compaction, forks, and the archive.

use crate::common::{
    STORY, TinyModel, context, context_params, decode_from, on_gpu, open_kv_cache, open_kv_cache_with_keys,
    sync_and_decode, tokenize_chunks,
};
use halo_core::model::{StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::Position;
use halo_llama::attention::TapConfig;
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext, LlamaError};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheMode};
use halo_llama::token_key::token_keys;

fn join_chunks(chunks: &[Vec<WindowToken>], which: &[usize]) -> Vec<WindowToken> {
    which.iter().flat_map(|&n| chunks[n].clone()).collect()
}

/// The logits after the question where nothing was ever pruned.
fn logits_without_pruning(all: &[WindowToken], question: &[WindowToken]) -> Vec<f32> {
    let mut cache = open_kv_cache(512);
    sync_and_decode(&mut cache, all).expect("decoded");
    sync_and_decode(&mut cache, question).expect("decoded").2
}

const ALL_CHUNKS: [usize; 6] = [0, 1, 2, 3, 4, 5];
const REMAINING_CHUNKS: [usize; 4] = [0, 1, 2, 5];

/// Chunks that are pruned and resurrected at once: the logits are the same to the last bit.
#[test]
fn kv_cache_prune_and_resurrect_is_bit_exact() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let question = [all.clone(), chunks[6].clone()].concat();
    let mut untouched = open_kv_cache(512);
    sync_and_decode(&mut untouched, &all).expect("decoded");
    let (_, row, expected) = sync_and_decode(&mut untouched, &question).expect("decoded");
    assert_eq!(row.mean.len(), question.len());

    let mut pruning = open_kv_cache(512);
    sync_and_decode(&mut pruning, &all).expect("decoded");
    let stats = pruning.persist("main", &without).expect("pruned");
    assert_eq!((stats.pruned, pruning.sequence().entries.len()), (all.len() - without.len(), without.len()));
    let resurrected = pruning.persist("main", &all).expect("resurrected");
    assert_eq!((resurrected.restored, resurrected.shifted, resurrected.recomputed), (stats.pruned, 0, 0));
    let (sync, _, logits) = sync_and_decode(&mut pruning, &question).expect("decoded");
    assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[6].len(), all.len()));
    assert_eq!(compare_logits(&expected, &logits), (0.0, 0.0, true));
    assert!(expected.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits()), "bit by bit");
}

/// The same with quantised keys: they are saved and restored as they are.
#[test]
fn kv_cache_with_quantized_keys_prune_and_resurrect_is_bit_exact() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let question = [all.clone(), chunks[6].clone()].concat();
    let plain = logits_without_pruning(&all, &question);
    let mut bytes = Vec::new();
    for key_type in [KvKeyType::F16, KvKeyType::Q8_0, KvKeyType::Q4_0] {
        let mut untouched = open_kv_cache_with_keys(512, key_type);
        sync_and_decode(&mut untouched, &all).expect("decoded");
        let (_, row, expected) = sync_and_decode(&mut untouched, &question).expect("decoded");
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        let mut pruning = open_kv_cache_with_keys(512, key_type);
        sync_and_decode(&mut pruning, &all).expect("decoded");
        pruning.persist("main", &without).expect("pruned");
        bytes.push(pruning.archive().usage().0 as f64 / all.len() as f64);
        let resurrected = pruning.persist("main", &all).expect("resurrected");
        assert_eq!((resurrected.restored, resurrected.shifted), (all.len() - without.len(), 0));
        let (_, _, logits) = sync_and_decode(&mut pruning, &question).expect("decoded");
        assert!(expected.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits()), "{key_type}");
        let (_, kl, _) = compare_logits(&plain, &logits);
        println!("{key_type}: {:.0} bytes per token, KL from f16 {kl:.1e}", bytes[bytes.len() - 1]);
        assert!(kl < 0.5, "{key_type}: {kl}");
        // A compaction rotates the keys, which are quantised again.
        pruning.persist("main", &without).expect("pruned");
        pruning.compact().expect("compacted");
        assert_eq!(pruning.sequence().next_position() as usize, without.len());
        sync_and_decode(&mut pruning, &question).expect("decoded");
    }
    assert!(bytes[1] < 0.8 * bytes[0] && bytes[2] < 0.7 * bytes[0], "{bytes:?}");
}

/// Cells can be recorded without a row: then the next row need not look for the cells of the window.
#[test]
fn kv_cache_records_cells_in_steps_without_rows() {
    let window = tokenize_chunks(&STORY[..2]).concat();
    let keys = token_keys(&window).expect("the window is in order");
    let tokens: Vec<_> = keys.iter().zip(&window).map(|(key, token)| InputToken::new(*key, token)).collect();
    for (source, cells) in [
        (AttentionSource::Softmax, true),
        (AttentionSource::Queries, true),
        (AttentionSource::Softmax, false),
    ] {
        let params = ContextParams { attention: source, ..context_params(512, KvKeyType::F16) };
        let context = LlamaContext::new(&TinyModel::Llama.weights(), params).expect("enough memory");
        let archive = KvArchive::open(KvArchiveLimits::disabled(), 1);
        let mut cache = KvCache::new(context, archive, KvCacheMode::EditCells);
        cache.sync_window("main", &window, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        for token in &tokens {
            let config = TapConfig { cells, ..TapConfig::off() };
            cache.decode(std::slice::from_ref(token), config).expect("decoded");
        }
        assert_eq!(cache.sequence().entries.len(), tokens.len());
        assert_eq!(cache.sequence().all_cells_known(), cells, "{source}");
    }
}

/// A head that blocks do not divide cannot have quantised keys.
#[test]
fn context_refuses_quantized_keys_of_small_heads() {
    let error = LlamaContext::new(&TinyModel::Gemma3.weights(), context_params(512, KvKeyType::Q8_0)).err();
    assert!(matches!(error, Some(LlamaError::KeyType { head_size: 16, key_type: KvKeyType::Q8_0 })));
}

/// Other tokens are decoded in between and take the freed cells: the resurrected tokens have the same positions in other
/// cells, so sums are computed in another order.
#[test]
fn kv_cache_resurrect_after_cells_were_reused() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let mut pruning = open_kv_cache(512);
    sync_and_decode(&mut pruning, &all).expect("decoded");
    let (_, row, _) = sync_and_decode(&mut pruning, &[without, chunks[6].clone()].concat()).expect("decoded");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let question = [all.clone(), chunks[6].clone()].concat();
    let (sync, row, logits) = sync_and_decode(&mut pruning, &question).expect("decoded");
    assert_eq!(
        (sync.stats.restored, sync.stats.prefilled, sync.stats.shifted),
        (chunks[3].len() + chunks[4].len(), 1, 0)
    );
    assert_eq!(row.mean.len(), question.len());
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    // The tokens in between were computed without the pruned chunks, so the logits differ from those without pruning.
    let expected = logits_without_pruning(&all, &question);
    let (_, kl, _) = compare_logits(&expected, &logits);
    assert!(kl < 0.5, "{kl}");
}

/// After a compaction, a resurrected chunk gets its position back, and the chunks after it are shifted.
#[test]
fn kv_cache_resurrect_after_compaction() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let question = [all.clone(), chunks[6].clone()].concat();
    let expected = logits_without_pruning(&all, &question);
    let mut pruning = open_kv_cache(512);
    sync_and_decode(&mut pruning, &all).expect("decoded");
    pruning.persist("main", &without).expect("pruned");
    pruning.compact().expect("compacted");
    assert_eq!(pruning.sequence().next_position() as usize, without.len(), "no holes");
    let resurrected = pruning.persist("main", &all).expect("resurrected");
    assert_eq!((resurrected.restored, resurrected.recomputed), (all.len() - without.len(), 0));
    assert_eq!(
        resurrected.shifted,
        chunks[5].len(),
        "the archived chunks keep their positions; the chunk after them is shifted"
    );
    let (_, row, logits) = sync_and_decode(&mut pruning, &question).expect("decoded");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let (max_diff, kl, same) = compare_logits(&expected, &logits);
    println!("after a compaction: largest difference {max_diff}, KL {kl:e}");
    // On a GPU the model itself rounds more: keys that were shifted meet kernels for other sizes of batches.
    let limit = if on_gpu() { 5e-3 } else { 1e-3 };
    assert!(same && kl <= limit, "largest difference {max_diff}, KL {kl}");
}

/// Near the position limit all holes are closed at once; chunks archived before are restored with a shift.
#[test]
fn kv_cache_compaction_near_position_limit() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let end = [without.clone(), chunks[6].clone()].concat();
    let mut open = open_kv_cache(512);
    sync_and_decode(&mut open, &all).expect("decoded");
    let (_, _, expected) = sync_and_decode(&mut open, &end).expect("decoded");
    let mut tight = open_kv_cache(512).with_position_limit(all.len() as i32 + 2);
    sync_and_decode(&mut tight, &all).expect("decoded");
    let (sync, row, logits) = sync_and_decode(&mut tight, &end).expect("decoded");
    assert_eq!(sync.stats.shifted, chunks[5].len(), "the chunk after the hole");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    // A hole of fifty positions is a distance to the model, so closing it changes more than rounding.
    let (max_diff, kl, same) = compare_logits(&expected, &logits);
    println!("a hole open and closed: largest difference {max_diff}, KL {kl:e}");
    let limit = if on_gpu() { 2e-2 } else { 1e-2 };
    assert!(same && kl <= limit, "largest difference {max_diff}, KL {kl}");

    // A chunk of the hole is resurrected: the tokens after it are shifted.
    let some = [join_chunks(&chunks, &[0, 1, 2, 3, 5]), chunks[6].clone()].concat();
    let (sync, _, _) = sync_and_decode(&mut tight, &some).expect("decoded");
    assert_eq!((sync.stats.restored, sync.stats.recomputed), (chunks[3].len(), 0));
    assert!(sync.stats.shifted > 0);
    // Then it has a position again: it is pruned and resurrected without a shift.
    tight.persist("main", &end).expect("pruned");
    let resurrected = tight.persist("main", &some).expect("resurrected");
    assert_eq!((resurrected.restored, resurrected.shifted), (chunks[3].len(), 0));
    // A window that does not fit is refused, and the cached tokens stay.
    let before = tight.sequence().entries.clone();
    assert!(sync_and_decode(&mut tight, &[all, chunks[6].clone()].concat()).is_err());
    let is_cached = |n: usize| tight.sequence().entries.iter().any(|t| t.key == before[n].key);
    assert!((0..before.len() - 1).all(is_cached), "{}", tight.sequence().entries.len());
}

/// After a restart all cells are restored from disk, and the logits are the same.
#[test]
fn kv_cache_restored_from_archive_after_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || {
        let limits = KvArchiveLimits { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.path().to_owned()) };
        KvCache::new(context(512), KvArchive::open(limits, 1), KvCacheMode::EditCells)
    };
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let question = [all.clone(), chunks[6].clone()].concat();
    let expected = logits_without_pruning(&all, &question);
    let mut before = open();
    sync_and_decode(&mut before, &all).expect("decoded");
    before.persist("main", &without).expect("pruned");
    before.save_and_clear();
    drop(before);
    let mut after = open();
    let (sync, row, logits) = sync_and_decode(&mut after, &question).expect("restored");
    let stats = sync.stats;
    assert_eq!(
        (stats.restored, stats.recomputed, stats.prefilled, stats.shifted),
        (all.len(), 0, chunks[6].len(), 0)
    );
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    assert_eq!(compare_logits(&expected, &logits), (0.0, 0.0, true));

    // Tokens of missing and damaged files are recomputed over the tokens before them.
    drop(after);
    let mut files = Vec::new();
    let mut folders = vec![folder.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    assert_eq!(files.len(), 6, "one file per chunk: {files:?}");
    std::fs::remove_file(&files[1]).expect("removed");
    let mut bytes = std::fs::read(&files[3]).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&files[3], bytes).expect("written");
    let mut after = open();
    let (sync, row, logits) = sync_and_decode(&mut after, &question).expect("restored");
    assert_eq!(sync.stats.recomputed, chunks[1].len() + chunks[3].len());
    assert_eq!(sync.stats.restored, all.len() - sync.stats.recomputed);
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let (max_diff, kl, same) = compare_logits(&expected, &logits);
    println!("two chunks recomputed: largest difference {max_diff}, KL {kl:e}");
    assert!(same && kl <= 1e-3, "largest difference {max_diff}, KL {kl}");
}

/// A fork shares the cells of its window and does not change the main sequence.
#[test]
fn fork_leaves_main_sequence_unchanged() {
    let chunks = tokenize_chunks(&STORY);
    let all = join_chunks(&chunks, &ALL_CHUNKS);
    let question = [all.clone(), chunks[6].clone()].concat();
    let mut plain = open_kv_cache(512);
    sync_and_decode(&mut plain, &all).expect("decoded");
    let (_, _, expected) = sync_and_decode(&mut plain, &question).expect("decoded");
    let mut forked = open_kv_cache(512);
    sync_and_decode(&mut forked, &all).expect("decoded");
    let main = forked.sequence().clone();
    // The window with more after it; a prefix; a window with a hole; a different window.
    let short = join_chunks(&chunks, &[0, 1, 2]);
    let with_hole = [join_chunks(&chunks, &[0, 1, 4]), chunks[6].clone()].concat();
    let mut other = join_chunks(&chunks, &[5, 0]);
    for (n, token) in other.iter_mut().enumerate() {
        token.position = Some(Position(n as u64));
    }
    for (window, shared) in [
        (&question, all.len()),
        (&short, short.len() - 1),
        (&with_hole, with_hole.len() - chunks[6].len()),
        (&other, 1),
    ] {
        let sync = forked.fork("main", window, 8).expect("forked");
        assert_eq!((sync.stats.reused, sync.prefill_from), (shared, shared));
        let row = decode_from(&mut forked, window, sync.prefill_from).expect("decoded");
        assert_eq!(row.mean.len(), window.len());
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        forked.drop_fork();
        assert_eq!(forked.sequence().entries, main.entries);
    }
    let (sync, _, logits) = sync_and_decode(&mut forked, &question).expect("decoded");
    assert_eq!((sync.stats.reused, sync.stats.prefilled), (all.len(), chunks[6].len()));
    assert_eq!(compare_logits(&expected, &logits), (0.0, 0.0, true));
}

/// Two conversations in turn: each is restored from the archive.
#[test]
fn kv_cache_switches_between_conversations() {
    let chunks = tokenize_chunks(&STORY);
    let (one, two) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &[0, 3, 4]));
    let two: Vec<WindowToken> = two
        .into_iter()
        .enumerate()
        .map(|(n, token)| WindowToken { position: Some(Position(n as u64)), ..token })
        .collect();
    let mut cache = open_kv_cache(512);
    let mut decode_window = |name: &str, window: &[WindowToken]| {
        let sync = cache.sync_window(name, window, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        let row = decode_from(&mut cache, window, sync.prefill_from).expect("decoded");
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        (sync.stats, cache.context().logits().to_vec())
    };
    let (_, first) = decode_window("one", &one);
    let (_, second) = decode_window("two", &two);
    let (stats, again) = decode_window("one", &one);
    assert_eq!((stats.restored, stats.prefilled, stats.recomputed), (one.len() - 1, 1, 0));
    // A token decoded alone rounds differently from one in a batch.
    let (_, kl, same) = compare_logits(&first, &again);
    assert!(same && kl < 1e-2, "{kl}");
    let (stats, again) = decode_window("two", &two);
    assert_eq!((stats.restored, stats.prefilled), (two.len() - 1, 1));
    let (_, kl, same) = compare_logits(&second, &again);
    assert!(same && kl < 1e-2, "{kl}");
}

#[test]
fn kv_cache_recompute_mode_prefills_from_first_difference() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let mut cache =
        KvCache::new(context(512), KvArchive::open(KvArchiveLimits::disabled(), 1), KvCacheMode::Recompute);
    sync_and_decode(&mut cache, &all).expect("decoded");
    let (sync, row, logits) = sync_and_decode(&mut cache, &without).expect("decoded");
    let same = join_chunks(&chunks, &[0, 1, 2]).len();
    assert_eq!((sync.stats.reused, sync.stats.prefilled), (same, without.len() - same));
    assert_eq!(row.mean.len(), without.len());
    let mut fresh =
        KvCache::new(context(512), KvArchive::open(KvArchiveLimits::disabled(), 1), KvCacheMode::Recompute);
    sync_and_decode(&mut fresh, &join_chunks(&chunks, &[0, 1, 2])).expect("decoded");
    let (_, _, expected) = sync_and_decode(&mut fresh, &without).expect("decoded");
    let (_, kl, top) = compare_logits(&expected, &logits);
    assert!(top && kl < 1e-3, "{kl}");
    assert!(
        matches!(cache.persist("main", &all), Ok(stats) if stats == halo_core::model::CacheStats::default())
    );
}

/// llama.cpp rotates the keys of shifted cells in the next decode. Cancelling that decode must not interrupt the K-shift:
/// after half a K-shift, the next one would rotate that half again.
#[test]
fn k_shift_is_not_interrupted_by_cancel() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    let question = [all.clone(), chunks[6].clone()].concat();
    let shifted_logits = |cancel_after: Option<u64>| {
        let mut cache = open_kv_cache(2048);
        sync_and_decode(&mut cache, &all).expect("decoded");
        cache.persist("main", &without).expect("pruned");
        cache.compact().expect("compacted");
        if let Some(micros) = cancel_after {
            let canceller = std::sync::Arc::clone(cache.context().canceller());
            canceller.add_job(1);
            canceller.set_batch_jobs(vec![1]);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(std::time::Duration::from_micros(micros));
                    canceller.cancel(1);
                });
                let _ = sync_and_decode(&mut cache, &question);
            });
            canceller.set_batch_jobs(Vec::new());
        }
        sync_and_decode(&mut cache, &question).expect("decoded").2
    };
    let expected = shifted_logits(None);
    for micros in [0, 500, 2_000, 10_000, 30_000] {
        let (_, kl, same) = compare_logits(&expected, &shifted_logits(Some(micros)));
        assert!(same && kl < 1e-5, "cancelled after {micros} µs: KL {kl}");
    }
}

/// A fork without enough free cells is refused or prefills; it changes neither the main sequence nor the archive.
#[test]
fn fork_with_few_free_cells_does_no_harm() {
    let texts = [STORY[0], &"The rain fell on the sea and on the old house. ".repeat(40), STORY[5], STORY[6]];
    let chunks = tokenize_chunks(&texts);
    let (all, without) = (join_chunks(&chunks, &[0, 1, 2]), join_chunks(&chunks, &[0, 2]));
    let long = chunks[1].len();
    let mut cache = open_kv_cache(all.len() as u32 + 8);
    sync_and_decode(&mut cache, &all).expect("decoded");
    cache.persist("main", &without).expect("pruned");
    let before = cache.sequence().entries.clone();
    let filler = "and then ".repeat(long / 2 - 10);
    let filler: Vec<WindowToken> = tokenize_chunks(&[&filler])[0]
        .iter()
        .enumerate()
        .map(|(n, token)| WindowToken { position: Some(Position(9000 + n as u64)), ..*token })
        .collect();
    sync_and_decode(&mut cache, &[without.clone(), filler].concat()).expect("decoded");
    // The pruned chunk does not fit beside the live ones.
    assert!(cache.fork("main", &all, 4).is_err());
    // A fork with other tokens under the keys of pruned ones does not delete their archive entry.
    let mut other = all.clone();
    other[chunks[0].len() + 3].id.0 += 1;
    let _ = cache.fork("main", &other, 4);
    cache.drop_fork();
    cache.sync_without_prefill("main", &without).expect("pruned");
    let resurrected = cache.sync_without_prefill("main", &all).expect("resurrected");
    assert_eq!((resurrected.restored, resurrected.shifted), (long, 0), "it is still archived");
    assert!(
        before.iter().all(|t| cache
            .sequence()
            .entries
            .iter()
            .any(|l| (l.key, l.position) == (t.key, t.position)))
    );
    // A long answer in a fork shifts nothing while positions are free.
    cache.sync_without_prefill("main", &without).expect("pruned");
    let positions = |cache: &KvCache| cache.sequence().entries.iter().map(|t| t.position).collect::<Vec<_>>();
    let before = positions(&cache);
    cache.fork("main", &without, 100_000).expect("forked");
    cache.drop_fork();
    assert_eq!(positions(&cache), before);
    // A long answer in the main sequence does not compact either.
    let sync = cache.sync_window("main", &without, 100_000, &mut |_, _| StepFlow::Continue).expect("synced");
    assert_eq!(sync.stats.shifted, 0);
    assert!(cache.fork("main", &[], 4).is_err() && cache.sync_without_prefill("main", &[]).is_ok());
}

/// Where positions run out while cells are free, a fork compacts, so that its answer is not cut off.
#[test]
fn fork_triggers_compaction_when_positions_run_out() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &ALL_CHUNKS), join_chunks(&chunks, &REMAINING_CHUNKS));
    assert!(all.len() - without.len() > 20);
    let mut cache = open_kv_cache(512).with_position_limit(all.len() as i32 + 6);
    sync_and_decode(&mut cache, &all).expect("decoded");
    cache.persist("main", &without).expect("pruned");
    let sync = cache.fork("main", &without, 20).expect("forked");
    assert_eq!((sync.answer_budget, sync.stats.prefilled), (20, 1));
    cache.drop_fork();
}

/// Missing chunks are recomputed in batches; the progress callback can cancel it.
#[test]
fn kv_cache_recompute_of_missing_chunks_can_be_cancelled() {
    let long = "It rained from morning on, and nobody came to the old house by the sea. ".repeat(30);
    let texts = [STORY[0], &long, STORY[5]];
    let chunks = tokenize_chunks(&texts);
    let (all, without) = (join_chunks(&chunks, &[0, 1, 2]), join_chunks(&chunks, &[0, 2]));
    let mut cache =
        KvCache::new(context(1024), KvArchive::open(KvArchiveLimits::disabled(), 1), KvCacheMode::EditCells);
    sync_and_decode(&mut cache, &without).expect("decoded");
    let mut progress = Vec::new();
    let stopped = cache.sync_window("main", &all, 1, &mut |done, total| {
        progress.push((done, total));
        if done > 0 { StepFlow::Stop } else { StepFlow::Continue }
    });
    assert!(stopped.is_err());
    assert_eq!(progress, [(0, chunks[1].len() + 1), (256, chunks[1].len() + 1)]);
    // What is cached belongs to the window, with a gap; what does not belong to it is still found.
    assert_eq!(cache.find_mismatch("main", &all), None);
    let other = join_chunks(&chunks, &[1, 2]);
    assert!(cache.find_mismatch("main", &other).is_some());
    let (sync, row, _) = sync_and_decode(&mut cache, &all).expect("decoded");
    assert_eq!((sync.stats.recomputed, row.mean.len()), (chunks[1].len(), all.len()));
    assert_eq!(cache.find_mismatch("main", &all), None);
    assert!(cache.find_mismatch("main", &without).is_some(), "gaps are a difference again");
}

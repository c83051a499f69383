//! The KV cache of models whose positions have several parts (M-RoPE). llama.cpp cannot shift them: cells keep the position
//! that they were computed at, and where there is no room for it, the rest of the window is prefilled again.

use crate::common::{
    STORY, TinyModel, rounding_kl, same_but_for_batches, sync_and_decode, tap_last_row, tokenize_chunks,
};
use crate::kv_cache_hybrid::join_chunks;
use halo_core::model::StepFlow;
use halo_core::testing::logits::compare_logits;
use halo_llama::ffi::{BatchToken, LlamaError, SeqId};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheMode};
use halo_llama::token_key::token_keys;
use std::path::Path;

const MODELS: [TinyModel; 2] = [TinyModel::Qwen2Vl, TinyModel::Qwen35];

fn open_cache(model: TinyModel, folder: &Path) -> KvCache {
    let limits = KvArchiveLimits { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.to_owned()) };
    KvCache::new(model.context(512), KvArchive::open(limits, 1), KvCacheMode::EditCells)
}

/// A shift is refused in place of the abort with which llama.cpp ends the process.
#[test]
fn context_with_multi_rope_refuses_shifts() {
    for model in MODELS {
        let mut context = model.context(256);
        assert!(context.can_edit() && !context.can_shift(), "{model:?}");
        let tokens: Vec<BatchToken> =
            (0..8).map(|n| BatchToken { token: 40 + n, position: n, logits: false }).collect();
        context.decode(SeqId(0), &tokens).expect("decoded");
        assert_eq!(context.cell_positions(SeqId(0), 8), Some((0..8).collect()));
        let refused = context.seq_add(SeqId(0), 4, 8, 2);
        assert!(matches!(refused, Err(LlamaError::StateRestore(_))), "{refused:?}");
        assert_eq!(
            context.cell_positions(SeqId(0), 4),
            Some((0..4).collect()),
            "what was not shifted is removed"
        );
    }
}

/// Pruned and resurrected, also after a restart: the logits of a context that never lost the chunks.
#[test]
fn kv_cache_with_multi_rope_prune_resurrect_and_restart_are_bit_exact() {
    let model = TinyModel::Qwen2Vl;
    let folder = tempfile::tempdir().expect("a folder");
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
    let question = [all.clone(), chunks[6].clone()].concat();
    let mut untouched = model.kv_cache(512);
    sync_and_decode(&mut untouched, &all).expect("decoded");
    let (_, _, expected) = sync_and_decode(&mut untouched, &question).expect("decoded");
    for restart in [false, true] {
        let mut cache = open_cache(model, folder.path());
        sync_and_decode(&mut cache, &all).expect("decoded");
        let pruned = cache.persist("main", &without).expect("pruned");
        assert_eq!(pruned.pruned, all.len() - without.len());
        if restart {
            cache.save_and_clear();
            cache.archive().flush();
            cache = open_cache(model, folder.path());
        } else {
            let stats = cache.persist("main", &all).expect("resurrected");
            assert_eq!((stats.restored, stats.shifted, stats.recomputed), (pruned.pruned, 0, 0));
        }
        let (sync, row, logits) = sync_and_decode(&mut cache, &question).expect("decoded");
        assert_eq!((sync.stats.prefilled, sync.stats.recomputed), (chunks[6].len(), 0), "{:?}", sync.stats);
        assert!(model.is_right_sum(&row) && row.mean.len() == question.len());
        assert!(same_but_for_batches(&expected, &logits), "{model:?}, restart {restart}");
    }
}

/// Compaction prefills everything behind the first hole again. A chunk that comes back after it has no room at its own
/// position: it is recomputed, or the rest is prefilled again.
#[test]
fn kv_cache_with_multi_rope_compaction_prefills_again() {
    for model in MODELS {
        let chunks = tokenize_chunks(&STORY);
        let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
        let mut fresh = model.kv_cache(512);
        let (_, _, expected) =
            sync_and_decode(&mut fresh, &[without.clone(), chunks[6].clone()].concat()).expect("decoded");
        let mut cache = model.kv_cache(512);
        sync_and_decode(&mut cache, &all).expect("decoded");
        cache.persist("main", &without).expect("pruned");
        assert!(cache.sequence().next_position() as usize > without.len(), "a hole");
        cache.compact().expect("compacted");
        assert_eq!(cache.sequence().next_position() as usize, without.len(), "no holes");
        let (sync, _, logits) =
            sync_and_decode(&mut cache, &[without.clone(), chunks[6].clone()].concat()).expect("decoded");
        assert_eq!((sync.stats.prefilled, sync.stats.reused), (chunks[6].len(), without.len()));
        let (_, kl, same) = compare_logits(&expected, &logits);
        assert!(same && kl < rounding_kl(), "{model:?}: other batches, other rounding: {kl}");

        let question = [all.clone(), chunks[6].clone()].concat();
        let mut fresh = model.kv_cache(512);
        let (_, _, expected) = sync_and_decode(&mut fresh, &question).expect("decoded");
        let (sync, row, logits) = sync_and_decode(&mut cache, &question).expect("decoded");
        assert_eq!(sync.stats.shifted, 0);
        assert!(sync.stats.recomputed + sync.stats.prefilled > chunks[3].len(), "{:?}", sync.stats);
        assert!(model.is_right_sum(&row) && row.mean.len() == question.len());
        assert_eq!(cache.sequence().next_position() as usize, question.len(), "as if it was never pruned");
        let (_, kl, same) = compare_logits(&expected, &logits);
        assert!(same && kl < rounding_kl(), "{model:?}: {kl}");
    }
}

/// An answer that passes the last position: the window is compacted while it is generated.
#[test]
fn kv_cache_with_multi_rope_compacts_during_an_answer() {
    for model in MODELS {
        let chunks = tokenize_chunks(&STORY);
        let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4]), join_chunks(&chunks, &[0, 1, 4]));
        let limit = all.len() as i32 + 3;
        let mut cache = model.kv_cache(512).with_position_limit(limit);
        sync_and_decode(&mut cache, &all).expect("decoded");
        cache.persist("main", &without).expect("pruned");
        let answer = [without.clone(), chunks[5].clone()].concat();
        let keys = token_keys(&answer).expect("in order");
        for n in without.len()..answer.len() {
            let token = InputToken::new(keys[n], &answer[n]);
            let row = cache.decode(&[token], tap_last_row()).expect("decoded").pop().expect("a row");
            assert!(model.is_right_sum(&row) && row.mean.len() == n + 1, "{model:?}");
        }
        assert_eq!(cache.sequence().next_position() as usize, answer.len(), "no holes");
        let decoded = cache.sequence().entries.iter().map(|entry| entry.token.cast_unsigned());
        assert!(decoded.eq(answer.iter().map(|token| token.id.0)));
        // The same at the start of an answer: there is no room for it behind the hole.
        let mut cache = model.kv_cache(512).with_position_limit(limit);
        sync_and_decode(&mut cache, &all).expect("decoded");
        cache.persist("main", &without).expect("pruned");
        let sync = cache.sync_window("main", &answer, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        assert_eq!((sync.stats.shifted, sync.stats.recomputed), (0, 0), "{:?}", sync.stats);
        assert!(sync.prefill_from <= join_chunks(&chunks, &[0, 1]).len(), "{model:?}: {sync:?}");
    }
}

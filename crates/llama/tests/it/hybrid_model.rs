//! Hybrid models: their context, their attention, whole answers, and what they still know of pruned chunks.

use crate::common::{STORY, TinyModel, sync_and_decode, tap_last_row, tokenize_chunks};
use crate::generate::{NEVER, generate, greedy};
use crate::kv_cache_hybrid::{HYBRIDS, join_chunks, without_position};
use crate::kv_cache_property::MAIN_SEQ;
use halo_core::attention::{AttentionRequest, LayerReduction};
use halo_core::model::{Model, StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::Position;
use halo_llama::attention::TapConfig;
use halo_llama::ffi::{BatchToken, LlamaError, SeqId};
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::kv_cache::{InputToken, LaneBatch};
use halo_llama::model::{Llama, LlamaOptions};
use halo_llama::token_key::token_keys;

/// The functions on cells leave the recurrent state alone, and a sequence cannot go on without it.
#[test]
fn context_of_hybrid_separates_cells_from_state() {
    for model in HYBRIDS {
        let mut context = model.context(256);
        let weights = model.weights();
        assert_eq!((weights.is_hybrid(), weights.kv_edit_unsupported()), (true, None));
        assert!(context.has_recurrent_states() && context.can_edit());
        assert_eq!(context.can_shift(), model != TinyModel::Qwen35);
        let attention: Vec<bool> = (0..6).map(|layer| context.tap().is_global(layer)).collect();
        let expected = if model == TinyModel::GraniteHybrid { [1, 4] } else { [2, 5] };
        assert_eq!(attention, [0, 1, 2, 3, 4, 5].map(|layer| expected.contains(&layer)));
        let batch = |from: i32, len: i32| -> Vec<BatchToken> {
            (from..from + len)
                .map(|n| BatchToken { token: 40 + n, position: n, logits: n + 1 == from + len })
                .collect()
        };
        let (spare, other) = (SeqId(1), SeqId(2));
        context.decode(MAIN_SEQ, &batch(0, 20)).expect("decoded");
        let state = without_position(context.save_recurrent(MAIN_SEQ));
        let empty = context.save_recurrent(spare);
        // A saved entry has no state: it is a few hundred bytes longer than its cells.
        context.seq_cp(MAIN_SEQ, spare, 5, 9);
        assert_eq!(context.save_recurrent(spare), empty);
        let cells = context.save_state(spare);
        assert!(cells.len() < context.save_state(MAIN_SEQ).len() && empty.len() < 200, "{}", empty.len());
        for (start, end) in [(5, 9), (0, 3), (15, -1), (19, 20)] {
            assert!(context.seq_rm(MAIN_SEQ, start, end), "{start}..{end}");
            assert!(without_position(context.save_recurrent(MAIN_SEQ)) == state, "{start}..{end}");
        }
        context.seq_cp(spare, MAIN_SEQ, -1, -1);
        assert!(without_position(context.save_recurrent(MAIN_SEQ)) == state);
        // Cells without a state: the sequence cannot decode.
        context.seq_cp(MAIN_SEQ, other, -1, -1);
        assert!(matches!(context.decode(other, &batch(15, 2)), Err(LlamaError::Decode(_))));
        context.copy_recurrent(MAIN_SEQ, other);
        context.decode(other, &batch(15, 2)).expect("decoded");
        assert!(without_position(context.save_recurrent(other)) != state);
        assert!(
            without_position(context.save_recurrent(MAIN_SEQ)) == state,
            "the other sequence has its own now"
        );
        context.decode(MAIN_SEQ, &batch(15, 2)).expect("decoded");
        assert_eq!(
            without_position(context.save_recurrent(MAIN_SEQ)),
            without_position(context.save_recurrent(other)),
            "the same tokens after the same state"
        );
        assert!(matches!(context.restore_recurrent(other, &cells), Err(LlamaError::StateRestore(_))));
        assert_eq!(context.save_recurrent(other)[8..], empty[8..], "a refused state leaves none");
        assert!(context.seq_rm(MAIN_SEQ, -1, -1));
        assert_eq!(context.save_recurrent(MAIN_SEQ)[8..], empty[8..], "everything is removed");
    }
}

/// The rows of every head: those of recurrent layers are 0, those of attention layers sum to 1.
#[test]
fn head_attention_of_hybrid_has_rows_of_every_layer() {
    for model in HYBRIDS {
        let window = tokenize_chunks(&STORY[..2]).concat();
        let mut cache = model.kv_cache(512);
        let keys = token_keys(&window).expect("in order");
        let tokens: Vec<_> =
            keys.iter().zip(&window).map(|(&key, token)| InputToken::new(key, token)).collect();
        let sync = cache.sync_window("main", &window, 1, &mut |_, _| StepFlow::Continue).expect("synced");
        assert_eq!(sync.prefill_from, 0);
        let config = TapConfig { full: true, ..tap_last_row() };
        let batch = LaneBatch { lane: cache.selected_lane(), tokens: &tokens, config };
        let rows = cache.decode_lanes(&[batch]).expect("decoded").pop().expect("one lane").per_head;
        let sums: Vec<f32> = rows.chunks(window.len()).map(|row| row.iter().sum()).collect();
        assert_eq!(sums.len(), 6 * 4);
        for (layer, sums) in sums.chunks(4).enumerate() {
            let expected = f32::from(u8::from(cache.context().tap().is_global(layer)));
            assert!(sums.iter().all(|sum| (sum - expected).abs() < 1e-5), "layer {layer}: {sums:?}");
        }
        // The last layer with attention is not always the last layer.
        let last = TapConfig { layers: LayerReduction::Last, ..tap_last_row() };
        let key = keys[keys.len() - 1].plus(1);
        let row = cache
            .decode(&[InputToken { key, id: 40, chunk_start: false }], last)
            .expect("decoded")
            .pop()
            .expect("a row");
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    }
}

/// The whole model: an answer is regenerated, a chunk is pruned and resurrected, and the program restarts. Only the last token of
/// the window is prefilled each time.
#[test]
fn generate_on_hybrid_prefills_only_new_tokens() {
    for model in HYBRIDS {
        let folder = tempfile::tempdir().expect("a folder");
        let open = || {
            let limits =
                KvArchiveLimits { ram: 1 << 30, disk: 1 << 30, folder: Some(folder.path().to_owned()) };
            let options = LlamaOptions { context: Some(1024), kv_archive: limits, ..LlamaOptions::default() };
            Llama::open(&model.path(), &options).expect("the model loads")
        };
        let mut llama = open();
        assert_eq!((llama.info().attention, llama.kv_edit_unsupported()), (true, None));
        let chunks = tokenize_chunks(&STORY);
        let (window, without) =
            (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
        let answer = |llama: &mut Llama, window: &[WindowToken], ephemeral: bool| {
            let request = AttentionRequest::default();
            let (end, steps) = generate(llama, window, &greedy(12), &request, ephemeral, NEVER);
            end.expect("an answer");
            (steps.ids, steps.stats.expect("figures").prefilled)
        };
        let (first, prefilled) = answer(&mut llama, &window, false);
        assert_eq!((first.len() > 2, prefilled), (true, window.len()));
        assert_eq!(answer(&mut llama, &window, false), (first.clone(), 1), "regenerated");
        // A program that regenerates gives the last chunk new positions.
        let mut moved = window.clone();
        let last_chunk = window.len() - chunks[5].len();
        moved[last_chunk..].iter_mut().for_each(|t| t.position = t.position.map(|p| Position(p.0 + 50)));
        assert_eq!(
            answer(&mut llama, &moved, false).1,
            chunks[5].len(),
            "from the state before the last chunk"
        );
        assert_eq!(answer(&mut llama, &window, false), (first.clone(), 1), "and back");
        llama.persist_kv("main", &window).expect("persisted");
        assert_eq!(answer(&mut llama, &without, false).1, 1, "pruned");
        assert_eq!(answer(&mut llama, &window, false), (first.clone(), 1), "resurrected");
        assert_eq!(answer(&mut llama, &window, true), (first.clone(), 1), "in a fork");
        llama.persist_kv("main", &window).expect("persisted");
        drop(llama);
        let mut llama = open();
        assert_eq!(answer(&mut llama, &window, false), (first, 1), "after a restart");
    }
}

/// What a hybrid still knows of pruned chunks: the divergence of the next token from a context in which they were never said.
#[test]
fn kv_cache_of_hybrid_pruned_chunk_compared_with_never_said() {
    let chunks = tokenize_chunks(&STORY);
    let (all, without) = (join_chunks(&chunks, &[0, 1, 2, 3, 4, 5]), join_chunks(&chunks, &[0, 1, 2, 5]));
    let question = [without.clone(), chunks[6].clone()].concat();
    let pruned_logits = |model: TinyModel, state: Option<&[u8]>| {
        let mut cache = model.kv_cache(512);
        sync_and_decode(&mut cache, &all).expect("decoded");
        cache.persist("main", &without).expect("pruned");
        if let Some(state) = state {
            cache.context().restore_recurrent(MAIN_SEQ, state).expect("the same model");
        }
        sync_and_decode(&mut cache, &question).expect("decoded").2
    };
    let never_said = |model: TinyModel| {
        let mut cache = model.kv_cache(512);
        sync_and_decode(&mut cache, &without).expect("decoded");
        let state = cache.context().save_recurrent(MAIN_SEQ);
        (sync_and_decode(&mut cache, &question).expect("decoded").2, state)
    };
    for model in [TinyModel::Llama, TinyModel::Lfm2, TinyModel::GraniteHybrid] {
        let (expected, state) = never_said(model);
        let (_, all_kl, _) = compare_logits(&expected, &{
            let mut cache = model.kv_cache(512);
            let full = [all.clone(), chunks[6].clone()].concat();
            sync_and_decode(&mut cache, &full).expect("decoded").2
        });
        let (_, kl, _) = compare_logits(&expected, &pruned_logits(model, None));
        println!("{model:?}: KL from never said: not pruned {all_kl:.3e}, pruned {kl:.3e}");
        if HYBRIDS.contains(&model) {
            let exchanged = pruned_logits(model, Some(&state));
            let (_, kl, _) = compare_logits(&expected, &exchanged);
            println!("{model:?}: pruned, with the recurrent state of never said: {kl:.3e}");
        }
        assert!(kl.is_finite() && kl > 0.0);
    }
}

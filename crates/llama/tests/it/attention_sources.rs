//! Attention rows from the softmax and from kept queries: the two sources agree.

use crate::common::{
    STORY, TinyModel, context_params, load_weights, on_gpu, tap_last_row, tiny_model_path, tokenize_chunks,
    weights,
};
use halo_core::attention::LayerReduction;
use halo_llama::attention::{LayerHeads, ReducedAttention, TapConfig, TapRows};
use halo_llama::ffi::{
    AttentionSource, BatchPart, BatchToken, ContextParams, KvKeyType, LlamaContext, LlamaToken, ModelWeights,
    QueriesFailure, SeqId,
};
use std::sync::Arc;

/// How queries are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeping {
    InPlace,
    Copied,
}

const MAIN_SEQ: SeqId = SeqId(0);
const OTHER_SEQ: SeqId = SeqId(1);

fn open(weights: &Arc<ModelWeights>, source: AttentionSource, key_type: KvKeyType) -> LlamaContext {
    let params = ContextParams { sequences: 4, attention: source, ..context_params(512, key_type) };
    let context = LlamaContext::new(weights, params).expect("enough memory");
    // A GPU need not have flash attention for heads as small as those of the small models.
    assert!(
        context.params().attention == source || on_gpu(),
        "queries do not work: {:?}",
        context.queries_failure()
    );
    context
}

/// Whether the check at load passed; if not, rows come from the softmax.
fn has_queries(context: &LlamaContext) -> bool {
    context.params().attention == AttentionSource::Queries
}

fn open_with_queries(weights: &Arc<ModelWeights>, keeping: Keeping, key_type: KvKeyType) -> LlamaContext {
    let mut context = open(weights, AttentionSource::Queries, key_type);
    context.tap().keep_queries_in_place(keeping == Keeping::InPlace);
    context
}

fn story_tokens() -> Vec<LlamaToken> {
    let chunks = tokenize_chunks(&STORY);
    chunks.concat().iter().map(|token| token.id.0.cast_signed()).collect()
}

fn items(tokens: &[LlamaToken], start: usize) -> Vec<BatchToken> {
    let item = |(n, &token): (usize, &LlamaToken)| BatchToken {
        token,
        position: (start + n) as i32,
        logits: n + 1 == tokens.len(),
    };
    tokens.iter().enumerate().map(item).collect()
}

/// Rows of a prefill in two batches and of single tokens after it.
fn rows_of(context: &mut LlamaContext, tokens: &[LlamaToken], config: &TapConfig) -> Vec<ReducedAttention> {
    let (prompt, answer) = tokens.split_at(tokens.len() - 6);
    let (first, second) = prompt.split_at(prompt.len() / 2);
    let batches = [first, second].into_iter().chain(answer.chunks(1));
    let (mut rows, mut start) = (Vec::new(), 0);
    for batch in batches {
        context.tap().configure(config.clone());
        context.decode(MAIN_SEQ, &items(batch, start)).expect("decoded");
        rows.extend(context.tap().take_rows(0));
        start += batch.len();
    }
    rows
}

fn rank(values: &[f32]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    order.iter().enumerate().for_each(|(rank, &n)| ranks[n] = rank as f64);
    ranks
}

/// Spearman's rank correlation of two rows.
fn rank_correlation(a: &[f32], b: &[f32]) -> f64 {
    let (a, b) = (rank(a), rank(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let covariance: f64 = a.iter().zip(&b).map(|(a, b)| (a - mean) * (b - mean)).sum();
    let variance: f64 = a.iter().map(|a| (a - mean) * (a - mean)).sum();
    covariance / variance
}

/// The two sources are two ways to compute the model. On a GPU their kernels differ in every layer, also in how they round.
fn least_correlation() -> f64 {
    if on_gpu() { 0.98 } else { 0.99 }
}

/// The numbers of the cells that hold a token.
fn live(row: &[f32], tokens: usize) -> &[f32] {
    assert!(row.len() >= tokens && row[tokens..].iter().all(|&a| a == 0.0), "attention on an empty cell");
    &row[..tokens]
}

fn check_agreement(name: &str, softmax: &[ReducedAttention], queries: &[ReducedAttention], tokens: usize) {
    assert_eq!(softmax.len(), queries.len(), "{name}");
    assert!(!softmax.is_empty(), "{name}");
    for (n, (softmax, queries)) in softmax.iter().zip(queries).enumerate() {
        let cells = softmax.mean.iter().rposition(|&a| a > 0.0).map_or(0, |last| last + 1);
        assert!(cells <= tokens, "{name}");
        let (a, b) = (live(&softmax.mean, cells), live(&queries.mean, cells));
        let (sum, expected): (f32, f32) = (b.iter().sum(), a.iter().sum());
        // What goes to attention sinks depends on the rounding of the model.
        let tolerance = if expected < 0.99 { 1e-3 } else { 1e-4 };
        assert!((sum - expected).abs() < tolerance, "{name}, row {n}: sum {sum}, expected {expected}");
        // Two neighbours among a few tokens that change places are more than one part in a hundred.
        let correlation = if cells < 32 { 1.0 } else { rank_correlation(a, b) };
        assert!(correlation >= least_correlation(), "{name}, row {n}: {correlation}");
        let largest = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest < 0.02, "{name}, row {n}: {largest}");
    }
}

/// Each of the small models that have attention: soft cap, sliding window, sinks, ALiBi, experts, M-RoPE, MLA and hybrids.
const ARCHITECTURES: [&str; 14] = [
    "llama",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "qwen2",
    "qwen2vl",
    "qwen3moe",
    "command-r",
    "deepseek2",
    "bloom",
    "lfm2",
    "granitehybrid",
    "falcon-h1",
    "nemotron_h",
];

#[test]
fn attention_of_queries_agrees_with_softmax_on_every_architecture() {
    let tokens = story_tokens();
    let tokens = &tokens[..120];
    for architecture in ARCHITECTURES {
        let weights = load_weights(&tiny_model_path(architecture));
        let mut softmax = open(&weights, AttentionSource::Softmax, KvKeyType::F16);
        let expected = rows_of(&mut softmax, tokens, &tap_last_row());
        for keeping in [Keeping::InPlace, Keeping::Copied] {
            let mut queries = open_with_queries(&weights, keeping, KvKeyType::F16);
            let rows = rows_of(&mut queries, tokens, &tap_last_row());
            check_agreement(&format!("{architecture}, {keeping:?}"), &expected, &rows, tokens.len());
            let in_place = queries.tap().queries_in_place();
            match keeping {
                _ if !has_queries(&queries) => assert_eq!(in_place, 0, "{architecture}"),
                Keeping::Copied => assert_eq!(in_place, 0, "{architecture}"),
                // The queries of these are no tensor of their own.
                Keeping::InPlace if architecture == "bloom" => assert_eq!(in_place, 0),
                Keeping::InPlace => assert!(in_place > 0, "{architecture}"),
            }
        }
    }
}

#[test]
fn attention_of_queries_sums_to_one_on_a_trained_model() {
    let tokens = story_tokens();
    let tokens = &tokens[..90];
    let config = TapConfig { rows: TapRows::All, ..tap_last_row() };
    for key_type in [KvKeyType::F16, KvKeyType::Q8_0] {
        let mut softmax = open(&weights(), AttentionSource::Softmax, key_type);
        let expected = rows_of(&mut softmax, tokens, &config);
        for keeping in [Keeping::InPlace, Keeping::Copied] {
            let mut queries = open_with_queries(&weights(), keeping, key_type);
            let rows = rows_of(&mut queries, tokens, &config);
            assert_eq!(rows.len(), tokens.len());
            for row in &rows {
                let sum: f32 = row.mean.iter().sum();
                assert!((sum - 1.0).abs() < 1e-4, "{sum}");
            }
            check_agreement(&format!("{key_type}, {keeping:?}"), &expected, &rows, tokens.len());
            let in_place = has_queries(&queries) && keeping == Keeping::InPlace;
            assert_eq!(queries.tap().queries_in_place() > 0, in_place, "{key_type}");
        }
    }
}

/// What needs single heads is computed from the same queries.
#[test]
fn attention_of_queries_has_max_heads_and_single_layers() {
    let tokens = story_tokens();
    let tokens = &tokens[..100];
    let heads_of = |context: &mut LlamaContext, config: &TapConfig| -> (ReducedAttention, Vec<LayerHeads>) {
        context.decode(MAIN_SEQ, &items(&tokens[..99], 0)).expect("decoded");
        context.tap().configure(config.clone());
        context.decode(MAIN_SEQ, &items(&tokens[99..], 99)).expect("decoded");
        let heads = context.tap().take_heads(0);
        (context.tap().take_rows(0).pop().expect("a row"), heads)
    };
    let base = tap_last_row();
    let configs = [
        TapConfig { max: true, ..base.clone() },
        TapConfig { full: true, ..base.clone() },
        TapConfig { layers: LayerReduction::Max, ..base.clone() },
        TapConfig { layers: LayerReduction::Last, ..base.clone() },
        TapConfig { layers: LayerReduction::Selected(vec![3, 7, 11]), ..base },
    ];
    for config in configs {
        let mut softmax = open(&weights(), AttentionSource::Softmax, KvKeyType::F16);
        let (expected, expected_heads) = heads_of(&mut softmax, &config);
        for keeping in [Keeping::InPlace, Keeping::Copied] {
            let mut queries = open_with_queries(&weights(), keeping, KvKeyType::F16);
            let (row, heads) = heads_of(&mut queries, &config);
            assert_eq!(row.max.len(), expected.max.len(), "{config:?}");
            let values = [(&expected.mean, &row.mean), (&expected.max, &row.max)];
            for (a, b) in values.into_iter().filter(|(a, _)| !a.is_empty()) {
                let correlation = rank_correlation(live(a, 100), live(b, 100));
                assert!(correlation >= 0.99, "{config:?}, {keeping:?}: {correlation}");
            }
            let shape = |heads: &[LayerHeads]| -> Vec<(usize, usize, usize)> {
                heads.iter().map(|h| (h.layer, h.cells, h.values.len())).collect()
            };
            assert_eq!(shape(&heads), shape(&expected_heads), "{config:?}");
            for (a, b) in expected_heads.iter().zip(&heads) {
                let largest = a.values.iter().zip(&b.values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(largest < if on_gpu() { 0.1 } else { 0.05 }, "layer {}: {largest}", a.layer);
            }
        }
    }
}

/// Two sequences in one batch: each row attends to the cells of its own sequence, whichever source it is from.
#[test]
fn attention_of_queries_of_several_sequences_in_one_batch() {
    let tokens = story_tokens();
    let (one, other) = (&tokens[..70], &tokens[70..130]);
    let decode = |context: &mut LlamaContext| -> [ReducedAttention; 2] {
        context.decode(MAIN_SEQ, &items(&one[..69], 0)).expect("decoded");
        context.decode(OTHER_SEQ, &items(&other[..57], 0)).expect("decoded");
        context.tap().configure_parts([(0..1, tap_last_row()), (1..4, tap_last_row())]);
        let (first, second) = (items(&one[69..], 69), items(&other[57..], 57));
        let parts =
            [BatchPart { seq: MAIN_SEQ, tokens: &first }, BatchPart { seq: OTHER_SEQ, tokens: &second }];
        context.decode_parts(&parts).expect("decoded");
        [0, 1].map(|part| context.tap().take_rows(part).pop().expect("a row"))
    };
    for model in [TinyModel::Llama, TinyModel::Gemma3, TinyModel::GptOss] {
        let expected = decode(&mut open(&model.weights(), AttentionSource::Softmax, KvKeyType::F16));
        for keeping in [Keeping::InPlace, Keeping::Copied] {
            let mut context = open_with_queries(&model.weights(), keeping, KvKeyType::F16);
            let rows = decode(&mut context);
            let in_place = has_queries(&context) && keeping == Keeping::InPlace;
            assert_eq!(context.tap().queries_in_place() > 0, in_place, "{model:?}");
            // The cells: 69 of one sequence, 57 of the other, then one and three.
            let own = |part: usize, cell: usize| match part {
                0 => cell < 69 || cell == 126,
                _ => (69..126).contains(&cell) || (127..130).contains(&cell),
            };
            for part in 0..2 {
                for row in [&expected[part], &rows[part]] {
                    let foreign = row.mean.iter().enumerate().any(|(cell, &a)| a != 0.0 && !own(part, cell));
                    assert!(!foreign, "{model:?}, {keeping:?}, part {part}");
                }
                let cells = |row: &ReducedAttention| -> Vec<f32> {
                    (0..130).filter(|&cell| own(part, cell)).map(|cell| row.mean[cell]).collect()
                };
                let correlation = rank_correlation(&cells(&expected[part]), &cells(&rows[part]));
                assert!(correlation >= 0.99, "{model:?}, {keeping:?}, part {part}: {correlation}");
            }
        }
    }
}

/// Rows are read in some steps only, and of other layers: what is kept in place stays right while llama.cpp reuses its graph.
#[test]
fn attention_of_queries_is_right_after_steps_without_rows() {
    let tokens = story_tokens();
    let configs = |n: usize| match n % 4 {
        0 => tap_last_row(),
        1 => TapConfig::off(),
        2 => TapConfig { layers: LayerReduction::Selected(vec![1, 4]), ..tap_last_row() },
        _ => TapConfig { layers: LayerReduction::Last, ..tap_last_row() },
    };
    let decode = |context: &mut LlamaContext| -> Vec<ReducedAttention> {
        context.decode(MAIN_SEQ, &items(&tokens[..60], 0)).expect("decoded");
        let step = |n: usize| {
            context.tap().configure(configs(n));
            context.decode(MAIN_SEQ, &items(&tokens[60 + n..61 + n], 60 + n)).expect("decoded");
            context.tap().take_rows(0)
        };
        (0..24).flat_map(step).collect()
    };
    let expected = decode(&mut open(&weights(), AttentionSource::Softmax, KvKeyType::F16));
    assert_eq!(expected.len(), 18);
    for keeping in [Keeping::InPlace, Keeping::Copied] {
        let rows = decode(&mut open_with_queries(&weights(), keeping, KvKeyType::F16));
        check_agreement(&format!("{keeping:?}"), &expected, &rows, 84);
    }
}

/// Keeping queries changes no result: the logits are those of flash attention without a callback, to the last bit.
#[test]
fn logits_are_the_same_with_and_without_kept_queries() {
    let tokens = story_tokens();
    let logits = |mut context: LlamaContext| {
        rows_of(&mut context, &tokens[..90], &tap_last_row());
        context.logits().iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
    };
    for model in [TinyModel::Llama, TinyModel::Gemma3, TinyModel::Lfm2] {
        let weights = model.weights();
        let expected = logits(open(&weights, AttentionSource::Nowhere, KvKeyType::F16));
        assert!(!expected.is_empty());
        // Without flash attention for heads of this size, the other context reads the softmax and computes other bits.
        if !has_queries(&open(&weights, AttentionSource::Queries, KvKeyType::F16)) {
            continue;
        }
        for keeping in [Keeping::InPlace, Keeping::Copied] {
            let found = logits(open_with_queries(&weights, keeping, KvKeyType::F16));
            assert!(found == expected, "{model:?}, {keeping:?}");
        }
    }
}

/// Where the check at load fails, attention comes from the softmax, in a context that is as good as one opened with it.
#[test]
fn failed_check_of_queries_falls_back_to_softmax() {
    let tokens = story_tokens();
    let weights = TinyModel::Llama.weights();
    let params = |attention| ContextParams { sequences: 4, attention, ..context_params(512, KvKeyType::F16) };
    let mut fallen = LlamaContext::new_with_check(&weights, params(AttentionSource::Queries), |_| {
        Err(QueriesFailure::NotFinite)
    })
    .expect("enough memory");
    assert_eq!(fallen.params().attention, AttentionSource::Softmax);
    assert_eq!(fallen.queries_failure(), Some(QueriesFailure::NotFinite));
    let mut softmax = open(&weights, AttentionSource::Softmax, KvKeyType::F16);
    assert_eq!(softmax.queries_failure(), None);
    let rows = rows_of(&mut fallen, &tokens[..90], &tap_last_row());
    assert_eq!(rows, rows_of(&mut softmax, &tokens[..90], &tap_last_row()));
    assert!(!rows.is_empty());
}

/// The check leaves nothing behind: cells are given out from the first one.
#[test]
fn check_of_queries_leaves_an_empty_context() {
    let tokens = story_tokens();
    for architecture in ARCHITECTURES {
        let weights = load_weights(&tiny_model_path(architecture));
        let first_cells = |source| {
            let mut context = open(&weights, source, KvKeyType::F16);
            context.tap().configure(TapConfig { cells: true, ..tap_last_row() });
            context.decode(MAIN_SEQ, &items(&tokens[..20], 0)).expect("decoded");
            context.tap().batch_cells().to_vec()
        };
        assert_eq!(
            first_cells(AttentionSource::Queries),
            first_cells(AttentionSource::Softmax),
            "{architecture}"
        );
    }
}

/// With flash attention the values of the cells are laid out in another way: such cells are refused, and not misread.
#[test]
fn saved_cells_of_the_other_source_are_refused() {
    let tokens = story_tokens();
    for (from, to) in [
        (AttentionSource::Softmax, AttentionSource::Queries),
        (AttentionSource::Queries, AttentionSource::Softmax),
    ] {
        let mut saved = open(&weights(), from, KvKeyType::F16);
        saved.decode(MAIN_SEQ, &items(&tokens[..20], 0)).expect("decoded");
        let state = saved.save_state(MAIN_SEQ);
        let mut other = open(&weights(), to, KvKeyType::F16);
        assert!(other.restore_state(OTHER_SEQ, &state).is_err());
        let mut same = open(&weights(), from, KvKeyType::F16);
        assert!(same.restore_state(OTHER_SEQ, &state).is_ok());
    }
}

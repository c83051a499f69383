//! Weights and context of the real model: tokens, attention rows, and saving and restoring KV cells.

use crate::common::{context_params, model_path, weights};
use halo_core::attention::LayerReduction;
use halo_llama::attention::{TapConfig, TapRows};
use halo_llama::ffi::{
    BatchToken, ContextParams, KvKeyType, LlamaContext, LlamaError, LlamaPos, LlamaToken, ModelWeights, SeqId,
};
use halo_llama::gguf;

const MAIN_SEQ: SeqId = SeqId(0);
const SCRATCH_SEQ: SeqId = SeqId(1);

fn context() -> LlamaContext {
    LlamaContext::new(&weights(), ContextParams { sequences: 4, ..context_params(1024, KvKeyType::F16) })
        .expect("enough memory")
}

/// Decodes tokens from a position on; returns the logits of the last.
fn decode_tokens(context: &mut LlamaContext, seq: SeqId, tokens: &[LlamaToken], from: LlamaPos) -> Vec<f32> {
    for (batch, start) in tokens.chunks(256).zip((from..).step_by(256)) {
        let end = from as usize + tokens.len() - 1;
        let item = |(i, &token): (usize, &LlamaToken)| {
            let position = start + i as LlamaPos;
            BatchToken { token, position, logits: position as usize == end }
        };
        let items: Vec<BatchToken> = batch.iter().enumerate().map(item).collect();
        context.decode(seq, &items).expect("decoded");
    }
    context.logits().to_vec()
}

const STORY: &str = "There is a gun on the wall above the fireplace, an old one. It rained from morning on, the guests came \
                     late and wet, and nobody spoke of the will. In the third act the brother takes the gun from the wall.";

#[test]
fn tokenize_round_trips_text() {
    let weights = weights();
    for text in
        [STORY, "谢谢 🌱 naïve\n\n```rust\nfn main() {}\n```", "", " ", "<|im_start|>user\nHi<|im_end|>\n"]
    {
        let bytes: Vec<u8> =
            weights.tokenize(text, false).iter().flat_map(|&t| weights.token_bytes(t, false)).collect();
        assert_eq!(String::from_utf8(bytes).expect("text"), text, "as plain text");
    }
    let special = weights.tokenize("<|im_start|>user\nHi<|im_end|>", true);
    assert!(
        weights.is_control(special[0]) && weights.is_end_of_generation(*special.last().expect("some")),
        "{special:?}"
    );
    assert!(
        weights.token_bytes(special[0], false).is_empty()
            && weights.token_bytes(special[0], true) == b"<|im_start|>"
    );
    assert!(weights.chat_template().is_some_and(|t| t.contains("im_start")));
    assert_eq!(
        (weights.layer_count(), weights.kv_edit_unsupported(), weights.trained_context()),
        (30, None, 8192)
    );
    assert!(weights.token_bytes(-1, true).is_empty() && weights.token_bytes(i32::MAX, true).is_empty());
}

#[test]
fn attention_rows_sum_to_one_and_do_not_change_logits() {
    let tokens = weights().tokenize(STORY, false);
    let (expected, mut tapped) = (decode_tokens(&mut context(), MAIN_SEQ, &tokens, 0), context());
    let reductions = [
        (LayerReduction::Mean, true),
        (LayerReduction::Last, false),
        (LayerReduction::Selected(vec![3, 7]), true),
    ];
    for (layers, max) in reductions {
        let _ = tapped.seq_rm(MAIN_SEQ, -1, -1);
        tapped.tap().configure(TapConfig {
            rows: TapRows::All,
            layers: layers.clone(),
            max,
            full: false,
            cells: true,
            visible_cells: true,
        });
        assert_eq!(
            decode_tokens(&mut tapped, MAIN_SEQ, &tokens, 0),
            expected,
            "the tap does not change logits"
        );
        let cells: Vec<i64> = tapped.tap().batch_cells().to_vec();
        assert_eq!(cells.len(), tokens.len());
        let rows = tapped.tap().take_rows(0);
        assert_eq!(rows.len(), tokens.len(), "{layers:?}");
        for (n, row) in rows.iter().enumerate() {
            let sum: f32 = row.mean.iter().sum();
            assert!((sum - 1.0).abs() < 1e-5, "{layers:?}: the row of token {n} sums to {sum}");
            let later: f32 = cells[n + 1..].iter().map(|&c| row.mean[c as usize]).sum();
            assert_eq!(later, 0.0, "attention is causal");
            assert_eq!(row.max.len(), if max { row.mean.len() } else { 0 });
        }
    }
    tapped.tap().configure(TapConfig::off());
    let _ = tapped.seq_rm(MAIN_SEQ, -1, -1);
    decode_tokens(&mut tapped, MAIN_SEQ, &tokens, 0);
    assert!(tapped.tap().take_rows(0).is_empty());
}

/// Cells that are saved, freed and restored at their own positions: the next logits are the same to the last bit.
#[test]
fn state_save_and_restore_is_bit_exact() {
    let tokens = weights().tokenize(STORY, false);
    let (story, question) = tokens.split_at(tokens.len() - 1);
    let mut untouched = context();
    decode_tokens(&mut untouched, MAIN_SEQ, story, 0);
    let expected = decode_tokens(&mut untouched, MAIN_SEQ, question, story.len() as LlamaPos);
    let mut context = context();
    decode_tokens(&mut context, MAIN_SEQ, story, 0);
    let (start, end) = (10, 30);
    context.seq_cp(MAIN_SEQ, SCRATCH_SEQ, start, end);
    let saved = context.save_state(SCRATCH_SEQ);
    assert!(context.seq_rm(SCRATCH_SEQ, -1, -1) && context.seq_rm(MAIN_SEQ, start, end));
    // A fork that decodes meanwhile leaves no trace.
    context.seq_cp(MAIN_SEQ, SeqId(2), -1, -1);
    let without = decode_tokens(&mut context, SeqId(2), question, story.len() as LlamaPos);
    assert!(context.seq_rm(SeqId(2), -1, -1));
    assert_ne!(without, expected, "the paragraph matters");
    context.restore_state(SCRATCH_SEQ, &saved).expect("restored");
    context.seq_cp(SCRATCH_SEQ, MAIN_SEQ, -1, -1);
    assert!(context.seq_rm(SCRATCH_SEQ, -1, -1));
    assert_eq!(decode_tokens(&mut context, MAIN_SEQ, question, story.len() as LlamaPos), expected);
    assert!(matches!(
        context.restore_state(SCRATCH_SEQ, &saved[..saved.len() / 2]),
        Err(LlamaError::StateRestore(_))
    ));
}

#[test]
fn context_refuses_invalid_params_and_tokens() {
    let weights = weights();
    let params = ContextParams { batch: 64, sequences: 1, ..context_params(9000, KvKeyType::F16) };
    assert!(matches!(
        LlamaContext::new(&weights, params),
        Err(LlamaError::ContextTooLarge { requested: 9000, max: 8192 })
    ));
    let mut context = context();
    assert!(context.decode(MAIN_SEQ, &[]).is_err());
    assert!(context.decode(MAIN_SEQ, &[BatchToken { token: 1 << 30, position: 0, logits: true }]).is_err());
    assert!(context.decode(MAIN_SEQ, &[BatchToken { token: -5, position: 0, logits: true }]).is_err());
}

/// The check of the header refuses damaged headers and random bytes, before llama.cpp sees them.
#[test]
fn gguf_damaged_files_are_refused() {
    let good = std::fs::read(model_path()).expect("the model");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut state = 7u64;
    let mut next_below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit.max(1)
    };
    for n in 0..300 {
        let len = if n % 3 == 0 { next_below(good.len().min(1 << 21)) } else { 1 << 16 };
        let mut bytes = good[..len].to_vec();
        for _ in 0..next_below(8) {
            let at = next_below(len.min(4096));
            bytes[at] = next_below(256) as u8;
        }
        std::fs::write(&path, &bytes).expect("written");
        // All of them are shorter than their tensors.
        assert!(gguf::read_header(&path).is_err());
        assert!(matches!(ModelWeights::load(&path, 0), Err(LlamaError::File { .. })));
    }
    for noise in [&b""[..], b"GGUF", b"GGUF\x03\0\0\0", &[0; 4096], b"not a model at all"] {
        std::fs::write(&path, noise).expect("written");
        assert!(matches!(ModelWeights::load(&path, 0), Err(LlamaError::File { .. })));
    }
    let intact = gguf::read_header(&model_path()).expect("an intact header");
    assert_eq!(intact.metadata.get("general.architecture"), Some(&gguf::GgufValue::Text("llama".into())));
}

//! Helpers of the tests on the real model.

use halo_core::model::{StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::{Position, TokenId};
use halo_llama::attention::{ReducedAttention, TapConfig, TapRows};
use halo_llama::ffi::{AttentionSource, ContextParams, KvKeyType, LlamaContext, LlamaToken, ModelWeights};
use halo_llama::kv_archive::{KvArchive, KvArchiveLimits};
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheError, KvCacheMode, WindowSync, sequence_count};
use halo_llama::token_key::token_keys;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// A file that `scripts/models` downloads or writes, or the one that an environment variable names.
fn test_model(variable: &str, file: &str) -> PathBuf {
    let configured = std::env::var_os(variable).map(PathBuf::from);
    let path = configured
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models").join(file));
    assert!(path.exists(), "{} is missing: `scripts/models` creates it", path.display());
    path
}

pub fn model_path() -> PathBuf {
    test_model("HALO_TEST_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The small model of an architecture.
pub fn tiny_model_path(architecture: &str) -> PathBuf {
    test_model("", &format!("tiny-{architecture}.gguf"))
}

/// A small model with random weights and the tokenizer of SmolLM2: for tests of mechanics it is as good and much faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TinyModel {
    /// Attention over all tokens in every layer. With `HALO_TEST_THOROUGH` it is SmolLM2.
    Llama,
    /// A sliding window of 48 tokens in five of six layers.
    Gemma3,
    /// A sliding window of 48 tokens in every second layer, attention sinks and experts.
    GptOss,
    /// A hybrid: convolutions with a recurrent state in four of six layers.
    Lfm2,
    /// A hybrid: state space layers (Mamba 2) in four of six layers, and attention without position encoding.
    GraniteHybrid,
    /// Positions of several parts (M-RoPE), which llama.cpp cannot shift.
    Qwen2Vl,
    /// A hybrid with M-RoPE: a gated delta net in four of six layers.
    Qwen35,
    /// A hybrid whose attention layers have a sliding window: its cells are not edited.
    Lfm2Sliding,
}

impl TinyModel {
    pub fn path(self) -> PathBuf {
        match self {
            TinyModel::Llama if std::env::var_os("HALO_TEST_THOROUGH").is_some() => model_path(),
            TinyModel::Llama => test_model("HALO_TEST_TINY_MODEL", "tiny-llama.gguf"),
            TinyModel::Gemma3 => test_model("HALO_TEST_TINY_GEMMA3", "tiny-gemma3.gguf"),
            TinyModel::GptOss => test_model("HALO_TEST_TINY_GPT_OSS", "tiny-gpt-oss.gguf"),
            TinyModel::Lfm2 => test_model("HALO_TEST_TINY_LFM2", "tiny-lfm2.gguf"),
            TinyModel::GraniteHybrid => {
                test_model("HALO_TEST_TINY_GRANITE_HYBRID", "tiny-granitehybrid.gguf")
            }
            TinyModel::Qwen2Vl => test_model("HALO_TEST_TINY_QWEN2VL", "tiny-qwen2vl.gguf"),
            TinyModel::Qwen35 => test_model("HALO_TEST_TINY_QWEN35", "tiny-qwen35.gguf"),
            TinyModel::Lfm2Sliding => test_model("HALO_TEST_TINY_LFM2_SLIDING", "tiny-lfm2-sliding.gguf"),
        }
    }

    /// The weights, loaded once.
    pub fn weights(self) -> Arc<ModelWeights> {
        static LOADED: Mutex<BTreeMap<TinyModel, Arc<ModelWeights>>> = Mutex::new(BTreeMap::new());
        let mut loaded = LOADED.lock();
        Arc::clone(loaded.entry(self).or_insert_with(|| load_weights(&self.path())))
    }

    pub fn context(self, tokens: u32) -> LlamaContext {
        context_of(&self.weights(), tokens)
    }

    /// A KV cache for several conversations, with an archive in RAM.
    pub fn kv_cache_with_lanes(self, tokens: u32, lanes: u32) -> KvCache {
        let params =
            ContextParams { sequences: sequence_count(lanes), ..context_params(tokens, KvKeyType::F16) };
        kv_cache_of(LlamaContext::new(&self.weights(), params).expect("enough memory"))
    }

    /// A KV cache with an archive in RAM.
    pub fn kv_cache(self, tokens: u32) -> KvCache {
        kv_cache_of(self.context(tokens))
    }

    /// Whether an attention row has the right sum: 1, or less where a part goes to attention sinks.
    pub fn is_right_sum(self, row: &ReducedAttention) -> bool {
        let sum: f32 = row.mean.iter().sum();
        if self == TinyModel::GptOss { sum > 0.1 && sum < 1.0 } else { (sum - 1.0).abs() < 1e-5 }
    }
}

/// Where attention comes from in the tests that do not compare sources: `HALO_TEST_ATTENTION`, or the softmax.
pub fn attention_source() -> AttentionSource {
    let named = std::env::var("HALO_TEST_ATTENTION").ok();
    named.map_or(AttentionSource::Softmax, |name| name.parse().expect("softmax or queries"))
}

/// Whether the tests run on a GPU.
pub fn on_gpu() -> bool {
    std::env::var_os("HALO_TEST_GPU_LAYERS").is_some()
}

/// How far logits of the same tokens in other batches may be apart (KL): a GPU chooses its kernels by the size of a batch, and they
/// round differently.
pub fn rounding_kl() -> f64 {
    if on_gpu() { 1e-4 } else { 1e-6 }
}

pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Whether logits are the same to the last bit, or on a GPU as far as its rounding in other batches allows.
pub fn same_but_for_batches(expected: &[f32], logits: &[f32]) -> bool {
    let (_, kl, same_top) = compare_logits(expected, logits);
    same_bits(expected, logits) || (on_gpu() && same_top && kl < rounding_kl())
}

/// A model with `HALO_TEST_GPU_LAYERS` layers on a GPU.
pub fn load_weights(path: &Path) -> Arc<ModelWeights> {
    let layers = std::env::var("HALO_TEST_GPU_LAYERS").ok().and_then(|n| n.parse().ok());
    Arc::new(ModelWeights::load(path, layers.unwrap_or(0)).expect("the model loads"))
}

/// The model, loaded once; `HALO_TEST_GPU_LAYERS` layers of it on a GPU.
pub fn weights() -> Arc<ModelWeights> {
    static WEIGHTS: LazyLock<Arc<ModelWeights>> = LazyLock::new(|| load_weights(&model_path()));
    Arc::clone(&WEIGHTS)
}

fn context_of(weights: &Arc<ModelWeights>, tokens: u32) -> LlamaContext {
    LlamaContext::new(weights, context_params(tokens, KvKeyType::F16)).expect("enough memory")
}

pub fn context_params(tokens: u32, key_type: KvKeyType) -> ContextParams {
    let attention = attention_source();
    ContextParams { tokens, batch: 256, threads: 1, sequences: sequence_count(1), key_type, attention }
}

/// A KV cache whose keys have a type, with an archive in RAM.
pub fn open_kv_cache_with_keys(tokens: u32, key_type: KvKeyType) -> KvCache {
    kv_cache_of(LlamaContext::new(&weights(), context_params(tokens, key_type)).expect("enough memory"))
}

pub fn context(tokens: u32) -> LlamaContext {
    context_of(&weights(), tokens)
}

fn kv_cache_of(context: LlamaContext) -> KvCache {
    let limits = KvArchiveLimits { ram: 1 << 30, disk: 0, folder: None };
    KvCache::new(context, KvArchive::open(limits, 1), KvCacheMode::EditCells)
}

/// A KV cache with an archive in RAM.
pub fn open_kv_cache(tokens: u32) -> KvCache {
    kv_cache_of(context(tokens))
}

/// A conversation; each message is one chunk.
pub const STORY: [&str; 7] = [
    "<|im_start|>system\nYou are a playwright.<|im_end|>\n",
    "<|im_start|>user\nThere is a gun on the wall above the fireplace, an old one, and nobody has touched it since the war.<|im_end|>\n",
    "<|im_start|>assistant\nA gun on the wall in the first act. Then it must be fired before the last one.<|im_end|>\n",
    "<|im_start|>user\nTell me about the weather on the day of the wedding, the guests and the old house by the sea.<|im_end|>\n",
    "<|im_start|>assistant\nIt rained from morning on. The guests came late and wet, and nobody spoke of the will.<|im_end|>\n",
    "<|im_start|>user\nAnd who is the man that waits in the hall?<|im_end|>\n",
    "<|im_start|>assistant\nHe is the brother",
];

/// Chunks with consecutive timeline positions.
pub fn tokenize_chunks(texts: &[&str]) -> Vec<Vec<WindowToken>> {
    let weights = weights();
    let mut position = 0;
    let chunk = |text: &&str| {
        let tokens = weights.tokenize(text, true);
        let window_token = |(n, &token): (usize, &LlamaToken)| WindowToken {
            position: Some(Position(position + n as u64)),
            offset: 0,
            id: TokenId(token.cast_unsigned()),
            chunk_start: n == 0,
        };
        let chunk: Vec<WindowToken> = tokens.iter().enumerate().map(window_token).collect();
        position += chunk.len() as u64;
        chunk
    };
    texts.iter().map(chunk).collect()
}

/// Records the attention row of the last token of a batch.
pub fn tap_last_row() -> TapConfig {
    TapConfig { rows: TapRows::Last, cells: true, ..TapConfig::off() }
}

/// Syncs the cache with a window and prefills the rest; returns the sync, the attention row and the logits of the last token.
pub fn sync_and_decode(
    cache: &mut KvCache,
    window: &[WindowToken],
) -> Result<(WindowSync, ReducedAttention, Vec<f32>), KvCacheError> {
    let sync = cache.sync_window("main", window, 1, &mut |_, _| StepFlow::Continue)?;
    let row = decode_from(cache, window, sync.prefill_from)?;
    Ok((sync, row, cache.context().logits().to_vec()))
}

/// Prefills a window from a slot on; returns the attention row of the last token.
pub fn decode_from(
    cache: &mut KvCache,
    window: &[WindowToken],
    from: usize,
) -> Result<ReducedAttention, KvCacheError> {
    let keys = token_keys(window).expect("the window is in order");
    let tokens: Vec<_> = (from..window.len()).map(|n| InputToken::new(keys[n], &window[n])).collect();
    let mut row = ReducedAttention::default();
    for batch in tokens.chunks(256) {
        row = cache.decode(batch, tap_last_row())?.pop().expect("a row");
    }
    Ok(row)
}

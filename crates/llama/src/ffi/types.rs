//! The numbers of llama.cpp's C API.

/// The id of a token in the model's vocabulary (`llama_token`).
pub type LlamaToken = i32;

/// A position that RoPE is computed from (`llama_pos`). Unlike a timeline position it changes when cells are shifted.
pub type LlamaPos = i32;

/// The id of a sequence of a context (`llama_seq_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeqId(pub i32);

/// The type of the keys in the KV cache (`type_k`). Values are always f16: llama.cpp quantises them only with flash attention,
/// which computes no softmax that could be read.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "snake_case")]
pub enum KvKeyType {
    #[default]
    F16,
    #[strum(serialize = "q8_0")]
    Q8_0,
    #[strum(serialize = "q4_0")]
    Q4_0,
}

impl KvKeyType {
    /// The values of a head are quantised in blocks of this size.
    pub(crate) fn block_size(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::Q8_0 | Self::Q4_0 => 32,
        }
    }
}

/// Where attention rows come from.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "snake_case")]
pub enum AttentionSource {
    /// The softmax that llama.cpp computes without flash attention.
    #[default]
    Softmax,
    /// Nowhere: llama.cpp computes with flash attention and without a callback, at its own speed. For measurements only.
    Nowhere,
    /// The queries and the keys, while llama.cpp computes with flash attention. The values of the KV cache are laid out in
    /// another way, so cells that were saved with one source are not restored with the other.
    Queries,
}

/// What the check at load found wrong with rows of attention from queries: then they come from the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueriesFailure {
    #[error("llama.cpp could not compute the check")]
    Decode,
    #[error("flash attention of some layers is not computed where their keys are")]
    Layers,
    #[error("no row of attention came out")]
    NoRow,
    #[error("a row of attention has numbers that are infinite or not numbers")]
    NotFinite,
    #[error("a row of attention does not add up to 1")]
    Sum,
    #[error("the cells that a token attends to could not be read")]
    Cells,
    #[error("a row of attention is on cells that the token cannot attend to")]
    ForeignCell,
}

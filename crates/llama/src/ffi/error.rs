//! The error of loading and running a model.

use super::types::KvKeyType;
use crate::gguf::GgufError;
use halo_core::ErrorKind;

#[derive(Debug, thiserror::Error)]
pub enum LlamaError {
    /// The GGUF header fails its checks; llama.cpp has not seen the file.
    #[error("{path}: {why}")]
    File { path: String, why: GgufError },
    /// llama.cpp refuses the file, for example because it does not know the architecture.
    #[error("llama.cpp cannot load {path}: {why}; download it again, or choose another model")]
    Load { path: String, why: String },
    #[error(
        "model.context of {requested} tokens is more than the {max} that the model was trained for; lower it"
    )]
    ContextTooLarge { requested: u32, max: u32 },
    #[error("model.context of {requested} tokens is too small; set it to {min} or more")]
    ContextTooSmall { requested: u32, min: u32 },
    #[error(
        "llama.cpp cannot create a context of {0} tokens, probably for lack of memory; set model.context lower"
    )]
    ContextCreation(u32),
    #[error(
        "{need} MiB of memory are needed and {free} MiB are free; close other programs, set model.context lower, or use a smaller model"
    )]
    OutOfMemory { need: u64, free: u64 },
    #[error(
        "kv.type {key_type} needs attention heads of a multiple of {} values, and those of the model have {head_size}; set kv.type to f16",
        key_type.block_size()
    )]
    KeyType { head_size: u32, key_type: KvKeyType },
    #[error("the computation was cancelled")]
    Cancelled,
    /// No cells are free for the tokens of a batch.
    #[error("the KV cache has no free cells")]
    CacheFull,
    #[error("decoding failed: {0}")]
    Decode(String),
    #[error("saved KV cells cannot be restored: {0}")]
    StateRestore(&'static str),
}

impl LlamaError {
    /// Whether loading may succeed with less memory. llama.cpp does not say why it cannot load a file.
    #[must_use]
    pub fn may_be_short_memory(&self) -> bool {
        matches!(self, Self::Load { .. } | Self::ContextCreation(_) | Self::OutOfMemory { .. })
    }

    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { why, .. } => why.kind(),
            Self::Load { .. }
            | Self::ContextTooLarge { .. }
            | Self::ContextTooSmall { .. }
            | Self::KeyType { .. } => ErrorKind::InvalidInput,
            Self::ContextCreation(_) | Self::OutOfMemory { .. } => ErrorKind::Unavailable,
            Self::Cancelled => ErrorKind::Cancelled,
            Self::CacheFull | Self::Decode(_) => ErrorKind::Internal,
            Self::StateRestore(_) => ErrorKind::Damaged,
        }
    }
}

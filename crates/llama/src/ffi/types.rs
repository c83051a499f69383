//! The numbers of llama.cpp's C API.

/// The id of a token in the model's vocabulary (`llama_token`).
pub type LlamaToken = i32;

/// A position that RoPE is computed from (`llama_pos`). Unlike a timeline position it changes when cells are shifted.
pub type LlamaPos = i32;

/// The id of a sequence of a context (`llama_seq_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeqId(pub i32);

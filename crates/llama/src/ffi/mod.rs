//! Safe types over the C API of llama.cpp. All `unsafe` code of the workspace is in this folder.
//!
//! [`ModelWeights`] is a `llama_model`, [`LlamaContext`] a `llama_context` with its KV cache, [`SamplerChain`] a chain
//! of samplers. The words are llama.cpp's own: a *cell* of the KV cache holds key and value of one token, a *position*
//! is the number that the rotary embedding (RoPE) of the key is computed from, and a *sequence* is a set of cells that
//! attend to each other.
//!
//! This folder knows nothing of windows, chunks or the timeline: [`kv_cache`](crate::kv_cache) does.

mod canceller;
mod candidates;
mod context;
mod device;
pub(crate) mod error;
mod log;
pub(crate) mod node;
pub(crate) mod query_capture;
mod recurrent;
mod row_graph;
mod sampler;
pub(crate) mod types;
mod weights;

pub use canceller::JobCanceller;
pub use context::{BatchPart, BatchToken, ContextParams, LlamaContext};
pub use device::free_gpu_bytes;
pub use error::LlamaError;
pub use sampler::SamplerChain;
pub use types::{AttentionSource, KvKeyType, LlamaPos, LlamaToken, QueriesFailure, SeqId};
pub use weights::ModelWeights;

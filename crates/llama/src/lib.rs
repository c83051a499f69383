//! The local model on llama.cpp.
//!
//! - [`model`]: implements `halo_core`'s `Model` trait; one thread owns the context and generates many answers in one batch.
//! - [`kv_cache`]: keeps the KV cache equal to the context window: saves, restores, shifts and recomputes cells.
//! - [`kv_archive`]: KV cells of pruned chunks, in RAM and on disk.
//! - [`self_test`]: whether KV cells of a model can be edited, by trying it.
//! - [`source_speed`]: where attention is read the fastest, by measuring it.
//! - [`attention`]: attention rows of all layers, read from the compute graph of any unpatched GGUF model.
//! - [`gpu_layers`]: how many layers fit a GPU.
//! - [`ffi`]: the only foreign code and the only `unsafe` of the workspace.
//!
//! The crate does not decide what is pruned or resurrected: it is given a window and follows it.

/// The version of llama.cpp. Another version may compute other cells from the same file.
pub const ENGINE_VERSION: &str = "llama-cpp-sys-2 0.1.160";

pub mod attention;
mod batch_loop;
pub mod cells;
pub mod chat_template;
pub mod ffi;
mod fingerprint;
pub mod gbnf;
mod generate;
pub mod gguf;
pub mod gpu_layers;
pub mod grammar;
mod job_queue;
pub mod kv_archive;
pub mod kv_cache;
pub mod layout;
mod logprobs;
pub mod model;
mod open_context;
pub mod self_test;
pub mod source_speed;
pub mod system_memory;
pub mod template_runner;
pub mod token_key;
pub mod token_text;
mod tool_grammar;
mod tool_template;

#[cfg(debug_assertions)]
pub use batch_loop::planted;

//! The local model on llama.cpp.
//!
//! - [`model`]: implements `halo_core`'s `Model` trait; one thread owns the context.
//! - [`kv_cache`]: keeps the KV cache equal to the context window: saves, restores, shifts and recomputes cells.
//! - [`kv_archive`]: KV cells of pruned chunks, in RAM and on disk.
//! - [`attention`]: attention rows of all layers, read from the compute graph of any unpatched GGUF model.
//! - [`ffi`]: the only foreign code and the only `unsafe` of the workspace.
//!
//! The crate does not decide what is pruned or resurrected: it is given a window and follows it.

pub mod attention;
pub mod cells;
pub mod chat_template;
pub mod ffi;
pub mod gbnf;
mod generate;
pub mod gguf;
pub mod grammar;
pub mod kv_archive;
pub mod kv_cache;
pub mod layout;
mod logprobs;
pub mod model;
pub mod system_memory;
pub mod template_runner;
pub mod token_key;
pub mod token_text;
mod tool_grammar;
mod tool_template;

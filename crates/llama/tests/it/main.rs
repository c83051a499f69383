//! All integration tests of this crate, in one binary.

mod attention_sources;
mod batch;
mod chat_templates;
mod common;
mod damaged_gguf;
mod generate;
mod hybrid_model;
mod kv_cache;
mod kv_cache_fuzz;
mod kv_cache_hybrid;
mod kv_cache_multi_rope;
mod kv_cache_property;
mod long_runs;
mod model;
mod samplers;
mod self_test;

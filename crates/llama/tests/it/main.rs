//! All integration tests of this crate, in one binary.

mod common;
mod damaged_gguf;
mod generate;
mod kv_cache;
mod kv_cache_fuzz;
mod kv_cache_property;
mod model;
mod samplers;

//! Test doubles of the traits: a model with scripted answers, an embedder that hashes words, a store in memory,
//! and a store that fails on demand.

mod failing_store;
mod memory_store;
mod model;

pub use failing_store::FailingStore;
pub use memory_store::InMemoryStore;
pub use model::{HashEmbedder, RecordedPrompt, ScriptedAnswer, ScriptedAttention, ScriptedModel};

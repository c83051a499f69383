//! The KV cache follows the context window: after a sync it holds exactly the window's tokens, cell for token.
//!
//! [`KvCache::sync_window`] compares the window with the cells. Cells of pruned tokens are saved to the
//! [KV archive](crate::kv_archive) and freed. Cells of resurrected tokens are restored at the position that they were
//! saved at. Tokens whose cells are lost are recomputed in a fork over the tokens before them. New tokens at the end of
//! the window are left to be prefilled by the caller with [`KvCache::decode`].
//!
//! Pruning leaves holes in the RoPE positions. They stay open, so nothing is shifted and results are the same to the last
//! bit, until positions run out: then compaction closes all holes with a K-shift ([`layout`](crate::layout)).
//!
//! The cache holds a few conversations at a time, each in a lane; the others are in the archive. It does not choose what is
//! pruned, and it generates no text.
//!
//! - `cache`: the state, and decoding.
//! - `lane`: several conversations that share the cells, and eviction.
//! - `plan`: compares a window with cache and archive. Changes nothing.
//! - `sync`: carries the plan out.
//! - `edit`: the single operations: save, remove, restore, shift, recompute, compact.
//! - `fork`: a second sequence over the same cells, for side tasks.
//! - `recurrent`: the recurrent state of a hybrid model, beside its cells; `history`: which tokens it has read.

mod cache;
mod edit;
mod error;
mod fork;
mod history;
mod lane;
mod plan;
mod recurrent;
mod sync;
mod window;

pub use cache::{DecodedLane, InputToken, KvCache, KvCacheMode, LaneBatch, TableChecks};
pub use error::KvCacheError;
pub use lane::{LaneId, sequence_count};
pub use sync::WindowSync;

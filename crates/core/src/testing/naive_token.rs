//! A token as one record, as the founding documents describe it. The naive timeline consists of these, and benches
//! compare with them.

use crate::token::ChunkId;

/// One token.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of the founding documents' token record")]
pub struct NaiveToken {
    pub chunk: ChunkId,
    pub brightness: f32,
    pub votes: u64,
    pub mass: f64,
    pub exposures: u64,
    pub pruned: bool,
    pub deleted: bool,
    pub pinned: bool,
    pub template: bool,
}

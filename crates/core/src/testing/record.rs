//! The token record of the founding documents, one object for each token: what the twin is made of, and what the
//! benches compare with.

use crate::token::ChunkId;

/// One token.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of the founding documents' token record")]
pub struct Tok {
    pub chunk: ChunkId,
    pub brightness: f32,
    pub votes: u64,
    pub mass: f64,
    pub looks: u64,
    pub dead: bool,
    pub gone: bool,
    pub pinned: bool,
    pub frame: bool,
}

//! A chunk's row in the timeline.

use super::TimelineError;
use crate::chunk_body::ChunkBody;
use crate::token::{ChunkId, Position};

/// The row of a chunk. Its tokens are at the positions `start .. start + len`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Chunk {
    pub id: ChunkId,
    pub pinned: bool,
    pub start: Position,
    pub len: u32,
    /// How many of the tokens are live.
    pub live: u32,
    /// How many of the tokens are deleted.
    pub deleted: u32,
    pub body: BodyState,
}

/// Whether the tokens of a chunk are in memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BodyState {
    Loaded(Box<ChunkBody>),
    /// The checksum of a body that only the store has. The empty row of a merged chunk is unloaded too.
    Unloaded(u64),
}

impl Chunk {
    pub(crate) fn loaded_body(&self) -> Option<&ChunkBody> {
        match &self.body {
            BodyState::Loaded(body) => Some(body),
            BodyState::Unloaded(_) => None,
        }
    }

    /// The checksum of the body, loaded or not.
    pub(super) fn checksum(&self) -> u64 {
        match &self.body {
            BodyState::Loaded(body) => body.checksum(),
            BodyState::Unloaded(checksum) => *checksum,
        }
    }

    /// Checks that a body belongs to this row: by its counts, and by `checksum` where that is known.
    pub(crate) fn check_body(&self, body: &ChunkBody, checksum: Option<u64>) -> Result<(), TimelineError> {
        if body.len() != self.len as usize || body.live_and_deleted() != (self.live, self.deleted) {
            return Err(TimelineError::BodyCount(self.id));
        }
        if checksum.is_some_and(|checksum| checksum != body.checksum()) {
            return Err(TimelineError::BodyChecksum(self.id));
        }
        Ok(())
    }
}

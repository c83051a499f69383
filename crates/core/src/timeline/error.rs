//! The error of a timeline whose parts contradict each other.

use crate::token::{ChunkId, TurnId};

/// How the parts of a timeline contradict each other: a stored timeline is damaged, or a change has broken an
/// invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimelineError {
    /// No row has this id.
    #[error("there is no chunk {0}")]
    NoChunk(ChunkId),
    /// The row number is behind the last row.
    #[error("there is no row {0}")]
    NoRow(usize),
    /// The body has another number of tokens, of live tokens or of deleted tokens than the row says.
    #[error("the body of {0} does not have the number of tokens that its row says")]
    BodyCount(ChunkId),
    /// The body is not the one that the row has the checksum of.
    #[error("the checksum of the body of {0} differs from the stored one")]
    BodyChecksum(ChunkId),
    /// The ids, brightness, flags and text ends of a body are not equally many.
    #[error("the columns of the body of {0} differ in length")]
    ColumnLength(ChunkId),
    /// The token ends of a body are not ascending, or do not end with the text.
    #[error("the token ends of {0} do not match its text")]
    TextEnds(ChunkId),
    /// A brightness of a body is not a finite number.
    #[error("a brightness of {0} is not finite")]
    BadBrightness(ChunkId),
    /// A chunk with live tokens has no body in memory.
    #[error("{0} has live tokens but its body is not loaded")]
    LiveUnloaded(ChunkId),
    /// The search by id does not find the row.
    #[error("the row of {0} is not found by its id")]
    RowNotFound(ChunkId),
    /// The number of live tokens per chunk is not what the live index has.
    #[error("the live index differs from the rows")]
    LiveIndex,
    /// More tokens are live than slots can be numbered.
    #[error("more tokens are live than slots can be numbered")]
    TooManyLive,
    /// The chunk does not start where the chunk before it ends.
    #[error("{0} does not start where the chunk before it ends")]
    ChunkStart(ChunkId),
    /// The last chunk does not end where the timeline ends.
    #[error("the chunks end at position {chunks} and the tokens at {tokens}")]
    Length {
        /// The end of the last chunk.
        chunks: u64,
        /// The length of the timeline.
        tokens: u64,
    },
    /// The turn has a lower id than the turn before it, or begins before it.
    #[error("turn {} does not come after the turn before it", .0.0)]
    TurnOrder(TurnId),
    /// The turn has chunks of another turn, or its chunks are out of order.
    #[error("the chunks of turn {} are out of order, or of another turn", .0.0)]
    TurnChunks(TurnId),
    /// A chunk comes before the first turn.
    #[error("a chunk comes before the first turn")]
    ChunkWithoutTurn,
    /// The last turn begins behind the last row.
    #[error("the last turn begins behind the last chunk")]
    TurnBehindEnd,
    /// The counts, the pin or the index of a header contradict each other or the header before it.
    #[error("the header of {0} contradicts itself or the header before it")]
    BadHeader(ChunkId),
}

/// The message. Stores report damage with a text.
impl From<TimelineError> for String {
    fn from(error: TimelineError) -> Self {
        error.to_string()
    }
}

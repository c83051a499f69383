//! The reasons why a change does not fit a timeline.

use crate::token::{ChunkId, Position, Role, TurnId};
use std::fmt;

/// Why a change does not fit a timeline. The timeline is unchanged after each of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Tokens are appended at the end of the timeline and nowhere else.
    #[error("cannot append tokens at position {}: the next position is {}", .got.0, .next.0)]
    NotNextPosition {
        /// The position that the change names.
        got: Position,
        /// The next position of the timeline.
        next: Position,
    },
    /// Tokens are appended to the last turn, or to a new turn after it.
    #[error(
        "cannot append to turn {} ({}): the last turn is {} ({})",
        .turn.0, .role.name(), .last.0, .last_role.name()
    )]
    NotLastTurn {
        /// The turn that the change names.
        turn: TurnId,
        /// The role that the change names.
        role: Role,
        /// The last turn of the timeline.
        last: TurnId,
        /// The role of the last turn.
        last_role: Role,
    },
    /// Tokens are appended to the last chunk of a turn, or to a new chunk after it.
    #[error("cannot append to {chunk}: its turn has a later chunk, or {chunk} was merged into another")]
    NotLastChunk {
        /// The chunk that the change names.
        chunk: ChunkId,
    },
    /// No chunk with this id holds a token.
    #[error("there is no chunk {0}")]
    NoChunk(ChunkId),
    /// The body of the chunk is only in the store.
    #[error("the tokens of {0} are not in memory; load them from the store first")]
    Unloaded(ChunkId),
    /// The token runs are outside of the chunk, overlap or are out of order.
    #[error("the token runs of {0} are outside of the chunk, overlap or are out of order")]
    BadRuns(ChunkId),
    /// A change may name a chunk only once.
    #[error("{0} is named twice in one change")]
    DuplicateChunk(ChunkId),
    /// A token is not in the state that the change starts from.
    #[error("cannot {operation} {chunk}: its token at position {} is {state}", .at.0)]
    WrongState {
        /// The chunk.
        chunk: ChunkId,
        /// What the change does to the chunk.
        operation: FlagOperation,
        /// The first token in the wrong state.
        at: Position,
        /// The state of that token.
        state: TokenState,
    },
    /// The chunk has the pin that the change sets, or lacks the pin that the change removes.
    #[error("{0} is {state} already", state = pinned_word(*.1))]
    PinUnchanged(ChunkId, bool),
    /// The turn has no earlier chunk, or that chunk differs in being pinned.
    #[error("cannot merge {0}: no earlier chunk of its turn is {state} as well", state = pinned_word(*.1))]
    NothingToMerge(ChunkId, bool),
    /// The chunk cannot be split there, or not under that index.
    #[error("cannot split {chunk} at position {}: {reason}", .at.0)]
    BadSplit {
        /// The chunk.
        chunk: ChunkId,
        /// The first token of the tail.
        at: Position,
        /// Why not.
        reason: SplitError,
    },
    /// A brightness that is not finite, or that is meant for a position without a token.
    #[error("the brightness for position {} is not finite, or the timeline has no such position", .0.0)]
    BadScore(Position),
    /// A tally would fall below zero or overflow.
    #[error("the tally of {0} would fall below zero or overflow")]
    BadTally(ChunkId),
    /// The change exceeds the width of an index: the text of a chunk, the slots of a window or the chunks of a turn.
    #[error(
        "limit exceeded: a chunk holds up to 4 GiB of text; slots and chunks are numbered up to 4294967294"
    )]
    LimitExceeded,
}

/// Why a chunk cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// The tail must begin behind the first token of the chunk, and within it.
    #[error("the position is not inside the chunk")]
    NotInside,
    /// The tail cannot take more of the tally than the chunk has.
    #[error("the tail takes more of the tally than the chunk has")]
    TallyTooLarge,
    /// Another chunk has tokens under the index of the tail.
    #[error("the index of the tail is in use")]
    IndexInUse,
    /// The index of the tail is neither a new one at the end of the last turn nor one that a merge has emptied.
    #[error("the index of the tail must be a free one behind the chunk")]
    IndexNotFree,
    /// Another chunk with tokens lies between the head and the tail.
    #[error("another chunk lies between the chunk and its tail")]
    NotAdjacent,
}

/// What a change does to the flags of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagOperation {
    /// Live tokens become pruned.
    Prune,
    /// Pruned tokens become live.
    Resurrect,
    /// Tokens become deleted.
    Delete,
    /// Deleted tokens become what they were before.
    Undelete,
}

impl fmt::Display for FlagOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FlagOperation::Prune => "prune",
            FlagOperation::Resurrect => "resurrect",
            FlagOperation::Delete => "delete",
            FlagOperation::Undelete => "undelete",
        })
    }
}

/// The state of a token, from its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// In the context window.
    Live,
    /// Out of the context window; can be resurrected.
    Pruned,
    /// Out of the context window and out of search; can be undeleted.
    Deleted,
}

impl fmt::Display for TokenState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenState::Live => "live",
            TokenState::Pruned => "pruned",
            TokenState::Deleted => "deleted",
        })
    }
}

fn pinned_word(pinned: bool) -> &'static str {
    if pinned { "pinned" } else { "not pinned" }
}

//! What happens in a turn, told as it happens: one stream for the terminal, the page and the tests.

use crate::tools::Done;
use halo_core::attention::AttentionStats;
use halo_core::seams::{Finish, Upkeep};
use halo_core::token::{ChunkId, Position, Role, TurnId};
use std::time::Duration;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The model is busy; so many are ahead.
    Waiting {
        /// How many.
        ahead: usize,
    },
    /// A message was stored: from here on it cannot be lost.
    Said {
        /// Its turn.
        turn: TurnId,
        /// Whose.
        role: Role,
        /// Its length.
        tokens: usize,
    },
    /// What the model would begin to say, in a fork, and what search is asked with beside the message.
    Previewed {
        /// The text.
        text: String,
    },
    /// A chunk came back to its own place.
    Returned {
        /// Which.
        chunk: ChunkId,
        /// Its tokens.
        tokens: usize,
        /// Why.
        why: String,
    },
    /// A chunk left the window.
    Left {
        /// Which.
        chunk: ChunkId,
        /// Its tokens.
        tokens: usize,
        /// Why.
        why: String,
    },
    /// So much of the window has been read; of how much, where that is known.
    Reading {
        /// Tokens read.
        done: usize,
        /// Tokens to read; 0: unknown.
        of: usize,
    },
    /// The window is in the model's memory: what that took.
    Ready(Upkeep),
    /// A token of the answer; the text is empty while a character is incomplete.
    Token {
        /// Its chunk.
        chunk: ChunkId,
        /// Its birth index.
        position: Position,
        /// What it adds to the text.
        text: String,
    },
    /// What the answer's attention came to.
    Scored {
        /// Steps that were scored.
        steps: u64,
        /// Votes in all.
        votes: usize,
        /// Mean brightness at the end.
        mean: f64,
        /// Steps whose attention could not be used, and why the first of them.
        faults: Option<(u64, String)>,
    },
    /// The model has called a tool, and this is what came of it.
    Tool(Done),
    /// More is in the window than may be, and nothing that is left may leave.
    Exceeded(String),
    /// Something that the user should know.
    Notice(String),
    /// A part of the turn is over.
    Stage(Stage, Duration),
    /// The answer is complete, stored and searchable.
    Done(Summary),
    /// There is no answer, or no more of it: why. What was told before stands.
    Failed(String),
    /// The message takes something for granted that was said not to be so. It is answered all the same.
    Premise {
        /// What.
        premise: String,
        /// Why it is not so.
        reason: String,
        /// What to do.
        suggestion: String,
    },
    /// Something happened to a memory.
    Memory {
        /// Which.
        id: u64,
        /// What.
        what: &'static str,
    },
    /// Something was done to chunks by hand.
    Changed {
        /// What.
        what: &'static str,
        /// To which.
        chunks: Vec<ChunkId>,
    },
}

/// The parts of a turn, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The message is stored.
    Store,
    /// The beginning of an answer, in a fork.
    Preview,
    /// What of the past matters is found and brought back.
    Recall,
    /// The model's memory is brought in line with the window, and the window is read.
    Read,
    /// The answer, the model's own share.
    Speak,
    /// What is done for every token of the answer.
    Attend,
    /// Scores, departures, and the commit of both.
    Prune,
    /// The index is brought in line.
    Index,
    /// The model's memory is saved.
    Settle,
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Stage; 9] = [
        Stage::Store,
        Stage::Preview,
        Stage::Recall,
        Stage::Read,
        Stage::Speak,
        Stage::Attend,
        Stage::Prune,
        Stage::Index,
        Stage::Settle,
    ];

    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stage::Preview => "preview",
            Stage::Recall => "recall",
            Stage::Store => "store",
            Stage::Read => "read",
            Stage::Speak => "speak",
            Stage::Attend => "attend",
            Stage::Prune => "prune",
            Stage::Index => "index",
            Stage::Settle => "settle",
        }
    }
}

/// A turn that is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The answer's turn.
    pub turn: TurnId,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Chunks that came back.
    pub returned: usize,
    /// Chunks that left.
    pub left: usize,
    /// Tokens in the window now, the system prompt included.
    pub live: usize,
    /// How long each part took.
    pub stages: Vec<(Stage, Duration)>,
    /// The shape of what the answer looked at, every so many tokens.
    pub traces: Vec<(u64, AttentionStats)>,
}

impl Summary {
    /// How long a part took.
    #[must_use]
    pub fn took(&self, stage: Stage) -> Duration {
        self.stages.iter().filter(|(s, _)| *s == stage).map(|(_, took)| *took).sum()
    }

    /// Tokens a second, while it spoke.
    #[must_use]
    pub fn pace(&self) -> f64 {
        let spoke = self.took(Stage::Speak) + self.took(Stage::Attend);
        if spoke.is_zero() { 0.0 } else { self.tokens as f64 / spoke.as_secs_f64() }
    }
}

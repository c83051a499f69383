//! What can happen to a timeline, as values.
//!
//! Planners return a [`Change`]; only [`Timeline::apply`](crate::timeline::Timeline::apply) mutates. The
//! store, the KV cache, the search index and the screen follow the same values, so what you see is what is
//! stored. Each `apply` returns the inverse, also a `Change`, so undo and replay come free.
//!
//! One law bends on purpose: a position is never given twice, so the inverse of an append does not unmake
//! the tokens. It withdraws them: they leave the window and the search for good, and stay on record. (A change
//! that fails halfway, or that a store refuses, is taken back exactly: nobody was told of its positions.)

use crate::token::{Brightness, ChunkId, Position, Role, TokenId, TurnId, Voice};
use std::collections::BTreeSet;
use std::fmt;

/// Some neighbouring tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them.
    pub start: Position,
    /// How many.
    pub len: u32,
}

/// How much of a chunk a change touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Every token of the chunk to which the change can apply.
    Whole,
    /// Just these, in order.
    Runs(Vec<Run>),
}

/// What happens to a timeline.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// New tokens at the end.
    Append(Append),
    /// New brightness for tokens, and what it was made of.
    Score(Score),
    /// Live tokens leave the window.
    Prune(Vec<Leave>),
    /// Dead tokens come back to their own place.
    Resurrect(Vec<Return>),
    /// A chunk becomes immune to pruning, or stops being so.
    Pin {
        /// Which.
        chunk: ChunkId,
        /// From now on.
        pinned: bool,
    },
    /// Tokens are deleted: out of the window and out of search, and still on the timeline.
    Withdraw {
        /// Which.
        parts: Vec<Part>,
        /// Who asked for it, and for what.
        reason: DeleteReason,
    },
    /// Deleted tokens are no longer so; whether they are live or pruned is as it was before.
    Restore(Vec<Part>),
    /// A chunk joins the nearest earlier chunk of its turn. Both must agree on being pinned.
    Merge {
        /// The later of the two.
        chunk: ChunkId,
        /// Whether its name may be used again: only to undo a split. What the user merges keeps its name for
        /// itself, for the record.
        frees_name: bool,
    },
    /// The tail of a chunk becomes a chunk of its own.
    Split {
        /// The chunk that keeps the head.
        chunk: ChunkId,
        /// The first token of the tail.
        at: Position,
        /// The tail's number in the turn: the next new one, or one that a merge set free here.
        sentence: u32,
        /// What the tail takes with it of the chunk's tally.
        tally: Tally,
    },
    /// Several, in order, all or none.
    Batch(Vec<Change>),
}

impl Change {
    /// The chunks that the change names, in order of birth and each once, but for those that it only scores or
    /// adds tokens to: what a chunk's history is made of.
    #[must_use]
    pub fn names(&self) -> BTreeSet<ChunkId> {
        match self {
            Change::Append(_) | Change::Score(_) => BTreeSet::new(),
            Change::Prune(leaves) => leaves.iter().map(|l| l.chunk).collect(),
            Change::Resurrect(returns) => returns.iter().map(|r| r.chunk).collect(),
            Change::Pin { chunk, .. } | Change::Merge { chunk, .. } => [*chunk].into(),
            Change::Withdraw { parts, .. } | Change::Restore(parts) => {
                parts.iter().map(|p| p.chunk).collect()
            }
            Change::Split { chunk, sentence, .. } => {
                [*chunk, ChunkId { sentence: *sentence, ..*chunk }].into()
            }
            Change::Batch(changes) => changes.iter().flat_map(Change::names).collect(),
        }
    }

    /// The changes that it is made of, batches taken apart, in order.
    #[must_use]
    pub fn parts(&self) -> Vec<&Change> {
        match self {
            Change::Batch(changes) => changes.iter().flat_map(Change::parts).collect(),
            one => vec![one],
        }
    }
}

/// New tokens at the end of the timeline, all of one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Append {
    /// Where the first of them stands: the timeline's next position.
    pub at: Position,
    /// The last turn, or a later one, which this begins.
    pub turn: TurnId,
    /// Who speaks in that turn.
    pub role: Role,
    /// The tokens; none is allowed and begins an empty turn.
    pub tokens: Vec<NewToken>,
}

/// A token that is being born.
#[derive(Clone, Debug, PartialEq)]
pub struct NewToken {
    /// Its number in the vocabulary.
    pub id: TokenId,
    /// What it adds to the text; empty while a character is incomplete.
    pub text: String,
    /// The chunk of the turn: the turn's last one, or a later one, which this begins.
    pub sentence: u32,
    /// What it starts with.
    pub brightness: Brightness,
    /// Whose words it is.
    pub voice: Voice,
}

/// What a generation has taught about the tokens that it looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// New brightness, by neighbouring tokens.
    pub runs: Vec<Scored>,
    /// What is added to the tally of each chunk.
    pub tallies: Vec<(ChunkId, TallyChange)>,
}

/// New brightness of neighbouring tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The first of them.
    pub start: Position,
    /// One for each.
    pub brightness: Vec<Brightness>,
}

/// What a chunk has gathered in its life, beside the brightness of its tokens.
///
/// Whole numbers, so that merging and splitting chunks is exact and can be undone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How often one of its tokens was attended to above the step's threshold.
    pub votes: u64,
    /// Attention received in all, in units of 2⁻³².
    pub mass: u64,
    /// How often one of its tokens could have been attended to: steps times tokens.
    pub looks: u64,
}

/// What is added to a [`Tally`]; negative only to undo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TallyChange {
    /// Votes.
    pub votes: i64,
    /// Attention, in units of 2⁻³².
    pub mass: i64,
    /// Looks.
    pub looks: i64,
}

impl Tally {
    /// One whole unit of attention in [`Tally::mass`].
    pub const UNIT: f64 = 4_294_967_296.0;

    /// The attention that a token received at a step, on average; none where nothing could have looked at one yet.
    #[must_use]
    pub fn share(self) -> Option<f64> {
        (self.looks > 0).then(|| self.mass as f64 / Self::UNIT / self.looks as f64)
    }

    /// The tally after `change`, or nothing where it would fall below zero or overflow.
    #[must_use]
    pub fn plus(self, change: TallyChange) -> Option<Self> {
        // The one number whose inverse does not exist.
        if [change.votes, change.mass, change.looks].contains(&i64::MIN) {
            return None;
        }
        Some(Self {
            votes: self.votes.checked_add_signed(change.votes)?,
            mass: self.mass.checked_add_signed(change.mass)?,
            looks: self.looks.checked_add_signed(change.looks)?,
        })
    }

    /// Both together, or nothing where that overflows.
    pub(crate) fn join(self, other: Self) -> Option<Self> {
        Some(Self {
            votes: self.votes.checked_add(other.votes)?,
            mass: self.mass.checked_add(other.mass)?,
            looks: self.looks.checked_add(other.looks)?,
        })
    }

    /// What is left when `other` goes.
    pub(crate) fn without(self, other: Self) -> Option<Self> {
        Some(Self {
            votes: self.votes.checked_sub(other.votes)?,
            mass: self.mass.checked_sub(other.mass)?,
            looks: self.looks.checked_sub(other.looks)?,
        })
    }
}

impl TallyChange {
    /// What undoes this.
    #[must_use]
    pub fn inverse(self) -> Self {
        let [votes, mass, looks] = [self.votes, self.mass, self.looks].map(i64::wrapping_neg);
        Self { votes, mass, looks }
    }
}

/// A chunk, or some of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which chunk.
    pub chunk: ChunkId,
    /// How much of it.
    pub extent: Extent,
}

/// A chunk that leaves the window.
#[derive(Clone, Debug, PartialEq)]
pub struct Leave {
    /// Which chunk.
    pub chunk: ChunkId,
    /// How much of it.
    pub extent: Extent,
    /// Why.
    pub why: WhyLeft,
}

/// A chunk that comes back.
#[derive(Clone, Debug, PartialEq)]
pub struct Return {
    /// Which chunk.
    pub chunk: ChunkId,
    /// How much of it.
    pub extent: Extent,
    /// What its tokens come back with; nothing: what they left with.
    pub brightness: Option<Brightness>,
    /// Why.
    pub why: WhyReturned,
}

/// What chunks are ranked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The brightest token.
    Peak,
    /// The mean of all tokens.
    Mean,
    /// The mean of the four brightest tokens.
    Top4,
    /// How often its tokens were attended to above the threshold.
    Votes,
    /// The attention that its tokens received, summed.
    Attention,
    /// The attention that a token of it received at a step, on average.
    Share,
    /// Its place in the conversation.
    Age,
    /// A lot.
    Lot,
}

/// Whether a chunk left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// It did.
    Alone,
    /// It was next to go, and took its partner along.
    Takes(ChunkId),
    /// Its partner was next to go.
    With(ChunkId),
}

/// Why a chunk left the window.
#[derive(Clone, Debug, PartialEq)]
pub enum WhyLeft {
    /// The window was over its budget, and this was next to go.
    Ranked {
        /// Which of the turn's departures this was, counted from 0.
        order: u32,
        /// What chunks were ranked by.
        by: Measure,
        /// Its own value by that measure.
        value: f64,
        /// Its brightest token.
        peak: Brightness,
        /// Tokens in the window before it left; for both halves of a pair, before either left.
        live: usize,
        /// Tokens that the window may hold.
        budget: usize,
        /// Whether it left as one half of a pair of anchors.
        pair: Pair,
    },
    /// One of the dimmest tokens of a full window (v0).
    Culled {
        /// Tokens in the window before.
        live: usize,
        /// Tokens that the window should hold.
        target: usize,
    },
    /// The user said so.
    Manual,
    /// It hangs on a chunk that the user sent away.
    ManualWith(ChunkId),
    /// A client that keeps its own history no longer sends it.
    Client,
    /// It had left before it came here: in another program, or in a log that was lost.
    Before,
    /// A return was undone.
    Undo,
}

/// Why a chunk was deleted. The text stays on the timeline in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeleteReason {
    /// The user deleted it.
    #[default]
    User,
    /// The user asked for another answer; this one is kept as a variant.
    UserRegenerated,
    /// The user edited the message; this version and its answer are kept as a variant.
    UserEdited,
    /// A client sent the same history again and asked for another answer; this one is kept as a variant.
    ClientRegenerated,
    /// A client sent an edited message in its place; this version and its answer are kept as a variant.
    ClientEdited,
    /// Another variant was chosen in its place.
    VariantChosen,
    /// The answer ended before its first token.
    NoAnswer,
    /// It is to be forgotten.
    Forget,
    /// What had added or restored it was undone.
    Undo,
}

impl fmt::Display for DeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeleteReason::User => "deleted by the user",
            DeleteReason::UserRegenerated => "replaced by another answer, which the user asked for",
            DeleteReason::UserEdited => "replaced by the user's edited message",
            DeleteReason::ClientRegenerated => "replaced by another answer, which the client asked for",
            DeleteReason::ClientEdited => "replaced by the client's edited message",
            DeleteReason::VariantChosen => "another variant was chosen",
            DeleteReason::NoAnswer => "the answer ended before its first token",
            DeleteReason::Forget => "waiting to be forgotten",
            DeleteReason::Undo => "what had added it was undone",
        })
    }
}

/// Why a chunk came back.
#[derive(Clone, Debug, PartialEq)]
pub enum WhyReturned {
    /// Search found it.
    Found {
        /// Its place among the hits, counted from 0.
        rank: u32,
        /// Its score.
        score: f64,
    },
    /// It opens the turn of a chunk that came back.
    OpensTurnOf(ChunkId),
    /// It is the question that a chunk that came back answers, or the answer to it.
    PairOf(ChunkId),
    /// The user said so.
    Manual,
    /// It is being merged with a live chunk.
    Merged,
    /// A departure was undone.
    Undo,
}

impl fmt::Display for WhyLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyLeft::Ranked { order, by, value, peak, live, budget, pair } => {
                write!(f, "{live} tokens live, {budget} allowed; ")?;
                if let Pair::With(partner) = pair {
                    write!(f, "leaves as a pair with {partner}; ")?;
                } else {
                    let left = if *order == 0 { "" } else { " of those left" };
                    write!(f, "{}{left}; ", if *by == Measure::Age { "oldest" } else { "lowest" })?;
                }
                match by {
                    Measure::Peak => write!(f, "its brightest token {peak}")?,
                    Measure::Mean => write!(f, "mean of its tokens {value:.2}, brightest {peak}")?,
                    Measure::Top4 => write!(f, "its four brightest tokens {value:.2}, brightest {peak}")?,
                    Measure::Votes => write!(f, "votes {value}, brightest token {peak}")?,
                    Measure::Attention => write!(f, "attention received {value:.3}, brightest token {peak}")?,
                    // Among a thousand tokens, an even share is one in a thousand.
                    Measure::Share if value.is_finite() => write!(
                        f,
                        "a token of it received {:.3} ‰ of the attention, brightest {peak}",
                        value * 1000.0
                    )?,
                    Measure::Share => write!(f, "nothing has looked at it yet, brightest {peak}")?,
                    Measure::Age => write!(f, "policy goes by age")?,
                    Measure::Lot => write!(f, "drawn by lot")?,
                }
                if let Pair::Takes(partner) = pair {
                    write!(f, "; takes {partner}, its pair")
                } else {
                    Ok(())
                }
            }
            WhyLeft::Culled { live, target } => write!(f, "dimmest of {live} tokens, target {target}"),
            WhyLeft::Manual => f.write_str("sent away by the user"),
            WhyLeft::ManualWith(chunk) => write!(f, "hangs on {chunk}, which the user sent away"),
            WhyLeft::Client => f.write_str("the client no longer sends it"),
            WhyLeft::Before => f.write_str("had left before it came here"),
            WhyLeft::Undo => f.write_str("its return was undone"),
        }
    }
}

impl fmt::Display for WhyReturned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyReturned::Found { rank, score } => {
                write!(f, "found by search, hit {} at {score:.3}", rank + 1)
            }
            WhyReturned::OpensTurnOf(chunk) => write!(f, "opens the turn of {chunk}, which came back"),
            WhyReturned::PairOf(chunk) => write!(f, "question or answer to {chunk}, which came back"),
            WhyReturned::Manual => f.write_str("called back by the user"),
            WhyReturned::Merged => f.write_str("merged with a live chunk"),
            WhyReturned::Undo => f.write_str("its departure was undone"),
        }
    }
}

//! What can happen to a timeline, as values.
//!
//! Planners return a [`Change`]; only [`Timeline::apply`](crate::timeline::Timeline::apply) performs one. The
//! store, the KV cache, the search index and the page follow the same values, so that they agree. Each `apply`
//! returns the inverse, which is a `Change` too: undo and replay need no code of their own.
//!
//! The inverse of an append is an exception: a position is never used twice, so undoing an append deletes the
//! tokens instead of removing them. They stay on the timeline, out of the window and out of search. A change
//! that fails halfway, or that the store refuses, is rolled back exactly: no caller has seen its positions.

use crate::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TurnId};
use std::collections::BTreeSet;
use std::fmt;

/// Neighbouring tokens of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// The position of the first token.
    pub start: Position,
    /// How many tokens.
    pub len: u32,
}

impl TokenRun {
    /// The positions of the tokens, in order.
    pub fn positions(self) -> impl Iterator<Item = Position> {
        (self.start.0..self.start.0 + u64::from(self.len)).map(Position)
    }
}

/// How much of a chunk a change applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Every token of the chunk that is in the right state for the change.
    Whole,
    /// These tokens, in order.
    Runs(Vec<TokenRun>),
}

/// One change of a timeline.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Adds tokens at the end.
    Append(Append),
    /// Sets the brightness of tokens and adds to the tallies of chunks.
    Score(Score),
    /// Takes live tokens out of the context window.
    Prune(Vec<Pruned>),
    /// Puts pruned tokens back into the context window, at their own positions.
    Resurrect(Vec<Resurrected>),
    /// Protects a chunk from pruning, or removes the protection.
    Pin {
        /// The chunk.
        chunk: ChunkId,
        /// True to pin, false to unpin.
        pinned: bool,
    },
    /// Deletes tokens: out of the window and out of search, still on the timeline.
    Delete {
        /// The tokens, by chunk.
        chunks: Vec<ChunkSelection>,
        /// Why they are deleted.
        reason: DeleteReason,
    },
    /// Clears the deletion of tokens, which are live or pruned again as they were before.
    Undelete(Vec<ChunkSelection>),
    /// Moves the tokens of a chunk to the nearest earlier chunk of its turn. Both must be pinned or both
    /// unpinned.
    Merge {
        /// The later of the two chunks.
        chunk: ChunkId,
        /// Whether the id of the later chunk may be used again; only for the inverse of a split. The log names
        /// chunks by their ids, so the id of a chunk that the user merges is never used again.
        frees_id: bool,
    },
    /// Moves the tail of a chunk to a chunk of its own.
    Split {
        /// The chunk that keeps the head.
        chunk: ChunkId,
        /// The first token of the tail.
        at: Position,
        /// The index of the tail in its turn: a new one, or that of an empty row that a merge has left there.
        tail_index: u32,
        /// The part of the tally that the tail takes.
        tally: AttentionTally,
    },
    /// Several changes in order; either all are performed or none.
    Batch(Vec<Change>),
}

impl Change {
    /// The ids of the chunks that the change names, except those that it only scores or appends to: the log
    /// indexes its entries by these.
    #[must_use]
    pub fn named_chunks(&self) -> BTreeSet<ChunkId> {
        match self {
            Change::Append(_) | Change::Score(_) => BTreeSet::new(),
            Change::Prune(pruned) => pruned.iter().map(|p| p.chunk).collect(),
            Change::Resurrect(resurrected) => resurrected.iter().map(|r| r.chunk).collect(),
            Change::Pin { chunk, .. } | Change::Merge { chunk, .. } => [*chunk].into(),
            Change::Delete { chunks, .. } | Change::Undelete(chunks) => {
                chunks.iter().map(|c| c.chunk).collect()
            }
            Change::Split { chunk, tail_index, .. } => {
                [*chunk, ChunkId { index: *tail_index, ..*chunk }].into()
            }
            Change::Batch(changes) => changes.iter().flat_map(Change::named_chunks).collect(),
        }
    }

    /// The changes without batches, in order.
    #[must_use]
    pub fn flatten(&self) -> Vec<&Change> {
        match self {
            Change::Batch(changes) => changes.iter().flat_map(Change::flatten).collect(),
            one => vec![one],
        }
    }
}

/// New tokens at the end of the timeline, all of one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Append {
    /// The position of the first token: the next position of the timeline.
    pub at: Position,
    /// The last turn, or a new one with a higher id.
    pub turn: TurnId,
    /// Who writes the message of that turn.
    pub role: Role,
    /// The tokens. Without any, the change begins an empty turn.
    pub tokens: Vec<NewToken>,
}

/// A token that is appended.
#[derive(Clone, Debug, PartialEq)]
pub struct NewToken {
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// The text that it adds; empty while a character is incomplete.
    pub text: String,
    /// The index of its chunk in the turn: that of the last chunk, or a higher one, which begins a new chunk.
    pub chunk_index: u32,
    /// Its initial brightness.
    pub brightness: Brightness,
    /// Message text, tool result or chat template.
    pub kind: ContentKind,
}

/// The result of scoring the attention of one generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// The new brightness of tokens.
    pub runs: Vec<BrightnessRun>,
    /// What is added to the tally of each chunk.
    pub tallies: Vec<(ChunkId, TallyDelta)>,
}

/// The new brightness of neighbouring tokens, which may lie in several chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct BrightnessRun {
    /// The position of the first token.
    pub start: Position,
    /// One value per token.
    pub brightness: Vec<Brightness>,
}

/// The attention that a chunk has received so far.
///
/// Integers, so that merging and splitting chunks is exact and can be undone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionTally {
    /// How often one of its tokens received attention above the threshold of a step.
    pub votes: u64,
    /// The sum of the attention that its tokens received, in units of 2⁻³².
    pub mass: u64,
    /// How often one of its tokens could have received attention: the sum over steps of its tokens in the
    /// window.
    pub exposures: u64,
}

/// An addition to an [`AttentionTally`]; negative only to undo one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TallyDelta {
    /// Change of the votes.
    pub votes: i64,
    /// Change of the attention, in units of 2⁻³².
    pub mass: i64,
    /// Change of the exposures.
    pub exposures: i64,
}

impl AttentionTally {
    /// [`mass`](Self::mass) for an attention of 1.
    pub const MASS_UNIT: f64 = 4_294_967_296.0;

    /// The mean attention per token and step; none without exposures.
    #[must_use]
    pub fn share(self) -> Option<f64> {
        (self.exposures > 0).then(|| self.mass as f64 / Self::MASS_UNIT / self.exposures as f64)
    }

    /// The tally with `delta` added; none where it would fall below zero or overflow.
    #[must_use]
    pub fn checked_add_delta(self, delta: TallyDelta) -> Option<Self> {
        // `i64::MIN` has no inverse, so it could not be undone.
        if [delta.votes, delta.mass, delta.exposures].contains(&i64::MIN) {
            return None;
        }
        Some(Self {
            votes: self.votes.checked_add_signed(delta.votes)?,
            mass: self.mass.checked_add_signed(delta.mass)?,
            exposures: self.exposures.checked_add_signed(delta.exposures)?,
        })
    }

    /// The sum of two tallies; none where it overflows.
    pub(crate) fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            votes: self.votes.checked_add(other.votes)?,
            mass: self.mass.checked_add(other.mass)?,
            exposures: self.exposures.checked_add(other.exposures)?,
        })
    }

    /// The difference of two tallies; none where it would fall below zero.
    pub(crate) fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self {
            votes: self.votes.checked_sub(other.votes)?,
            mass: self.mass.checked_sub(other.mass)?,
            exposures: self.exposures.checked_sub(other.exposures)?,
        })
    }
}

impl TallyDelta {
    /// The delta that leads from an empty tally to `tally`; a number that an `i64` cannot hold is cut to its maximum.
    pub(crate) fn from_zero_to(tally: AttentionTally) -> Self {
        let AttentionTally { votes, mass, exposures } = tally;
        let [votes, mass, exposures] = [votes, mass, exposures].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        Self { votes, mass, exposures }
    }
    /// The delta that undoes this one.
    #[must_use]
    pub fn inverse(self) -> Self {
        let [votes, mass, exposures] = [self.votes, self.mass, self.exposures].map(i64::wrapping_neg);
        Self { votes, mass, exposures }
    }
}

/// Some or all tokens of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSelection {
    /// The chunk.
    pub chunk: ChunkId,
    /// Which of its tokens.
    pub extent: Extent,
}

/// A chunk that is taken out of the context window.
#[derive(Clone, Debug, PartialEq)]
pub struct Pruned {
    /// The chunk.
    pub chunk: ChunkId,
    /// Which of its tokens.
    pub extent: Extent,
    /// Why it was chosen.
    pub reason: PruneReason,
}

/// A chunk that is put back into the context window.
#[derive(Clone, Debug, PartialEq)]
pub struct Resurrected {
    /// The chunk.
    pub chunk: ChunkId,
    /// Which of its tokens.
    pub extent: Extent,
    /// The new brightness of its tokens; without it, they keep the brightness that they were pruned with.
    pub brightness: Option<Brightness>,
    /// Why it was chosen.
    pub reason: ResurrectReason,
}

/// The value that chunks were ranked by for pruning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Brightness of the brightest token.
    Peak,
    /// Mean brightness of all tokens.
    Mean,
    /// Mean brightness of the four brightest tokens.
    Top4,
    /// How often its tokens received attention above the threshold.
    Votes,
    /// Sum of the attention that its tokens received.
    Attention,
    /// Mean attention per token and step.
    Share,
    /// Position in the conversation: the oldest is pruned first.
    Age,
    /// A random number from a seed and the chunk's id.
    Random,
    /// Salience of the text.
    Salience,
}

/// Whether a chunk was pruned together with another. The first chunks of a question and of its answer are
/// pruned as a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrunePairing {
    /// The chunk was pruned alone.
    Alone,
    /// The chunk ranked lowest; this partner was pruned with it.
    TookPartner(ChunkId),
    /// This partner ranked lowest; the chunk was pruned with it.
    WithPartner(ChunkId),
}

/// Why a chunk was pruned.
#[derive(Clone, Debug, PartialEq)]
pub enum PruneReason {
    /// The window exceeded its budget, and the chunk ranked lowest.
    Ranked {
        /// The number of this chunk among those of one pruning, counted from 0.
        order: u32,
        /// The value that chunks were ranked by.
        measure: Measure,
        /// The value of this chunk.
        value: f64,
        /// The brightness of its brightest token.
        peak: Brightness,
        /// Tokens in the window before it was pruned; for both chunks of a pair, before either was.
        live: usize,
        /// Tokens that the window may hold.
        budget: usize,
        /// Whether it was pruned as part of a pair.
        pairing: PrunePairing,
    },
    /// It was among the dimmest tokens of a full window ([`ttl`](crate::ttl) scoring).
    Culled {
        /// Tokens in the window before.
        live: usize,
        /// Tokens that the window should hold.
        target: usize,
    },
    /// The user pruned it.
    Manual,
    /// It depends on this chunk, which the user pruned.
    ManualDependent(ChunkId),
    /// A client that keeps the chat history itself no longer sends it.
    Client,
    /// It is the reasoning before an answer, and the answer is finished.
    Reasoning,
    /// It was pruned before this log begins: in another program, in the conversation that this is a copy of, or
    /// in a log that was lost.
    BeforeImport,
    /// Its resurrection was undone.
    Undo,
}

/// Why a chunk was deleted. The text stays on the timeline in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeleteReason {
    /// The user deleted it.
    #[default]
    User,
    /// The user asked for another answer; this one is a variant.
    UserRegenerated,
    /// The user edited the message; this version and its answer are a variant.
    UserEdited,
    /// A client sent the same history again and asked for another answer; this one is a variant.
    ClientRegenerated,
    /// A client sent an edited message in its place; this version and its answer are a variant.
    ClientEdited,
    /// The user chose another variant in its place.
    VariantChosen,
    /// The answer ended before its first token.
    NoAnswer,
    /// Its calls of functions were written again in the format of the chat template, in the next turn.
    CallsRewritten,
    /// Its text is about to be erased for good.
    Forget,
    /// The append or undelete that had made it live was undone.
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
            DeleteReason::CallsRewritten => "its calls were written again in the format of the chat template",
            DeleteReason::Forget => "waiting to be forgotten",
            DeleteReason::Undo => "the change that had added it was undone",
        })
    }
}

/// Why a chunk was resurrected.
#[derive(Clone, Debug, PartialEq)]
pub enum ResurrectReason {
    /// Search found it for the user's message.
    SearchHit {
        /// Its rank among the hits, counted from 0.
        rank: u32,
        /// Its search score.
        score: f64,
    },
    /// It is the first chunk of the turn of this chunk, which was resurrected.
    OpensTurnOf(ChunkId),
    /// It is the first chunk of the question or answer that this chunk, which was resurrected, is paired with.
    PairOf(ChunkId),
    /// The user resurrected it.
    Manual,
    /// It is merged with a live chunk.
    Merged,
    /// Its pruning was undone.
    Undo,
}

impl PruneReason {
    /// The kind of the reason, for programs that show it in words of their own.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            PruneReason::Ranked { pairing: PrunePairing::WithPartner(_), .. } => "full_pair",
            PruneReason::Ranked { measure: Measure::Age, .. } => "full_oldest",
            PruneReason::Ranked { measure: Measure::Random, .. } => "full_random",
            PruneReason::Ranked { .. } | PruneReason::Culled { .. } => "full_dimmest",
            PruneReason::Manual => "user",
            PruneReason::ManualDependent(_) => "user_dependent",
            PruneReason::Client => "client",
            PruneReason::Reasoning => "reasoning",
            PruneReason::BeforeImport => "import",
            PruneReason::Undo => "undo",
        }
    }
}

impl ResurrectReason {
    /// The kind of the reason, for programs that show it in words of their own.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            ResurrectReason::SearchHit { .. } => "search",
            ResurrectReason::OpensTurnOf(_) => "opens_turn",
            ResurrectReason::PairOf(_) => "pair",
            ResurrectReason::Manual => "user",
            ResurrectReason::Merged => "merged",
            ResurrectReason::Undo => "undo",
        }
    }
}

impl fmt::Display for PruneReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PruneReason::Ranked { order, measure, value, peak, live, budget, pairing } => {
                write!(f, "{live} tokens live, {budget} allowed; ")?;
                if let PrunePairing::WithPartner(partner) = pairing {
                    write!(f, "pruned as the pair of {partner}; ")?;
                } else {
                    let of = if *order == 0 { "" } else { " of the rest" };
                    write!(f, "{}{of}; ", if *measure == Measure::Age { "oldest" } else { "lowest" })?;
                }
                match measure {
                    Measure::Peak => write!(f, "its brightest token {peak}")?,
                    Measure::Mean => write!(f, "mean of its tokens {value:.2}, brightest {peak}")?,
                    Measure::Top4 => write!(f, "its four brightest tokens {value:.2}, brightest {peak}")?,
                    Measure::Votes => write!(f, "votes {value}, brightest token {peak}")?,
                    Measure::Attention => write!(f, "attention received {value:.3}, brightest token {peak}")?,
                    // Per mille: with a thousand tokens in the window, an even share is 1 ‰.
                    Measure::Share if value.is_finite() => write!(
                        f,
                        "a token of it received {:.3} ‰ of the attention, brightest {peak}",
                        value * 1000.0
                    )?,
                    Measure::Share => write!(f, "no attention measured yet, brightest {peak}")?,
                    Measure::Age => write!(f, "the policy prunes by age")?,
                    Measure::Random => write!(f, "chosen at random")?,
                    Measure::Salience => write!(f, "salience of its text {value:.2}")?,
                }
                if let PrunePairing::TookPartner(partner) = pairing {
                    write!(f, "; pruned with its pair {partner}")
                } else {
                    Ok(())
                }
            }
            PruneReason::Culled { live, target } => write!(f, "dimmest of {live} tokens, target {target}"),
            PruneReason::Manual => f.write_str("pruned by the user"),
            PruneReason::ManualDependent(chunk) => write!(f, "depends on {chunk}, which the user pruned"),
            PruneReason::Client => f.write_str("the client no longer sends it"),
            PruneReason::Reasoning => f.write_str("reasoning of a finished answer"),
            PruneReason::BeforeImport => f.write_str("before this log begins"),
            PruneReason::Undo => f.write_str("its resurrection was undone"),
        }
    }
}

impl fmt::Display for ResurrectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ResurrectReason::SearchHit { rank, score } => {
                write!(f, "found by search, hit {} at {score:.3}", rank + 1)
            }
            ResurrectReason::OpensTurnOf(chunk) => {
                write!(f, "opens the turn of {chunk}, which was resurrected")
            }
            ResurrectReason::PairOf(chunk) => {
                write!(f, "question or answer to {chunk}, which was resurrected")
            }
            ResurrectReason::Manual => f.write_str("resurrected by the user"),
            ResurrectReason::Merged => f.write_str("merged with a live chunk"),
            ResurrectReason::Undo => f.write_str("its pruning was undone"),
        }
    }
}

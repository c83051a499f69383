//! How attention becomes brightness: the strategies and their settings, what makes a row usable, and where
//! the threshold lies. The loop that runs at every step is in [`scorer`](crate::scorer).
//!
//! Two strategies, both complete: magnitude voting (the founding documents' third version) and the v0
//! engine, in [`ttl`](crate::ttl).

use crate::token::{Brightness, Role};
use crate::ttl::Ttl;

/// How attention becomes brightness.
#[derive(Clone, Debug, PartialEq)]
pub enum Strategy {
    /// Votes weighted by how far attention exceeds the step's threshold; a flat decay for the rest.
    Magnitude(Magnitude),
    /// The v0 engine: time to live.
    Ttl(Ttl),
}

impl Strategy {
    /// What a new token starts with.
    #[must_use]
    pub fn birth(&self, source: Source) -> Brightness {
        match self {
            Strategy::Magnitude(m) => m.initial,
            Strategy::Ttl(ttl) => ttl.seeds.of(source),
        }
    }

    /// The most that a token can have: what pinning and calling back by hand give.
    #[must_use]
    pub fn full(&self) -> Brightness {
        match self {
            Strategy::Magnitude(m) => m.cap,
            Strategy::Ttl(ttl) => ttl.max,
        }
    }
}

/// Where a token came from, as far as its first brightness is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The user's words.
    User,
    /// Standing instructions.
    System,
    /// A tool's result.
    Tool,
    /// The model's words.
    Llm,
    /// Anything else.
    Other,
}

impl Source {
    /// The source of a token by its role, or that it is part of a tool's result.
    #[must_use]
    pub fn of(role: Role, tool: bool) -> Self {
        match role {
            _ if tool => Source::Tool,
            Role::User => Source::User,
            Role::System => Source::System,
            Role::Assistant => Source::Llm,
        }
    }
}

/// The settings of magnitude voting.
#[derive(Clone, Debug, PartialEq)]
pub struct Magnitude {
    /// What a new token starts with: bright, so that it has time to prove itself.
    pub initial: Brightness,
    /// No token is brighter than this. There is no floor.
    pub cap: Brightness,
    /// What a token below the threshold loses, a whole number: flat, because a proportional decay collapses
    /// all to the mean.
    pub decay: f32,
    /// What counts as the attention sink.
    pub sink: Sink,
    /// Whether the tokens of the running turn are scored too.
    pub score_current_turn: bool,
    /// How rows that do not sum to 1 (the largest head instead of the mean) set the threshold.
    pub mass: Mass,
}

impl Default for Magnitude {
    fn default() -> Self {
        Self {
            initial: Brightness(10_000.0),
            cap: Brightness(10_000.0),
            decay: 1.0,
            sink: Sink::First,
            score_current_turn: false,
            mass: Mass::One,
        }
    }
}

/// Which slot is the attention sink, whose share says nothing about meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// The first slot. It is left out of the threshold and of scoring; the threshold is the mean attention
    /// of the other slots that the row covers.
    First,
    /// The largest value, wherever it stands, and nobody is exempt. This is the arithmetic of the original
    /// front end, all of it: the threshold also counts slots that came after the row was made, and zeros
    /// that pad the row count as attention.
    Max,
}

/// What the attention of a row sums to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mass {
    /// One: a mean over heads and layers.
    One,
    /// Whatever it sums to: a maximum over heads or layers.
    Sum,
}

/// Why a row of attention was not used. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// There was none.
    #[error("the step came without attention")]
    Missing,
    /// It does not cover the window.
    #[error("attention for {got} slots, but the window has {expected}")]
    TooShort {
        /// Its length.
        got: usize,
        /// The window's.
        expected: usize,
    },
    /// It goes on, not in zeros, behind the window.
    #[error("attention for {got} slots, but the window has {expected}, and the rest is not padding")]
    TooLong {
        /// Its length.
        got: usize,
        /// The window's.
        expected: usize,
    },
    /// A value that is no probability: not a number, infinite, negative or above 1. Raw logits look like this.
    #[error("attention at slot {slot} is {value}, which is no probability")]
    NotProbability {
        /// Where.
        slot: usize,
        /// What stands there.
        value: f32,
    },
    /// All of it lies on the sink, so no threshold can be drawn.
    #[error("all attention lies on the sink")]
    AllOnSink,
}

/// What one step of scoring did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observed {
    /// Attention above this was a vote.
    pub threshold: f64,
    /// Mean brightness of the scored tokens before the step, rounded down.
    pub mean: f64,
    /// How many tokens were voted for.
    pub votes: usize,
    /// How many slots of zeros the row was padded with.
    pub padding: usize,
}

impl Magnitude {
    /// What attention must exceed in this step, where the window has `live` slots.
    pub(crate) fn threshold(&self, row: &[f32], live: usize) -> Result<f64, Fault> {
        let total = match self.mass {
            Mass::One => 1.0,
            Mass::Sum => row.iter().map(|&a| f64::from(a)).sum(),
        };
        let (sink, count) = match self.sink {
            Sink::First => (row.first().copied().unwrap_or(0.0), row.len()),
            Sink::Max => (row.iter().fold(0.0, |a, &b| if b > a { b } else { a }), live),
        };
        let threshold = (total - f64::from(sink)) / (count as f64 - 1.0);
        if threshold <= 0.0 || !threshold.is_finite() {
            return Err(Fault::AllOnSink);
        }
        Ok(threshold)
    }
}

/// The part of a row that covers a window of `live` slots, and how many zeros it is padded with.
pub(crate) fn covered(row: &[f32], live: usize) -> Result<(&[f32], usize), Fault> {
    let expected = live.saturating_sub(1);
    if row.len() < expected || row.is_empty() {
        return Err(Fault::TooShort { got: row.len(), expected: live });
    }
    check_probabilities(row)?;
    if row.len() <= live {
        return Ok((row, 0));
    }
    if row[live..].iter().any(|&a| a != 0.0) {
        return Err(Fault::TooLong { got: row.len(), expected: live });
    }
    // Zeros behind the window are padding, and then the newest token, which the pass had not seen, is too.
    let used = if row[expected] == 0.0 { expected } else { live };
    Ok((&row[..used], row.len() - used))
}

/// Whether every value is a probability.
pub(crate) fn check_probabilities(row: &[f32]) -> Result<(), Fault> {
    // Among floats that are not negative, the order of the bits is the order of the numbers, and what is no
    // number comes last: one comparison of whole numbers tells.
    let most = CERTAIN.to_bits();
    let improper = row.iter().map(|a| u32::from(a.to_bits() > most)).fold(0u32, |n, i| n.wrapping_add(i));
    if improper > 0
        && let Some(slot) = row.iter().position(|a| !(0.0..=CERTAIN).contains(a))
    {
        return Err(Fault::NotProbability { slot, value: row[slot] });
    }
    Ok(())
}

/// One, and room for the rounding of a sum over heads.
const CERTAIN: f32 = 1.001;

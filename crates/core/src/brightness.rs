//! How attention becomes brightness: the strategies, their settings, and where the threshold lies. The loop
//! that runs at every step is in [`scorer`](crate::scorer).
//!
//! Two strategies, both complete: magnitude voting (the founding documents' third version) and the v0
//! engine, in [`ttl`](crate::ttl).

use crate::attention::Fault;
use crate::token::{Brightness, Source};
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

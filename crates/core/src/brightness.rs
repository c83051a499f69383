//! How attention becomes brightness: the strategies and their settings. [`scorer`](crate::scorer) has the loop
//! that runs at every step.
//!
//! There are two strategies: magnitude voting, the default, and time to live (v0, the first engine), in
//! [`ttl`](crate::ttl).

use crate::attention::AttentionError;
use crate::token::{Brightness, TokenSource};
use crate::ttl::TtlRules;

/// How attention becomes brightness.
#[derive(Clone, Debug, PartialEq, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(ScoringKind),
    derive(strum::Display, strum::EnumString, strum::VariantNames),
    strum(serialize_all = "snake_case"),
    doc = "A [`ScoringStrategy`] without its rules."
)]
pub enum ScoringStrategy {
    /// Magnitude voting: a token above the threshold of the step gains in proportion to its attention, and
    /// every other token loses a fixed amount.
    Magnitude(MagnitudeRules),
    /// Time to live, as in the v0 engine.
    Ttl(TtlRules),
}

impl ScoringStrategy {
    /// The brightness of a new token.
    #[must_use]
    pub fn initial_brightness(&self, source: TokenSource) -> Brightness {
        match self {
            ScoringStrategy::Magnitude(m) => m.initial,
            ScoringStrategy::Ttl(ttl) => ttl.initial.for_source(source),
        }
    }

    /// Whether a step is scored whose token the model gave this probability. A step without one is.
    #[must_use]
    pub fn scores_step(&self, probability: Option<f32>) -> bool {
        match self {
            ScoringStrategy::Magnitude(m) => {
                probability.is_none_or(|probability| probability >= m.min_confidence)
            }
            ScoringStrategy::Ttl(_) => true,
        }
    }

    /// The highest brightness of a token; pinning and manual resurrection set it.
    #[must_use]
    pub fn max_brightness(&self) -> Brightness {
        match self {
            ScoringStrategy::Magnitude(m) => m.cap,
            ScoringStrategy::Ttl(ttl) => ttl.max,
        }
    }
}

/// The settings of magnitude voting.
#[derive(Clone, Debug, PartialEq)]
pub struct MagnitudeRules {
    /// The brightness of a new token: high, so that it is not pruned before attention could reach it.
    pub initial: Brightness,
    /// The highest brightness. There is no lowest.
    pub cap: Brightness,
    /// What a token below the threshold loses per step; an integer. A fixed amount, because a proportional
    /// decay lets all tokens converge to the mean.
    pub decay: f32,
    /// Which slot is the attention sink.
    pub sink: AttentionSink,
    /// Whether the tokens of the running turn are scored as well.
    pub score_current_turn: bool,
    /// The sum of a row, which the threshold depends on.
    pub row_mass: RowMass,
    /// Steps in which the model gave its token a lower probability are not scored; 0: every step is.
    pub min_confidence: f32,
}

impl Default for MagnitudeRules {
    fn default() -> Self {
        Self {
            initial: Brightness(10_000.0),
            cap: Brightness(10_000.0),
            decay: 1.0,
            sink: AttentionSink::First,
            score_current_turn: false,
            row_mass: RowMass::One,
            min_confidence: 0.0,
        }
    }
}

/// Which slot is the attention sink. Its attention says nothing about the meaning of its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AttentionSink {
    /// The first slot. It is excluded from scoring and from the threshold, which is the mean attention of the
    /// other slots that the row covers.
    First,
    /// The slot with the largest value. No slot is excluded from scoring. This is the arithmetic of the
    /// original front end: the threshold also counts slots that are newer than the row, and padding zeros count
    /// as attention.
    Max,
}

/// What an attention row sums to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMass {
    /// 1: rows are means over heads and layers.
    One,
    /// The measured sum of the row: rows are maxima over heads or layers.
    Measured,
}

impl MagnitudeRules {
    /// The attention that a token must exceed in this step to receive a vote, in a window of `live` slots.
    pub(crate) fn threshold(&self, row: &[f32], live: usize) -> Result<f64, AttentionError> {
        let total = match self.row_mass {
            RowMass::One => 1.0,
            RowMass::Measured => row.iter().map(|&a| f64::from(a)).sum(),
        };
        let (sink, count) = match self.sink {
            AttentionSink::First => (row.first().copied().unwrap_or(0.0), row.len()),
            AttentionSink::Max => (row.iter().fold(0.0, |a, &b| if b > a { b } else { a }), live),
        };
        let threshold = (total - f64::from(sink)) / (count as f64 - 1.0);
        if threshold <= 0.0 || !threshold.is_finite() {
            return Err(AttentionError::AllOnSink);
        }
        Ok(threshold)
    }
}

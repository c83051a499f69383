//! Attention rows: which of them are requested from a model, which can be scored, and their statistics.

use crate::token::{ChunkId, Position};
use std::fmt;

/// Which attention rows a model is asked for. A model skips the work for rows that are not asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionRequest {
    /// Rows of the answer.
    pub answer: bool,
    /// A row for every Nth token of the answer, the first one included; 0 and 1 are every token.
    pub stride: u32,
    /// Rows of the prompt.
    pub prompt: PromptRows,
    /// How the layers are reduced to one row.
    pub layers: LayerReduction,
    /// The maximum over the heads, in addition to the mean.
    pub max: bool,
    /// The row of every head of every layer, for captures.
    pub per_head: bool,
    /// The probability that the model gave to the token of each step.
    pub probability: bool,
}

impl AttentionRequest {
    /// No rows at all.
    #[must_use]
    pub fn none() -> Self {
        Self {
            answer: false,
            stride: 1,
            prompt: PromptRows::Off,
            layers: LayerReduction::Mean,
            max: false,
            per_head: false,
            probability: false,
        }
    }
}

impl Default for AttentionRequest {
    /// The row of each step of the answer and of the last token of each prompt batch, averaged over heads and
    /// layers.
    fn default() -> Self {
        Self { answer: true, prompt: PromptRows::Last, ..Self::none() }
    }
}

/// Which rows of a prompt are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum PromptRows {
    /// No row.
    Off,
    /// The row of the last token of each batch.
    #[strum(serialize = "last_row")]
    Last,
    /// The row of every token.
    #[strum(serialize = "all_rows")]
    All,
}

/// How the rows of the layers are reduced to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerReduction {
    /// The mean over all layers.
    Mean,
    /// The last layer alone.
    Last,
    /// The maximum over all layers, slot by slot. Such a row does not sum to 1.
    Max,
    /// The mean over these layers, counted from 0.
    Selected(Vec<usize>),
}

impl fmt::Display for LayerReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerReduction::Mean => f.write_str("mean"),
            LayerReduction::Last => f.write_str("last"),
            LayerReduction::Max => f.write_str("max"),
            LayerReduction::Selected(layers) => write!(f, "{layers:?}"),
        }
    }
}

/// Why an attention row was not scored. The scores are unchanged after each of these.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// The step has no row.
    #[error("the step came without attention")]
    Missing,
    /// The row covers fewer slots than the window has.
    #[error("attention for {got} slots, but at least {expected} were in the window")]
    TooShort {
        /// Slots of the row.
        got: usize,
        /// Slots of the window without the newest token.
        expected: usize,
    },
    /// The row has values other than zero behind the end of the window.
    #[error("attention for {got} slots, but the window has {expected}, and the rest is not padding")]
    TooLong {
        /// Slots of the row.
        got: usize,
        /// Slots of the window.
        expected: usize,
    },
    /// A value that is not a number between 0 and 1. Raw logits look like this.
    #[error("attention at slot {slot} is {value}, which is no probability")]
    NotProbability {
        /// The slot.
        slot: usize,
        /// Its value.
        value: f32,
    },
    /// All attention lies on the sink, so there is no threshold for the other slots.
    #[error("the sink takes all attention, so there is no threshold")]
    AllOnSink,
    /// All attention lies on tokens that this window does not hold, because a replay has pruned them.
    #[error("all attention lies on tokens that the replay has pruned")]
    AllOnPruned,
}

/// The result of scoring one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScore {
    /// The attention above which a token received a vote; 0 for [`ttl`](crate::ttl) scoring, which has none.
    pub threshold: f64,
    /// The mean brightness of the scored tokens before the step, rounded down.
    pub mean: f64,
    /// How many tokens received a vote.
    pub votes: usize,
    /// How many zeros the row was padded with.
    pub padding: usize,
}

/// The part of a row that covers a window of `live` slots, and how many zeros it is padded with.
pub(crate) fn covered_slots(row: &[f32], live: usize) -> Result<(&[f32], usize), AttentionError> {
    let expected = live.saturating_sub(1);
    if row.len() < expected || row.is_empty() {
        return Err(AttentionError::TooShort { got: row.len(), expected });
    }
    check_probabilities(row)?;
    if row.len() < live {
        return Ok((row, 0));
    }
    if row[live..].iter().any(|&a| a != 0.0) {
        return Err(AttentionError::TooLong { got: row.len(), expected: live });
    }
    // Zeros behind the window are padding. So is a zero for the newest token: the forward pass did not include
    // it, and a softmax gives exactly zero to no token that it includes.
    let used = if live > 1 && row[expected] == 0.0 { expected } else { live };
    Ok((&row[..used], row.len() - used))
}

/// Checks that every value is a probability.
pub(crate) fn check_probabilities(row: &[f32]) -> Result<(), AttentionError> {
    // The bits of non-negative floats are ordered like their values, and NaN and negative numbers have larger
    // bits: one integer comparison per value finds them all.
    let max_bits = MAX_PROBABILITY.to_bits();
    let invalid = row.iter().map(|a| u32::from(a.to_bits() > max_bits)).fold(0u32, |n, i| n.wrapping_add(i));
    if invalid > 0
        && let Some(slot) = row.iter().position(|a| !(0.0..=MAX_PROBABILITY).contains(a))
    {
        return Err(AttentionError::NotProbability { slot, value: row[slot] });
    }
    Ok(())
}

/// One, with a margin for the rounding of a sum over heads.
const MAX_PROBABILITY: f32 = 1.001;

/// Where the attention of one step lies on the earlier messages: what a page draws while an answer is generated. The running turn,
/// the system prompt and the attention sink are left out, because they receive most of the attention at every step.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionFocus {
    /// The tokens with the most attention, the largest share first.
    pub tokens: Vec<FocusedToken>,
    /// The share of each chunk, in the order of the window. The shares sum to 1.
    pub chunks: Vec<(ChunkId, f32)>,
}

/// A token with its share of the attention to the earlier messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FocusedToken {
    /// Its chunk.
    pub chunk: ChunkId,
    /// Its position on the timeline.
    pub position: Position,
    /// Its share, from 0 to 1.
    pub share: f32,
}

/// The statistics of one attention row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionStats {
    /// Mean of the values.
    pub mean: f64,
    /// Median of the values; of an even number, the mean of the middle two.
    pub median: f64,
    /// Largest value.
    pub max: f64,
    /// Smallest value.
    pub min: f64,
    /// Standard deviation of the row as a population, not as a sample.
    pub std: f64,
    /// How the attention is distributed over the slots.
    pub histogram: AttentionHistogram,
}

/// How many slots of a row received how much attention. The bins are powers of two, because attention spans many
/// orders of magnitude: bin 0 counts the slots below 2⁻¹⁵, bin `k` those from 2^(`k` − 16) to below 2^(`k` − 15), and
/// the last bin those of a half or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionHistogram(pub [u32; AttentionHistogram::BINS]);

impl AttentionHistogram {
    /// The number of bins.
    pub const BINS: usize = 16;

    /// The histogram of a row of finite values.
    #[must_use]
    pub fn from_row(row: &[f32]) -> Self {
        let mut counts = [0; Self::BINS];
        for &attention in row {
            counts[Self::bin_of(attention)] += 1;
        }
        Self(counts)
    }

    /// The attention at which a bin begins: 0 for the first.
    #[must_use]
    pub fn lower_edge(bin: usize) -> f64 {
        if bin == 0 { 0.0 } else { (bin as f64 - Self::BINS as f64).exp2() }
    }

    fn bin_of(attention: f32) -> usize {
        (1..Self::BINS).rev().find(|&bin| f64::from(attention) >= Self::lower_edge(bin)).unwrap_or(0)
    }
}

impl AttentionStats {
    /// The statistics of a row; none for an empty row and for one with a value that is not finite.
    #[must_use]
    pub fn from_row(row: &[f32]) -> Option<Self> {
        if row.is_empty() || row.iter().any(|a| !a.is_finite()) {
            return None;
        }
        let mut sorted: Vec<f64> = row.iter().map(|&a| f64::from(a)).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let n = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / n;
        let std = (sorted.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / n).sqrt();
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
        Some(Self { mean, median, max, min, std, histogram: AttentionHistogram::from_row(row) })
    }
}

/// Whether the statistics of a step are recorded: every `interval` steps, counted from 0; never where
/// `interval` is 0.
#[must_use]
pub fn is_traced(step: u64, interval: u64) -> bool {
    interval > 0 && step.is_multiple_of(interval)
}

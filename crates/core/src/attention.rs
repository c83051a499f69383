//! Rows of attention: which can be used, what scoring one gives, and what shape it has.

/// What is wanted of a model's attention. Nothing costs nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// Whether the answer's own steps.
    pub answer: bool,
    /// What of the prompt.
    pub prompt: PromptRows,
    /// How layers are made one.
    pub layers: Layers,
    /// Whether the largest head is wanted beside the mean.
    pub max: bool,
    /// Whether every head of every layer is wanted as well: for captures.
    pub full: bool,
}

impl Watch {
    /// Nothing.
    #[must_use]
    pub fn nothing() -> Self {
        Self { answer: false, prompt: PromptRows::Off, layers: Layers::Mean, max: false, full: false }
    }
}

impl Default for Watch {
    /// Every step of the answer, the last row of each batch of the prompt, all layers, the mean of heads.
    fn default() -> Self {
        Self { answer: true, prompt: PromptRows::Last, ..Self::nothing() }
    }
}

/// Which rows of a prompt are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptRows {
    /// None.
    Off,
    /// That of the last token of each batch.
    Last,
    /// All.
    All,
}

/// How the layers of a model are made one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// The mean of all.
    Mean,
    /// The last alone.
    Last,
    /// The largest of all, slot by slot: no probabilities any more.
    Max,
    /// The mean of these, counted from 0.
    These(Vec<usize>),
}

/// Why a row of attention was not used. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// There was none.
    #[error("the step came without attention")]
    Missing,
    /// It does not cover the window.
    #[error("attention for {got} slots, but at least {expected} were in the window")]
    TooShort {
        /// Its length.
        got: usize,
        /// The window's, without the newest token.
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
    #[error("the sink takes all attention, so no threshold can be drawn")]
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

/// The part of a row that covers a window of `live` slots, and how many zeros it is padded with.
pub(crate) fn covered(row: &[f32], live: usize) -> Result<(&[f32], usize), Fault> {
    let expected = live.saturating_sub(1);
    if row.len() < expected || row.is_empty() {
        return Err(Fault::TooShort { got: row.len(), expected });
    }
    check_probabilities(row)?;
    if row.len() < live {
        return Ok((row, 0));
    }
    if row[live..].iter().any(|&a| a != 0.0) {
        return Err(Fault::TooLong { got: row.len(), expected: live });
    }
    // Zeros behind the window are padding, and so is a zero for the newest token, which the pass had not seen:
    // a softmax gives nothing that it sees exactly zero.
    let used = if live > 1 && row[expected] == 0.0 { expected } else { live };
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

/// The shape of one row of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionStats {
    /// Mean.
    pub mean: f64,
    /// Median; of an even number, the mean of the middle two.
    pub median: f64,
    /// Largest.
    pub max: f64,
    /// Smallest.
    pub min: f64,
    /// Standard deviation, of the whole row (not of a sample).
    pub std: f64,
}

impl AttentionStats {
    /// The statistics of a row; none for an empty row or one with something that is no number.
    #[must_use]
    pub fn of(row: &[f32]) -> Option<Self> {
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
        Some(Self { mean, median, max: sorted[sorted.len() - 1], min: sorted[0], std })
    }
}

/// Whether the attention of a step is saved: every `interval` steps, counted from 0; never at 0.
#[must_use]
pub fn is_traced(step: u64, interval: u64) -> bool {
    interval > 0 && step.is_multiple_of(interval)
}

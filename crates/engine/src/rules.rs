//! What a conversation goes by.

use crate::frame::Names;
use crate::memory::MemoryRules;
use crate::premise::Premises;
use crate::tools::jq::Runner;
use halo_core::attention::Watch;
use halo_core::replay;
use halo_core::seams::Sampling;
use halo_recall::recall::Manner;

/// What a conversation goes by.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Scoring and pruning.
    pub context: replay::Rules,
    /// Tokens that pruning leaves free for what comes back with the next message, beside those of its answer; 0 leaves
    /// nothing free.
    pub room: usize,
    /// What is watched of the model.
    pub watch: Watch,
    /// How answers are drawn.
    pub sampling: Sampling,
    /// How the past is searched, and how many hits are considered.
    pub recall: Manner,
    /// What a chunk that search brings back shines with.
    pub returns: ReturnLight,
    /// How many tokens of its answer the model begins, in a fork, to search with; 0: none.
    pub preview: usize,
    /// How the model's tools run; none: it has no tools.
    pub tools: Option<Runner>,
    /// The standing instructions.
    pub system: String,
    /// Whether the model is told the day at the first message of a day.
    pub dates: bool,
    /// What the user and the model are called.
    pub names: Names,
    /// Who holds what a question takes for granted against what was said; none: nobody.
    pub premises: Option<Premises>,
    /// How memories are formed; none: they are not.
    pub memory: Option<MemoryRules>,
}

/// What a chunk that search brings back shines with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnLight {
    /// What it left with.
    Earned,
    /// The mean of what is live.
    Mean,
    /// All there is.
    Full,
}

impl Rules {
    /// Tokens that the window may hold after a turn; none: as many as the model can see.
    #[must_use]
    pub fn budget(&self) -> Option<usize> {
        let free = if self.room == 0 { 0 } else { self.room + self.sampling.max_tokens };
        (self.context.max_tokens > 0).then(|| self.context.max_tokens.saturating_sub(free))
    }
}

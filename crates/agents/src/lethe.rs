//! What is forgotten for good, and when. Nothing else forgets: what leaves a window is only out of sight.
//!
//! By age, what was said passes through four stages. Hot: all of it is there. Warm: the words are, the model's own memory
//! of them and recordings of its attention are not. Compost: the words are gone, and a sketch of how much there was
//! remains. Then that goes too, and a proof remains that something was forgotten.

use crate::sketch::Sketch;

/// A day, in milliseconds.
pub const DAY: i64 = 24 * 60 * 60 * 1000;

/// How much of something is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// All.
    Hot,
    /// The words.
    Warm,
    /// A sketch.
    Compost,
    /// A proof that it was.
    Forgotten,
}

impl Stage {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stage::Hot => "hot",
            Stage::Warm => "warm",
            Stage::Compost => "compost",
            Stage::Forgotten => "forgotten",
        }
    }

    /// The stage of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Stage::Hot, Stage::Warm, Stage::Compost, Stage::Forgotten].into_iter().find(|s| s.name() == name)
    }
}

/// Until which age, in days, each stage lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// All is kept.
    pub hot: u32,
    /// The words are kept.
    pub warm: u32,
    /// A sketch is kept.
    pub compost: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { hot: 30, warm: 365, compost: 730 }
    }
}

impl Policy {
    /// Whether the stages follow each other.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.hot <= self.warm && self.warm <= self.compost
    }

    /// How much is kept of what is of that age, in milliseconds. What was said in the future is hot.
    #[must_use]
    pub fn stage(&self, age: i64) -> Stage {
        let reached = |days: u32| age >= i64::from(days) * DAY;
        match () {
            () if reached(self.compost) => Stage::Forgotten,
            () if reached(self.warm) => Stage::Compost,
            () if reached(self.hot) => Stage::Warm,
            () => Stage::Hot,
        }
    }

    /// What is to be taken further, of things known by when they were said and how much of them is kept: which, and how
    /// far. Nothing ever comes back.
    pub fn due<K>(&self, things: impl IntoIterator<Item = (K, i64, Stage)>, now: i64) -> Vec<(K, Stage)> {
        let due = |(key, said, stage): (K, i64, Stage)| {
            let to = self.stage(now.saturating_sub(said));
            (to > stage).then_some((key, to))
        };
        things.into_iter().filter_map(due).collect()
    }
}

/// What remains of words that are gone: how many there were, and how they were spread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compost {
    /// Messages of the user's.
    pub user: u64,
    /// Messages of the model's.
    pub assistant: u64,
    /// Tokens in all.
    pub tokens: u64,
    /// How long the paragraphs were, in tokens.
    pub length: Sketch,
    /// How bright their brightest token was.
    pub peak: Sketch,
}

impl Compost {
    /// Puts another heap on this one.
    pub fn merge(&mut self, other: &Compost) {
        self.user += other.user;
        self.assistant += other.assistant;
        self.tokens += other.tokens;
        self.length.merge(&other.length);
        self.peak.merge(&other.peak);
    }
}

//! Retention: what is deleted for good, and when. Pruning a window deletes nothing.
//!
//! By age, a message passes through four stages. Hot: everything is stored. Warm: the text is stored, its KV cells and
//! attention recordings are deleted. Compost: the text is deleted, and statistics remain. Forgotten: the statistics are
//! deleted too, and a proof of deletion remains.

use crate::sketch::QuantileSketch;

/// Milliseconds of a day.
pub const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

/// How much of a message is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetentionStage {
    /// Everything.
    Hot,
    /// The text.
    Warm,
    /// Statistics.
    Compost,
    /// A proof of deletion.
    Forgotten,
}

impl RetentionStage {
    /// The name of the stage.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RetentionStage::Hot => "hot",
            RetentionStage::Warm => "warm",
            RetentionStage::Compost => "compost",
            RetentionStage::Forgotten => "forgotten",
        }
    }

    /// The stage with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [RetentionStage::Hot, RetentionStage::Warm, RetentionStage::Compost, RetentionStage::Forgotten]
            .into_iter()
            .find(|s| s.name() == name)
    }
}

/// The age in days at which each stage ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// The end of [`RetentionStage::Hot`].
    pub hot: u32,
    /// The end of [`RetentionStage::Warm`].
    pub warm: u32,
    /// The end of [`RetentionStage::Compost`].
    pub compost: u32,
}

impl Default for RetentionPolicy {
    fn default() -> Self {
        Self { hot: 30, warm: 365, compost: 730 }
    }
}

impl RetentionPolicy {
    /// Whether the stages are in order.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        self.hot <= self.warm && self.warm <= self.compost
    }

    /// The stage for an age in milliseconds. A negative age is hot.
    #[must_use]
    pub fn stage_for_age(&self, age: i64) -> RetentionStage {
        let is_older_than = |days: u32| age >= i64::from(days) * DAY_MILLIS;
        match () {
            () if is_older_than(self.compost) => RetentionStage::Forgotten,
            () if is_older_than(self.warm) => RetentionStage::Compost,
            () if is_older_than(self.hot) => RetentionStage::Warm,
            () => RetentionStage::Hot,
        }
    }

    /// The items that are due for a later stage, with that stage. Each item has a key, its time and its stage; no item
    /// goes back to an earlier stage.
    pub fn due_transitions<K>(
        &self,
        items: impl IntoIterator<Item = (K, i64, RetentionStage)>,
        now: i64,
    ) -> Vec<(K, RetentionStage)> {
        let due = |(key, time, stage): (K, i64, RetentionStage)| {
            let next = self.stage_for_age(now.saturating_sub(time));
            (next > stage).then_some((key, next))
        };
        items.into_iter().filter_map(due).collect()
    }
}

/// Statistics of deleted messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompostStats {
    /// Messages of the user.
    pub user_messages: u64,
    /// Messages of the model.
    pub assistant_messages: u64,
    /// Tokens of all messages.
    pub tokens: u64,
    /// Tokens per chunk.
    pub lengths: QuantileSketch,
    /// The highest brightness per chunk.
    pub peak_brightness: QuantileSketch,
}

impl CompostStats {
    /// Adds other statistics to these.
    pub fn merge(&mut self, other: &CompostStats) {
        self.user_messages += other.user_messages;
        self.assistant_messages += other.assistant_messages;
        self.tokens += other.tokens;
        self.lengths.merge(&other.lengths);
        self.peak_brightness.merge(&other.peak_brightness);
    }
}

//! A sliding window over pieces of text: the first tokens and the latest tokens stay, and those between are
//! pruned by salience, or by age without a scorer.
//!
//! For agents and for models without attention. A conversation with attention has the timeline and
//! [`prune`](crate::prune).

use crate::budget::pressure;
use crate::salience::{SalienceScorer, recency};
use std::collections::{BTreeSet, VecDeque};

/// The sizes of a window, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// The whole window.
    pub window: usize,
    /// The first tokens, the attention sinks.
    pub sink: usize,
    /// The latest tokens.
    pub recent: usize,
}

impl Default for WindowSize {
    fn default() -> Self {
        Self { window: 4096, sink: 4, recent: 1024 }
    }
}

impl WindowSize {
    /// What is left for the pieces between the first and the latest.
    #[must_use]
    pub fn middle(&self) -> usize {
        self.window.saturating_sub(self.sink).saturating_sub(self.recent)
    }
}

/// The pressure above which a window should be pruned.
pub const HIGH_PRESSURE: f64 = 0.8;

/// A piece of text in a window: a token, a sentence or a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindowItem {
    /// Distinguishes pieces with equal texts.
    pub id: u64,
    /// The text.
    pub text: String,
    /// Its length in tokens.
    pub tokens: usize,
}

/// The first pieces, the latest pieces, and those between.
#[derive(Clone, Debug)]
pub struct SlidingWindow {
    size: WindowSize,
    scorer: Option<SalienceScorer>,
    sinks: Vec<SlidingWindowItem>,
    middle: VecDeque<SlidingWindowItem>,
    recent: VecDeque<SlidingWindowItem>,
    /// Tokens in each of the three.
    tokens: [usize; 3],
    next_id: u64,
}

const SINKS: usize = 0;
const MIDDLE: usize = 1;
const RECENT: usize = 2;

/// The result of pruning a window under pressure.
#[derive(Clone, Debug, PartialEq)]
pub struct PressureRelief {
    /// Pressure before.
    pub initial_pressure: f64,
    /// Pressure after.
    pub final_pressure: f64,
    /// The pieces that were removed.
    pub pruned: Vec<SlidingWindowItem>,
}

impl SlidingWindow {
    /// An empty window. Without a scorer, the oldest piece of the middle is pruned first.
    #[must_use]
    pub fn new(size: WindowSize, scorer: Option<SalienceScorer>) -> Self {
        let (middle, recent) = (VecDeque::new(), VecDeque::new());
        Self { size, scorer, sinks: Vec::new(), middle, recent, tokens: [0; 3], next_id: 0 }
    }

    /// Adds a piece of `tokens` tokens at the end and returns the pieces that were pruned. The first pieces and
    /// the latest one stay even if they alone exceed the window; [`pressure`](Self::pressure) is then above 1.
    pub fn push(&mut self, text: impl Into<String>, tokens: usize) -> Vec<SlidingWindowItem> {
        let item = SlidingWindowItem { id: self.next_id, text: text.into(), tokens };
        self.next_id += 1;
        if self.tokens[SINKS] < self.size.sink {
            self.tokens[SINKS] += tokens;
            self.sinks.push(item);
            return Vec::new();
        }
        self.tokens[RECENT] += tokens;
        self.recent.push_back(item);
        while self.tokens[RECENT] > self.size.recent && self.recent.len() > 1 {
            let old = self.recent.pop_front().expect("more than one item");
            self.tokens[RECENT] -= old.tokens;
            self.tokens[MIDDLE] += old.tokens;
            self.middle.push_back(old);
        }
        let mut pruned = Vec::new();
        // Large pieces at either end may exceed their share; the middle makes room for them.
        while self.tokens() > self.size.window.max(self.tokens[SINKS] + self.tokens[RECENT])
            || self.tokens[MIDDLE] > self.size.middle()
        {
            pruned.extend(self.prune());
        }
        pruned
    }

    /// Prunes the least salient tenth of the middle, at least one piece; without a scorer, the oldest piece.
    pub fn prune(&mut self) -> Vec<SlidingWindowItem> {
        let pruned: Vec<SlidingWindowItem> = match &self.scorer {
            None => self.middle.pop_front().into_iter().collect(),
            Some(scorer) => {
                let (offset, count) = (self.sinks.len(), self.items().count());
                let score = |(i, item): (usize, &SlidingWindowItem)| {
                    (scorer.score(&item.text, recency(offset + i, count)), item.id)
                };
                let mut scored: Vec<(f64, u64)> = self.middle.iter().enumerate().map(score).collect();
                scored.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                scored.truncate((scored.len() / 10).max(1));
                let lowest: BTreeSet<u64> = scored.into_iter().map(|(_, id)| id).collect();
                let (pruned, rest): (Vec<_>, Vec<_>) =
                    self.middle.drain(..).partition(|item| lowest.contains(&item.id));
                self.middle = rest.into();
                pruned
            }
        };
        self.tokens[MIDDLE] -= pruned.iter().map(|item| item.tokens).sum::<usize>();
        pruned
    }

    /// How full the window is; see [`pressure`].
    #[must_use]
    pub fn pressure(&self) -> f64 {
        pressure(self.tokens(), self.size.window)
    }

    /// Prunes once if the pressure is above `threshold`.
    pub fn relieve_pressure(&mut self, threshold: f64) -> Option<PressureRelief> {
        let initial_pressure = self.pressure();
        if initial_pressure <= threshold {
            return None;
        }
        let pruned = self.prune();
        Some(PressureRelief { initial_pressure, final_pressure: self.pressure(), pruned })
    }

    /// The pieces in the window, in order.
    pub fn items(&self) -> impl Iterator<Item = &SlidingWindowItem> {
        self.sinks.iter().chain(&self.middle).chain(&self.recent)
    }

    /// How many tokens the window holds.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// The texts of the pieces, joined by spaces.
    #[must_use]
    pub fn context(&self) -> String {
        self.items().map(|p| p.text.as_str()).collect::<Vec<_>>().join(" ")
    }
}

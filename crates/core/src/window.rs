//! A sliding window over pieces of text: the first tokens stay, the latest stay, and what lies between gives
//! way by salience, or in order of age where nothing scores it.
//!
//! This is the window of agents and of models without attention; a conversation with attention has the
//! timeline and [`prune`](crate::prune).

use crate::budget::pressure;
use crate::salience::{Salience, recency};
use std::collections::{BTreeSet, VecDeque};

/// The sizes of a window, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// All of it.
    pub window: usize,
    /// The first tokens, which anchor attention.
    pub sink: usize,
    /// The latest tokens, the working memory.
    pub recent: usize,
}

impl Default for WindowSize {
    fn default() -> Self {
        Self { window: 4096, sink: 4, recent: 1024 }
    }
}

impl WindowSize {
    /// What is left for the middle.
    #[must_use]
    pub fn middle(&self) -> usize {
        self.window.saturating_sub(self.sink).saturating_sub(self.recent)
    }
}

/// Above this pressure a window should be relieved.
pub const HIGH_PRESSURE: f64 = 0.8;

/// A piece of text in a window: a token, a sentence, a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which one it is: equal texts are different pieces.
    pub id: u64,
    /// What it says.
    pub text: String,
    /// How long it is.
    pub tokens: usize,
}

/// The first, the middle and the latest pieces.
#[derive(Clone, Debug)]
pub struct SlidingWindow {
    size: WindowSize,
    scorer: Option<Salience>,
    sinks: Vec<Piece>,
    middle: VecDeque<Piece>,
    recent: VecDeque<Piece>,
    /// Tokens in each of the three.
    tokens: [usize; 3],
    next: u64,
}

const SINKS: usize = 0;
const MIDDLE: usize = 1;
const RECENT: usize = 2;

/// A window that was too full, before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct Relief {
    /// Pressure before.
    pub initial_pressure: f64,
    /// Pressure after.
    pub final_pressure: f64,
    /// What left.
    pub pruned: Vec<Piece>,
}

impl SlidingWindow {
    /// An empty window; without a scorer the oldest of the middle leaves first.
    #[must_use]
    pub fn new(size: WindowSize, scorer: Option<Salience>) -> Self {
        let (middle, recent) = (VecDeque::new(), VecDeque::new());
        Self { size, scorer, sinks: Vec::new(), middle, recent, tokens: [0; 3], next: 0 }
    }

    /// Adds a piece of `tokens` tokens at the end; returns what leaves. The first pieces and the latest one stay
    /// even where they alone exceed the window: [`pressure`](Self::pressure) above 1 says so.
    pub fn add(&mut self, text: impl Into<String>, tokens: usize) -> Vec<Piece> {
        let piece = Piece { id: self.next, text: text.into(), tokens };
        self.next += 1;
        if self.tokens[SINKS] < self.size.sink {
            self.tokens[SINKS] += tokens;
            self.sinks.push(piece);
            return Vec::new();
        }
        self.tokens[RECENT] += tokens;
        self.recent.push_back(piece);
        while self.tokens[RECENT] > self.size.recent && self.recent.len() > 1 {
            let old = self.recent.pop_front().expect("more than one piece");
            self.tokens[RECENT] -= old.tokens;
            self.tokens[MIDDLE] += old.tokens;
            self.middle.push_back(old);
        }
        let mut pruned = Vec::new();
        // Large pieces may take more than their share at either end; the middle gives way for them.
        while self.tokens() > self.size.window.max(self.tokens[SINKS] + self.tokens[RECENT])
            || self.tokens[MIDDLE] > self.size.middle()
        {
            pruned.extend(self.prune());
        }
        pruned
    }

    /// Takes the least salient tenth of the middle, at least one piece; without a scorer, the oldest piece.
    pub fn prune(&mut self) -> Vec<Piece> {
        let gone: Vec<Piece> = match &self.scorer {
            None => self.middle.pop_front().into_iter().collect(),
            Some(scorer) => {
                let (offset, all) = (self.sinks.len(), self.pieces().count());
                let score = |(i, p): (usize, &Piece)| (scorer.score(&p.text, recency(offset + i, all)), p.id);
                let mut scored: Vec<(f64, u64)> = self.middle.iter().enumerate().map(score).collect();
                scored.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                scored.truncate((scored.len() / 10).max(1));
                let goes: BTreeSet<u64> = scored.into_iter().map(|(_, id)| id).collect();
                let (gone, stay): (Vec<_>, Vec<_>) =
                    self.middle.drain(..).partition(|p| goes.contains(&p.id));
                self.middle = stay.into();
                gone
            }
        };
        self.tokens[MIDDLE] -= gone.iter().map(|p| p.tokens).sum::<usize>();
        gone
    }

    /// How full the window is.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        pressure(self.tokens(), self.size.window)
    }

    /// Prunes once if the pressure is above `threshold`.
    pub fn relieve(&mut self, threshold: f64) -> Option<Relief> {
        let initial_pressure = self.pressure();
        if initial_pressure <= threshold {
            return None;
        }
        let pruned = self.prune();
        Some(Relief { initial_pressure, final_pressure: self.pressure(), pruned })
    }

    /// The pieces that are left, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.sinks.iter().chain(&self.middle).chain(&self.recent)
    }

    /// How many tokens are left.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// What is left, joined by spaces.
    #[must_use]
    pub fn context(&self) -> String {
        self.pieces().map(|p| p.text.as_str()).collect::<Vec<_>>().join(" ")
    }
}

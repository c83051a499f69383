//! Time-to-live scoring (v0, the first engine). A token starts with a brightness that depends on its origin,
//! loses some at every step and gains by attention. The dimmest tokens of a full window are culled, one or two
//! per step.

use crate::token::{Brightness, TokenSource};

/// The settings of time-to-live scoring.
#[derive(Clone, Debug, PartialEq)]
pub struct TtlRules {
    /// The brightness of a new token.
    pub initial: InitialBrightness,
    /// The highest brightness; the lowest is 0.
    pub max: Brightness,
    /// What each token loses per step.
    pub decay: f32,
    /// What a token gains for an attention of 1.
    pub gain: f32,
    /// Whether gains are truncated to integers.
    pub whole_gain: bool,
    /// How many tokens the window should hold.
    pub target: usize,
}

impl Default for TtlRules {
    fn default() -> Self {
        Self {
            initial: InitialBrightness::default(),
            max: Brightness(255.0),
            decay: 2.0,
            gain: 10.0,
            whole_gain: true,
            target: 500,
        }
    }
}

/// The brightness of new tokens, by origin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitialBrightness {
    /// For messages of the user.
    pub user: Brightness,
    /// For system messages.
    pub system: Brightness,
    /// For tool results.
    pub tool: Brightness,
    /// For answers of the model.
    pub llm: Brightness,
    /// For anything else.
    pub other: Brightness,
}

impl Default for InitialBrightness {
    fn default() -> Self {
        let [full, model] = [Brightness(255.0), Brightness(200.0)];
        Self { user: full, system: full, tool: full, llm: model, other: model }
    }
}

impl InitialBrightness {
    /// The initial brightness for an origin.
    #[must_use]
    pub fn for_source(&self, source: TokenSource) -> Brightness {
        match source {
            TokenSource::User => self.user,
            TokenSource::System => self.system,
            TokenSource::Tool => self.tool,
            TokenSource::Llm => self.llm,
            TokenSource::Other => self.other,
        }
    }
}

impl TtlRules {
    /// Scores one step: each token decays and gains by its attention. Tokens that the row does not cover are
    /// unchanged.
    pub fn update(&self, brightness: &mut [f32], attention: &[f32]) {
        for (b, &a) in brightness.iter_mut().zip(attention) {
            let gain = a * self.gain;
            let gain = if self.whole_gain { gain.trunc() } else { gain };
            *b = (*b - self.decay + gain).clamp(0.0, self.max.0);
        }
    }

    /// How many tokens of a window of `len` are culled: none below the target, one at the target, at most two
    /// above it.
    #[must_use]
    pub fn cull_count(&self, len: usize) -> usize {
        match len {
            _ if len < self.target || len == 0 => 0,
            _ if len == self.target => 1,
            _ => 2.min(len - self.target),
        }
    }

    /// How many tokens of a window of `len` exceed the target.
    #[must_use]
    pub fn excess(&self, len: usize) -> usize {
        len.saturating_sub(self.target)
    }

    /// The slots of `count` tokens to cull, in order: the dimmest ones, and of equal ones the first. Slots for which
    /// `may_cull` is false are not culled.
    #[must_use]
    pub fn dimmest(&self, brightness: &[f32], count: usize, may_cull: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut slots: Vec<usize> = (0..brightness.len()).filter(|&slot| may_cull(slot)).collect();
        if count < slots.len() {
            slots.select_nth_unstable_by(count, |&a, &b| {
                brightness[a].total_cmp(&brightness[b]).then(a.cmp(&b))
            });
            slots.truncate(count);
        }
        slots.sort_unstable();
        slots
    }

    /// The slots of the tokens to cull at one step.
    #[must_use]
    pub fn cull(&self, brightness: &[f32], may_cull: impl Fn(usize) -> bool) -> Vec<usize> {
        self.dimmest(brightness, self.cull_count(brightness.len()), may_cull)
    }
}

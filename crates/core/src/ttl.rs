//! The v0 engine: every token has a time to live. It is born with a brightness that depends on its source,
//! loses some at every step, gains by attention, and the dimmest tokens of a full window are culled one
//! step at a time.

use crate::token::{Brightness, Source};

/// The settings of the v0 engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Ttl {
    /// What a token is born with.
    pub seeds: Seeds,
    /// No token is brighter; none is dimmer than 0.
    pub max: Brightness,
    /// Lost at every step.
    pub decay: f32,
    /// Brightness for one whole unit of attention.
    pub gain: f32,
    /// Whether a gain is cut to a whole number.
    pub whole_gain: bool,
    /// How many tokens the window should hold.
    pub target: usize,
}

impl Default for Ttl {
    fn default() -> Self {
        Self {
            seeds: Seeds::default(),
            max: Brightness(255.0),
            decay: 2.0,
            gain: 10.0,
            whole_gain: true,
            target: 500,
        }
    }
}

/// What tokens are born with, by source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seeds {
    /// The user's words.
    pub user: Brightness,
    /// Standing instructions.
    pub system: Brightness,
    /// A tool's result.
    pub tool: Brightness,
    /// The model's words.
    pub llm: Brightness,
    /// Anything else.
    pub other: Brightness,
}

impl Default for Seeds {
    fn default() -> Self {
        let [full, model] = [Brightness(255.0), Brightness(200.0)];
        Self { user: full, system: full, tool: full, llm: model, other: model }
    }
}

impl Seeds {
    /// The seed of a source.
    #[must_use]
    pub fn of(&self, source: Source) -> Brightness {
        match source {
            Source::User => self.user,
            Source::System => self.system,
            Source::Tool => self.tool,
            Source::Llm => self.llm,
            Source::Other => self.other,
        }
    }
}

impl Ttl {
    /// One step: every token decays, and gains by the attention that it received. Tokens that the row does
    /// not cover stay as they are.
    pub fn update(&self, brightness: &mut [f32], attention: &[f32]) {
        for (b, &a) in brightness.iter_mut().zip(attention) {
            let gain = a * self.gain;
            let gain = if self.whole_gain { gain.trunc() } else { gain };
            *b = (*b - self.decay + gain).clamp(0.0, self.max.0);
        }
    }

    /// How many tokens leave a window of `len`: none below the target, one at it, at most two above it.
    #[must_use]
    pub fn cull_count(&self, len: usize) -> usize {
        match len {
            _ if len < self.target || len == 0 => 0,
            _ if len == self.target => 1,
            _ => 2.min(len - self.target),
        }
    }

    /// The tokens that leave a window of this brightness: the dimmest, and of equals the first. Those for
    /// which `may_go` is false stay.
    #[must_use]
    pub fn cull(&self, brightness: &[f32], may_go: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut dimmest: Vec<usize> = Vec::new();
        for _ in 0..self.cull_count(brightness.len()) {
            let free = (0..brightness.len()).filter(|&i| may_go(i) && !dimmest.contains(&i));
            let Some(next) = free.min_by(|&a, &b| brightness[a].total_cmp(&brightness[b])) else { break };
            dimmest.push(next);
        }
        dimmest.sort_unstable();
        dimmest
    }
}

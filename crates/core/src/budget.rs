//! How many tokens there is room for. Every count here is made with the model's own tokenizer.

/// What a turn has to fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The most that the model can see.
    pub model_context: usize,
    /// The most that the user lets it see; 0 is no limit.
    pub max_context: usize,
    /// Live now, the system prompt included.
    pub live: usize,
    /// The message that is about to be said.
    pub message: usize,
    /// The longest answer.
    pub answer: usize,
}

impl Room {
    /// How many tokens may come back: the same equation on the first turn and on the thousandth.
    #[must_use]
    pub fn for_returns(&self) -> usize {
        let limit = match self.max_context {
            0 => self.model_context,
            max => max.min(self.model_context),
        };
        limit.saturating_sub(self.live).saturating_sub(self.message).saturating_sub(self.answer)
    }
}

/// How full a window is: tokens over tokens.
#[must_use]
pub fn pressure(tokens: usize, window: usize) -> f64 {
    if window == 0 { f64::from(u8::from(tokens > 0)) } else { tokens as f64 / window as f64 }
}

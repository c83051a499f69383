//! How many tokens fit. All counts are made with the tokenizer of the model.

/// What a turn must fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnBudget {
    /// The context length of the model.
    pub model_context: usize,
    /// The user's limit for the context; 0 for none.
    pub max_context: usize,
    /// Live tokens, including the system prompt.
    pub live: usize,
    /// Tokens of the message that is about to be appended.
    pub message: usize,
    /// The maximum length of the answer.
    pub answer: usize,
}

impl TurnBudget {
    /// How many tokens may be resurrected: what the other parts leave free.
    #[must_use]
    pub fn for_resurrection(&self) -> usize {
        let limit = match self.max_context {
            0 => self.model_context,
            max => max.min(self.model_context),
        };
        limit.saturating_sub(self.live).saturating_sub(self.message).saturating_sub(self.answer)
    }
}

/// How full a window is: `tokens / window`. With a window of 0, the pressure is 0 without tokens and 1 with
/// any.
#[must_use]
pub fn pressure(tokens: usize, window: usize) -> f64 {
    if window == 0 { f64::from(u8::from(tokens > 0)) } else { tokens as f64 / window as f64 }
}

//! When memories are formed, and how much of the window they take.

use std::time::Duration;

/// How memories are formed and used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryRules {
    /// A memory is formed when a range has this many tokens.
    pub range_tokens: usize,
    /// The most tokens of the range of one memory.
    pub max_range_tokens: usize,
    /// The most tokens of a memory.
    pub max_tokens: usize,
    /// A memory is placed after this many further answers.
    pub delay_answers: usize,
    /// The largest share of the context window that memories take.
    pub window_share: f64,
    /// How many tokens of the text before its range a memory overlaps with.
    pub overlap_tokens: usize,
    /// Whether the model also reflects on the whole conversation when it is idle.
    pub reflection: Option<ReflectionRules>,
}

/// When the model reflects on the whole conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReflectionRules {
    /// How long the conversation must have been idle.
    pub idle_for: Duration,
    /// Messages since the last reflection.
    pub min_messages: usize,
}

impl Default for ReflectionRules {
    fn default() -> Self {
        Self { idle_for: Duration::from_secs(300), min_messages: 5 }
    }
}

impl Default for MemoryRules {
    fn default() -> Self {
        Self {
            range_tokens: 500,
            max_range_tokens: 2000,
            max_tokens: 200,
            delay_answers: 3,
            window_share: 0.25,
            overlap_tokens: 0,
            reflection: None,
        }
    }
}

//! The rules of a conversation: budgets, sampling, search, memories, tools.

use crate::chat_format::SpeakerNames;
use crate::chat_options::Persona;
use crate::memory::rules::MemoryRules;
use crate::premise::PremiseMethod;
use crate::tools::jq::JqRunner;
use halo_agents::principle::JudgePrinciple;
use halo_core::attention::AttentionRequest;
use halo_core::brightness::ScoringStrategy;
use halo_core::model::Sampling;
use halo_core::rules::ContextRules;
use halo_core::sliding_window::HIGH_PRESSURE;
use halo_recall::recall::SearchOptions;

/// The rules of a conversation, as the settings have them when it is opened.
#[derive(Clone, Debug)]
pub struct ConversationRules {
    pub context: ContextRules,
    /// Which sizes follow from the model and its speed; see [`window_size`](crate::window_size).
    pub auto_sizes: AutoSizes,
    /// Tokens that pruning leaves free for chunks that are resurrected with the next message, beside those of its answer;
    /// 0: nothing is left free.
    pub reserved_tokens: usize,
    /// Which attention the model reports.
    pub watch: AttentionRequest,
    pub sampling: Sampling,
    /// How the timeline is searched, and how many hits are considered.
    pub recall: SearchOptions,
    pub resurrect_brightness: ResurrectBrightness,
    pub resurrect_limit: ResurrectLimit,
    /// Tokens of the answer that the model generates in a fork, to search with; 0: none.
    pub preview_tokens: usize,
    /// Runs the model's tools; none: it has no tools.
    pub tools: Option<JqRunner>,
    pub system_prompt: String,
    /// Who talks: it completes the system prompt.
    pub persona: Persona,
    /// Whether the first user message of a day carries the date.
    pub show_dates: bool,
    pub speaker_names: SpeakerNames,
    /// How the premises of a question are checked; none: they are not.
    pub premise_method: Option<PremiseMethod>,
    /// The principles that premises are judged by.
    pub judge_principles: Vec<JudgePrinciple>,
    /// How memories are formed; none: they are not.
    pub memory: Option<MemoryRules>,
    /// Whether the reasoning of a finished answer stays in the context window.
    pub keep_reasoning: bool,
    /// The most bytes of the stored attention of the conversation; 0: none is stored.
    pub attention_history_bytes: usize,
    /// When a forgetting cycle runs; none: never.
    pub forgetting: Option<ForgettingRules>,
}

/// When a forgetting cycle runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForgettingRules {
    /// The context pressure above which it runs.
    pub threshold: f64,
}

impl Default for ForgettingRules {
    fn default() -> Self {
        Self { threshold: HIGH_PRESSURE }
    }
}

/// Which sizes of the context window are automatic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AutoSizes {
    pub window: bool,
    /// A quarter of the window.
    pub recent: bool,
    /// A quarter of the window.
    pub reserved: bool,
}

/// What limits the window while a message is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ResurrectLimit {
    /// The size of the window, also for chunks that are resurrected.
    Window,
    /// The model's context, as in the founding documents: the window has its size again after the turn.
    Model,
}

/// The brightness of a chunk that search resurrects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ResurrectBrightness {
    /// The brightness that it was pruned with.
    #[strum(serialize = "earned")]
    Previous,
    /// The mean of the live tokens.
    Mean,
    #[strum(serialize = "full")]
    Max,
}

impl ConversationRules {
    /// Tokens that the context window may hold after a turn; none: as many as the model's context, or as many as TTL
    /// scoring keeps by culling tokens.
    #[must_use]
    pub fn token_budget(&self, model_context: usize) -> Option<usize> {
        let limit = self.context.max_tokens.min(model_context);
        let free = match self.resurrection_reserve(limit) {
            0 => 0,
            reserved => reserved + self.answer_reserve(limit),
        };
        let prunes_chunks = self.context.max_tokens > 0 && self.ttl_target().is_none();
        prunes_chunks.then(|| limit.saturating_sub(free))
    }

    /// The most tokens in the context window of a model with this context, behind a system prompt of that many tokens.
    #[must_use]
    pub fn token_limit(&self, model_context: usize, system_tokens: usize) -> usize {
        match (self.ttl_target(), self.context.max_tokens) {
            (Some(target), _) => model_context.min(system_tokens + target),
            (None, 0) => model_context,
            (None, max) => max.min(model_context),
        }
    }

    /// The most tokens of a message, the reserve for its answer and the rest of the window together. TTL scoring culls what
    /// exceeds its target during the answer and after it, so only the model's context limits it.
    #[must_use]
    pub fn turn_limit(&self, model_context: usize, system_tokens: usize) -> usize {
        match (self.ttl_target(), self.resurrect_limit) {
            (None, ResurrectLimit::Window) => self.token_limit(model_context, system_tokens),
            (Some(_), _) | (None, ResurrectLimit::Model) => model_context,
        }
    }

    /// The most tokens in the window with the chunks that are resurrected for a message.
    #[must_use]
    pub fn resurrection_limit(&self, model_context: usize, system_tokens: usize) -> usize {
        match (self.ttl_target(), self.resurrect_limit) {
            (None, ResurrectLimit::Model) => model_context,
            _ => self.token_limit(model_context, system_tokens),
        }
    }

    /// Tokens of a limit that are kept free for an answer: at most so many that half of the limit stays for the
    /// conversation. A longer answer is not cut there: it may exceed the window until the turn ends, within the model's
    /// context.
    #[must_use]
    pub fn answer_reserve(&self, limit: usize) -> usize {
        let most = (limit / 2).saturating_sub(self.resurrection_reserve(limit)).max(limit / 8).max(1);
        self.sampling.expected_tokens.unwrap_or(self.sampling.max_tokens).min(most)
    }

    /// Tokens of a limit that are kept free for chunks to be resurrected. The model's context may be smaller than the
    /// window that the settings ask for.
    fn resurrection_reserve(&self, limit: usize) -> usize {
        if self.auto_sizes.reserved { limit / 4 } else { self.reserved_tokens.min(limit / 2) }
    }

    /// Sets the sizes that are automatic, for a window of so many tokens.
    pub fn set_auto_sizes(&mut self, window: usize) {
        let AutoSizes { window: auto_window, recent, reserved } = self.auto_sizes;
        if !auto_window {
            return;
        }
        self.context.max_tokens = window;
        if recent {
            self.context.recent = window / 4;
        }
        if reserved {
            self.reserved_tokens = window / 4;
        }
    }

    /// The size of the window under TTL scoring, without the system prompt.
    fn ttl_target(&self) -> Option<usize> {
        match &self.context.strategy {
            ScoringStrategy::Ttl(ttl) => Some(ttl.target),
            ScoringStrategy::Magnitude(_) => None,
        }
    }

    /// The memory rules, if memories are used here. A memory takes the place of pruned chunks, so it needs a window that
    /// prunes, and one that prunes whole chunks.
    #[must_use]
    pub fn active_memory_rules(&self) -> Option<MemoryRules> {
        let prunes = self.context.max_tokens > 0;
        let whole_chunks = matches!(self.context.strategy, ScoringStrategy::Magnitude(_));
        self.memory.filter(|_| prunes && whole_chunks)
    }
}

//! The events of a turn, as they happen: one stream for the terminal, the page and the tests.

use crate::tools::ToolCallResult;
use halo_agents::forgetting::ForgettingResult;
use halo_agents::principle::JudgePrinciple;
use halo_core::ErrorKind;
use halo_core::attention::{AttentionFocus, AttentionStats};
use halo_core::model::{CacheStats, FinishReason, TokenLogprobs};
use halo_core::resurrect::Hit;
use halo_core::token::{ChunkId, Position, Role, TurnId};
use std::time::Duration;

/// The shortest time between two [`Event::Attention`]: thirty per second, as fast as a page draws them.
pub const ATTENTION_INTERVAL: Duration = Duration::from_millis(33);

/// Something that happened in a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The model is busy: this many requests are ahead.
    Queued { ahead: usize },
    /// A message was committed: it cannot be lost any more.
    MessageStored { turn: TurnId, role: Role, tokens: usize },
    /// The beginning of an answer, generated in a fork: search uses it beside the message.
    Previewed { text: String },
    /// A chunk was resurrected at its own position.
    Resurrected { chunk: ChunkId, tokens: usize, reason: String },
    /// A chunk was pruned from the context window.
    Pruned { chunk: ChunkId, tokens: usize, reason: String },
    /// Progress of the prefill.
    Prefilling {
        done: usize,
        /// Tokens to prefill; 0: unknown.
        total: usize,
    },
    /// The context window is in the KV cache.
    Prefilled(CacheStats),
    /// A token of the answer; its text is empty while a character is incomplete.
    Token { chunk: ChunkId, position: Position, text: String },
    /// The log-probabilities of the next token, where they were requested.
    Logprobs(TokenLogprobs),
    /// Where the attention of the token at this position lies. Not sent for every token: at most once per
    /// [`ATTENTION_INTERVAL`].
    Attention { position: Position, focus: AttentionFocus },
    /// The scores of the answer.
    Scored {
        steps: u64,
        votes: usize,
        /// Mean brightness after scoring.
        mean: f64,
        /// How many steps had attention that could not be used, and the first error.
        errors: Option<(u64, String)>,
    },
    /// The model called a tool.
    ToolCalled(ToolCallResult),
    /// The context window exceeds its budget, and nothing more can be pruned.
    BudgetExceeded(String),
    /// A message for the user.
    Notice(String),
    /// A stage of the turn ended.
    StageFinished(TurnStage, Duration),
    /// The answer is complete, committed and indexed.
    Done(TurnSummary),
    /// The turn failed with this error. Earlier events remain true.
    Failed { kind: ErrorKind, message: String },
    /// The message has a premise that the conversation contradicts. It is answered all the same.
    FalsePremise {
        premise: String,
        reason: String,
        /// The principle that it was judged by.
        principle: Option<JudgePrinciple>,
        suggestion: String,
    },
    /// A forgetting cycle ran.
    ForgettingCycle(ForgettingResult),
    /// Something happened to a memory.
    MemoryChanged { id: u64, action: MemoryAction },
    /// The conversation changed outside of a turn: readers load its state again.
    Changed { action: ChangeAction, chunks: Vec<ChunkId> },
}

/// What happened to a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryAction {
    Formed,
    /// It was placed in the context window.
    Placed,
}

impl MemoryAction {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            MemoryAction::Formed => "formed",
            MemoryAction::Placed => "placed",
        }
    }
}

/// What changed a conversation outside of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeAction {
    Pinned,
    Unpinned,
    Pruned,
    Resurrected,
    Deleted,
    Undeleted,
    Merged,
    /// A manual edit was undone.
    Undone,
    /// The last exchange was deleted, because another one takes its place.
    Replaced,
    VariantChosen,
    Renamed,
    NotesWritten,
    /// The system prompt or the sampling of the conversation.
    OptionsChanged,
    MemoryEdited,
    RecordingChanged,
    /// A client sent messages that the conversation did not have.
    MessagesAppended,
    /// Another program changed the conversation in the store.
    ChangedElsewhere,
}

impl ChangeAction {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ChangeAction::Pinned => "pinned",
            ChangeAction::Unpinned => "unpinned",
            ChangeAction::Pruned => "pruned",
            ChangeAction::Resurrected => "resurrected",
            ChangeAction::Deleted => "deleted",
            ChangeAction::Undeleted => "undeleted",
            ChangeAction::Merged => "merged",
            ChangeAction::Undone => "undone",
            ChangeAction::Replaced => "replaced",
            ChangeAction::VariantChosen => "variant_chosen",
            ChangeAction::Renamed => "renamed",
            ChangeAction::NotesWritten => "notes_written",
            ChangeAction::OptionsChanged => "options_changed",
            ChangeAction::MemoryEdited => "memory_edited",
            ChangeAction::RecordingChanged => "recording_changed",
            ChangeAction::MessagesAppended => "messages_appended",
            ChangeAction::ChangedElsewhere => "changed_elsewhere",
        }
    }
}

/// The stages of a turn, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TurnStage {
    Store,
    /// Generates the beginning of an answer in a fork.
    Preview,
    /// Searches the timeline and resurrects chunks.
    Recall,
    /// Brings the KV cache in line with the context window.
    Prefill,
    /// Generates the answer: the time of the model alone.
    Generate,
    /// Commits and scores the tokens of the answer.
    Score,
    /// Prunes the context window.
    Prune,
    /// Updates the search index.
    Index,
    /// Saves the KV cache.
    PersistKv,
}

impl TurnStage {
    pub const ALL: [TurnStage; 9] = [
        TurnStage::Store,
        TurnStage::Preview,
        TurnStage::Recall,
        TurnStage::Prefill,
        TurnStage::Generate,
        TurnStage::Score,
        TurnStage::Prune,
        TurnStage::Index,
        TurnStage::PersistKv,
    ];

    /// The stages before the first token.
    pub const BEFORE_ANSWER: [TurnStage; 4] =
        [TurnStage::Store, TurnStage::Preview, TurnStage::Recall, TurnStage::Prefill];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TurnStage::Preview => "preview",
            TurnStage::Recall => "recall",
            TurnStage::Store => "store",
            TurnStage::Prefill => "prefill",
            TurnStage::Generate => "generate",
            TurnStage::Score => "score",
            TurnStage::Prune => "prune",
            TurnStage::Index => "index",
            TurnStage::PersistKv => "persist_kv",
        }
    }
}

/// The result of a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnSummary {
    pub turn: TurnId,
    pub finish: FinishReason,
    /// Tokens of the answer.
    pub tokens: usize,
    /// The number of chunks that were resurrected.
    pub resurrected: usize,
    /// Those chunks, in the order of the search.
    pub resurrected_chunks: Vec<ChunkId>,
    /// For each of them, the mean attention per token that it received from the answer, in ‰; none if none was measured.
    pub resurrected_attention: Vec<Option<f64>>,
    /// The number of chunks.
    pub pruned: usize,
    /// Earlier answers that were shortened in the prompts of this turn, for a model behind an API.
    pub cooled_messages: usize,
    /// Tokens in the context window, including the system prompt.
    pub live_tokens: usize,
    /// The most tokens in the context window.
    pub token_limit: usize,
    /// The duration of each stage.
    pub stages: Vec<(TurnStage, Duration)>,
    /// Statistics of the attention rows, at the trace interval.
    pub traces: Vec<(u64, AttentionStats)>,
    /// The best hits that were not resurrected, because they are below the relevance floor.
    pub below_floor: Vec<Hit>,
}

impl TurnSummary {
    /// The total duration of a stage.
    #[must_use]
    pub fn stage_duration(&self, stage: TurnStage) -> Duration {
        self.stages.iter().filter(|(s, _)| *s == stage).map(|(_, duration)| *duration).sum()
    }

    /// Tokens per second of generation.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        let duration = self.stage_duration(TurnStage::Generate) + self.stage_duration(TurnStage::Score);
        if duration.is_zero() { 0.0 } else { self.tokens as f64 / duration.as_secs_f64() }
    }
}

//! Conversations: their lists, snapshots, turns, variants and notes.

use super::chunk::{ApiChunk, context_window, is_pruned};
use halo_core::store::ConversationSummary;
use halo_core::token::{ChunkId, Role};
use halo_engine::forgetting_record::ForgettingRecord;
use halo_engine::memory::placement::PlacedMemory;
use halo_engine::snapshot::{AnswerProgress, ConversationState};
use halo_engine::turn_record::{AttentionSample, SkippedHit, TurnFigures, TurnRecord};
use halo_engine::variant::VariantChoice;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

#[derive(Serialize, ToSchema)]
#[schema(as = ConversationSummary)]
pub(crate) struct ApiConversationSummary {
    /// Identifies the conversation in metrics and traces, which contain no names.
    pub id: String,
    pub name: String,
    /// The model whose tokens it consists of; empty if no model has tokenized it yet.
    pub model: String,
    /// In milliseconds since 1970.
    pub created: i64,
    /// In milliseconds since 1970.
    pub updated: i64,
    pub turns: u64,
    pub tokens: u64,
    /// Tokens in the context window.
    pub live: u64,
    /// The conversation with the same messages that took its place when they were retokenized for another model; null: it is no
    /// such copy.
    pub original_of: Option<String>,
}

impl ApiConversationSummary {
    pub fn new(summary: ConversationSummary, original_of: Option<String>) -> Self {
        let ConversationSummary { id, name, model, created, updated, turns, tokens, live, .. } = summary;
        Self { id, name, model, created, updated, turns, tokens, live, original_of }
    }
}

/// A conversation with its context window and the running answer.
#[derive(Serialize, ToSchema)]
#[schema(as = Conversation)]
pub(crate) struct ApiConversation {
    #[serde(flatten)]
    #[schema(inline)]
    pub snapshot: Arc<ApiSnapshot>,
    /// The number of the last event that is included.
    pub last_event: u64,
    /// Messages for the user about how the conversation was opened.
    pub notices: Vec<String>,
    /// The answer that is being generated.
    pub running: Option<ApiRunningAnswer>,
}

/// A conversation after its last change.
#[derive(Serialize, ToSchema)]
#[schema(as = ConversationSnapshot)]
pub(crate) struct ApiSnapshot {
    pub name: String,
    pub model: String,
    /// Whether the model reports attention.
    pub attention: bool,
    /// The maximum number of tokens in the context window.
    pub limit: usize,
    /// The maximum number of tokens after a turn: the rest is reserved for the next message, its answer, and the chunks that are
    /// resurrected for it.
    pub budget_after_turn: usize,
    /// Tokens in the context window, with the system prompt.
    pub live: usize,
    /// The context pressure: `live` divided by `limit`.
    pub pressure: f64,
    /// The forgetting cycles so far; null if none has run.
    pub forgetting: Option<ApiForgettingRecord>,
    /// Tokens on the timeline.
    pub tokens: usize,
    /// Number of pruned chunks.
    pub pruned: usize,
    /// The system prompt with its chat template.
    pub system_prompt: String,
    pub system_prompt_tokens: usize,
    /// The maximum brightness of a token.
    pub max_brightness: f32,
    /// The chunks of the context window, in order.
    pub chunks: Vec<ApiChunk>,
    /// The memories in the context window, each where its range was.
    pub placed_memories: Vec<ApiPlacedMemory>,
    /// When each turn of the context window began, in milliseconds since 1970.
    pub times: BTreeMap<u32, i64>,
    /// False premises of questions, by the turn of the answer.
    pub premises: BTreeMap<u32, String>,
    /// The finish reasons of turns, except of those that ended normally.
    pub finish_reasons: BTreeMap<u32, String>,
}

impl ApiSnapshot {
    /// `times`, `premises` and `finish_reasons` are empty: they come from the store.
    pub fn from_state(state: &ConversationState) -> Self {
        let timeline = &state.timeline;
        Self {
            name: state.name.clone(),
            model: state.model.name.clone(),
            attention: state.model.attention,
            limit: state.token_limit,
            budget_after_turn: state.budget_after_turn,
            live: state.live_tokens(),
            pressure: state.pressure(),
            forgetting: None,
            tokens: timeline.len(),
            pruned: timeline.chunks().filter(|c| is_pruned(*c)).count(),
            system_prompt: state.system_tokens.iter().map(|token| token.text.as_str()).collect(),
            system_prompt_tokens: state.system_tokens.len(),
            max_brightness: state.max_brightness.0,
            chunks: context_window(timeline, state.rank),
            placed_memories: state.placed_memories.iter().map(ApiPlacedMemory::from).collect(),
            times: BTreeMap::new(),
            finish_reasons: BTreeMap::new(),
            premises: BTreeMap::new(),
        }
    }
}

/// The forgetting cycles of a conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = ForgettingRecord)]
pub(crate) struct ApiForgettingRecord {
    /// How many have run.
    pub runs: u64,
    /// When the last one ran, in milliseconds since 1970.
    pub at: i64,
    /// The context pressure before the last one.
    pub initial_pressure: f64,
    pub final_pressure: f64,
    /// Chunks that it pruned from the context window.
    pub pruned: usize,
    /// Chunks that it erased, in all conversations.
    pub erased: usize,
    pub disabled_memories: Vec<u64>,
}

impl From<ForgettingRecord> for ApiForgettingRecord {
    fn from(record: ForgettingRecord) -> Self {
        let ForgettingRecord {
            runs,
            at,
            initial_pressure,
            final_pressure,
            pruned,
            forgotten,
            disabled_memories,
        } = record;
        Self { runs, at, initial_pressure, final_pressure, pruned, erased: forgotten, disabled_memories }
    }
}

/// A memory in the context window.
#[derive(Serialize, ToSchema)]
#[schema(as = PlacedMemory)]
pub(crate) struct ApiPlacedMemory {
    pub id: u64,
    /// The position on the timeline that it comes after.
    pub position: u64,
    /// The turn that it replaces.
    pub turn: u32,
    /// Its text, with the quoted messages of the user.
    pub text: String,
    pub tokens: usize,
}

impl From<&PlacedMemory> for ApiPlacedMemory {
    fn from(memory: &PlacedMemory) -> Self {
        Self {
            id: memory.id,
            position: memory.position.0,
            turn: memory.turn.0,
            text: memory.text(),
            tokens: memory.len(),
        }
    }
}

/// The answer that is being generated.
#[derive(Serialize, ToSchema)]
#[schema(as = RunningAnswer)]
pub(crate) struct ApiRunningAnswer {
    /// Null until its first token.
    pub turn: Option<u32>,
    /// How many requests are ahead of it in the queue.
    pub ahead: usize,
    /// The text so far: chunk id and text.
    pub chunks: Vec<(String, String)>,
}

impl From<&AnswerProgress> for ApiRunningAnswer {
    fn from(answer: &AnswerProgress) -> Self {
        let mut chunks: Vec<(ChunkId, String)> = Vec::new();
        for (chunk, _, text) in &answer.tokens {
            match chunks.last_mut() {
                Some((last, so_far)) if last == chunk => so_far.push_str(text),
                _ => chunks.push((*chunk, text.clone())),
            }
        }
        Self {
            turn: answer.turn.map(|turn| turn.0),
            ahead: answer.ahead,
            chunks: chunks.into_iter().map(|(chunk, text)| (chunk.to_string(), text)).collect(),
        }
    }
}

/// A turn: how it ended, chunks pruned and resurrected, times of the stages.
#[derive(Serialize, ToSchema)]
#[schema(as = Turn)]
pub(crate) struct ApiTurn {
    pub turn: u32,
    /// When it ended, in milliseconds since 1970.
    pub at: i64,
    /// A finish reason, `failed` or `interrupted`.
    pub finish: String,
    pub error: Option<String>,
    /// Why the premise of the message is false.
    pub premise: Option<String>,
    /// The forgetting cycle that ran after it.
    pub forgetting: Option<ApiForgettingRecord>,
    /// Null if the program ended during the turn.
    pub figures: Option<ApiTurnFigures>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = TurnFigures)]
pub(crate) struct ApiTurnFigures {
    /// Tokens of the answer.
    pub tokens: usize,
    /// The number of chunks.
    pub resurrected: usize,
    /// The chunks that were resurrected for this answer, and whether it attended to them.
    pub resurrected_chunks: Vec<ApiResurrectedChunk>,
    /// The number of chunks.
    pub pruned: usize,
    /// The number of earlier answers that `model.cooling_tokens` shortened in the prompt.
    pub cooled_messages: usize,
    /// Tokens in the context window after the turn.
    pub live: usize,
    /// The context pressure after the turn; null for turns of earlier versions.
    pub pressure: Option<f64>,
    pub tokens_per_second: f64,
    /// From the message to the first token.
    pub first_token_ms: f64,
    /// Time outside of the model.
    pub overhead_ms: f64,
    /// Milliseconds of each stage.
    pub ms: BTreeMap<&'static str, f64>,
    /// The attention at some steps of the answer, every `trace.interval`.
    pub attention: Vec<ApiAttentionSample>,
    /// The best hits that were not brought back, because their relevance is below `resurrect.floor`.
    pub below_floor: Vec<ApiSkippedHit>,
}

/// A chunk that was resurrected for an answer.
#[derive(Serialize, ToSchema)]
#[schema(as = ResurrectedChunk)]
pub(crate) struct ApiResurrectedChunk {
    pub chunk: String,
    /// The mean attention that a token of it received from a token of the answer, in ‰; null if none was measured.
    pub attention: Option<f64>,
}

/// A search hit below the relevance floor.
#[derive(Serialize, ToSchema)]
#[schema(as = SkippedHit)]
pub(crate) struct ApiSkippedHit {
    pub chunk: String,
    pub score: f64,
}

impl From<SkippedHit> for ApiSkippedHit {
    fn from(hit: SkippedHit) -> Self {
        Self { chunk: hit.chunk, score: hit.score }
    }
}

/// The attention of one step of an answer: statistics and distribution over the tokens of the context window.
#[derive(Serialize, ToSchema)]
#[schema(as = AttentionSample)]
pub(crate) struct ApiAttentionSample {
    pub step: u64,
    pub mean: f64,
    pub median: f64,
    pub max: f64,
    pub min: f64,
    pub std: f64,
    /// Number of tokens by attention received: below 2^-15, then one bin per doubling; the last is 1/2 and more. Empty for
    /// turns of older versions.
    pub histogram: Vec<u32>,
}

impl From<AttentionSample> for ApiAttentionSample {
    fn from(sample: AttentionSample) -> Self {
        let AttentionSample { step, mean, median, max, min, std, histogram } = sample;
        Self { step, mean, median, max, min, std, histogram }
    }
}

impl ApiTurn {
    pub fn new(turn: u32, at: i64, record: TurnRecord) -> Self {
        let TurnRecord { finish, error, premise, forgetting, figures } = record;
        let (forgetting, figures) = (forgetting.map(Into::into), figures.map(ApiTurnFigures::from));
        Self { turn, at, finish, error, premise, forgetting, figures }
    }
}

impl From<TurnFigures> for ApiTurnFigures {
    fn from(figures: TurnFigures) -> Self {
        Self {
            tokens_per_second: figures.tokens_per_second(),
            first_token_ms: figures.stages.first_token_ms(),
            overhead_ms: figures.stages.overhead_ms(),
            ms: figures.stages.by_name(),
            pressure: figures.pressure(),
            tokens: figures.tokens,
            resurrected: figures.resurrected,
            pruned: figures.pruned,
            cooled_messages: figures.cooled_messages,
            live: figures.live_tokens,
            attention: figures.attention.into_iter().map(ApiAttentionSample::from).collect(),
            resurrected_chunks: (figures.resurrected_chunks.into_iter())
                .zip(figures.resurrected_attention.into_iter().chain(std::iter::repeat(None)))
                .map(|(chunk, attention)| ApiResurrectedChunk { chunk, attention })
                .collect(),
            below_floor: figures.below_floor.into_iter().map(ApiSkippedHit::from).collect(),
        }
    }
}

/// The context window after an earlier turn.
#[derive(Serialize, ToSchema)]
#[schema(as = ContextAtTurn)]
pub(crate) struct ApiContextAtTurn {
    pub turn: u32,
    /// Tokens in the context window then, with the current system prompt.
    pub live: usize,
    /// Brightness of the past is not stored: peaks are those of new tokens.
    pub chunks: Vec<ApiChunk>,
    /// Those of them that are not in the context window now.
    pub removed_since: Vec<String>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = Note)]
pub(crate) struct ApiNote {
    pub file: String,
    pub text: String,
}

/// A variant of the last answer, or of the last exchange.
#[derive(Serialize, ToSchema)]
#[schema(as = Variant)]
pub(crate) struct ApiVariant {
    /// Its first turn, which identifies it.
    pub turn: u32,
    pub messages: Vec<ApiVariantMessage>,
    /// Whether the conversation contains it now.
    pub current: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = VariantMessage)]
pub(crate) struct ApiVariantMessage {
    /// The role: user or assistant.
    pub role: String,
    pub text: String,
}

impl From<VariantChoice> for ApiVariant {
    fn from(choice: VariantChoice) -> Self {
        let message = |(role, text): (Role, String)| ApiVariantMessage { role: role.name().to_owned(), text };
        Self {
            turn: choice.turns.first().map_or(0, |turn| turn.0),
            messages: choice.messages.into_iter().map(message).collect(),
            current: choice.is_current,
        }
    }
}

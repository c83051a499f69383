//! Events of the stream `GET /events`.

use super::chunk::{
    ApiChunk, ApiFocusedToken, attention_permille, is_pruned, relative_brightness, with_pruned_before,
};
use halo_agents::principle::JudgePrinciple;
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::snapshot::{ConversationState, SnapshotCell};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

#[derive(Serialize, ToSchema)]
#[schema(as = Event)]
pub(crate) struct ApiEvent {
    /// Empty for events of the server and of worlds.
    pub conversation: String,
    /// Counts up through all conversations.
    pub number: u64,
    #[serde(flatten)]
    pub kind: ApiEventKind,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EventKind)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ApiEventKind {
    /// The model is busy; the request is queued.
    Queued {
        ahead: usize,
    },
    MessageStored {
        turn: u32,
        chunks: Vec<ApiChunk>,
        live: usize,
    },
    /// The beginning of an answer, generated in a fork for search.
    Previewed {
        text: String,
    },
    /// A chunk was resurrected at its own position.
    Resurrected {
        chunk: Option<ApiChunk>,
        reason: String,
        live: usize,
    },
    Pruned {
        chunk: String,
        tokens: usize,
        reason: String,
        live: usize,
    },
    /// Progress of prefill, in tokens; a total of 0 is unknown.
    Prefilling {
        done: usize,
        total: usize,
    },
    /// Prefill is complete; numbers of tokens.
    Prefilled {
        reused: usize,
        pruned: usize,
        restored: usize,
        recomputed: usize,
        prefilled: usize,
    },
    /// A token of the answer.
    Token {
        chunk: String,
        position: u64,
        text: String,
    },
    /// Where the attention of the token at `position` lies on the earlier messages, without the system prompt. At most thirty of
    /// these events are sent per second.
    Attention {
        position: u64,
        /// The tokens with the most attention, the largest share first.
        tokens: Vec<ApiFocusedToken>,
        /// The shares of the chunks in the order of the context window. They sum to 1.
        chunks: Vec<(String, f32)>,
    },
    /// The attention of the answer was scored.
    Scored {
        steps: u64,
        votes: usize,
        mean: f64,
        errors: Option<String>,
    },
    /// The model called a tool.
    ToolCalled {
        command: String,
        ok: bool,
        result: String,
    },
    /// The context window exceeds its budget, and no more chunks can be pruned.
    BudgetExceeded {
        reason: String,
    },
    /// A message for the user.
    Notice {
        text: String,
    },
    /// The answer is complete and stored. `window` has a row for each chunk of the context window: id, peak, pruned_before,
    /// relative_brightness, attention.
    Done {
        summary: ApiTurnSummary,
        live: usize,
        pruned: usize,
        tokens: usize,
        chunks: Vec<ApiChunk>,
        window: Vec<(String, f32, usize, f32, Option<f32>)>,
    },
    /// The turn failed. Tokens that were sent before it are stored.
    Failed {
        error: String,
    },
    /// The question assumes something that was contradicted.
    FalsePremise {
        premise: String,
        reason: String,
        /// The principle that it was judged by: accuracy, honesty or consistency.
        principle: Option<&'static str>,
        suggestion: String,
    },
    /// A forgetting cycle ran.
    ForgettingCycle {
        /// The context pressure before.
        initial_pressure: f64,
        final_pressure: f64,
        /// Chunks pruned from the context window.
        pruned: usize,
        /// Chunks erased by retention, in all conversations.
        erased: usize,
        disabled_memories: Vec<u64>,
        live: usize,
    },
    /// A memory was formed or placed.
    MemoryChanged {
        id: u64,
        action: &'static str,
        live: usize,
    },
    /// The conversation changed outside of a turn: load it again.
    Changed {
        action: &'static str,
        chunks: Vec<String>,
    },
    SettingsChanged,
    /// How much of an uploaded file has been read, while it is imported.
    ImportProgress(ApiImportProgress),
    /// A model is being downloaded, or its download has ended.
    ModelDownload(ApiModelDownload),
    /// A world changed: load the rooms and agents that are listed again.
    WorldChanged(ApiWorldEvent),
}

/// The progress of an import, in bytes.
#[derive(Serialize, ToSchema)]
#[schema(as = ImportProgress)]
pub(crate) struct ApiImportProgress {
    /// The id that the request has given it.
    pub id: String,
    pub done: u64,
    pub all: u64,
}

/// The progress of a download.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ModelDownload)]
pub(crate) struct ApiModelDownload {
    pub name: String,
    /// Bytes that are there.
    pub done: u64,
    /// Bytes of all; 0 at the end.
    pub all: u64,
    /// Whether it has ended.
    pub finished: bool,
    /// Why it has failed; null if it has not.
    pub error: Option<String>,
}

/// What changed in a world.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = WorldEvent)]
pub(crate) struct ApiWorldEvent {
    pub name: String,
    pub rooms: Vec<u32>,
    pub agents: Vec<u32>,
    /// The agent whose heartbeat it was.
    pub beat: Option<u32>,
    /// The tokens of that heartbeat.
    pub usage: Option<ApiHeartbeatUsage>,
    /// Why a heartbeat failed, or a queued command was refused.
    pub error: Option<String>,
    /// Whether the world was created or deleted.
    pub worlds_changed: bool,
    /// The agent that begins to think; nothing else has changed then.
    pub thinking: Option<u32>,
}

/// The tokens of a heartbeat.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = HeartbeatUsage)]
pub(crate) struct ApiHeartbeatUsage {
    pub prompt_tokens: usize,
    /// Prompt tokens that were not in the KV cache.
    pub prefilled_tokens: usize,
    pub completion_tokens: usize,
    /// How full the HUD was: its tokens divided by the most that fit.
    pub pressure: f64,
    /// Messages of other agents that were shortened in the HUD.
    pub cooled_messages: usize,
    /// Messages of the agent that were shortened under pressure.
    pub summarized_messages: usize,
}

#[derive(Serialize, ToSchema)]
#[schema(as = TurnSummary)]
pub(crate) struct ApiTurnSummary {
    pub turn: u32,
    /// end, stop, length or aborted.
    pub finish_reason: &'static str,
    /// Tokens of the answer.
    pub tokens: usize,
    /// The number of chunks.
    pub resurrected: usize,
    /// The ids of the resurrected chunks, in the order of the search.
    pub resurrected_chunks: Vec<String>,
    /// The number of chunks.
    pub pruned: usize,
    pub tokens_per_second: f64,
    /// Seconds from the message to the first token.
    pub first_token_seconds: f64,
    /// Milliseconds of each stage.
    pub ms: BTreeMap<&'static str, f64>,
}

impl From<&TurnSummary> for ApiTurnSummary {
    fn from(summary: &TurnSummary) -> Self {
        let seconds = |stage: TurnStage| summary.stage_duration(stage).as_secs_f64();
        Self {
            turn: summary.turn.0,
            finish_reason: summary.finish.name(),
            tokens: summary.tokens,
            resurrected: summary.resurrected,
            resurrected_chunks: summary.resurrected_chunks.iter().map(ToString::to_string).collect(),
            pruned: summary.pruned,
            tokens_per_second: summary.tokens_per_second(),
            first_token_seconds: TurnStage::BEFORE_ANSWER.into_iter().map(seconds).sum(),
            ms: TurnStage::ALL.iter().map(|&stage| (stage.name(), seconds(stage) * 1e3)).collect(),
        }
    }
}

/// The public form of an event; none for events that clients do not get.
pub(crate) fn api_event(event: &Event, snapshot: &SnapshotCell) -> Option<ApiEventKind> {
    // Tokens are frequent, so they do not read the snapshot.
    if let Event::Token { chunk, position, text } = event {
        let (chunk, position, text) = (chunk.to_string(), position.0, text.clone());
        return Some(ApiEventKind::Token { chunk, position, text });
    }
    let state = snapshot.get().state;
    let (timeline, live) = (&state.timeline, state.live_tokens());
    Some(match event {
        Event::Queued { ahead } => ApiEventKind::Queued { ahead: *ahead },
        Event::MessageStored { turn, .. } => {
            ApiEventKind::MessageStored { turn: turn.0, chunks: live_chunks_of_turn(&state, *turn), live }
        }
        Event::Previewed { text } => ApiEventKind::Previewed { text: text.clone() },
        Event::Resurrected { chunk, reason, .. } => {
            let chunk = timeline.chunk(*chunk).filter(|chunk| chunk.is_loaded());
            let chunk = chunk.map(|c| ApiChunk::from_chunk(c, timeline, 0));
            ApiEventKind::Resurrected { chunk, reason: reason.clone(), live }
        }
        Event::Pruned { chunk, tokens, reason } => {
            ApiEventKind::Pruned { chunk: chunk.to_string(), tokens: *tokens, reason: reason.clone(), live }
        }
        Event::Prefilling { done, total } => ApiEventKind::Prefilling { done: *done, total: *total },
        Event::Prefilled(stats) => ApiEventKind::Prefilled {
            reused: stats.reused,
            pruned: stats.pruned,
            restored: stats.restored,
            recomputed: stats.recomputed,
            prefilled: stats.prefilled,
        },
        Event::Attention { position, focus } => ApiEventKind::Attention {
            position: position.0,
            tokens: focus.tokens.iter().filter_map(|token| ApiFocusedToken::new(token, timeline)).collect(),
            chunks: focus.chunks.iter().map(|(chunk, share)| (chunk.to_string(), *share)).collect(),
        },
        Event::Scored { steps, votes, mean, errors } => ApiEventKind::Scored {
            steps: *steps,
            votes: *votes,
            mean: *mean,
            errors: errors.as_ref().map(|(steps, message)| format!("{steps} steps: {message}")),
        },
        Event::ToolCalled(call) => {
            ApiEventKind::ToolCalled { command: call.command.clone(), ok: call.ok, result: call.to_text() }
        }
        Event::BudgetExceeded(reason) => ApiEventKind::BudgetExceeded { reason: reason.clone() },
        Event::Notice(text) => ApiEventKind::Notice { text: text.clone() },
        Event::Done(summary) => done_event(summary, &state),
        Event::FalsePremise { premise, reason, principle, suggestion } => ApiEventKind::FalsePremise {
            premise: premise.clone(),
            reason: reason.clone(),
            principle: principle.map(JudgePrinciple::name),
            suggestion: suggestion.clone(),
        },
        Event::ForgettingCycle(result) => ApiEventKind::ForgettingCycle {
            initial_pressure: result.initial_pressure,
            final_pressure: result.final_pressure,
            pruned: result.pruned(),
            erased: result.forgotten(),
            disabled_memories: result.deactivated(),
            live,
        },
        Event::MemoryChanged { id, action } => {
            ApiEventKind::MemoryChanged { id: *id, action: action.as_str(), live }
        }
        Event::Failed { message, .. } => ApiEventKind::Failed { error: message.clone() },
        Event::Changed { action, chunks } => ApiEventKind::Changed {
            action: action.as_str(),
            chunks: chunks.iter().map(ToString::to_string).collect(),
        },
        Event::Token { .. } | Event::Logprobs(_) | Event::StageFinished(..) => return None,
    })
}

fn done_event(summary: &TurnSummary, state: &ConversationState) -> ApiEventKind {
    let timeline = &state.timeline;
    let brightness = relative_brightness(timeline, state.rank);
    ApiEventKind::Done {
        summary: summary.into(),
        live: state.live_tokens(),
        pruned: timeline.chunks().filter(|c| is_pruned(*c)).count(),
        tokens: timeline.len(),
        chunks: live_chunks_of_turn(state, summary.turn),
        window: (with_pruned_before(timeline).zip(brightness))
            .map(|((chunk, pruned_before), brightness)| {
                let attention = attention_permille(chunk);
                (chunk.id().to_string(), chunk.peak().0, pruned_before, brightness, attention)
            })
            .collect(),
    }
}

fn live_chunks_of_turn(state: &ConversationState, turn: halo_core::token::TurnId) -> Vec<ApiChunk> {
    let timeline = &state.timeline;
    let chunks = timeline.turn_chunks(turn).filter(|chunk| chunk.is_live());
    chunks.map(|chunk| ApiChunk::from_chunk(chunk, timeline, 0)).collect()
}

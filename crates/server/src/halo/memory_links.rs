//! Memories: where their bytes come from, what contradicts them, and how they are carried into other conversations.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, spawn_blocking};
use crate::search::load_bodies;
use crate::session_job::run_in_session;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::token::ChunkId;
use halo_engine::event::ChangeAction;
use halo_engine::memory::source::{CarriedFrom, SourceSegment};
use halo_engine::memory::trace::{TracedSpan, trace_memory};
use halo_engine::memory::{CarryMode, ConflictDecision, MemoryConflict, MemoryReference, open_conflicts};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_memory_origins))
        .routes(routes!(list_memory_conflicts))
        .routes(routes!(resolve_memory_conflict))
        .routes(routes!(carry_memories))
}

/// Where a memory comes from.
#[derive(Serialize, ToSchema)]
#[schema(as = MemoryOrigins)]
struct ApiMemoryOrigins {
    id: u64,
    /// The memory as it is in the context window or, if it is not there, its own text.
    text: String,
    /// Parts that cover the whole text, in order.
    spans: Vec<ApiOriginSpan>,
    /// What the model saw when it wrote the memory, in order; empty for memories of earlier versions.
    segments: Vec<ApiSourceSegment>,
    /// The memories of other conversations that it was carried from.
    carried_from: Vec<ApiCarriedFrom>,
    /// Sentences that are left out, because another memory contradicts them.
    retracted: Vec<String>,
}

/// A part of a memory with its origin.
#[derive(Serialize, ToSchema)]
#[schema(as = OriginSpan)]
struct ApiOriginSpan {
    /// The first byte in the text, in UTF-8.
    start: usize,
    /// The byte after the last.
    end: usize,
    /// `model` (written by the model), `user` (edited by the user), `quote` (the user's words) or `markup`.
    kind: String,
    /// The chunk that it quotes or, for written text, the chunk that it shares the most words with.
    chunk: Option<String>,
    /// The share of its words that this chunk has.
    overlap: f64,
}

impl From<TracedSpan> for ApiOriginSpan {
    fn from(span: TracedSpan) -> Self {
        Self {
            start: span.bytes.start,
            end: span.bytes.end,
            kind: span.kind.to_string(),
            chunk: span.chunk.map(|chunk| chunk.to_string()),
            overlap: span.overlap,
        }
    }
}

/// A part of the context in which a memory was written.
#[derive(Serialize, ToSchema)]
#[schema(as = SourceSegment)]
struct ApiSourceSegment {
    /// `instructions`, `turn-N` or `memory-N`.
    block: String,
    turns: Vec<u32>,
    /// Chunks, tool results and text of the chat template.
    facets: Vec<String>,
    tokens: usize,
}

impl From<SourceSegment> for ApiSourceSegment {
    fn from(segment: SourceSegment) -> Self {
        let SourceSegment { block, turns, facets, tokens } = segment;
        Self { block, turns, facets, tokens }
    }
}

/// A memory of another conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = CarriedFrom)]
pub(super) struct ApiCarriedFrom {
    /// The name of the conversation; null if it was deleted.
    conversation: Option<String>,
    memory: u64,
    first_turn: u32,
    last_turn: u32,
}

impl ApiCarriedFrom {
    fn new(source: &CarriedFrom, names: &BTreeMap<String, String>) -> Self {
        Self {
            conversation: names.get(&source.conversation).cloned(),
            memory: source.memory,
            first_turn: source.from,
            last_turn: source.to,
        }
    }
}

/// Tells where every byte of a memory comes from
#[utoipa::path(get, path = "/conversations/{name}/memories/{memory}/origins", params(("name" = String, Path), ("memory" = u64, Path)),
    responses((status = 200, body = ApiMemoryOrigins), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_memory_origins(
    State(app): State<Arc<App>>,
    PathParams((name, id)): PathParams<(String, u64)>,
) -> ApiResult<Json<ApiMemoryOrigins>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        let memory = state.memories.iter().find(|memory| memory.id == id);
        let memory = memory.ok_or_else(|| ErrorResponse::not_found(format!("there is no memory {id}")))?;
        let mut timeline = state.timeline.clone();
        let chunks: Vec<ChunkId> = memory.range.chunks(&timeline).map(|chunk| chunk.id()).collect();
        let names = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &chunks)?;
            let summaries = store.list_conversations()?;
            Ok(summaries.into_iter().map(|summary| (summary.id, summary.name)).collect())
        })?;
        let placed = state.placed_memories.iter().find(|placed| placed.id == id);
        let traced = trace_memory(memory, placed, &timeline);
        let segments = memory.source.clone().unwrap_or_default().segments;
        Ok(Json(ApiMemoryOrigins {
            id,
            text: traced.text,
            spans: traced.spans.into_iter().map(Into::into).collect(),
            segments: segments.into_iter().map(Into::into).collect(),
            carried_from: memory
                .carried_from
                .iter()
                .map(|source| ApiCarriedFrom::new(source, &names))
                .collect(),
            retracted: memory.retracted.iter().cloned().collect(),
        }))
    })
    .await
}

/// Two memories that contradict each other.
#[derive(Serialize, ToSchema)]
#[schema(as = MemoryConflict)]
struct ApiMemoryConflict {
    /// The memory that was formed first.
    first: u64,
    second: u64,
    first_sentence: String,
    second_sentence: String,
    reason: String,
}

impl From<MemoryConflict> for ApiMemoryConflict {
    fn from(conflict: MemoryConflict) -> Self {
        let MemoryConflict { first, second, first_sentence, second_sentence, reason } = conflict;
        Self { first, second, first_sentence, second_sentence, reason: reason.description().to_owned() }
    }
}

/// Lists the contradictions between memories that wait for a decision
#[utoipa::path(get, path = "/conversations/{name}/memories/conflicts", params(("name" = String, Path)),
    responses((status = 200, body = Vec<ApiMemoryConflict>), (status = 404, body = ApiError)))]
async fn list_memory_conflicts(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<ApiMemoryConflict>>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        Ok(Json(open_conflicts(&state.memories).into_iter().map(Into::into).collect()))
    })
    .await
}

/// A decision about two memories.
#[derive(Deserialize, ToSchema)]
#[schema(as = ConflictDecision)]
#[serde(deny_unknown_fields)]
struct ApiConflictDecision {
    first: u64,
    second: u64,
    /// The memory that is right; what the other one says against it is left out.
    keep: ApiKeptMemory,
}

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[schema(as = KeptMemory)]
#[serde(rename_all = "snake_case")]
enum ApiKeptMemory {
    First,
    Second,
    Both,
}

/// Decides which of two memories is right
#[utoipa::path(post, path = "/conversations/{name}/memories/conflicts", params(("name" = String, Path)), request_body = ApiConflictDecision,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn resolve_memory_conflict(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(decision): JsonBody<ApiConflictDecision>,
) -> ApiResult<StatusCode> {
    let opener = Arc::clone(&app);
    let handle = spawn_blocking(move || opener.open_conversation(&name)).await?;
    let ApiConflictDecision { first, second, keep } = decision;
    let decision = match keep {
        ApiKeptMemory::First => ConflictDecision::KeepFirst,
        ApiKeptMemory::Second => ConflictDecision::KeepSecond,
        ApiKeptMemory::Both => ConflictDecision::KeepBoth,
    };
    run_in_session(&handle, move |session| {
        session.resolve_memory_conflict(first, second, decision)?;
        Ok(((), Some((ChangeAction::MemoryEdited, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Memories to carry into a conversation.
#[derive(Deserialize, ToSchema)]
#[schema(as = CarryRequest)]
#[serde(deny_unknown_fields)]
struct ApiCarryRequest {
    memories: Vec<ApiMemoryReference>,
    /// Whether all of them become one memory, which spans their conversations.
    #[serde(default)]
    join: bool,
}

/// A memory of a conversation.
#[derive(Deserialize, ToSchema)]
#[schema(as = MemoryReference)]
#[serde(deny_unknown_fields)]
struct ApiMemoryReference {
    conversation: String,
    id: u64,
}

#[derive(Serialize, ToSchema)]
#[schema(as = CarryResult)]
struct ApiCarryResult {
    /// The ids of the memories in the conversation.
    ids: Vec<u64>,
}

/// Carries memories of other conversations into this one; a new conversation stores them with its first message
#[utoipa::path(post, path = "/conversations/{name}/memories/carry", params(("name" = String, Path)), request_body = ApiCarryRequest,
    responses((status = 200, body = ApiCarryResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn carry_memories(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiCarryRequest>,
) -> ApiResult<Json<ApiCarryResult>> {
    let opener = Arc::clone(&app);
    let handle = spawn_blocking(move || opener.open_or_create_conversation("name", &name)).await?;
    let mode = if request.join { CarryMode::Joined } else { CarryMode::Separate };
    let references: Vec<MemoryReference> = (request.memories.into_iter())
        .map(|memory| MemoryReference { conversation: memory.conversation, memory: memory.id })
        .collect();
    let ids = run_in_session(&handle, move |session| {
        let ids = session.carry_memories(&references, mode)?;
        Ok((ids, Some((ChangeAction::MemoryEdited, Vec::new()))))
    })
    .await?;
    Ok(Json(ApiCarryResult { ids }))
}

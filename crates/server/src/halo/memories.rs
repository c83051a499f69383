//! Memories: list, update, delete.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use crate::search::search_index;
use crate::session_job::run_in_session;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_engine::event::ChangeAction;
use halo_engine::memory::{self, Memory, MemoryEdit};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_memories))
        .routes(routes!(update_memory))
        .routes(routes!(delete_memory))
}

#[derive(Serialize, ToSchema)]
#[schema(as = MemoryList)]
struct ApiMemoryList {
    /// Whether memories are formed.
    enabled: bool,
    /// The latest first; with a query, the best match first.
    memories: Vec<ApiMemory>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Memory)]
struct ApiMemory {
    id: u64,
    /// The first turn of its range.
    first_turn: u32,
    /// The last turn of its range.
    last_turn: u32,
    text: String,
    /// The model that wrote it.
    model: String,
    /// When it was formed, in milliseconds since 1970.
    at: i64,
    /// Whether it is a reflection on the whole conversation, which replaces no range.
    reflection: bool,
    /// Pinned memories are placed first.
    pinned: bool,
    /// A disabled memory is stored and not used.
    disabled: bool,
    /// Whether the user edited its text.
    edited: bool,
    /// Whether it is in the context window.
    placed: bool,
    /// Ids of memories that it contradicts: these conflicts wait for a decision.
    conflicts: Vec<u64>,
    /// Whether it was carried from another conversation: then it has no range here and is part of the system prompt.
    carried: bool,
    /// Sentences that are left out, because another memory contradicts them.
    retracted: Vec<String>,
}

/// Fields that are left out do not change.
#[derive(Deserialize, ToSchema)]
#[schema(as = MemoryUpdate)]
#[serde(deny_unknown_fields)]
struct ApiMemoryUpdate {
    text: Option<String>,
    pinned: Option<bool>,
    disabled: Option<bool>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct MemoriesQuery {
    /// Only memories that match this query
    q: Option<String>,
}

#[utoipa::path(get, path = "/conversations/{name}/memories", params(("name" = String, Path), MemoriesQuery),
    responses((status = 200, body = ApiMemoryList), (status = 404, body = ApiError)))]
async fn list_memories(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<MemoriesQuery>,
) -> ApiResult<Json<ApiMemoryList>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        let api_memory = |memory: &Memory| ApiMemory {
            id: memory.id,
            first_turn: memory.range.from.0,
            last_turn: memory.range.to.0,
            text: memory.text.clone(),
            model: memory.model.clone(),
            at: memory.formed_at,
            reflection: memory.reflection,
            pinned: memory.pinned,
            disabled: memory.disabled,
            edited: memory.edited,
            placed: state.placed_memories.iter().any(|placed| placed.id == memory.id),
            conflicts: memory.conflicts.iter().copied().collect(),
            carried: memory.is_carried(),
            retracted: memory.retracted.iter().cloned().collect(),
        };
        let memories = match query.q.filter(|text| !text.trim().is_empty()) {
            None => state.memories.iter().rev().map(api_memory).collect(),
            Some(text) => {
                let ranked = search_index(&app, &state, &text, state.search_options.limit)?;
                let hits: Vec<_> = ranked.iter().map(|chunk| (chunk.hit.chunk, chunk.hit.score)).collect();
                let ranked = memory::rank_memories(&state.memories, &text, &hits);
                ranked.iter().map(|(_, memory)| api_memory(memory)).collect()
            }
        };
        Ok(Json(ApiMemoryList { enabled: state.forms_memories, memories }))
    })
    .await
}

/// Updates a memory: its text, whether it is pinned, whether it is used
#[utoipa::path(put, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)), request_body = ApiMemoryUpdate,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn update_memory(
    State(app): State<Arc<App>>,
    PathParams((name, memory)): PathParams<(String, u64)>,
    JsonBody(update): JsonBody<ApiMemoryUpdate>,
) -> ApiResult<StatusCode> {
    let ApiMemoryUpdate { text, pinned, disabled } = update;
    let edits =
        [text.map(MemoryEdit::SetText), pinned.map(MemoryEdit::Pin), disabled.map(MemoryEdit::Disable)];
    edit_memory(&app, name, memory, edits.into_iter().flatten().collect()).await
}

/// Deletes a memory; the messages of its range stay
#[utoipa::path(delete, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)),
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn delete_memory(
    State(app): State<Arc<App>>,
    PathParams((name, memory)): PathParams<(String, u64)>,
) -> ApiResult<StatusCode> {
    edit_memory(&app, name, memory, vec![MemoryEdit::Delete]).await
}

async fn edit_memory(
    app: &Arc<App>,
    name: String,
    memory: u64,
    edits: Vec<MemoryEdit>,
) -> ApiResult<StatusCode> {
    let opener = Arc::clone(app);
    let handle = spawn_blocking(move || opener.open_conversation(&name)).await?;
    run_in_session(&handle, move |session| {
        if !session.memories().iter().any(|other| other.id == memory) {
            return Err(ErrorResponse::not_found(format!("there is no memory {memory}")));
        }
        for edit in edits {
            session.edit_memory(memory, edit)?;
        }
        Ok(((), Some((ChangeAction::MemoryEdited, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

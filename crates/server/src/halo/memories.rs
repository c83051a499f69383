//! What the model remembers, and the user's hand on it.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::commands::run_in_session;
use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
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

/// What is remembered of a conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = MemoryList)]
struct ApiMemoryList {
    /// Whether memories are formed.
    enabled: bool,
    /// Those that there are: the latest first, or those that were asked for, the best first.
    memories: Vec<ApiMemory>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Memory)]
struct ApiMemory {
    id: u64,
    /// The first turn that it is of.
    first_turn: u32,
    last_turn: u32,
    text: String,
    /// The model that wrote it.
    model: String,
    /// When, in milliseconds since 1970.
    at: i64,
    /// Whether it looks back over everything, and so stands in nothing's place.
    reflection: bool,
    /// Whether it stands before others.
    pinned: bool,
    /// Whether it is kept and not used.
    disabled: bool,
    /// Whether it was changed by hand.
    edited: bool,
    /// Whether it stands in the window now.
    placed: bool,
    /// Memories that it contradicts.
    conflicts: Vec<u64>,
}

/// What a memory is to be; what is left out stays as it is.
#[derive(Deserialize, ToSchema)]
#[schema(as = MemoryUpdate)]
#[serde(deny_unknown_fields)]
struct ApiMemoryUpdate {
    /// What it is to say.
    text: Option<String>,
    /// Whether it is to stand before others.
    pinned: Option<bool>,
    /// Whether it is to be kept and not used.
    disabled: Option<bool>,
}

#[derive(Deserialize, IntoParams)]
struct MemoriesQuery {
    /// Only those that have to do with these words
    q: Option<String>,
}

#[utoipa::path(get, path = "/conversations/{name}/memories", params(("name" = String, Path), MemoriesQuery),
    responses((status = 200, body = ApiMemoryList), (status = 404, body = ApiError)))]
async fn list_memories(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(asked): QueryParams<MemoriesQuery>,
) -> ApiResult<Json<ApiMemoryList>> {
    spawn_blocking(move || {
        let standing = app.view_conversation(&name)?.snapshot.state;
        let told = |memory: &Memory| ApiMemory {
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
            placed: standing.placed_memories.iter().any(|stand| stand.id == memory.id),
            conflicts: memory.conflicts.iter().copied().collect(),
        };
        let asked = asked.q.filter(|words| !words.trim().is_empty());
        let memories = match asked {
            None => standing.memories.iter().rev().map(told).collect(),
            Some(words) => {
                let found = super::search_index(&app, &standing, &words, standing.search_options.limit)?;
                let hits: Vec<_> = found.iter().map(|found| (found.hit.chunk, found.hit.score)).collect();
                let ranked = memory::rank_memories(&standing.memories, &words, &hits);
                ranked.iter().map(|(_, memory)| told(memory)).collect()
            }
        };
        Ok(Json(ApiMemoryList { enabled: standing.forms_memories, memories }))
    })
    .await
}

/// Changes a memory: what it says, whether it stands before others, whether it is used
#[utoipa::path(put, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)), request_body = ApiMemoryUpdate,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn update_memory(
    State(app): State<Arc<App>>,
    PathParams((name, memory)): PathParams<(String, u64)>,
    JsonBody(changed): JsonBody<ApiMemoryUpdate>,
) -> ApiResult<StatusCode> {
    let ApiMemoryUpdate { text, pinned, disabled } = changed;
    let orders =
        [text.map(MemoryEdit::SetText), pinned.map(MemoryEdit::Pin), disabled.map(MemoryEdit::Disable)];
    edit_memory(&app, name, memory, orders.into_iter().flatten().collect()).await
}

/// Deletes a memory; what it is of stays
#[utoipa::path(delete, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)),
    responses((status = 204), (status = 404, body = ApiError)))]
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
    orders: Vec<MemoryEdit>,
) -> ApiResult<StatusCode> {
    let opener = Arc::clone(app);
    let desk = spawn_blocking(move || opener.open_conversation(&name)).await?;
    run_in_session(&desk, move |session| {
        if !session.memories().iter().any(|known| known.id == memory) {
            return Err(ErrorResponse::not_found(format!("there is no memory {memory}")));
        }
        for order in orders {
            session.edit_memory(memory, order)?;
        }
        Ok(((), Some((ChangeAction::MemoryEdited, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

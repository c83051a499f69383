//! Figures of a stored conversation, and its brightest sentences.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, PathParams, QueryParams, spawn_blocking};
use crate::search::load_bodies;
use axum::Json;
use axum::extract::State;
use halo_core::extract::{self, ExtractedSentence};
use halo_core::token::ChunkId;
use halo_engine::forget::pending as pending_forget;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_store_figures)).routes(routes!(extract_sentences))
}

/// What the store holds of a conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = StoreFigures)]
struct ApiStoreFigures {
    /// Tokens in the context window, without the system prompt.
    live_tokens: usize,
    /// Tokens that are pruned or deleted.
    dead_tokens: usize,
    /// Chunks in the search index.
    semantic_entries: usize,
    /// Chunks of the search index that have no embedding yet.
    missing_embeddings: usize,
    /// The position of the next token.
    next_position: u64,
    /// The number of the next turn.
    next_turn: u32,
}

/// The figures of the store: live and dead tokens, index entries, the next position and turn
#[utoipa::path(get, path = "/conversations/{name}/stats", params(("name" = String, Path)),
    responses((status = 200, body = ApiStoreFigures), (status = 404, body = ApiError)))]
async fn get_store_figures(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiStoreFigures>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        let timeline = &state.timeline;
        let index = app.search_index(&state)?;
        let index = index.read();
        Ok(Json(ApiStoreFigures {
            live_tokens: timeline.live_len(),
            dead_tokens: timeline.len() - timeline.live_len(),
            semantic_entries: index.len(),
            missing_embeddings: index.missing_vectors(),
            next_position: timeline.next_position().0,
            next_turn: timeline.next_turn().0,
        }))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ExtractQuery {
    /// How many sentences to return, at most 200
    #[serde(default = "ten")]
    limit: usize,
}

fn ten() -> usize {
    10
}

/// A sentence of the conversation, word for word.
#[derive(Serialize, ToSchema)]
#[schema(as = ExtractedSentence)]
struct ApiExtractedSentence {
    /// The chunk that it is a part of.
    chunk: String,
    /// The position of its first token.
    position: u64,
    text: String,
    /// The larger, the more attention it received.
    brightness: f64,
}

impl From<ExtractedSentence> for ApiExtractedSentence {
    fn from(sentence: ExtractedSentence) -> Self {
        let ExtractedSentence { chunk, position, text, brightness } = sentence;
        Self { chunk: chunk.to_string(), position: position.0, text, brightness }
    }
}

/// The sentences that received the most attention, word for word, in order of the conversation
#[utoipa::path(get, path = "/conversations/{name}/extract", params(("name" = String, Path), ExtractQuery),
    responses((status = 200, body = Vec<ApiExtractedSentence>), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn extract_sentences(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<ExtractQuery>,
) -> ApiResult<Json<Vec<ApiExtractedSentence>>> {
    spawn_blocking(move || {
        let mut timeline = app.view_conversation(&name)?.snapshot.state.timeline.clone();
        let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        let pending = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &all)?;
            pending_forget::pending_chunks(store, &name)
        })?;
        let sentences = extract::brightest_sentences(&timeline, query.limit.min(200), |chunk| {
            !pending.contains_key(&chunk.id())
        });
        Ok(Json(sentences.into_iter().map(Into::into).collect()))
    })
    .await
}

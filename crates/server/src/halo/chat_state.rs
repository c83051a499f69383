//! A conversation without its texts: what a client needs beside the transcript, however long the conversation is.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use super::options::ApiPersona;
use crate::app::App;
use crate::error::{ApiError, ApiResult, PathParams, spawn_blocking};
use crate::wire::{ApiPlacedMemory, ApiRunningAnswer, is_pruned};
use axum::Json;
use axum::extract::State;
use halo_engine::chat_options::ChatOptions;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_chat_state))
}

/// A conversation without its texts; the transcript has them.
#[derive(Serialize, ToSchema)]
#[schema(as = ChatState)]
struct ApiChatState {
    name: String,
    model: String,
    /// Whether the model reports attention.
    attention: bool,
    /// The maximum number of tokens in the context window.
    limit: usize,
    /// The maximum number of tokens after a turn.
    budget_after_turn: usize,
    /// Tokens in the context window, with the system prompt.
    live: usize,
    /// Tokens on the timeline.
    tokens: usize,
    /// Number of pruned chunks.
    pruned: usize,
    system_prompt_tokens: usize,
    /// The memories in the context window, each where its range was.
    placed_memories: Vec<ApiPlacedMemory>,
    /// The number of the last event that is included.
    last_event: u64,
    /// Messages for the user about how the conversation was opened.
    notices: Vec<String>,
    /// The number of another process that has the conversation open, so that it can only be read here; 0 where its number
    /// is unknown, null where there is none.
    in_use_by: Option<u32>,
    /// The model that was chosen for this conversation, where it is not installed any more: another one must be chosen.
    missing_model: Option<String>,
    /// Who talks in this conversation, where it has names of its own.
    persona: ApiPersona,
    /// The answer that is being generated.
    running: Option<ApiRunningAnswer>,
}

/// The sizes of a conversation and its running answer, without its texts
#[utoipa::path(get, path = "/conversations/{name}/state", params(("name" = String, Path)),
    responses((status = 200, body = ApiChatState), (status = 404, body = ApiError)))]
async fn get_chat_state(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiChatState>> {
    spawn_blocking(move || {
        let view = app.view_conversation(&name)?;
        let state = &view.snapshot.state;
        let in_use_by = process_elsewhere(&app, &name)?;
        let ChatOptions { persona, model: chosen, .. } =
            app.with_reader(|store| ChatOptions::load(store, &name))?;
        let missing_model = chosen.filter(|model| !model.contains("://") && !is_installed(&app, model));
        Ok(Json(ApiChatState {
            name: state.name.clone(),
            model: state.model.name.clone(),
            attention: state.model.attention,
            limit: state.token_limit,
            budget_after_turn: state.budget_after_turn,
            live: state.live_tokens(),
            tokens: state.timeline.len(),
            pruned: state.timeline.chunks().filter(|chunk| is_pruned(*chunk)).count(),
            system_prompt_tokens: state.system_tokens.len(),
            placed_memories: state.placed_memories.iter().map(ApiPlacedMemory::from).collect(),
            last_event: view.snapshot.last_event,
            running: view.snapshot.answer.as_deref().map(Into::into),
            notices: view.notices,
            in_use_by,
            missing_model,
            persona: persona.into(),
        }))
    })
    .await
}

/// Whether the models folder has a model; true where it cannot be listed.
fn is_installed(app: &App, model: &str) -> bool {
    let choices = app.backend.model_choices();
    choices.map_or(true, |choices| choices.installed.iter().any(|installed| installed.name == model))
}

/// Another process that has the conversation open.
fn process_elsewhere(app: &App, name: &str) -> ApiResult<Option<u32>> {
    let holder = app.with_reader(|store| store.lease_holder(name))?;
    // A database that does not know the process does not tell this one from others either.
    let is_here = |pid: u32| pid == std::process::id() || (pid == 0 && app.host.find_open(name).is_some());
    Ok(holder.filter(|&pid| !is_here(pid)))
}

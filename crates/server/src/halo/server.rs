//! Status, events and settings of the server.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::backend::Setting;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use crate::wire::{ApiEvent, ApiEventKind, ApiSettingValue};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_status))
        .routes(routes!(stream_events))
        .routes(routes!(list_settings))
        .routes(routes!(update_setting))
}

#[derive(Serialize, ToSchema)]
#[schema(as = Status)]
struct ApiStatus {
    version: &'static str,
    model: String,
    /// The context length of the model, in tokens.
    context: usize,
    /// Whether the model reports attention.
    attention: bool,
    /// Whether KV cells of pruned chunks are removed and restored; null if that is unknown, as for a model on another server. If
    /// not, everything behind a change of the window is prefilled again.
    kv_edit: Option<bool>,
    /// Why KV cells cannot be edited.
    kv_edit_reason: Option<String>,
    /// Whether the chat template of the model has functions.
    tools: bool,
    /// Whether the model writes its reasoning before an answer.
    reasoning: bool,
    /// Whether the model is generating.
    busy: bool,
    /// Answers that are generated now.
    running: usize,
    /// The most answers that are generated at once.
    parallel: usize,
    /// Requests in the queue of the model.
    queued: usize,
    /// How long a new request is likely to wait for the model; null until one was served.
    expected_wait_ms: Option<u64>,
    /// Whether there is an embedder, so that search finds meanings too.
    embedder: bool,
    /// The largest file that can be imported, in bytes.
    max_import_bytes: u64,
}

/// Status of the server
#[utoipa::path(get, path = "/status", responses((status = 200, body = ApiStatus)))]
async fn get_status(State(app): State<Arc<App>>) -> Json<ApiStatus> {
    let info = app.backend.model_info();
    let capabilities = info.capabilities();
    Json(ApiStatus {
        version: env!("CARGO_PKG_VERSION"),
        model: info.name,
        context: info.context,
        attention: capabilities.attention,
        kv_edit: capabilities.kv_editing.edits_cells(),
        kv_edit_reason: capabilities.kv_editing.reason().map(str::to_owned),
        tools: capabilities.tools,
        reasoning: capabilities.reasoning,
        busy: app.host.scheduler().is_busy(),
        running: app.host.scheduler().permits_in_use(),
        parallel: app.host.scheduler().limit(),
        queued: app.host.scheduler().queue_len(),
        expected_wait_ms: app.host.scheduler().expected_wait().map(|wait| wait.as_millis() as u64),
        embedder: app.backend.embedder().is_some(),
        max_import_bytes: app.limits.max_import_bytes,
    })
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct EventsQuery {
    /// Only events of this conversation
    conversation: Option<String>,
}

/// Events from now on, as server-sent events with one JSON object each
#[utoipa::path(get, path = "/events", params(EventsQuery), responses((status = 200, body = ApiEvent, content_type = "text/event-stream")))]
async fn stream_events(
    State(app): State<Arc<App>>,
    QueryParams(query): QueryParams<EventsQuery>,
) -> Response {
    app.events.subscribe(query.conversation)
}

#[utoipa::path(get, path = "/settings", responses((status = 200, body = Vec<Setting>)))]
async fn list_settings(State(app): State<Arc<App>>) -> Json<Vec<Setting>> {
    Json(app.backend.settings())
}

/// Writes a setting to the settings file, or removes it from there
#[utoipa::path(put, path = "/settings/{key}", params(("key" = String, Path)), request_body = ApiSettingValue,
    responses((status = 200, body = Vec<Setting>), (status = 400, body = ApiError), (status = 403, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn update_setting(
    State(app): State<Arc<App>>,
    PathParams(key): PathParams<String>,
    JsonBody(new): JsonBody<ApiSettingValue>,
) -> ApiResult<Response> {
    spawn_blocking(move || {
        if !app.backend.settings().iter().any(|setting| setting.key == key) {
            return Err(ErrorResponse::not_found(format!("there is no setting {key}")));
        }
        app.backend.save_setting(&key, new.value.as_deref())?;
        // Conversations read their settings when they are opened.
        for (name, _) in app.host.open_conversations() {
            app.host.close(&name);
        }
        app.events.publish("", app.host.next_event_number(), ApiEventKind::SettingsChanged);
        Ok(Json(app.backend.settings()).into_response())
    })
    .await
}

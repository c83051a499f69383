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
    /// Whether the model is generating.
    busy: bool,
    /// Requests in the queue of the model.
    queued: usize,
    /// Whether there is an embedder, so that search finds meanings too.
    embedder: bool,
}

/// Status of the server
#[utoipa::path(get, path = "/status", responses((status = 200, body = ApiStatus)))]
async fn get_status(State(app): State<Arc<App>>) -> Json<ApiStatus> {
    let info = app.backend.model_info();
    Json(ApiStatus {
        version: env!("CARGO_PKG_VERSION"),
        model: info.name,
        context: info.context,
        attention: info.attention,
        busy: app.host.scheduler().is_busy(),
        queued: app.host.scheduler().queue_len(),
        embedder: app.backend.embedder().is_some(),
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

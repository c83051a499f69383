//! Halo's own API: conversations, what is in their windows and what has left, and the user's hand.

mod captures;
mod commands;
mod forget;
mod memories;
mod queries;
pub(crate) mod wire;
mod worlds;

pub(crate) use commands::run_in_session;
pub(crate) use queries::{chunk_texts, search_index};

use crate::app::App;
use crate::backend::Setting;
use crate::error::{ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use wire::{ApiEventKind, ApiSettingValue};

/// The API as a document, but for its routes, which bring their own.
#[derive(OpenApi)]
#[openapi(info(
    title = "Halo",
    description = "Conversations without end: what the model sees, what has left its window and why, and the user's own hand.",
    license(name = "MIT OR Apache-2.0")
))]
struct OpenApiDocument;

pub(crate) fn routes() -> Router<Arc<App>> {
    let (router, document) = OpenApiRouter::with_openapi(OpenApiDocument::openapi())
        .nest(
            "/api/halo/v1",
            server_routes()
                .merge(queries::routes())
                .merge(commands::routes())
                .merge(forget::routes())
                .merge(captures::routes())
                .merge(memories::routes())
                .merge(worlds::routes()),
        )
        .split_for_parts();
    let document = document.to_json().unwrap_or_default();
    router.route(
        "/api/halo/openapi.json",
        get(move || async move { ([("content-type", "application/json")], document) }),
    )
}

fn server_routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_status))
        .routes(routes!(stream_events))
        .routes(routes!(list_settings))
        .routes(routes!(update_setting))
}

/// How the server stands.
#[derive(Serialize, ToSchema)]
#[schema(as = Status)]
struct ApiStatus {
    version: &'static str,
    /// The model that speaks.
    model: String,
    /// Tokens that it can see.
    context: usize,
    /// Whether it tells what it looks at.
    attention: bool,
    /// Whether it is answering.
    busy: bool,
    /// How many wait for it.
    queued: usize,
    /// Whether search goes by meaning too.
    embedder: bool,
}

/// How the server stands
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

#[derive(Deserialize, utoipa::IntoParams)]
struct EventsQuery {
    /// Only what happens in this conversation
    conversation: Option<String>,
}

/// All that happens from now on, as server-sent events: each is one line of JSON
#[utoipa::path(get, path = "/events", params(EventsQuery), responses((status = 200, body = wire::ApiEvent, content_type = "text/event-stream")))]
async fn stream_events(
    State(app): State<Arc<App>>,
    QueryParams(asked): QueryParams<EventsQuery>,
) -> Response {
    app.events.subscribe(asked.conversation)
}

#[utoipa::path(get, path = "/settings", responses((status = 200, body = Vec<Setting>)))]
async fn list_settings(State(app): State<Arc<App>>) -> Json<Vec<Setting>> {
    Json(app.backend.settings())
}

/// Sets a setting for good, or back to what it is without
#[utoipa::path(put, path = "/settings/{key}", params(("key" = String, Path, description = "Its name")), request_body = ApiSettingValue,
    responses((status = 200, body = Vec<Setting>), (status = 400, body = crate::error::ApiError), (status = 404, body = crate::error::ApiError), (status = 422, body = crate::error::ApiError)))]
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
        // Whatever is open goes by the new ones when it is wanted again.
        for (name, _) in app.host.open_conversations() {
            app.host.close(&name);
        }
        app.events.publish("", app.host.next_event_number(), ApiEventKind::SettingsChanged);
        Ok(Json(app.backend.settings()).into_response())
    })
    .await
}

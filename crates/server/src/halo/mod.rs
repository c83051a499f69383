//! Halo's own API: conversations, what is in their windows and what has left, and the user's hand.

mod captures;
mod look;
mod memories;
mod talk;
pub(crate) mod wire;
mod worlds;

pub(crate) use look::{find, texts_of};
pub(crate) use talk::within;

use crate::answer::{Answer, Body, Named, Refusal, Words, aside};
use crate::app::App;
use crate::parts::Setting;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use wire::{NewValue, Told};

/// The API as a document, but for its routes, which bring their own.
#[derive(OpenApi)]
#[openapi(info(
    title = "Halo",
    description = "Conversations without end: what the model sees, what has left its window and why, and the user's own hand.",
    license(name = "MIT OR Apache-2.0")
))]
struct Document;

pub(crate) fn routes() -> Router<Arc<App>> {
    let (router, document) = OpenApiRouter::with_openapi(Document::openapi())
        .nest(
            "/api/halo/v1",
            api()
                .merge(look::routes())
                .merge(talk::routes())
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

fn api() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(status))
        .routes(routes!(events))
        .routes(routes!(settings))
        .routes(routes!(set))
}

/// How the server stands.
#[derive(Serialize, ToSchema)]
struct Status {
    /// The program's version.
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
    waiting: usize,
    /// Whether search goes by meaning too.
    embedder: bool,
}

/// How the server stands
#[utoipa::path(get, path = "/status", responses((status = 200, body = Status)))]
async fn status(State(app): State<Arc<App>>) -> Json<Status> {
    let info = app.parts.info();
    Json(Status {
        version: env!("CARGO_PKG_VERSION"),
        model: info.name,
        context: info.context,
        attention: info.attention,
        busy: app.host.gate().is_busy(),
        waiting: app.host.gate().waiting(),
        embedder: app.parts.embedder().is_some(),
    })
}

#[derive(Deserialize, utoipa::IntoParams)]
struct Where {
    /// Only what happens in this conversation
    conversation: Option<String>,
}

/// All that happens from now on, as server-sent events: each is one line of JSON
#[utoipa::path(get, path = "/events", params(Where), responses((status = 200, body = wire::Numbered, content_type = "text/event-stream")))]
async fn events(State(app): State<Arc<App>>, Words(asked): Words<Where>) -> Response {
    app.hub.listen(asked.conversation)
}

/// All settings
#[utoipa::path(get, path = "/settings", responses((status = 200, body = Vec<Setting>)))]
async fn settings(State(app): State<Arc<App>>) -> Json<Vec<Setting>> {
    Json(app.parts.settings())
}

/// Sets a setting for good, or back to what it is without
#[utoipa::path(put, path = "/settings/{key}", params(("key" = String, Path, description = "Its name")), request_body = NewValue,
    responses((status = 200, body = Vec<Setting>), (status = 400, body = crate::answer::Wrong), (status = 404, body = crate::answer::Wrong), (status = 422, body = crate::answer::Wrong)))]
async fn set(
    State(app): State<Arc<App>>,
    Named(key): Named<String>,
    Body(new): Body<NewValue>,
) -> Answer<Response> {
    aside(move || {
        if !app.parts.settings().iter().any(|setting| setting.key == key) {
            return Err(Refusal::missing(format!("there is no setting {key}")));
        }
        app.parts.set(&key, new.value.as_deref())?;
        // Whatever is open goes by the new ones when it is wanted again.
        for (name, _) in app.host.open_now() {
            app.host.close(&name);
        }
        app.hub.send("", app.host.number(), Told::Settings);
        Ok(Json(app.parts.settings()).into_response())
    })
    .await
}

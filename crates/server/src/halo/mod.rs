//! Halo's own API under `/api/halo/v1`, and its OpenAPI document.

mod brightness;
mod captures;
mod chat_state;
mod commands;
mod exchange;
mod figures;
mod forget;
mod memories;
mod memory_links;
mod models;
mod openapi;
mod options;
mod queries;
mod search_all;
mod server;
mod transcript;
mod worlds;

pub use captures::capture_folder_names;
pub(crate) use exchange::MAX_IMPORTS;
pub(crate) use models::RunningDownloads;

use crate::app::App;
use axum::Router;
use axum::routing::get;
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

/// The document without its routes, which the routers add.
#[derive(OpenApi)]
#[openapi(info(
    title = "Halo",
    description = "Conversations without a length limit: the context window, the chunks that were pruned from it and why, and manual edits.",
    license(name = "MIT OR Apache-2.0")
))]
struct OpenApiDocument;

pub(crate) fn routes(max_body_bytes: usize) -> Router<Arc<App>> {
    let (router, document) = OpenApiRouter::with_openapi(OpenApiDocument::openapi())
        .nest(
            "/api/halo/v1",
            server::routes()
                .merge(queries::routes())
                .merge(transcript::routes())
                .merge(chat_state::routes())
                .merge(search_all::routes())
                .merge(exchange::routes())
                .merge(models::routes())
                .merge(options::routes())
                .merge(brightness::routes())
                .merge(figures::routes())
                .merge(commands::routes())
                .merge(forget::routes())
                .merge(captures::routes())
                .merge(memories::routes())
                .merge(memory_links::routes())
                .merge(worlds::routes()),
        )
        .split_for_parts();
    let mut document = serde_json::to_value(&document).unwrap_or_default();
    openapi::complete_document(&mut document, max_body_bytes);
    let document = document.to_string();
    router.route(
        "/api/halo/openapi.json",
        get(move || async move { ([("content-type", "application/json")], document) }),
    )
}

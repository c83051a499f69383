//! Ollama's API. A chat is stored as a conversation, like a chat of OpenAI's API; `/api/generate` stores nothing. Streams are lines
//! of JSON.

mod chat;
mod embed;
mod generate;
mod models;
mod options;
mod protocol;

use crate::app::App;
use axum::Router;
use axum::routing::{delete, get, post};
use std::sync::Arc;

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/api/tags", get(models::list_models))
        .route("/api/ps", get(models::running_models))
        .route("/api/version", get(models::version))
        .route("/api/show", post(models::show_model))
        .route("/api/chat", post(chat::chat))
        .route("/api/generate", post(generate::generate))
        .route("/api/embed", post(embed::embed))
        .route("/api/embeddings", post(embed::embeddings))
        .route("/api/delete", delete(models::refuse_model_change).post(models::refuse_model_change));
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy"] {
        router = router.route(path, post(models::refuse_model_change));
    }
    router
}

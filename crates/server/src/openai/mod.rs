//! OpenAI's API: chat, completions, embeddings and models. A chat is stored as a conversation: messages that a client has dropped
//! from its history stay there, and are resurrected when they are relevant.

mod chat;
mod chat_request;
mod chat_response;
mod completions;
mod dispatch;
mod embeddings;
mod models;
mod protocol;
mod unstored_chat;

use crate::app::App;
use crate::error::ErrorResponse;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use protocol::OpenAiError;
use std::sync::Arc;

/// Whether a client of OpenAI's API expects an answer in its format there.
pub(crate) fn is_openai_path(path: &str) -> bool {
    path == "/v1" || path.starts_with("/v1/")
}

/// An error in OpenAI's format.
pub(crate) fn error_response(error: ErrorResponse) -> Response {
    OpenAiError::from(error).into_response()
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/models", get(models::list_models))
        .route("/v1/models/{model}", get(models::get_model))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
}

//! OpenAI's API: chat, completions, embeddings and models. A chat is stored as a conversation: messages that a client has dropped
//! from its history stay there, and are resurrected when they are relevant.

mod answer_reader;
mod call_gate;
mod chat;
mod chat_request;
mod chat_response;
mod chat_target;
mod chat_turn;
mod choices;
mod completions;
mod dispatch;
mod embeddings;
mod foreign_chat;
mod model_check;
mod models;
mod protocol;
mod reasoning_params;
mod responses;
mod tools;
mod unstored_chat;
mod usage;

use crate::app::App;
use crate::error::ErrorResponse;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
pub(crate) use chat::NOT_STORED;
pub(crate) use foreign_chat::{ForeignChat, StartedChat, chat_prompt_text, start_foreign_chat};
pub(crate) use protocol::CONVERSATION_HEADER;
use protocol::OpenAiError;
use std::sync::Arc;
pub(crate) use usage::timings;

/// An error in OpenAI's format.
pub(crate) fn error_response(error: ErrorResponse) -> Response {
    OpenAiError::from(error).into_response()
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/models", get(models::list_models))
        .route("/v1/models/{model}", get(models::get_model))
        .route("/v1/chat/completions", post(chat::chat_completions))
        // llama-server has these without the version too.
        .route("/models", get(models::list_models))
        .route("/chat/completions", post(chat::chat_completions))
        .merge(responses::routes())
        .route("/v1/completions", post(completions::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
}

//! The routes of llama-server that are not OpenAI's: what the model is, tokens, templates and raw completions. Nothing of them is
//! stored as a conversation.

mod completion;
mod info;
mod protocol;
mod tokens;

use crate::app::App;
use crate::error::ErrorResponse;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use std::sync::Arc;

/// An error in the format of llama-server.
pub(crate) fn error_response(error: ErrorResponse) -> Response {
    protocol::LlamaServerError::from(error).into_response()
}

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/props", get(info::props))
        .route("/slots", get(info::slots))
        .route("/slots/{slot}", any(info::refuse_slot_action))
        .route("/lora-adapters", get(info::lora_adapters))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/completion", post(completion::completion))
        .route("/completions", post(completion::completion))
        .route("/embedding", post(tokens::embedding))
        .route("/embeddings", post(tokens::embedding));
    for path in ["/infill", "/rerank", "/reranking"] {
        router = router.route(path, any(info::refuse_route));
    }
    router
}

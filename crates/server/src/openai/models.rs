//! The list of models, which has the chat model, and a model by its name. The embedder is not listed: programs offer what is listed for
//! chats.

use super::protocol::{OpenAiPath, OpenAiResult};
use crate::app::App;
use crate::embedding::find_embedder;
use crate::error::ErrorResponse;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_object(&app)] }))
}

/// `max_model_len` is vLLM's name of the context length, `meta` has those of llama-server.
fn model_object(app: &App) -> Value {
    let (info, details) = (app.backend.model_info(), app.backend.model_details());
    json!({
        "id": info.name,
        "object": "model",
        "created": app.model_created(),
        "owned_by": "halo",
        "max_model_len": info.context,
        "context_length": info.context,
        "meta": {
            "n_ctx": info.context,
            "n_ctx_train": details.trained_context,
            "n_vocab": details.vocab_size,
            "n_embd": details.embedding_size,
            "size": details.file_bytes,
        },
    })
}

pub(super) async fn get_model(
    State(app): State<Arc<App>>,
    OpenAiPath(name): OpenAiPath<String>,
) -> OpenAiResult<Json<Value>> {
    let loaded = app.backend.model_info().name;
    if name == loaded {
        return Ok(Json(model_object(&app)));
    }
    if let Some(embedder) = find_embedder(Arc::clone(&app), name.clone()).await? {
        return Ok(Json(json!({
            "id": embedder.name,
            "object": "model",
            "created": app.model_created(),
            "owned_by": "halo",
            "max_model_len": embedder.max_tokens,
            "context_length": embedder.max_tokens,
            "meta": { "n_ctx": embedder.max_tokens, "n_embd": embedder.dimensions },
        })));
    }
    let message = format!("there is no model '{name}'; this server has {loaded}");
    Err(ErrorResponse::not_found(message).with_param("model").with_code("model_not_found").into())
}

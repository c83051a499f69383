//! `/api/embed`, and `/api/embeddings` of older clients.

use super::protocol::{OllamaJson, OllamaResult, nanos};
use crate::app::App;
use crate::embedding::{EmbeddingOptions, LongInput, TokenVocabulary, embed_request};
use crate::error::null_as_default;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

#[derive(Deserialize)]
pub(super) struct OllamaEmbedRequest {
    #[serde(default)]
    input: Value,
    /// With `true` a text that is too long is embedded in pieces; nothing is ever cut.
    truncate: Option<bool>,
    dimensions: Option<u64>,
}

pub(super) async fn embed(
    State(app): State<Arc<App>>,
    OllamaJson(request): OllamaJson<OllamaEmbedRequest>,
) -> OllamaResult<Json<Value>> {
    let started = Instant::now();
    if request.input.as_array().is_some_and(Vec::is_empty) {
        // Ollama loads the model then.
        return Ok(Json(json!({ "model": app.backend.model_info().name, "embeddings": [] })));
    }
    let long = if request.truncate == Some(true) { LongInput::Split } else { LongInput::Refuse };
    let options = EmbeddingOptions {
        dimensions: request.dimensions,
        long,
        vocabulary: TokenVocabulary::ChatModel,
        allow_no_texts: false,
    };
    let embedded = embed_request(app, ("input", &request.input), options).await?;
    Ok(Json(json!({
        "model": embedded.model,
        "embeddings": embedded.vectors,
        "total_duration": nanos(started.elapsed()),
        "load_duration": 0,
        "prompt_eval_count": embedded.tokens.iter().sum::<usize>(),
    })))
}

#[derive(Deserialize)]
pub(super) struct OllamaEmbeddingsRequest {
    #[serde(default, deserialize_with = "null_as_default")]
    prompt: String,
}

/// One text, one vector. An empty text has an empty vector, as in Ollama.
pub(super) async fn embeddings(
    State(app): State<Arc<App>>,
    OllamaJson(request): OllamaJson<OllamaEmbeddingsRequest>,
) -> OllamaResult<Json<Value>> {
    if request.prompt.is_empty() {
        return Ok(Json(json!({ "embedding": [] })));
    }
    let options = EmbeddingOptions {
        dimensions: None,
        long: LongInput::Refuse,
        vocabulary: TokenVocabulary::ChatModel,
        allow_no_texts: false,
    };
    let embedded = embed_request(app, ("prompt", &json!(request.prompt)), options).await?;
    Ok(Json(json!({ "embedding": embedded.vectors.first() })))
}

//! Embeddings.

use super::protocol::{OpenAiJson, OpenAiResult};
use crate::app::App;
use crate::embedding::{LongInput, embed_inputs, parse_inputs};
use crate::error::{ErrorResponse, spawn_blocking};
use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct OpenAiEmbeddingsRequest {
    #[serde(default)]
    input: Value,
    encoding_format: Option<String>,
    dimensions: Option<u64>,
}

pub(super) async fn embeddings(
    State(app): State<Arc<App>>,
    OpenAiJson(request): OpenAiJson<OpenAiEmbeddingsRequest>,
) -> OpenAiResult<Json<Value>> {
    let inputs = parse_inputs("input", &request.input)?;
    let as_base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format '{other}' is not supported; use float or base64");
            return Err(ErrorResponse::bad_request(message).with_param("encoding_format").into());
        }
    };
    let embedded =
        spawn_blocking(move || embed_inputs(&app, "input", inputs, request.dimensions, LongInput::Refuse));
    let embedded = embedded.await?;
    let data: Vec<Value> = (embedded.vectors.iter().enumerate())
        .map(|(index, vector)| {
            let embedding = if as_base64 {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                json!(BASE64_STANDARD.encode(bytes))
            } else {
                json!(vector)
            };
            json!({ "object": "embedding", "index": index, "embedding": embedding })
        })
        .collect();
    let tokens: usize = embedded.tokens.iter().sum();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    Ok(Json(json!({ "object": "list", "data": data, "model": embedded.model, "usage": usage })))
}

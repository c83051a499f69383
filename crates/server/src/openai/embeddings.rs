//! Embeddings.

use super::protocol::{OneOrMany, OpenAiJson, OpenAiResult};
use crate::app::App;
use crate::error::{ErrorResponse, spawn_blocking};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct OpenAiEmbeddingsRequest {
    input: OneOrMany<String>,
    encoding_format: Option<String>,
}

const MAX_INPUTS: usize = 2048;

pub(super) async fn embeddings(
    State(app): State<Arc<App>>,
    OpenAiJson(request): OpenAiJson<OpenAiEmbeddingsRequest>,
) -> OpenAiResult<Json<Value>> {
    let texts = request.input.into_vec();
    if texts.is_empty() || texts.len() > MAX_INPUTS || texts.iter().any(String::is_empty) {
        return Err(ErrorResponse::bad_request("input must have 1 to 2048 texts, none of them empty").into());
    }
    let as_base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format '{other}' is not supported; use float or base64");
            return Err(ErrorResponse::bad_request(message).into());
        }
    };
    let response = spawn_blocking(move || {
        let missing = "there is no embedder: download one, set recall.embedder and restart";
        let mut embedder =
            app.backend.embedder().ok_or_else(|| ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, missing))?;
        let info = embedder.info()?;
        let mut model = app.backend.model()?;
        let tokens =
            texts.iter().try_fold(0, |sum, text| model.count_tokens(text).map(|tokens| sum + tokens))?;
        let passages: Vec<String> =
            texts.iter().map(|text| format!("{}{text}", info.passage_prefix)).collect();
        let vectors = embedder.embed(&passages.iter().map(String::as_str).collect::<Vec<_>>())?;
        let data: Vec<Value> = (vectors.iter().enumerate())
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
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        Ok(json!({ "object": "list", "data": data, "model": info.name, "usage": usage }))
    });
    Ok(Json(response.await?))
}

//! Embeddings.

use super::protocol::{OpenAiJson, OpenAiResult};
use crate::app::App;
use crate::embedding::{EmbeddingOptions, LongInput, TokenVocabulary, embed_request};
use crate::error::ErrorResponse;
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
    let as_base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format '{other}' is not supported; use float or base64");
            return Err(ErrorResponse::bad_request(message).with_param("encoding_format").into());
        }
    };
    let input = ("input", &request.input);
    let options = EmbeddingOptions {
        dimensions: request.dimensions,
        long: LongInput::Refuse,
        vocabulary: TokenVocabulary::Cl100k,
        allow_no_texts: false,
    };
    let embedded = embed_request(app, input, options).await?;
    Ok(Json(embedded.to_openai_json(|vector| match as_base64 {
        true => {
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            json!(BASE64_STANDARD.encode(bytes))
        }
        false => json!(vector),
    })))
}

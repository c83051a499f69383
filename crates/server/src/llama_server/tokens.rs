//! Tokens, chat templates and embeddings.

use super::protocol::{LlamaServerJson, LlamaServerResult};
use crate::app::App;
use crate::embedding::{EmbeddingOptions, LongInput, TokenVocabulary, embed_request};
use crate::error::{ErrorResponse, spawn_blocking};
use crate::openai::chat_prompt_text;
use axum::Json;
use axum::extract::State;
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct TokenizeRequest {
    content: String,
    /// Whether the token at the beginning of a text is added.
    #[serde(default)]
    add_special: bool,
    /// Whether names of special tokens become these tokens.
    #[serde(default = "yes")]
    parse_special: bool,
    #[serde(default)]
    with_pieces: bool,
}

fn yes() -> bool {
    true
}

pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    LlamaServerJson(request): LlamaServerJson<TokenizeRequest>,
) -> LlamaServerResult<Json<Value>> {
    let tokens = spawn_blocking(move || {
        let mut model = app.backend.model()?;
        let mut tokens: Vec<(u32, String)> = (model.tokenize(&request.content, request.parse_special)?)
            .into_iter()
            .map(|token| (token.id.0, token.text))
            .collect();
        let bos = u32::try_from(app.backend.model_details().bos).ok();
        if let Some(bos) = bos.filter(|_| request.add_special) {
            tokens.insert(0, (bos, model.detokenize(&[TokenId(bos)]).unwrap_or_default()));
        }
        let token = |(id, piece): &(u32, String)| match request.with_pieces {
            true => json!({ "id": id, "piece": piece }),
            false => json!(id),
        };
        Ok(tokens.iter().map(token).collect::<Vec<Value>>())
    });
    Ok(Json(json!({ "tokens": tokens.await? })))
}

#[derive(Deserialize)]
pub(super) struct DetokenizeRequest {
    tokens: Vec<u32>,
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    LlamaServerJson(request): LlamaServerJson<DetokenizeRequest>,
) -> LlamaServerResult<Json<Value>> {
    let content = spawn_blocking(move || {
        let ids: Vec<TokenId> = request.tokens.into_iter().map(TokenId).collect();
        let unknown = |e: halo_core::Error| ErrorResponse::bad_request(e.to_string()).with_param("tokens");
        app.backend.model()?.detokenize(&ids).map_err(unknown)
    });
    Ok(Json(json!({ "content": content.await? })))
}

/// The messages and the functions of a chat request as a prompt. Nothing is added that the client has not sent: no system prompt of the
/// settings, no dates.
pub(super) async fn apply_template(
    State(app): State<Arc<App>>,
    LlamaServerJson(request): LlamaServerJson<Value>,
) -> LlamaServerResult<Json<Value>> {
    let prompt = spawn_blocking(move || chat_prompt_text(&app, request)).await?;
    Ok(Json(json!({ "prompt": prompt })))
}

#[derive(Deserialize)]
pub(super) struct EmbeddingRequest {
    #[serde(default, alias = "input")]
    content: Value,
}

/// One object per text. A vector is in a list of its own, because a server without pooling has one per token.
pub(super) async fn embedding(
    State(app): State<Arc<App>>,
    LlamaServerJson(request): LlamaServerJson<EmbeddingRequest>,
) -> LlamaServerResult<Json<Value>> {
    let options = EmbeddingOptions {
        dimensions: None,
        long: LongInput::Refuse,
        vocabulary: TokenVocabulary::ChatModel,
        allow_no_texts: false,
    };
    let embedded = embed_request(app, ("content", &request.content), options).await?;
    let item = |(index, vector): (usize, &Vec<f32>)| json!({ "index": index, "embedding": [vector] });
    Ok(Json(embedded.vectors.iter().enumerate().map(item).collect()))
}

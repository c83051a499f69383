//! Tokens of texts, and texts of tokens.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, JsonBody, spawn_blocking};
use axum::Json;
use axum::extract::State;
use halo_core::model::ModelToken;
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct KoboldText {
    #[serde(alias = "content", alias = "prompt")]
    text: String,
}

/// Special tokens in the text are parsed: clients build their chat template as text.
pub(super) async fn tokenize_text(app: Arc<App>, text: String) -> ApiResult<Vec<ModelToken>> {
    spawn_blocking(move || Ok(app.backend.model()?.tokenize(&text, true)?)).await
}

pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBody(KoboldText { text }): JsonBody<KoboldText>,
) -> ApiResult<Json<Value>> {
    let tokens = tokenize_text(Arc::clone(&app), text).await?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id.0).collect();
    let tokens: Vec<Value> = tokens
        .iter()
        .map(|token| json!({ "token_id": token.id.0, "text": visible_text(&app, token) }))
        .collect();
    Ok(Json(json!({ "tokens": tokens, "token_count": ids.len(), "token_ids": ids })))
}

/// The text of a token for clients: empty for special tokens.
pub(super) fn visible_text<'a>(app: &App, token: &'a ModelToken) -> &'a str {
    if app.backend.is_special_token(token.id) { "" } else { &token.text }
}

pub(super) async fn count_tokens(
    State(app): State<Arc<App>>,
    JsonBody(KoboldText { text }): JsonBody<KoboldText>,
) -> ApiResult<Json<Value>> {
    let tokens = tokenize_text(app, text).await?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id.0).collect();
    Ok(Json(json!({ "value": ids.len(), "ids": ids })))
}

#[derive(Deserialize)]
pub(super) struct KoboldTokenIds {
    #[serde(alias = "ids")]
    token_ids: Vec<u32>,
}

async fn decode_tokens(app: Arc<App>, ids: KoboldTokenIds) -> ApiResult<String> {
    let ids: Vec<TokenId> = ids.token_ids.into_iter().map(TokenId).collect();
    spawn_blocking(move || {
        app.backend.model()?.detokenize(&ids).map_err(|e| ErrorResponse::bad_request(e.to_string()))
    })
    .await
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBody(ids): JsonBody<KoboldTokenIds>,
) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "text": decode_tokens(app, ids).await? })))
}

pub(super) async fn detokenize_extra(
    State(app): State<Arc<App>>,
    JsonBody(ids): JsonBody<KoboldTokenIds>,
) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "result": decode_tokens(app, ids).await?, "success": true })))
}

/// The tokens of a request, if the model has all of them.
pub(super) fn parse_token_ids(
    app: &App,
    field: &str,
    ids: impl IntoIterator<Item = u32>,
) -> ApiResult<Vec<TokenId>> {
    let vocab_size = app.backend.model_details().vocab_size;
    let parse = |id: u32| match vocab_size > 0 && id as usize >= vocab_size {
        true => Err(ErrorResponse::bad_request(format!(
            "{field}: there is no token {id}: the vocabulary of the model has {vocab_size}"
        ))),
        false => Ok(TokenId(id)),
    };
    ids.into_iter().map(parse).collect()
}

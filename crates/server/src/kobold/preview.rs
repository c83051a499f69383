//! A preview of the next answer, as the fork for Halo Weave designed it.

use super::tokens::parse_token_ids;
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::{CompletionRequest, TextOptions, complete_text};
use crate::error::{ApiResult, ErrorResponse, JsonBody};
use crate::running_completions::GenerationOwner;
use axum::Json;
use axum::extract::State;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Sampling};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct KoboldPreviewRequest {
    #[serde(default)]
    append_tokens: Vec<KoboldAppendedToken>,
    #[serde(default = "fifty")]
    max_tokens: usize,
    temperature: Option<f32>,
    top_p: Option<f32>,
}

#[derive(Deserialize)]
struct KoboldAppendedToken {
    token_id: u32,
}

fn fifty() -> usize {
    50
}

/// Continues the last completion without storing the result.
pub(super) async fn preview(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    JsonBody(body): JsonBody<KoboldPreviewRequest>,
) -> ApiResult<Json<Value>> {
    let mut ids = app
        .completion_histories
        .last_window()
        .ok_or_else(|| ErrorResponse::bad_request("No cached context available"))?;
    let appended = body.append_tokens.iter().map(|token| token.token_id);
    ids.extend(parse_token_ids(&app, "append_tokens", appended)?);
    let defaults = app.backend.rules().sampling;
    let sampling = Sampling {
        max_tokens: body.max_tokens.clamp(1, 256),
        temperature: body.temperature.filter(|t| (0.0..=100.0).contains(t)).unwrap_or(defaults.temperature),
        top_p: body.top_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(defaults.top_p),
        ..defaults
    };
    let started = std::time::Instant::now();
    let request = CompletionRequest {
        ids,
        text: String::new(),
        messages: Vec::new(),
        sampling,
        attention: AttentionRequest::none(),
        client: "kobold".into(),
        owner: GenerationOwner::without_key(client),
        ephemeral: true,
    };
    let result =
        complete_text(app, request, TextOptions { trims_stop: false, ..TextOptions::default() }).await?;
    Ok(Json(json!({
        "text": result.text,
        "token_count": result.tokens,
        "stopped_reason": if result.finish == FinishReason::Length { "max_tokens" } else { "stop" },
        "cache_hit": true,
        "generation_time_ms": started.elapsed().as_millis(),
    })))
}

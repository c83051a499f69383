//! Watching and aborting generations, and their figures. Clients that share a server keep their generations apart by `genkey`; without
//! one, a client has those that came from its address.

use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::error::{ApiResult, ErrorResponse};
use crate::running_completions::GenerationOwner;
use crate::sampling::{chat_logprobs, completion_logprobs};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use halo_core::model::FinishReason;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Default, Deserialize)]
struct KoboldGenerationKey {
    #[serde(default)]
    genkey: Option<String>,
}

/// Whose generation a request means; an empty key is none. These requests may have no body.
fn asking_owner(client: ClientNetwork, body: Result<Bytes, BytesRejection>) -> ApiResult<GenerationOwner> {
    let unreadable =
        |e: BytesRejection| ErrorResponse::new(e.status(), format!("the request body cannot be read: {e}"));
    let body = body.map_err(unreadable)?;
    if body.trim_ascii().is_empty() {
        return Ok(GenerationOwner::without_key(client));
    }
    let key: KoboldGenerationKey = serde_json::from_slice(&body)
        .map_err(|e| ErrorResponse::bad_request(format!("invalid JSON body: {e}")))?;
    Ok(GenerationOwner { key: key.genkey.filter(|key| !key.is_empty()), client })
}

/// The text of the client's generation that runs or ended just now.
pub(super) async fn check(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    body: Result<Bytes, BytesRejection>,
) -> ApiResult<Json<Value>> {
    let text = app.running_completions.text(&asking_owner(client, body)?);
    Ok(Json(json!({ "results": [{ "text": text }] })))
}

/// The log-probabilities of the client's generation that runs or ended just now, in both formats of OpenAI.
pub(super) async fn last_logprobs(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    body: Result<Bytes, BytesRejection>,
) -> ApiResult<Json<Value>> {
    let tokens = app.running_completions.logprobs(&asking_owner(client, body)?);
    let mut json = completion_logprobs(&tokens, 0);
    if !json.is_null() {
        json["content"] = chat_logprobs(&tokens)["content"].take();
    }
    Ok(Json(json!({ "logprobs": json })))
}

/// Stops the client's generation; without a key what it runs, be it a completion or the answer of a chat. Clients expect strings, not
/// booleans.
pub(super) async fn abort(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    body: Result<Bytes, BytesRejection>,
) -> ApiResult<Json<Value>> {
    let stopped = app.running_completions.stop(&asking_owner(client, body)?);
    Ok(Json(json!({ "success": if stopped { "true" } else { "false" }, "done": "true" })))
}

pub(super) async fn perf(State(app): State<Arc<App>>) -> Json<Value> {
    let (scheduler, figures) = (app.host.scheduler(), app.generation_log.figures());
    let last = figures.last.as_ref();
    let per_second = |tokens: usize, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    let process = last.map_or(0.0, |last| last.prefill.as_secs_f64());
    let eval = last.map_or(0.0, |last| last.decode.as_secs_f64());
    let (input, output) = last.map_or((0, 0), |last| (last.prompt_tokens, last.tokens));
    Json(json!({
        "last_process": process,
        "last_eval": eval,
        "last_token_count": output,
        "last_input_count": input,
        "last_process_speed": per_second(input, process),
        "last_eval_speed": per_second(output, eval),
        "last_seed": last.and_then(|last| last.seed).map_or(json!(-1), |seed| json!(seed)),
        "total_gens": figures.count,
        "stop_reason": last.and_then(|last| last.finish).map_or(-1, stop_reason),
        "queue": scheduler.queue_len(),
        "idle": u8::from(!scheduler.is_busy()),
        "idletime": figures.since_last.as_secs(),
        "uptime": figures.uptime.as_secs(),
        "quiet": false,
    }))
}

/// KoboldCPP's numbers: 0 out of tokens, 1 end-of-text token, 2 stop sequence, -1 invalid.
fn stop_reason(finish: FinishReason) -> i32 {
    match finish {
        FinishReason::Length => 0,
        FinishReason::EndOfText => 1,
        FinishReason::StopSequence => 2,
        FinishReason::Cancelled => -1,
    }
}

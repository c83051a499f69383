//! What the server is: its model, its settings and its one slot.

use super::protocol::{LlamaServerQuery, LlamaServerResult};
use crate::app::App;
use crate::error::{ErrorResponse, spawn_blocking};
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use halo_core::model::{MirostatVersion, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn props(State(app): State<Arc<App>>) -> LlamaServerResult<Json<Value>> {
    let reader = Arc::clone(&app);
    let tokens = spawn_blocking(move || {
        let details = reader.backend.model_details();
        Ok([details.bos, details.eos].map(|id| token_text(&reader, id)))
    });
    let [bos_token, eos_token] = tokens.await?;
    let (info, file) = (app.backend.model_info(), app.backend.model_details());
    let mut settings = json!({"id": 0, "n_ctx": app.backend.model_info().context, "speculative": false});
    settings["is_processing"] = app.host.scheduler().is_busy().into();
    settings["params"] = sampling_json(&app.backend.rules().sampling);
    Ok(Json(json!({
        "default_generation_settings": settings,
        "total_slots": app.host.scheduler().limit(),
        "model_alias": info.name,
        // The folder is nobody's business.
        "model_path": if file.file_name.is_empty() { info.name.as_str() } else { file.file_name.as_str() },
        "modalities": { "vision": false, "audio": false },
        "chat_template": file.chat_template,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "build_info": format!("halo-{}", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// The text of a token; empty if the model has no such token.
fn token_text(app: &App, id: i64) -> String {
    let id = u32::try_from(id).ok().map(TokenId);
    let text = id.and_then(|id| app.backend.model().and_then(|mut model| model.detokenize(&[id])).ok());
    text.unwrap_or_default()
}

/// One slot for each answer that is generated at once. Of the answers nothing is shown.
fn slot_list(app: &App) -> Vec<Value> {
    let scheduler = app.host.scheduler();
    let (context, in_use) = (app.backend.model_info().context, scheduler.permits_in_use());
    let slot = |id| json!({"id": id, "n_ctx": context, "speculative": false, "is_processing": id < in_use});
    (0..scheduler.limit()).map(slot).collect()
}

/// The sampling parameters, with the names of llama-server. -1 stands for no limit and for the whole window.
pub(super) fn sampling_json(sampling: &Sampling) -> Value {
    let count = |n: usize| if n == usize::MAX { json!(-1) } else { json!(n) };
    let mirostat = sampling.mirostat;
    json!({
        "n_predict": count(sampling.max_tokens),
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynamic_temperature.range,
        "dynatemp_exponent": sampling.dynamic_temperature.exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "typical_p": sampling.typical_p,
        "xtc_probability": sampling.xtc.probability,
        "xtc_threshold": sampling.xtc.threshold,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": count(sampling.penalty_range),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry.multiplier,
        "dry_base": sampling.dry.base,
        "dry_allowed_length": sampling.dry.allowed_length,
        "dry_penalty_last_n": count(sampling.dry.range),
        "dry_sequence_breakers": sampling.dry.sequence_breakers,
        "mirostat": mirostat.map_or(0, |mirostat| match mirostat.version {
            MirostatVersion::One => 1,
            MirostatVersion::Two => 2,
        }),
        "mirostat_tau": mirostat.map_or(5.0, |mirostat| mirostat.tau),
        "mirostat_eta": mirostat.map_or(0.1, |mirostat| mirostat.eta),
        "n_probs": sampling.logprobs.unwrap_or(0),
        "ignore_eos": sampling.ignore_end,
        "stop": sampling.stop,
    })
}

#[derive(Deserialize)]
pub(super) struct SlotsQuery {
    fail_on_no_slot: Option<u8>,
}

pub(super) async fn slots(
    State(app): State<Arc<App>>,
    LlamaServerQuery(query): LlamaServerQuery<SlotsQuery>,
) -> LlamaServerResult<Json<Value>> {
    if query.fail_on_no_slot.is_some_and(|n| n != 0)
        && app.host.scheduler().permits_in_use() >= app.host.scheduler().limit()
    {
        let message = "the model generates as many answers as it can at once: try again later";
        return Err(ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, message).into());
    }
    Ok(Json(slot_list(&app).into()))
}

pub(super) async fn lora_adapters() -> Json<Value> {
    Json(json!([]))
}

pub(super) async fn refuse_slot_action() -> LlamaServerResult<Json<Value>> {
    let message = "slots cannot be saved, restored or erased: the server keeps the KV cache of each conversation itself";
    Err(ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message).into())
}

pub(super) async fn refuse_route(uri: Uri) -> LlamaServerResult<Json<Value>> {
    let message = format!("{} is not supported by this server; /completion completes a prompt", uri.path());
    Err(ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message).into())
}

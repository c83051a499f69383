//! The models of Ollama's API: there is one, it is loaded, and clients cannot change it.

use super::protocol::{OllamaJson, OllamaResult};
use crate::app::App;
use crate::embedding::find_embedder;
use crate::error::ErrorResponse;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::embedder::EmbedderInfo;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// The version of Ollama whose API this is. Clients compare it with the version that brought a feature.
const OLLAMA_VERSION: &str = "0.13.0";

pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": OLLAMA_VERSION }))
}

pub(super) async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "models": [model_object(&app)] }))
}

pub(super) async fn running_models(State(app): State<Arc<App>>) -> Json<Value> {
    let mut model = model_object(&app);
    // The model stays loaded as long as the server runs.
    model["expires_at"] = json!("2318-01-01T00:00:00Z");
    model["size_vram"] = json!(0);
    model["context_length"] = json!(app.backend.model_info().context);
    Json(json!({ "models": [model] }))
}

fn model_object(app: &App) -> Value {
    let (info, file) = (app.backend.model_info(), app.backend.model_details());
    json!({
        "name": info.name,
        "model": info.name,
        "modified_at": timestamp(app.model_created()),
        "size": file.file_bytes,
        "digest": digest(app),
        "details": details(app),
    })
}

fn details(app: &App) -> Value {
    let file = app.backend.model_details();
    json!({
        "parent_model": "",
        "format": if file.file_name.is_empty() { "" } else { "gguf" },
        "family": file.architecture,
        "families": [file.architecture],
        "parameter_size": file.parameters,
        "quantization_level": file.quantization,
    })
}

/// Identifies the model. It is made of the name and the size of the file: its content is not read for it.
fn digest(app: &App) -> String {
    let file = app.backend.model_details();
    let identity = format!("{}\0{}\0{}", app.backend.model_info().name, file.file_bytes, file.modified);
    Sha256::digest(identity).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn timestamp(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

#[derive(Deserialize)]
pub(super) struct OllamaShowRequest {
    model: Option<String>,
    /// The older name of `model`. Some clients send both.
    name: Option<String>,
}

pub(super) async fn show_model(
    State(app): State<Arc<App>>,
    OllamaJson(request): OllamaJson<OllamaShowRequest>,
) -> OllamaResult<Json<Value>> {
    let (info, file) = (app.backend.model_info(), app.backend.model_details());
    let named = [request.model, request.name].into_iter().flatten().find(|name| !name.is_empty());
    let Some(named) = named else {
        return Err(ErrorResponse::invalid_parameter("model", "model is required").into());
    };
    // Ollama's clients may add the tag `latest`.
    let named = named.strip_suffix(":latest").unwrap_or(&named).to_owned();
    if named != info.name {
        if let Some(embedder) = find_embedder(Arc::clone(&app), named.clone()).await? {
            return Ok(Json(show_embedder(&app, &embedder)));
        }
        let message = format!("model '{named}' not found; this server has {}", info.name);
        return Err(ErrorResponse::not_found(message).with_param("model").into());
    }
    let sampling = app.backend.rules().sampling;
    let parameters = [
        format!("num_ctx                        {}", info.context),
        format!("temperature                    {}", sampling.temperature),
        format!("top_k                          {}", sampling.top_k),
        format!("top_p                          {}", sampling.top_p),
    ];
    let architecture = if file.architecture.is_empty() { "model" } else { file.architecture.as_str() };
    let key = |name: &str| format!("{architecture}.{name}");
    let mut capabilities = vec!["completion", "tools"];
    if info.template.reasoning.is_some() {
        capabilities.push("thinking");
    }
    if app.backend.embedder().is_some() {
        capabilities.push("embedding");
    }
    Ok(Json(json!({
        "license": "",
        "modelfile": format!("FROM {}\n", info.name),
        "parameters": parameters.join("\n"),
        "template": file.chat_template,
        "modified_at": timestamp(app.model_created()),
        "details": details(&app),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": info.name,
            key("context_length"): if file.trained_context > 0 { file.trained_context } else { info.context },
            key("embedding_length"): file.embedding_size,
            key("block_count"): file.layers,
            key("attention.head_count"): file.heads,
            key("attention.head_count_kv"): file.kv_heads,
            key("vocab_size"): file.vocab_size,
        },
        "capabilities": capabilities,
    })))
}

/// What Ollama says of a model that only embeds.
fn show_embedder(app: &App, embedder: &EmbedderInfo) -> Value {
    json!({
        "license": "",
        "modelfile": format!("FROM {}\n", embedder.name),
        "parameters": format!("num_ctx                        {}", embedder.max_tokens),
        "template": "",
        "modified_at": timestamp(app.model_created()),
        "details": {
            "parent_model": "",
            "format": "",
            "family": "bert",
            "families": ["bert"],
            "parameter_size": "",
            "quantization_level": "",
        },
        "model_info": {
            "general.architecture": "bert",
            "general.basename": embedder.name,
            "bert.context_length": embedder.max_tokens,
            "bert.embedding_length": embedder.dimensions,
        },
        "capabilities": ["embedding"],
    })
}

/// Models are files of the person who runs the server.
pub(super) async fn refuse_model_change() -> OllamaResult<Json<Value>> {
    let message = "this server does not download, copy or delete models for clients: use `halo models` on the machine that it \
                   runs on";
    Err(ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message).into())
}

//! KoboldCPP's API. With `output_attentions` the stream has the attention of each token, as in the fork for Halo Weave.

mod attention;
mod control;
mod generate;
mod preview;
mod tokens;

use crate::app::App;
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new();
    // Some clients use the versioned path, some the latest.
    for version in ["/api/v1", "/api/latest"] {
        let versioned = Router::new()
            .route("/model", get(model))
            .route("/tokenize", post(tokens::tokenize))
            .route("/detokenize", post(tokens::detokenize))
            .route("/generate", post(generate::generate))
            .route("/generate/preview", post(preview::preview))
            .route("/info/version", get(|| async { Json(json!({ "result": "1.2.5" })) }))
            .route("/config/max_context_length", get(max_context_length))
            .route("/config/max_length", get(max_length));
        router = router.nest(version, versioned);
    }
    router
        .route("/api/extra/detokenize", post(tokens::detokenize_extra))
        .route("/api/extra/tokencount", post(tokens::count_tokens))
        .route("/api/extra/generate/stream", post(generate::generate_stream))
        .route("/api/extra/generate/check", get(control::check).post(control::check))
        .route("/api/extra/last_logprobs", get(control::last_logprobs).post(control::last_logprobs))
        .route("/api/extra/abort", post(control::abort))
        .route("/api/extra/version", get(version))
        .route("/api/extra/true_max_context_length", get(max_context_length))
        .route("/api/extra/perf", get(control::perf))
}

async fn model(State(app): State<Arc<App>>) -> Json<Value> {
    let (info, details) = (app.backend.model_info(), app.backend.model_details());
    Json(json!({
        "result": format!("koboldcpp/{}", info.name),
        "model_name": info.name,
        "vocab_size": details.vocab_size,
        "num_layers": details.layers,
        "num_attention_heads": details.heads,
        "num_key_value_heads": details.kv_heads,
        "embedding_size": details.embedding_size,
        "max_context_length": info.context,
        "max_trained_context": details.trained_context,
        "bos_token_id": details.bos,
        "eos_token_id": details.eos,
        "eot_token_id": details.eot,
        "rope_freq_base": details.rope_base,
        "rope_freq_scale": details.rope_scale,
    }))
}

async fn version(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({
        "result": "KoboldCpp",
        "version": "1.100",
        "protected": false,
        "llm": true,
        "txt2img": false,
        "vision": false,
        "audio": false,
        "transcribe": false,
        "multiplayer": false,
        "websearch": false,
        "tts": false,
        "embeddings": app.backend.embedder().is_some(),
        "savedata": false,
        "admin": 0,
        "attention": true,
    }))
}

async fn max_context_length(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "value": app.backend.model_info().context }))
}

async fn max_length(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "value": app.backend.rules().sampling.max_tokens }))
}

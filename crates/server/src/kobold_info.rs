//! The routes of KoboldCPP that describe the server, and those of its parts that Halo does not have: clients ask for them when they
//! connect.

use crate::app::App;
use crate::embedding::{EmbeddingOptions, LongInput, TokenVocabulary, embed_request};
use crate::error::{ApiResult, ErrorResponse, JsonBody, spawn_blocking};
use crate::json_grammar::json_schema_to_gbnf;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{any, get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Parts of KoboldCPP that Halo does not have, by path.
const MISSING_PARTS: [(&str, &str); 24] = [
    ("/api/extra/websearch", "web search"),
    ("/api/extra/transcribe", "speech recognition"),
    ("/api/extra/tts", "speech"),
    ("/api/extra/speakers_list", "speech"),
    ("/api/extra/music/prepare", "music"),
    ("/api/extra/music/generate", "music"),
    ("/api/extra/multiplayer/status", "multiplayer"),
    ("/api/extra/multiplayer/getstory", "multiplayer"),
    ("/api/extra/multiplayer/setstory", "multiplayer"),
    ("/api/extra/data/list", "saved data"),
    ("/api/extra/data/save", "saved data"),
    ("/api/extra/data/load", "saved data"),
    ("/api/admin/list_options", "remote administration"),
    ("/api/admin/reload_config", "remote administration"),
    ("/api/extra/shutdown", "remote administration"),
    ("/api/admin/check_state", "saved states"),
    ("/api/admin/save_state", "saved states"),
    ("/api/admin/load_state", "saved states"),
    ("/api/admin/clear_state", "saved states"),
    ("/sdapi/v1/options", "image generation"),
    ("/sdapi/v1/upscale", "image generation"),
    ("/sdapi/v1/txt2img", "image generation"),
    ("/sdapi/v1/img2img", "image generation"),
    ("/sdapi/v1/interrogate", "image recognition"),
];

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/api/extra/embeddings", post(embeddings))
        .route("/api/extra/preloadstory", get(|| async { Json(json!({})) }))
        .route("/api/extra/json_to_grammar", post(json_to_grammar))
        .route("/sdapi/v1/sd-models", get(|| async { Json(json!([])) }))
        .route("/sdapi/v1/samplers", get(|| async { Json(json!([])) }));
    for version in ["/api/v1", "/api/latest"] {
        let list = get(|| async { Json(json!({ "values": [] })) });
        let one = get(|| async { Json(json!({ "value": "" })) }).put(set_soft_prompt).post(set_soft_prompt);
        router = router
            .route(&format!("{version}/config/soft_prompts_list"), list)
            .route(&format!("{version}/config/soft_prompt"), one);
    }
    for (path, part) in MISSING_PARTS {
        router = router.route(path, any(move || async move { refuse_part(part) }));
    }
    router
}

fn refuse_part(part: &str) -> ErrorResponse {
    let message = format!("this server has no {part}: /api/extra/version lists what it has");
    ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message)
}

#[derive(Deserialize)]
struct KoboldSoftPrompt {
    #[serde(default)]
    value: String,
}

/// Clients set an empty soft prompt when they connect.
async fn set_soft_prompt(JsonBody(prompt): JsonBody<KoboldSoftPrompt>) -> ApiResult<Json<Value>> {
    match prompt.value.is_empty() {
        true => Ok(Json(json!({}))),
        false => Err(ErrorResponse::bad_request("soft prompts are not supported; send an empty value")
            .with_param("value")),
    }
}

#[derive(Deserialize)]
struct KoboldEmbeddingsRequest {
    #[serde(default)]
    input: Value,
    /// With `true` a text that is too long is embedded in pieces; nothing is ever cut.
    truncate: Option<bool>,
}

/// The format is that of OpenAI's embeddings.
async fn embeddings(
    State(app): State<Arc<App>>,
    JsonBody(request): JsonBody<KoboldEmbeddingsRequest>,
) -> ApiResult<Json<Value>> {
    let long = if request.truncate == Some(true) { LongInput::Split } else { LongInput::Refuse };
    let options = EmbeddingOptions {
        dimensions: None,
        long,
        vocabulary: TokenVocabulary::ChatModel,
        allow_no_texts: true,
    };
    let embedded = embed_request(app, ("input", &request.input), options).await?;
    Ok(Json(embedded.to_openai_json(|vector| json!(vector))))
}

#[derive(Deserialize)]
struct KoboldSchema {
    schema: Value,
}

async fn json_to_grammar(
    JsonBody(KoboldSchema { schema }): JsonBody<KoboldSchema>,
) -> ApiResult<Json<Value>> {
    let grammar = spawn_blocking(move || Ok(json_schema_to_gbnf(&schema))).await?;
    match grammar {
        Ok(grammar) => Ok(Json(json!({ "result": grammar, "success": true }))),
        Err(e) => {
            let message = format!("the schema cannot become a grammar: {} at {}", e.problem, e.at);
            Err(ErrorResponse::bad_request(message).with_param("schema"))
        }
    }
}

//! KoboldCPP's API. With `output_attentions` the stream has the attention of each token, as in the fork for Halo Weave.

use crate::app::App;
use crate::completion::{self, CompletionRequest, complete_text, seed_or_random};
use crate::error::{ApiResult, ErrorResponse, JsonBody, spawn_blocking};
use crate::sse::{SseSender, spawn_sse_stream};
use crate::stop_sequences::StopSequenceFilter;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::attention::{AttentionRequest, PromptRows};
use halo_core::model::{AttentionRow, FinishReason, ModelStep, ModelToken, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new();
    // Some clients use the versioned path, some the latest.
    for version in ["/api/v1", "/api/latest"] {
        let versioned = Router::new()
            .route("/model", get(model))
            .route("/tokenize", post(tokenize))
            .route("/detokenize", post(detokenize))
            .route("/generate", post(generate))
            .route("/generate/preview", post(preview))
            .route("/info/version", get(|| async { Json(json!({ "result": "1.2.5" })) }))
            .route("/config/max_context_length", get(max_context_length))
            .route("/config/max_length", get(max_length));
        router = router.nest(version, versioned);
    }
    router
        .route("/api/extra/detokenize", post(detokenize_extra))
        .route("/api/extra/tokencount", post(count_tokens))
        .route("/api/extra/generate/stream", post(generate_stream))
        .route("/api/extra/generate/check", get(generation_progress).post(generation_progress))
        .route("/api/extra/abort", post(abort))
        .route("/api/extra/version", get(version))
        .route("/api/extra/true_max_context_length", get(max_context_length))
        .route("/api/extra/perf", get(perf))
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

async fn version() -> Json<Value> {
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
        "embeddings": true,
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

async fn perf(State(app): State<Arc<App>>) -> Json<Value> {
    let scheduler = app.host.scheduler();
    Json(
        json!({ "idle": u8::from(!scheduler.is_busy()), "queue": scheduler.queue_len(), "last_token_count": 0, "stop_reason": -1 }),
    )
}

#[derive(Deserialize)]
struct KoboldText {
    #[serde(alias = "content", alias = "prompt")]
    text: String,
}

/// Special tokens in the text are parsed: clients build their chat template as text.
async fn tokenize_text(app: Arc<App>, text: String) -> ApiResult<Vec<ModelToken>> {
    spawn_blocking(move || Ok(app.backend.model()?.tokenize(&text, true)?)).await
}

async fn tokenize(
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
fn visible_text<'a>(app: &App, token: &'a ModelToken) -> &'a str {
    if app.backend.is_special_token(token.id) { "" } else { &token.text }
}

async fn count_tokens(
    State(app): State<Arc<App>>,
    JsonBody(KoboldText { text }): JsonBody<KoboldText>,
) -> ApiResult<Json<Value>> {
    let tokens = tokenize_text(app, text).await?;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id.0).collect();
    Ok(Json(json!({ "value": ids.len(), "ids": ids })))
}

#[derive(Deserialize)]
struct KoboldTokenIds {
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

async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBody(ids): JsonBody<KoboldTokenIds>,
) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "text": decode_tokens(app, ids).await? })))
}

async fn detokenize_extra(
    State(app): State<Arc<App>>,
    JsonBody(ids): JsonBody<KoboldTokenIds>,
) -> ApiResult<Json<Value>> {
    Ok(Json(json!({ "result": decode_tokens(app, ids).await?, "success": true })))
}

/// How the attention of a token is sent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AttentionFormat {
    /// One row: the mean over all layers and heads.
    #[default]
    Aggregated,
    /// The row of every head of every layer.
    PerLayer,
}

/// The parameters that are used. Clients send many more, which are ignored.
#[derive(Deserialize)]
struct KoboldGenerateRequest {
    #[serde(default)]
    prompt: String,
    #[serde(default)]
    input_ids: Vec<u32>,
    max_length: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    rep_pen: Option<f32>,
    sampler_seed: Option<i64>,
    #[serde(default)]
    stop_sequence: Vec<String>,
    #[serde(default)]
    output_attentions: bool,
    #[serde(default)]
    attention_format: AttentionFormat,
    #[serde(default)]
    request_id: Value,
    #[serde(default = "yes")]
    trim_stop: bool,
}

fn yes() -> bool {
    true
}

impl KoboldGenerateRequest {
    fn sampling(&self, defaults: &Sampling) -> ApiResult<Sampling> {
        let max_tokens = self.max_length.unwrap_or(defaults.max_tokens as i64);
        let max_tokens = usize::try_from(max_tokens).ok().filter(|&n| n > 0);
        let temperature = self.temperature.unwrap_or(defaults.temperature);
        if !(0.0..=100.0).contains(&temperature) {
            return Err(ErrorResponse::bad_request(format!(
                "temperature is {temperature}; it must be from 0 to 100"
            )));
        }
        Ok(Sampling {
            max_tokens: max_tokens
                .ok_or_else(|| ErrorResponse::bad_request("max_length must be at least 1"))?,
            temperature,
            top_p: self.top_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(defaults.top_p),
            top_k: self.top_k.and_then(|k| usize::try_from(k).ok()).unwrap_or(defaults.top_k),
            min_p: self.min_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(defaults.min_p),
            repetition_penalty: self.rep_pen.filter(|r| *r >= 1.0).unwrap_or(1.0),
            seed: seed_or_random(self.sampler_seed),
            stop: self.stop_sequence.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            constraint: None,
        })
    }
}

/// The tokens of a request, if the model has all of them.
fn parse_token_ids(app: &App, field: &str, ids: impl IntoIterator<Item = u32>) -> ApiResult<Vec<TokenId>> {
    let vocab_size = app.backend.model_details().vocab_size;
    let parse = |id: u32| match vocab_size > 0 && id as usize >= vocab_size {
        true => Err(ErrorResponse::bad_request(format!(
            "{field}: there is no token {id}: the vocabulary of the model has {vocab_size}"
        ))),
        false => Ok(TokenId(id)),
    };
    ids.into_iter().map(parse).collect()
}

/// A prompt that is sent as text is tokenized here.
async fn completion_request(app: &Arc<App>, body: &KoboldGenerateRequest) -> ApiResult<CompletionRequest> {
    let sampling = body.sampling(&app.backend.rules().sampling)?;
    let ids = if body.input_ids.is_empty() {
        tokenize_text(Arc::clone(app), body.prompt.clone()).await?.iter().map(|token| token.id).collect()
    } else {
        parse_token_ids(app, "input_ids", body.input_ids.iter().copied())?
    };
    let attention = AttentionRequest {
        answer: body.output_attentions,
        prompt: PromptRows::Off,
        per_head: body.attention_format == AttentionFormat::PerLayer,
        ..AttentionRequest::default()
    };
    Ok(CompletionRequest {
        ids,
        text: body.prompt.clone(),
        messages: Vec::new(),
        sampling,
        attention,
        client: "kobold".into(),
        ephemeral: false,
    })
}

async fn generate(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Json<Value>> {
    let request = completion_request(&app, &body).await?;
    let result = complete_text(app, request, body.trim_stop).await?;
    Ok(Json(json!({ "results": [{
        "text": result.text,
        "finish_reason": finish_reason(result.finish),
        "completion_tokens": result.tokens,
    }] })))
}

async fn generate_stream(
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Response> {
    let request = completion_request(&app, &body).await?;
    spawn_sse_stream(error_event, move |out| {
        if body.output_attentions {
            stream_with_attention(&app, &request, &body, out)
        } else {
            stream_text(&app, &request, body.trim_stop, out)
        }
    })
    .await
}

fn finish_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

/// The last event of a stream that failed.
fn error_event(error: &ErrorResponse) -> (Option<&'static str>, Value) {
    let json = json!({ "type": "error", "error": error.message(), "token": "", "finish_reason": "error" });
    (Some("error"), json)
}

/// Streams tokens with their attention. Stop sequences are sent too: clients look for them.
fn stream_with_attention(
    app: &App,
    request: &CompletionRequest,
    body: &KoboldGenerateRequest,
    out: &SseSender,
) -> ApiResult<()> {
    let request_id = &body.request_id;
    let layers = app.backend.model_details().layers;
    let mut tokens = 0;
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(token, row) = step {
            tokens += 1;
            let attention = row.map(|row| attention_json(row, body.attention_format, layers));
            let token = json!({ "token_id": token.id.0, "text": visible_text(app, token) });
            let event =
                json!({ "type": "token", "token": token, "request_id": request_id, "attention": attention });
            return out.send_json(Some("message"), &event);
        }
        out.flow()
    })?;
    let (reason, total) = (finish_reason(finish), request.ids.len() + tokens);
    let done =
        json!({ "type": "done", "finish_reason": reason, "total_tokens": total, "request_id": request_id });
    out.send_json(Some("message"), &done);
    Ok(())
}

/// The attention of a token. A model without the rows of its heads is sent in the aggregated format, which every client reads.
fn attention_json(row: AttentionRow<'_>, format: AttentionFormat, layers: usize) -> Value {
    let context_length = row.mean.len();
    let heads = row.per_head.len() / (context_length * layers).max(1);
    let has_heads = heads > 0 && heads * layers * context_length == row.per_head.len();
    let (format, shape, values) = match format {
        AttentionFormat::PerLayer if has_heads => {
            ("per_layer", vec![layers, heads, context_length], row.per_head)
        }
        _ => ("aggregated", vec![context_length], row.mean),
    };
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    json!({
        "format": format,
        "shape": shape,
        "context_length": context_length,
        "encoding": "base64",
        "dtype": "float32",
        "data": BASE64_STANDARD.encode(bytes),
    })
}

/// Streams text in the format of every KoboldCPP.
fn stream_text(app: &App, request: &CompletionRequest, trim_stop: bool, out: &SseSender) -> ApiResult<()> {
    let mut filter = StopSequenceFilter::new(if trim_stop { &request.sampling.stop } else { &[] });
    let send = |text: &str, finish: Option<&str>| {
        out.send_json(Some("message"), &json!({ "token": text, "finish_reason": finish }))
    };
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(token, _) = step {
            let text = filter.push(&token.text);
            if !text.is_empty() {
                return send(&text, None);
            }
        }
        out.flow()
    })?;
    send(&filter.finish(), Some(finish_reason(finish)));
    Ok(())
}

async fn generation_progress(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "results": [{ "text": app.completion_histories.last_text() }] }))
}

/// Stops the running completion. Clients expect strings, not booleans.
async fn abort(State(app): State<Arc<App>>) -> Json<Value> {
    let busy = app.host.scheduler().is_busy();
    app.completion_histories.stop();
    Json(json!({ "success": if busy { "true" } else { "false" }, "done": "true" }))
}

#[derive(Deserialize)]
struct KoboldPreviewRequest {
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
async fn preview(
    State(app): State<Arc<App>>,
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
        ephemeral: true,
    };
    let result = complete_text(app, request, false).await?;
    Ok(Json(json!({
        "text": result.text,
        "token_count": result.tokens,
        "stopped_reason": if result.finish == FinishReason::Length { "max_tokens" } else { "stop" },
        "cache_hit": true,
        "generation_time_ms": started.elapsed().as_millis(),
    })))
}

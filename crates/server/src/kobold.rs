//! KoboldCPP's API, with attention: as the fork speaks it that streams what the model looks at, and as any KoboldCPP does for
//! those who do not ask for that.

use crate::app::App;
use crate::completion::{self, CompletionRequest};
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
use halo_core::model::{FinishReason, ModelStep, ModelToken, Sampling, StepFlow};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new();
    // Some clients ask for a version of it, some for the latest.
    for version in ["/api/v1", "/api/latest"] {
        let of_version = Router::new()
            .route("/model", get(model))
            .route("/tokenize", post(tokenize))
            .route("/detokenize", post(detokenize))
            .route("/generate", post(generate))
            .route("/generate/preview", post(preview))
            .route("/info/version", get(|| async { Json(json!({ "result": "1.2.5" })) }))
            .route("/config/max_context_length", get(max_context_length))
            .route("/config/max_length", get(max_length));
        router = router.nest(version, of_version);
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
    let (info, facts) = (app.backend.model_info(), app.backend.model_details());
    Json(json!({
        "result": format!("koboldcpp/{}", info.name),
        "model_name": info.name,
        "vocab_size": facts.vocab_size,
        "num_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "embedding_size": facts.embedding_size,
        "max_context_length": info.context,
        "max_trained_context": facts.trained_context,
        "bos_token_id": facts.bos,
        "eos_token_id": facts.eos,
        "eot_token_id": facts.eot,
        "rope_freq_base": facts.rope_base,
        "rope_freq_scale": facts.rope_scale,
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
    let gate = app.host.scheduler();
    Json(
        json!({ "idle": u8::from(!gate.is_busy()), "queue": gate.queue_len(), "last_token_count": 0, "stop_reason": -1 }),
    )
}

#[derive(Deserialize)]
struct KoboldText {
    #[serde(alias = "content", alias = "prompt")]
    text: String,
}

/// Cuts a text into tokens. The names of special tokens in it are those tokens: clients put messages together as text.
async fn tokenize_text(app: Arc<App>, text: String) -> ApiResult<Vec<ModelToken>> {
    spawn_blocking(move || Ok(app.backend.model()?.tokenize(&text, true)?)).await
}

async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBody(KoboldText { text }): JsonBody<KoboldText>,
) -> ApiResult<Json<Value>> {
    let cut = tokenize_text(Arc::clone(&app), text).await?;
    let ids: Vec<u32> = cut.iter().map(|piece| piece.id.0).collect();
    let tokens: Vec<Value> = cut
        .iter()
        .map(|piece| json!({ "token_id": piece.id.0, "text": visible_text(&app, piece) }))
        .collect();
    Ok(Json(json!({ "tokens": tokens, "token_count": ids.len(), "token_ids": ids })))
}

/// What a client is told that a token says: special ones say nothing.
fn visible_text<'a>(app: &App, piece: &'a ModelToken) -> &'a str {
    if app.backend.is_special_token(piece.id) { "" } else { &piece.text }
}

async fn count_tokens(
    State(app): State<Arc<App>>,
    JsonBody(KoboldText { text }): JsonBody<KoboldText>,
) -> ApiResult<Json<Value>> {
    let cut = tokenize_text(app, text).await?;
    let ids: Vec<u32> = cut.iter().map(|piece| piece.id.0).collect();
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
        app.backend.model()?.detokenize(&ids).map_err(|why| ErrorResponse::bad_request(why.to_string()))
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

/// What is asked for, as clients send it; they send much more, which is left alone.
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
    request_id: Value,
    #[serde(default = "yes")]
    trim_stop: bool,
}

fn yes() -> bool {
    true
}

impl KoboldGenerateRequest {
    fn sampling(&self, usual: &Sampling) -> ApiResult<Sampling> {
        let max_tokens = self.max_length.unwrap_or(usual.max_tokens as i64);
        let max_tokens = usize::try_from(max_tokens).ok().filter(|&n| n > 0);
        let temperature = self.temperature.unwrap_or(usual.temperature);
        if !(0.0..=100.0).contains(&temperature) {
            return Err(ErrorResponse::bad_request(format!(
                "temperature cannot be {temperature}: it is from 0 to 100"
            )));
        }
        Ok(Sampling {
            max_tokens: max_tokens
                .ok_or_else(|| ErrorResponse::bad_request("max_length must be at least 1"))?,
            temperature,
            top_p: self.top_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(usual.top_p),
            top_k: self.top_k.and_then(|k| usize::try_from(k).ok()).unwrap_or(usual.top_k),
            min_p: self.min_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(usual.min_p),
            repetition_penalty: self.rep_pen.filter(|r| *r >= 1.0).unwrap_or(1.0),
            seed: seed_or_random(self.sampler_seed),
            stop: self.stop_sequence.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            constraint: None,
        })
    }
}

/// A seed, or another one each time.
pub(crate) fn seed_or_random(wanted: Option<i64>) -> u64 {
    let wanted = wanted.filter(|&seed| seed >= 0).and_then(|seed| u64::try_from(seed).ok());
    wanted.unwrap_or_else(|| jiff::Timestamp::now().as_nanosecond() as u64)
}

/// What is asked of the model for that; the prompt is cut where it came as text.
async fn completion_request(app: &Arc<App>, wanted: &KoboldGenerateRequest) -> ApiResult<CompletionRequest> {
    let sampling = wanted.sampling(&app.backend.rules().sampling)?;
    let ids = if wanted.input_ids.is_empty() {
        tokenize_text(Arc::clone(app), wanted.prompt.clone()).await?.iter().map(|piece| piece.id).collect()
    } else {
        let vocabulary = app.backend.model_details().vocab_size;
        if let Some(wrong) = wanted.input_ids.iter().find(|&&id| vocabulary > 0 && id as usize >= vocabulary)
        {
            return Err(ErrorResponse::bad_request(format!(
                "{wrong} is no token of this model: it has {vocabulary}"
            )));
        }
        wanted.input_ids.iter().map(|&id| TokenId(id)).collect()
    };
    let watch = AttentionRequest {
        answer: wanted.output_attentions,
        prompt: PromptRows::Off,
        ..AttentionRequest::default()
    };
    Ok(CompletionRequest {
        ids,
        text: wanted.prompt.clone(),
        messages: Vec::new(),
        sampling,
        attention: watch,
        client: "kobold".into(),
        ephemeral: false,
    })
}

async fn generate(
    State(app): State<Arc<App>>,
    JsonBody(wanted): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Json<Value>> {
    let ask = completion_request(&app, &wanted).await?;
    let (text, finish, tokens) = complete_text(app, ask, wanted.trim_stop).await?;
    let finish = if finish == FinishReason::Length { "length" } else { "stop" };
    Ok(Json(json!({ "results": [{ "text": text, "finish_reason": finish, "completion_tokens": tokens }] })))
}

/// All that the model says; who goes away stops it.
pub(crate) async fn complete_text(
    app: Arc<App>,
    ask: CompletionRequest,
    trim: bool,
) -> ApiResult<(String, FinishReason, usize)> {
    // Dropped with the request, when whoever asked has gone.
    let (alive, gone) = tokio::sync::oneshot::channel::<()>();
    let done = spawn_blocking(move || {
        let mut gone = gone;
        let mut left =
            move || matches!(gone.try_recv(), Err(tokio::sync::oneshot::error::TryRecvError::Closed));
        let mut held = StopSequenceFilter::new(if trim { &ask.sampling.stop } else { &[] });
        let (mut text, mut tokens) = (String::new(), 0);
        let flow = std::cell::RefCell::new(move || if left() { StepFlow::Stop } else { StepFlow::Continue });
        let finish = completion::complete(&app, &ask, &mut |_| (flow.borrow_mut())(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                text.push_str(&held.push(&piece.text));
                tokens += 1;
            }
            (flow.borrow_mut())()
        })?;
        text.push_str(&held.finish());
        Ok((text, finish, tokens))
    })
    .await;
    drop(alive);
    done
}

async fn generate_stream(
    State(app): State<Arc<App>>,
    JsonBody(wanted): JsonBody<KoboldGenerateRequest>,
) -> ApiResult<Response> {
    let ask = completion_request(&app, &wanted).await?;
    spawn_sse_stream(error_event, move |out| {
        let count = ask.ids.len();
        if wanted.output_attentions {
            stream_with_attention(&app, &ask, count, &wanted.request_id, out)
        } else {
            stream_text(&app, &ask, wanted.trim_stop, out)
        }
    })
    .await
}

/// An answer that broke off, as an event of its stream.
fn error_event(why: &ErrorResponse) -> (Option<&'static str>, Value) {
    let error = json!({ "type": "error", "error": why.message(), "token": "", "finish_reason": "error" });
    (Some("error"), error)
}

/// Tokens with what the model looked at, each id by itself; a stop sequence is passed on, for clients look for it.
fn stream_with_attention(
    app: &App,
    ask: &CompletionRequest,
    prompt: usize,
    request: &Value,
    out: &SseSender,
) -> ApiResult<()> {
    let mut tokens = 0;
    let finish = completion::complete(app, ask, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(piece, look) = step {
            tokens += 1;
            let attention = look.map(|look| {
                let bytes: Vec<u8> = look.mean.iter().flat_map(|value| value.to_le_bytes()).collect();
                json!({
                    "format": "aggregated",
                    "shape": [look.mean.len()],
                    "context_length": look.mean.len(),
                    "encoding": "base64",
                    "dtype": "float32",
                    "data": BASE64_STANDARD.encode(bytes),
                })
            });
            let token = json!({ "token_id": piece.id.0, "text": visible_text(app, piece) });
            let event =
                json!({ "type": "token", "token": token, "request_id": request, "attention": attention });
            return out.send_json(Some("message"), &event);
        }
        out.flow()
    })?;
    let reason = if finish == FinishReason::Length { "length" } else { "stop" };
    let total = prompt + tokens;
    let done =
        json!({ "type": "done", "finish_reason": reason, "total_tokens": total, "request_id": request });
    out.send_json(Some("message"), &done);
    Ok(())
}

/// As any KoboldCPP streams.
fn stream_text(app: &App, ask: &CompletionRequest, trim: bool, out: &SseSender) -> ApiResult<()> {
    let mut held = StopSequenceFilter::new(if trim { &ask.sampling.stop } else { &[] });
    let told = |text: &str, finish: Option<&str>| {
        out.send_json(Some("message"), &json!({ "token": text, "finish_reason": finish }))
    };
    let finish = completion::complete(app, ask, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(piece, _) = step {
            let text = held.push(&piece.text);
            if !text.is_empty() {
                return told(&text, None);
            }
        }
        out.flow()
    })?;
    told(&held.finish(), Some(if finish == FinishReason::Length { "length" } else { "stop" }));
    Ok(())
}

async fn generation_progress(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "results": [{ "text": app.completion_histories.last_text() }] }))
}

/// Stops what is being said. Clients expect words and not truth values.
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

/// What the model would go on with from where it last was, forgotten at once.
async fn preview(
    State(app): State<Arc<App>>,
    JsonBody(wanted): JsonBody<KoboldPreviewRequest>,
) -> ApiResult<Json<Value>> {
    let mut ids = app
        .completion_histories
        .last_window()
        .ok_or_else(|| ErrorResponse::bad_request("No cached context available"))?;
    ids.extend(wanted.append_tokens.iter().map(|token| TokenId(token.token_id)));
    let usual = app.backend.rules().sampling;
    let sampling = Sampling {
        max_tokens: wanted.max_tokens.clamp(1, 256),
        temperature: wanted.temperature.filter(|t| (0.0..=100.0).contains(t)).unwrap_or(usual.temperature),
        top_p: wanted.top_p.filter(|p| (0.0..=1.0).contains(p)).unwrap_or(usual.top_p),
        ..usual
    };
    let begun = std::time::Instant::now();
    let ask = CompletionRequest {
        ids,
        text: String::new(),
        messages: Vec::new(),
        sampling,
        attention: AttentionRequest::none(),
        client: "kobold".into(),
        ephemeral: true,
    };
    let (text, finish, tokens) = complete_text(app, ask, false).await?;
    Ok(Json(json!({
        "text": text,
        "token_count": tokens,
        "stopped_reason": if finish == FinishReason::Length { "max_tokens" } else { "stop" },
        "cache_hit": true,
        "generation_time_ms": begun.elapsed().as_millis(),
    })))
}

//! OpenAI's API: chat, completions, embeddings and models, streamed and not. Behind chat there is a conversation of Halo's: what
//! a client has dropped of its history stays remembered, and comes back when it matters.

mod chat;
mod dispatch;

pub(crate) use dispatch::ChatDispatcher;

use crate::app::App;
use crate::completion::{self, CompletionRequest};
use crate::error::{ErrorResponse, JsonBody, spawn_blocking};
use crate::kobold::{complete_text, seed_or_random};
use crate::sse::spawn_sse_stream;
use crate::stop_sequences::StopSequenceFilter;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::ErrorKind;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, ModelStep, OutputConstraint, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/models", get(list_models))
        .route("/v1/models/{model}", get(get_model))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embeddings))
}

/// What went wrong, as OpenAI's clients expect it.
struct OpenAiError(ErrorResponse);

type OpenAiResult<T> = Result<T, OpenAiError>;

impl<E: Into<ErrorResponse>> From<E> for OpenAiError {
    fn from(refusal: E) -> Self {
        Self(refusal.into())
    }
}

/// An answer that broke off, as the last event of its stream.
fn error_event(why: &ErrorResponse) -> (Option<&'static str>, Value) {
    (None, OpenAiError(why.clone()).to_json())
}

impl OpenAiError {
    fn to_json(&self) -> Value {
        let status = self.0.status();
        let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
        let code = match self.0.kind() {
            ErrorKind::ContextLengthExceeded => Some("context_length_exceeded"),
            ErrorKind::NotFound => Some("not_found"),
            ErrorKind::Busy | ErrorKind::Unavailable => Some("overloaded"),
            ErrorKind::InvalidInput
            | ErrorKind::Conflict
            | ErrorKind::Cancelled
            | ErrorKind::Damaged
            | ErrorKind::Internal => None,
        };
        json!({ "error": { "message": self.0.message(), "type": kind, "param": null, "code": code } })
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        let status = match self.0.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        (status, Json(self.to_json())).into_response()
    }
}

/// A body of JSON; what is wrong with it is told as OpenAI's clients expect it.
struct OpenAiJson<T>(T);

impl<T: serde::de::DeserializeOwned, S: Send + Sync> axum::extract::FromRequest<S> for OpenAiJson<T> {
    type Rejection = OpenAiError;

    async fn from_request(request: axum::extract::Request, state: &S) -> Result<Self, OpenAiError> {
        Ok(Self(JsonBody::from_request(request, state).await?.0))
    }
}

/// A name for an answer that no other has.
fn response_id(kind: &str) -> String {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    let (now, n) = (jiff::Timestamp::now().as_microsecond(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    format!("{kind}-{now:x}{n:04x}")
}

fn unix_seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}

async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_object(&app.backend.model_info().name)] }))
}

fn model_object(name: &str) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "halo" })
}

async fn get_model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> OpenAiResult<Json<Value>> {
    let known = app.backend.model_info().name;
    if name != known {
        return Err(ErrorResponse::not_found(format!("there is no model '{name}': there is {known}")).into());
    }
    Ok(Json(model_object(&known)))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// How an answer is to be drawn, as all of OpenAI's requests say it. What is not here is left alone.
#[derive(Deserialize)]
struct SamplingParams {
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany<String>>,
    n: Option<u32>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    response_format: Option<OpenAiResponseFormat>,
    logprobs: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct OpenAiResponseFormat {
    r#type: String,
    json_schema: Option<OpenAiJsonSchema>,
}

#[derive(Deserialize)]
struct OpenAiJsonSchema {
    schema: Option<Value>,
}

impl SamplingParams {
    fn sampling(&self, usual: &Sampling) -> Result<Sampling, ErrorResponse> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(ErrorResponse::bad_request("n must be 1: there is one answer at a time"));
        }
        if self.logprobs.as_ref().is_some_and(|wanted| !matches!(wanted, Value::Null | Value::Bool(false))) {
            return Err(ErrorResponse::bad_request("logprobs are not told here: leave them out"));
        }
        let within = |name: &str, value: Option<f32>, most: f32, usual: f32| match value {
            Some(value) if !(0.0..=most).contains(&value) => {
                Err(ErrorResponse::bad_request(format!("{name} cannot be {value}: it is from 0 to {most}")))
            }
            value => Ok(value.unwrap_or(usual)),
        };
        let most = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = match most {
            None => usual.max_tokens,
            Some(most) => usize::try_from(most).ok().filter(|&n| n > 0).ok_or_else(|| {
                ErrorResponse::bad_request(format!("max_tokens cannot be {most}: it is at least 1"))
            })?,
        };
        let stop = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        Ok(Sampling {
            max_tokens,
            temperature: within("temperature", self.temperature, 5.0, usual.temperature)?,
            top_p: within("top_p", self.top_p, 1.0, usual.top_p)?,
            seed: if self.seed.is_some() { seed_or_random(self.seed) } else { usual.seed },
            stop: stop.into_iter().filter(|stop| !stop.is_empty()).collect(),
            constraint: self.response_schema()?.map(OutputConstraint::JsonSchema),
            ..usual.clone()
        })
    }

    fn response_schema(&self) -> Result<Option<String>, ErrorResponse> {
        let Some(format) = &self.response_format else { return Ok(None) };
        match format.r#type.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(json!({ "type": "object" }).to_string())),
            "json_schema" => {
                let schema = format.json_schema.as_ref().and_then(|schema| schema.schema.as_ref());
                let schema = schema.ok_or_else(|| {
                    ErrorResponse::bad_request("response_format.json_schema.schema is missing")
                })?;
                Ok(Some(schema.to_string()))
            }
            other => Err(ErrorResponse::bad_request(format!(
                "response_format cannot be '{other}': text, json_object or json_schema"
            ))),
        }
    }
}

fn finish_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

fn usage(prompt: usize, answer: usize) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer })
}

/// A prompt: text, or tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum CompletionPrompt {
    Text(String),
    Texts(Vec<String>),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
struct OpenAiCompletionRequest {
    prompt: CompletionPrompt,
    #[serde(default)]
    echo: bool,
    #[serde(flatten)]
    params: SamplingParams,
}

async fn completions(
    State(app): State<Arc<App>>,
    OpenAiJson(wanted): OpenAiJson<OpenAiCompletionRequest>,
) -> OpenAiResult<Response> {
    let sampling = wanted.params.sampling(&app.backend.rules().sampling)?;
    let cutter = Arc::clone(&app);
    let ask = spawn_blocking(move || {
        let mut model = cutter.backend.model()?;
        let one = |n: usize| ErrorResponse::bad_request(format!("one prompt at a time: there are {n}"));
        let (ids, text) = match wanted.prompt {
            CompletionPrompt::Text(text) => (None, text),
            CompletionPrompt::Texts(mut texts) if texts.len() == 1 => (None, texts.remove(0)),
            CompletionPrompt::Texts(texts) => return Err(one(texts.len())),
            CompletionPrompt::TokenIds(ids) => (Some(ids), String::new()),
            CompletionPrompt::TokenIdLists(mut ids) if ids.len() == 1 => (Some(ids.remove(0)), String::new()),
            CompletionPrompt::TokenIdLists(ids) => return Err(one(ids.len())),
        };
        let (ids, text) = match ids {
            Some(ids) => {
                let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
                let text =
                    model.detokenize(&ids).map_err(|why| ErrorResponse::bad_request(why.to_string()))?;
                (ids, text)
            }
            None => (model.tokenize(&text, true)?.into_iter().map(|piece| piece.id).collect(), text),
        };
        Ok(CompletionRequest {
            ids,
            text,
            messages: Vec::new(),
            sampling,
            attention: AttentionRequest::none(),
            client: "completions".into(),
            ephemeral: false,
        })
    })
    .await?;
    let (id, created, model) = (response_id("cmpl"), unix_seconds(), app.backend.model_info().name);
    let prompt = ask.ids.len();
    let before = if wanted.echo { ask.text.clone() } else { String::new() };
    let told = move |text: &str, finish: Option<&str>, used: Option<Value>| {
        let choice = json!({ "text": text, "index": 0, "logprobs": null, "finish_reason": finish });
        json!({ "id": id, "object": "text_completion", "created": created, "model": model, "choices": [choice], "usage": used })
    };
    if !wanted.params.stream {
        let (text, finish, tokens) = complete_text(app, ask, true).await?;
        let told = told(&format!("{before}{text}"), Some(finish_reason(finish)), Some(usage(prompt, tokens)));
        return Ok(Json(told).into_response());
    }
    let counted = wanted.params.stream_options.is_some_and(|options| options.include_usage);
    let response = spawn_sse_stream(error_event, move |out| {
        let mut held = StopSequenceFilter::new(&ask.sampling.stop);
        let mut tokens = 0;
        if !before.is_empty() {
            out.send_json(None, &told(&before, None, None));
        }
        let finish = completion::complete(&app, &ask, &mut |_| out.flow(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                tokens += 1;
                let text = held.push(&piece.text);
                if !text.is_empty() {
                    return out.send_json(None, &told(&text, None, None));
                }
            }
            out.flow()
        })?;
        let used = counted.then(|| usage(prompt, tokens));
        out.send_json(None, &told(&held.finish(), Some(finish_reason(finish)), used));
        out.send_text(None, "[DONE]");
        Ok(())
    });
    Ok(response.await?)
}

#[derive(Deserialize)]
struct OpenAiEmbeddingsRequest {
    input: OneOrMany<String>,
    encoding_format: Option<String>,
}

async fn embeddings(
    State(app): State<Arc<App>>,
    OpenAiJson(wanted): OpenAiJson<OpenAiEmbeddingsRequest>,
) -> OpenAiResult<Json<Value>> {
    let texts = wanted.input.into_vec();
    if texts.is_empty() || texts.len() > 2048 || texts.iter().any(String::is_empty) {
        return Err(ErrorResponse::bad_request("input must be 1 to 2048 texts, none of them empty").into());
    }
    let packed = match wanted.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(ErrorResponse::bad_request(format!(
                "encoding_format cannot be '{other}': float or base64"
            ))
            .into());
        }
    };
    let told = spawn_blocking(move || {
        let missing = "there is no embedder: download one, set recall.embedder and restart";
        let mut embedder =
            app.backend.embedder().ok_or_else(|| ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, missing))?;
        let info = embedder.info()?;
        let mut model = app.backend.model()?;
        let tokens =
            texts.iter().try_fold(0, |sum, text| model.count_tokens(text).map(|tokens| sum + tokens))?;
        let prepared: Vec<String> =
            texts.iter().map(|text| format!("{}{text}", info.passage_prefix)).collect();
        let vectors = embedder.embed(&prepared.iter().map(String::as_str).collect::<Vec<_>>())?;
        let data: Vec<Value> = (vectors.iter().enumerate())
            .map(|(index, vector)| {
                let embedding = if packed {
                    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                    json!(BASE64_STANDARD.encode(bytes))
                } else {
                    json!(vector)
                };
                json!({ "object": "embedding", "index": index, "embedding": embedding })
            })
            .collect();
        let used = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        Ok(json!({ "object": "list", "data": data, "model": info.name, "usage": used }))
    });
    Ok(Json(told.await?))
}

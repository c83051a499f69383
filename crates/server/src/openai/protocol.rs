//! What all of OpenAI's routes share: errors, sampling parameters, ids and usage.

use crate::app::App;
use crate::completion::seed_or_random;
use crate::error::{ErrorResponse, JsonBody, spawn_blocking};
use axum::Json;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use halo_core::ErrorKind;
use halo_core::model::{FinishReason, OutputConstraint, Sampling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names the conversation, in requests and in responses.
pub(super) const CONVERSATION_HEADER: &str = "x-halo-conversation";

/// An error in OpenAI's format.
pub(super) struct OpenAiError(ErrorResponse);

pub(super) type OpenAiResult<T> = Result<T, OpenAiError>;

impl<E: Into<ErrorResponse>> From<E> for OpenAiError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

/// The last event of a stream that failed.
pub(super) fn error_event(error: &ErrorResponse) -> (Option<&'static str>, Value) {
    (None, OpenAiError(error.clone()).to_json())
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
            | ErrorKind::Forbidden
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

/// A JSON body whose errors are in OpenAI's format.
pub(super) struct OpenAiJson<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for OpenAiJson<T> {
    type Rejection = OpenAiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, OpenAiError> {
        Ok(Self(JsonBody::from_request(request, state).await?.0))
    }
}

/// Checks that the model can follow the schema of `response_format`, before anything is stored.
pub(super) async fn check_response_format(app: &Arc<App>, sampling: &Sampling) -> Result<(), ErrorResponse> {
    let Some(constraint) = sampling.constraint.clone() else { return Ok(()) };
    let app = Arc::clone(app);
    spawn_blocking(move || {
        app.backend.model()?.check_constraint(&constraint).map_err(|e| match e.kind {
            ErrorKind::InvalidInput => ErrorResponse::bad_request(format!("response_format: {}", e.message)),
            _ => ErrorResponse::from(e),
        })
    })
    .await
}

/// A unique id for a response.
pub(super) fn response_id(kind: &str) -> String {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    let (now, n) = (jiff::Timestamp::now().as_microsecond(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    format!("{kind}-{now:x}{n:04x}")
}

pub(super) fn unix_seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}

pub(super) fn finish_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

pub(super) fn usage(prompt: usize, completion: usize) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// The sampling parameters of OpenAI's requests. Parameters that are not listed are ignored.
#[derive(Deserialize)]
pub(super) struct SamplingParams {
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany<String>>,
    n: Option<u32>,
    #[serde(default)]
    pub stream: bool,
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
    /// Whether the last event of a stream reports the usage.
    pub fn include_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    pub fn sampling(&self, defaults: &Sampling) -> Result<Sampling, ErrorResponse> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(ErrorResponse::bad_request(
                "n must be 1: this server generates one answer at a time",
            ));
        }
        if self.logprobs.as_ref().is_some_and(|value| !matches!(value, Value::Null | Value::Bool(false))) {
            return Err(ErrorResponse::bad_request("logprobs are not supported; leave them out"));
        }
        let in_range = |name: &str, value: Option<f32>, max: f32, default: f32| match value {
            Some(value) if !(0.0..=max).contains(&value) => {
                Err(ErrorResponse::bad_request(format!("{name} is {value}; it must be from 0 to {max}")))
            }
            value => Ok(value.unwrap_or(default)),
        };
        let max_tokens = match self.max_completion_tokens.or(self.max_tokens) {
            None => defaults.max_tokens,
            Some(max) => usize::try_from(max).ok().filter(|&n| n > 0).ok_or_else(|| {
                ErrorResponse::bad_request(format!("max_tokens is {max}; it must be at least 1"))
            })?,
        };
        let stop = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        Ok(Sampling {
            max_tokens,
            temperature: in_range("temperature", self.temperature, 5.0, defaults.temperature)?,
            top_p: in_range("top_p", self.top_p, 1.0, defaults.top_p)?,
            seed: if self.seed.is_some() { seed_or_random(self.seed) } else { defaults.seed },
            stop: stop.into_iter().filter(|stop| !stop.is_empty()).collect(),
            constraint: self.response_schema()?.map(OutputConstraint::JsonSchema),
            ..defaults.clone()
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
                "response_format '{other}' is not supported; use text, json_object or json_schema"
            ))),
        }
    }
}

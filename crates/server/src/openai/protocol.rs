//! What all of OpenAI's routes share: errors, sampling parameters, ids and usage.

use crate::error::{ErrorResponse, JsonBody, PathParams, QueryParams};
use crate::sampling::{
    ApiDialect, RequestFields, RequestedSampling, parse_choice_count, parse_sampling, wrong_type,
};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use halo_core::ErrorKind;
use halo_core::model::{FinishReason, Sampling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names the conversation, in requests and in responses.
pub(crate) const CONVERSATION_HEADER: &str = "x-halo-conversation";

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
            _ if self.0.code().is_some() => self.0.code(),
            ErrorKind::NotFound => Some("not_found"),
            ErrorKind::Busy | ErrorKind::Unavailable => Some("overloaded"),
            ErrorKind::InvalidInput if self.0.param().is_some() => Some("invalid_value"),
            ErrorKind::InvalidInput
            | ErrorKind::Conflict
            | ErrorKind::Forbidden
            | ErrorKind::Cancelled
            | ErrorKind::Damaged
            | ErrorKind::Internal => None,
        };
        json!({ "error": { "message": self.0.message(), "type": kind, "param": self.0.param(), "code": code } })
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        let status = match self.0.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        (status, Extension(self.0.label()), Json(self.to_json())).into_response()
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

/// Parameters in the path, whose errors are in OpenAI's format.
pub(super) struct OpenAiPath<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for OpenAiPath<T> {
    type Rejection = OpenAiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, OpenAiError> {
        Ok(Self(PathParams::from_request_parts(parts, state).await?.0))
    }
}

/// Parameters in the query, whose errors are in OpenAI's format.
pub(super) struct OpenAiQuery<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for OpenAiQuery<T> {
    type Rejection = OpenAiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, OpenAiError> {
        Ok(Self(QueryParams::from_request_parts(parts, state).await?.0))
    }
}

/// A unique id for a response. Servers that share a store differ in the random number.
pub(super) fn response_id(kind: &str) -> String {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    static PROCESS: LazyLock<u16> = LazyLock::new(|| RandomState::new().hash_one(0) as u16);
    let (now, n) = (jiff::Timestamp::now().as_microsecond(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    format!("{kind}-{now:x}{:04x}{n:04x}", *PROCESS)
}

pub(super) fn unix_seconds() -> i64 {
    jiff::Timestamp::now().as_second()
}

pub(super) fn finish_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

/// The parameters of OpenAI's requests for text: those of the stream, and those of sampling.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct SamplingParams {
    fields: RequestFields,
}

impl SamplingParams {
    pub fn stream(&self) -> Result<bool, ErrorResponse> {
        Ok(self.fields.boolean(&["stream"])?.is_some_and(|(_, stream)| stream))
    }

    /// Whether the last event of a stream reports the usage.
    pub fn include_usage(&self) -> Result<bool, ErrorResponse> {
        let wrong = |name, value| Err(wrong_type(name, value, "an object with include_usage, true or false"));
        match self.fields.find(&["stream_options"]) {
            None => Ok(false),
            Some((name, options @ Value::Object(_))) => match &options["include_usage"] {
                Value::Null => Ok(false),
                Value::Bool(include) => Ok(*include),
                _ => wrong(name, options),
            },
            Some((name, value)) => wrong(name, value),
        }
    }

    /// The fields that no other type has read.
    pub fn fields(&self) -> &RequestFields {
        &self.fields
    }

    /// How many answers are requested.
    pub fn choice_count(&self) -> Result<usize, ErrorResponse> {
        parse_choice_count(&self.fields)
    }

    pub fn sampling(&self, defaults: &Sampling) -> Result<RequestedSampling, ErrorResponse> {
        parse_sampling(&self.fields, defaults, ApiDialect::OpenAi)
    }
}

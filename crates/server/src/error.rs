//! Errors as HTTP responses, and the extractors that produce them.

use crate::connection::SlowBodyError;
use axum::extract::path::ErrorKind as PathErrorKind;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use halo_core::{Error, ErrorKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::time::Duration;
use utoipa::ToSchema;

#[derive(Clone, Debug)]
pub(crate) struct ErrorResponse {
    kind: ErrorKind,
    status: StatusCode,
    message: String,
    /// The field of the request that is wrong, such as `temperature`.
    param: Option<String>,
    /// OpenAI's word for the problem.
    code: Option<&'static str>,
}

/// An extension of error responses, for the log: it has no words of a conversation.
#[derive(Clone, Debug)]
pub(crate) struct ErrorLabel {
    pub kind: ErrorKind,
    /// The top-level field of the request that is wrong.
    pub param: Option<String>,
}

/// The body of every error response of Halo's own API.
#[derive(Serialize, ToSchema)]
pub(crate) struct ApiError {
    /// What failed, why, and what to do.
    error: String,
}

pub(crate) type ApiResult<T> = Result<T, ErrorResponse>;

impl ErrorResponse {
    /// For refusals that have an HTTP status of their own (405, 408, 413, …); errors of the engine have a kind instead.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::NOT_FOUND => ErrorKind::NotFound,
            StatusCode::CONFLICT => ErrorKind::Conflict,
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => ErrorKind::Forbidden,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => ErrorKind::Busy,
            status if status.is_client_error() => ErrorKind::InvalidInput,
            _ => ErrorKind::Internal,
        };
        Self { kind, status, message: message.into(), param: None, code: None }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A parameter with a value that cannot be used.
    pub fn invalid_parameter(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request(message).with_param(param)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// A prompt that does not fit: 400, as the clients of KoboldCPP and OpenAI expect.
    pub fn context_length_exceeded(message: impl Into<String>) -> Self {
        let (kind, status) = (ErrorKind::ContextLengthExceeded, StatusCode::BAD_REQUEST);
        Self { kind, status, message: message.into(), param: None, code: None }
    }

    /// A parameter that is known and has no effect here.
    pub fn unsupported_parameter(param: &str, message: impl Into<String>) -> Self {
        Self::invalid_parameter(param, message).with_code("unsupported_parameter")
    }

    /// OpenAI's word for the problem, which programs look for.
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// Names the field of the request that is wrong.
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// 400 instead of 422, for APIs whose clients do not know 422.
    pub fn with_bad_request_status(mut self) -> Self {
        if self.status == StatusCode::UNPROCESSABLE_ENTITY {
            self.status = StatusCode::BAD_REQUEST;
        }
        self
    }

    /// A worker ended without a result, because the server shuts down.
    pub fn shutting_down() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn code(&self) -> Option<&'static str> {
        self.code
    }

    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// A deeper path may have keys that the client has chosen, so the label has the first step only.
    pub fn label(&self) -> ErrorLabel {
        let first = |param: &str| param.split(['.', '[']).next().map(str::to_owned);
        ErrorLabel { kind: self.kind, param: self.param.as_deref().and_then(first) }
    }
}

impl From<Error> for ErrorResponse {
    fn from(error: Error) -> Self {
        Self {
            kind: error.kind,
            status: status_of(error.kind),
            message: error.to_string(),
            param: None,
            code: None,
        }
    }
}

pub(crate) fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::InvalidInput | ErrorKind::ContextLengthExceeded => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Conflict | ErrorKind::Cancelled => StatusCode::CONFLICT,
        ErrorKind::Forbidden => StatusCode::FORBIDDEN,
        ErrorKind::Busy | ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Damaged | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let label = Extension(self.label());
        (self.status, label, Json(ApiError { error: self.message })).into_response()
    }
}

/// How long the body of a request may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// A JSON body with any content type. Some clients send `text/plain`, so that the browser needs no preflight request.
pub(crate) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        let body = axum::body::Bytes::from_request(request, state);
        let late =
            |()| ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time");
        let bytes = tokio::time::timeout(BODY_TIMEOUT, body).await.map_err(|_| late(()))?;
        let unreadable = |e: axum::extract::rejection::BytesRejection| {
            if is_caused_by::<SlowBodyError>(&e) {
                return late(());
            }
            ErrorResponse::new(e.status(), format!("the request body cannot be read: {e}"))
        };
        let bytes = bytes.map_err(unreadable)?;
        if bytes.len() <= MAX_INLINE_JSON_BYTES {
            return parse_json(&bytes).map(Self);
        }
        spawn_blocking(move || parse_json(&bytes).map(Self)).await
    }
}

/// A request body that ended with an error, or that came too slowly.
pub(crate) fn body_error(what: &str, error: &axum::Error) -> ErrorResponse {
    if is_caused_by::<SlowBodyError>(error) {
        return ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time");
    }
    ErrorResponse::bad_request(format!("{what}: {error}"))
}

fn is_caused_by<E: std::error::Error + 'static>(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| cause.is::<E>())
}

/// Larger bodies are parsed on the pool for blocking work: a history of 100,000 messages would hold up other requests.
const MAX_INLINE_JSON_BYTES: usize = 64 << 10;

fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> ApiResult<T> {
    serde_json::from_slice(bytes).or_else(|_| {
        // The error of serde_json itself does not name the field; tracking fields costs time, so only errors pay for it.
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|e| invalid_body(&e))?;
        let trailing = |e| ErrorResponse::bad_request(format!("invalid JSON body: {e}"));
        deserializer.end().map_err(trailing)?;
        Ok(value)
    })
}

/// Converts JSON that is parsed already. Errors name the field.
pub(crate) fn parse_json_value<T: DeserializeOwned>(value: serde_json::Value) -> ApiResult<T> {
    serde_path_to_error::deserialize(value).map_err(|e| invalid_body(&e))
}

/// For fields that clients may send as null, and that are read as if they were not sent.
pub(crate) fn null_as_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

fn invalid_body(error: &serde_path_to_error::Error<serde_json::Error>) -> ErrorResponse {
    let path = error.path().to_string();
    let response = ErrorResponse::bad_request(format!("invalid JSON body: {error}"));
    // A path of "." or "?" names no field.
    match path.starts_with(|c: char| c.is_ascii_alphabetic()) {
        true => response.with_param(path),
        false => response,
    }
}

pub(crate) struct QueryParams<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ErrorResponse> {
        let query = Query::try_from_uri(&parts.uri);
        query
            .map(|Query(params)| Self(params))
            .map_err(|e| ErrorResponse::bad_request(format!("invalid query: {}", e.body_text())))
    }
}

pub(crate) struct PathParams<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(params)| Self(params)).map_err(|e| {
            let error = ErrorResponse::bad_request(format!("invalid path: {}", e.body_text()));
            match e {
                PathRejection::FailedToDeserializePathParams(e) => match e.into_kind() {
                    PathErrorKind::InvalidUtf8InPathParam { key }
                    | PathErrorKind::ParseErrorAtKey { key, .. }
                    | PathErrorKind::DeserializeError { key, .. } => error.with_param(key),
                    _ => error,
                },
                _ => error,
            }
        })
    }
}

/// Runs blocking work on the thread pool for it. A panic there becomes an error response.
pub(crate) async fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|_| {
        let message = "internal error: the request was stopped and nothing was changed; please report it";
        Err(ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, message))
    })
}

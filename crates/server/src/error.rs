//! What is said when something is not as it should be, in the shape that the clients of each API expect.

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use halo_core::{Error, ErrorKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use utoipa::ToSchema;

#[derive(Clone, Debug)]
pub(crate) struct ErrorResponse {
    kind: ErrorKind,
    status: StatusCode,
    message: String,
}

/// What went wrong, in words.
#[derive(Serialize, ToSchema)]
pub(crate) struct ApiError {
    /// What happened, why, and what to do.
    error: String,
}

pub(crate) type ApiResult<T> = Result<T, ErrorResponse>;

impl ErrorResponse {
    /// A refusal that HTTP has a status of its own for (405, 408, 413, …); errors of the engine have a kind instead.
    pub fn new(status: StatusCode, what: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::NOT_FOUND => ErrorKind::NotFound,
            StatusCode::CONFLICT => ErrorKind::Conflict,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => ErrorKind::Busy,
            status if status.is_client_error() => ErrorKind::InvalidInput,
            _ => ErrorKind::Internal,
        };
        Self { kind, status, message: what.into() }
    }

    /// What was asked for makes no sense.
    pub fn bad_request(what: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, what)
    }

    /// A prompt that does not fit into the context window.
    pub fn context_length_exceeded(what: impl Into<String>) -> Self {
        Self { kind: ErrorKind::ContextLengthExceeded, ..Self::bad_request(what) }
    }

    /// What was asked for is not there.
    pub fn not_found(what: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, what)
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
}

impl From<Error> for ErrorResponse {
    fn from(error: Error) -> Self {
        Self { kind: error.kind, status: status_of(error.kind), message: error.to_string() }
    }
}

/// The HTTP status of every kind of error.
pub(crate) fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::InvalidInput | ErrorKind::ContextLengthExceeded => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Conflict | ErrorKind::Cancelled => StatusCode::CONFLICT,
        ErrorKind::Busy | ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Damaged | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        (self.status, Json(ApiError { error: self.message })).into_response()
    }
}

/// Nothing is served there.
pub(crate) async fn route_not_found(method: Method, uri: Uri) -> ErrorResponse {
    ErrorResponse::not_found(format!(
        "there is no {method} {}: /api/halo/openapi.json lists what there is",
        uri.path()
    ))
}

/// Something is served there, but not so.
pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> ErrorResponse {
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

/// How long a request may take to come in.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// A body of JSON, whatever its type is called; what is wrong with it is told as everything else is.
pub(crate) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        let read = axum::body::Bytes::from_request(request, state);
        let late = |_| ErrorResponse::new(StatusCode::REQUEST_TIMEOUT, "the request did not come to its end");
        let bytes = tokio::time::timeout(BODY_TIMEOUT, read).await.map_err(late)?;
        let bytes =
            bytes.map_err(|e| ErrorResponse::new(e.status(), format!("the request cannot be read: {e}")))?;
        let mut read = serde_json::Deserializer::from_slice(&bytes);
        let value = T::deserialize(&mut read).and_then(|value| read.end().map(|()| value));
        value
            .map(Self)
            .map_err(|e| ErrorResponse::bad_request(format!("the request is no JSON that fits: {e}")))
    }
}

/// What is asked for in the address, behind the question mark.
pub(crate) struct QueryParams<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ErrorResponse> {
        let query = Query::try_from_uri(&parts.uri);
        query
            .map(|Query(asked)| Self(asked))
            .map_err(|e| ErrorResponse::bad_request(format!("the address is not right: {}", e.body_text())))
    }
}

/// What is named in the address itself.
pub(crate) struct PathParams<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(named)| Self(named))
            .map_err(|e| ErrorResponse::bad_request(format!("the address is not right: {}", e.body_text())))
    }
}

/// Runs what blocks where it may.
pub(crate) async fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        Err(ErrorResponse::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "a mistake in this program; nothing was changed",
        ))
    })
}

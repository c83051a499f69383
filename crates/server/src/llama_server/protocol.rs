//! Errors and bodies of llama-server's routes.

use crate::error::{ErrorResponse, JsonBody, QueryParams};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use halo_core::ErrorKind;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// An error in the format of llama-server: `{"error": {"code", "message", "type"}}`.
pub(super) struct LlamaServerError(ErrorResponse);

pub(super) type LlamaServerResult<T> = Result<T, LlamaServerError>;

impl<E: Into<ErrorResponse>> From<E> for LlamaServerError {
    fn from(error: E) -> Self {
        Self(error.into().with_bad_request_status())
    }
}

impl LlamaServerError {
    fn to_json(&self) -> Value {
        let status = self.0.status();
        let kind = match (self.0.kind(), status) {
            (ErrorKind::ContextLengthExceeded, _) => "exceed_context_size_error",
            (_, StatusCode::UNAUTHORIZED) => "authentication_error",
            (ErrorKind::Forbidden, _) => "permission_error",
            (ErrorKind::NotFound, _) => "not_found_error",
            (ErrorKind::Busy | ErrorKind::Unavailable, _) => "unavailable_error",
            (_, StatusCode::NOT_IMPLEMENTED) => "not_supported_error",
            (_, status) if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": { "code": status.as_u16(), "message": self.0.message(), "type": kind } })
    }
}

impl IntoResponse for LlamaServerError {
    fn into_response(self) -> Response {
        (self.0.status(), Extension(self.0.label()), Json(self.to_json())).into_response()
    }
}

/// The last event of a stream that failed.
pub(super) fn error_event(error: &ErrorResponse) -> (Option<&'static str>, Value) {
    (None, LlamaServerError(error.clone()).to_json())
}

/// Parameters in the query, whose errors are in the format of llama-server.
pub(super) struct LlamaServerQuery<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for LlamaServerQuery<T> {
    type Rejection = LlamaServerError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, LlamaServerError> {
        Ok(Self(QueryParams::from_request_parts(parts, state).await?.0))
    }
}

/// A JSON body whose errors are in the format of llama-server.
pub(super) struct LlamaServerJson<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for LlamaServerJson<T> {
    type Rejection = LlamaServerError;

    async fn from_request(request: Request, state: &S) -> Result<Self, LlamaServerError> {
        Ok(Self(JsonBody::from_request(request, state).await?.0))
    }
}

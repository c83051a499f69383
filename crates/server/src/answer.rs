//! What is said when something is not as it should be, in the shape that the clients of each API expect.

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use halo_core::seams::{Fault, SeamError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use utoipa::ToSchema;

/// What went wrong.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    what: String,
}

/// What went wrong, in words.
#[derive(Serialize, ToSchema)]
pub(crate) struct Wrong {
    /// What happened, why, and what to do.
    error: String,
}

pub(crate) type Answer<T> = Result<T, Refusal>;

impl Refusal {
    pub fn new(status: StatusCode, what: impl Into<String>) -> Self {
        Self { status, what: what.into() }
    }

    /// What was asked for makes no sense.
    pub fn bad(what: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, what)
    }

    /// What was asked for is not there.
    pub fn missing(what: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, what)
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn what(&self) -> &str {
        &self.what
    }
}

impl From<SeamError> for Refusal {
    fn from(error: SeamError) -> Self {
        let status = match error.fault {
            Fault::Asked => StatusCode::UNPROCESSABLE_ENTITY,
            Fault::Stopped => StatusCode::CONFLICT,
            Fault::Again => StatusCode::SERVICE_UNAVAILABLE,
            Fault::Outside => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(Wrong { error: self.what })).into_response()
    }
}

/// Nothing is served there.
pub(crate) async fn nothing_here(method: Method, uri: Uri) -> Refusal {
    Refusal::missing(format!(
        "there is no {method} {}: /api/halo/openapi.json lists what there is",
        uri.path()
    ))
}

/// Something is served there, but not so.
pub(crate) async fn not_so(method: Method, uri: Uri) -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

/// How long a request may take to come in.
const PATIENCE: Duration = Duration::from_secs(60);

/// A body of JSON, whatever its type is called; what is wrong with it is told as everything else is.
pub(crate) struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let read = axum::body::Bytes::from_request(request, state);
        let late = |_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "the request did not come to its end");
        let bytes = tokio::time::timeout(PATIENCE, read).await.map_err(late)?;
        let bytes =
            bytes.map_err(|e| Refusal::new(e.status(), format!("the request cannot be read: {e}")))?;
        let mut read = serde_json::Deserializer::from_slice(&bytes);
        let value = T::deserialize(&mut read).and_then(|value| read.end().map(|()| value));
        value.map(Self).map_err(|e| Refusal::bad(format!("the request is no JSON that fits: {e}")))
    }
}

/// What is asked for in the address, behind the question mark.
pub(crate) struct Words<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Words<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let query = Query::try_from_uri(&parts.uri);
        query
            .map(|Query(asked)| Self(asked))
            .map_err(|e| Refusal::bad(format!("the address is not right: {}", e.body_text())))
    }
}

/// What is named in the address itself.
pub(crate) struct Named<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Named<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(named)| Self(named))
            .map_err(|e| Refusal::bad(format!("the address is not right: {}", e.body_text())))
    }
}

/// Runs what blocks where it may.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> Answer<T> + Send + 'static) -> Answer<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "a mistake in this program; nothing was changed"))
    })
}

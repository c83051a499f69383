//! All routes of the server, behind access control.

use crate::app::App;
use crate::error::ErrorResponse;
use crate::{access_control, halo, kobold, mcp, monitoring, openai, page};
use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// The router that the server listens with, and that tests send requests to without a socket.
pub fn routes(app: &Arc<App>) -> Router {
    let router = Router::new()
        .merge(page::routes())
        .merge(halo::routes())
        .merge(kobold::routes())
        .merge(openai::routes())
        .merge(mcp::routes(app))
        .merge(monitoring::routes())
        .fallback(route_not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(app));
    access_control::wrap_router(router, app)
}

async fn route_not_found(method: Method, uri: Uri) -> Response {
    let message = format!("no route {method} {}: /api/halo/openapi.json lists the routes", uri.path());
    error_response(ErrorResponse::not_found(message), &uri)
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not accept {method}", uri.path());
    error_response(ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, message), &uri)
}

/// An error in the format of the API that the path belongs to.
fn error_response(error: ErrorResponse, uri: &Uri) -> Response {
    match openai::is_openai_path(uri.path()) {
        true => openai::error_response(error),
        false => error.into_response(),
    }
}

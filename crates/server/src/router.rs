//! All routes of the server, behind access control.

use crate::api_name::ApiName;
use crate::app::App;
use crate::error::ErrorResponse;
use crate::{access_control, halo, kobold, kobold_info, llama_server, mcp, monitoring, ollama, openai, page};
use axum::Router;
use axum::extract::Request;
use axum::http::uri::PathAndQuery;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tower::ServiceExt;

/// The router that the server listens with, and that tests send requests to without a socket.
pub fn routes(app: &Arc<App>) -> Router {
    let router = Router::new()
        .merge(page::routes())
        .merge(halo::routes(app.limits.max_body_bytes))
        .merge(kobold::routes())
        .merge(kobold_info::routes())
        .merge(ollama::routes())
        .merge(openai::routes())
        .merge(llama_server::routes())
        .merge(mcp::routes(app))
        .merge(monitoring::routes())
        .fallback(route_not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(app));
    let router = access_control::wrap_router(router, app);
    // The slash is removed before a route is looked for, and before access control sees the path.
    Router::new().fallback_service(router.map_request(remove_trailing_slash))
}

/// Some clients end the paths of the APIs with a slash.
fn remove_trailing_slash(mut request: Request) -> Request {
    let path = request.uri().path();
    let is_api = path.starts_with("/v1/") || path.starts_with("/api/");
    let trimmed = path.trim_end_matches('/');
    if !is_api || trimmed.len() == path.len() {
        return request;
    }
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(format!("{trimmed}{query}")).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
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
    match ApiName::of_path(uri.path()) {
        ApiName::OpenAi => openai::error_response(error),
        ApiName::LlamaServer => llama_server::error_response(error),
        ApiName::Halo | ApiName::Kobold | ApiName::Ollama | ApiName::Mcp | ApiName::Page => {
            error.into_response()
        }
    }
}

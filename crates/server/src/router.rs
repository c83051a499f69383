//! All routes of the server, behind access control.

use crate::app::App;
use crate::{access_control, error, halo, kobold, mcp, monitoring, openai, page};
use axum::Router;
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
        .fallback(error::route_not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(Arc::clone(app));
    access_control::wrap_router(router, app)
}

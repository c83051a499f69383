//! Halo over HTTP: the page, Halo's own API, and the APIs that other programs speak already. The only place with async web
//! code and with types of the wire; everything that is done is done by the engine, on threads of its own.

mod access_control;
mod app;
mod attention_cache;
mod backend;
mod completion;
mod error;
mod events;
mod halo;
mod kobold;
mod listen;
mod mcp;
mod metrics;
mod openai;
mod otlp;
mod page;
mod sse;
mod state_cache;
mod stop_sequences;
mod tls;
mod worlds;

pub use app::App;
pub use backend::{
    AttentionCapture, Backend, CaptureSegment, CaptureStep, ModelDetails, ServerLimits, Setting,
};
pub use listen::{ListenOptions, serve};
pub use mcp::serve_mcp_stdio;
pub use otlp::TraceExporter;
pub use tls::TlsConfig;

use axum::Router;
use std::sync::Arc;

/// All routes, behind the guard: what a server listens with, and what tests ask without one.
pub fn routes(app: &Arc<App>) -> Router {
    let router = Router::new()
        .merge(page::routes())
        .merge(halo::routes())
        .merge(kobold::routes())
        .merge(openai::routes())
        .merge(mcp::routes(app))
        .merge(metrics::routes())
        .fallback(error::route_not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(Arc::clone(app));
    access_control::wrap_router(router, app)
}

//! Halo over HTTP: the page, Halo's own API, and the APIs that other programs speak already. The only place with async web
//! code and with types of the wire; everything that is done is done by the engine, on threads of its own.

mod answer;
mod app;
mod events;
mod guard;
mod halo;
mod kobold;
mod listen;
mod looks;
mod mcp;
mod metrics;
mod openai;
mod page;
mod parts;
mod raw;
mod shown;
mod stops;
mod stream;
mod tls;
mod traces;
mod worlds;

pub use app::App;
pub use listen::{Address, serve};
pub use mcp::speak_mcp;
pub use parts::{Captured, CapturedPart, CapturedStep, Limits, ModelFacts, Parts, Setting};
pub use tls::Tls;
pub use traces::Export;

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
        .fallback(answer::nothing_here)
        .method_not_allowed_fallback(answer::not_so)
        .with_state(Arc::clone(app));
    guard::around(router, app)
}

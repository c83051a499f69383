//! What has been done, counted, as Prometheus reads it; and whether all is well.

use crate::app::App;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use halo_core::seams::SeamError;
use halo_engine::event::{Stage, Summary};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted.
#[derive(Clone, Default)]
pub(crate) struct Metrics(Arc<Counts>);

#[derive(Default)]
struct Counts {
    requests: [AtomicU64; 6],
    turns: AtomicU64,
    failed: AtomicU64,
    tokens: AtomicU64,
    returned: AtomicU64,
    left: AtomicU64,
    micros: [AtomicU64; Stage::ALL.len()],
}

impl Metrics {
    /// A request was answered with that status.
    pub fn request(&self, status: u16) {
        add(&self.0.requests[usize::from(status / 100).min(5)], 1);
    }

    /// A turn has ended.
    pub fn turn(&self, done: &Result<Summary, SeamError>) {
        let Ok(summary) = done else { return add(&self.0.failed, 1) };
        add(&self.0.turns, 1);
        add(&self.0.tokens, summary.tokens as u64);
        add(&self.0.returned, summary.returned as u64);
        add(&self.0.left, summary.left as u64);
        for (stage, micros) in Stage::ALL.iter().zip(&self.0.micros) {
            add(micros, u64::try_from(summary.took(*stage).as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// An answer that is of no conversation has ended.
    pub fn spoken(&self, tokens: usize) {
        add(&self.0.tokens, tokens as u64);
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new().route("/health", get(health)).route("/metrics", get(metrics))
}

/// Whether all is well.
async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "status": "ok", "model": app.parts.info().name, "version": env!("CARGO_PKG_VERSION") }))
}

/// The counts.
async fn metrics(State(app): State<Arc<App>>) -> ([(&'static str, &'static str); 1], String) {
    let mut out = String::new();
    let counts = &app.metrics.0;
    let head = |out: &mut String, name: &str, kind: &str, about: &str| {
        let _ = writeln!(out, "# HELP {name} {about}\n# TYPE {name} {kind}");
    };
    head(&mut out, "halo_requests_total", "counter", "Requests answered, by the class of their status.");
    for (class, count) in counts.requests.iter().enumerate().skip(1) {
        let _ =
            writeln!(out, "halo_requests_total{{status=\"{class}xx\"}} {}", count.load(Ordering::Relaxed));
    }
    let plain: [(&str, &str, &str, u64); 8] = [
        ("halo_turns_total", "counter", "Turns answered.", counts.turns.load(Ordering::Relaxed)),
        ("halo_turns_failed_total", "counter", "Turns that failed.", counts.failed.load(Ordering::Relaxed)),
        ("halo_tokens_total", "counter", "Tokens generated.", counts.tokens.load(Ordering::Relaxed)),
        (
            "halo_chunks_returned_total",
            "counter",
            "Chunks that came back.",
            counts.returned.load(Ordering::Relaxed),
        ),
        (
            "halo_chunks_left_total",
            "counter",
            "Chunks that left the window.",
            counts.left.load(Ordering::Relaxed),
        ),
        ("halo_waiting", "gauge", "Requests that wait for the model.", app.host.gate().waiting() as u64),
        ("halo_busy", "gauge", "Whether the model is answering.", u64::from(app.host.gate().is_busy())),
        ("halo_listeners", "gauge", "Readers of events.", app.hub.listeners() as u64),
    ];
    for (name, kind, about, value) in plain {
        head(&mut out, name, kind, about);
        let _ = writeln!(out, "{name} {value}");
    }
    head(&mut out, "halo_stage_seconds_total", "counter", "Time that the parts of turns took.");
    for (stage, micros) in Stage::ALL.iter().zip(&counts.micros) {
        let seconds = micros.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "halo_stage_seconds_total{{stage=\"{}\"}} {seconds}", stage.name());
    }
    head(
        &mut out,
        "halo_conversation_tokens",
        "gauge",
        "Tokens of open conversations, in the window and in all.",
    );
    for (name, desk) in app.host.open_now() {
        let standing = desk.board().look().standing;
        let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
        let (live, all) = (standing.live(), standing.timeline.len());
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",which=\"live\"}} {live}");
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",which=\"all\"}} {all}");
    }
    ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], out)
}

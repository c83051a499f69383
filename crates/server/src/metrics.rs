//! What has been done, counted, as Prometheus reads it; and whether all is well.

use crate::app::App;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use halo_core::Error;
use halo_engine::event::{TurnStage, TurnSummary};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Default)]
pub(crate) struct Metrics(Arc<MetricCounters>);

#[derive(Default)]
struct MetricCounters {
    requests: [AtomicU64; 6],
    turns: AtomicU64,
    failed_turns: AtomicU64,
    generated_tokens: AtomicU64,
    resurrected: AtomicU64,
    pruned: AtomicU64,
    stage_micros: [AtomicU64; TurnStage::ALL.len()],
}

impl Metrics {
    /// A request was answered with that status.
    pub fn record_request(&self, status: u16) {
        add(&self.0.requests[usize::from(status / 100).min(5)], 1);
    }

    /// A turn has ended.
    pub fn record_turn(&self, done: &Result<TurnSummary, Error>) {
        let Ok(summary) = done else { return add(&self.0.failed_turns, 1) };
        add(&self.0.turns, 1);
        add(&self.0.generated_tokens, summary.tokens as u64);
        add(&self.0.resurrected, summary.resurrected as u64);
        add(&self.0.pruned, summary.pruned as u64);
        for (stage, micros) in TurnStage::ALL.iter().zip(&self.0.stage_micros) {
            add(micros, u64::try_from(summary.stage_duration(*stage).as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// An answer that is of no conversation has ended.
    pub fn record_generated_tokens(&self, tokens: usize) {
        add(&self.0.generated_tokens, tokens as u64);
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
    Json(
        json!({ "status": "ok", "model": app.backend.model_info().name, "version": env!("CARGO_PKG_VERSION") }),
    )
}

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
        (
            "halo_turns_failed_total",
            "counter",
            "Turns that failed.",
            counts.failed_turns.load(Ordering::Relaxed),
        ),
        (
            "halo_tokens_total",
            "counter",
            "Tokens generated.",
            counts.generated_tokens.load(Ordering::Relaxed),
        ),
        (
            "halo_chunks_resurrected_total",
            "counter",
            "Chunks resurrected.",
            counts.resurrected.load(Ordering::Relaxed),
        ),
        ("halo_chunks_pruned_total", "counter", "Chunks pruned.", counts.pruned.load(Ordering::Relaxed)),
        (
            "halo_queued_requests",
            "gauge",
            "Requests that wait for the model.",
            app.host.scheduler().queue_len() as u64,
        ),
        ("halo_busy", "gauge", "Whether the model is answering.", u64::from(app.host.scheduler().is_busy())),
        ("halo_event_subscribers", "gauge", "Readers of events.", app.events.subscriber_count() as u64),
    ];
    for (name, kind, about, value) in plain {
        head(&mut out, name, kind, about);
        let _ = writeln!(out, "{name} {value}");
    }
    head(&mut out, "halo_stage_seconds_total", "counter", "Time that the parts of turns took.");
    for (stage, micros) in TurnStage::ALL.iter().zip(&counts.stage_micros) {
        let seconds = micros.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(out, "halo_stage_seconds_total{{stage=\"{}\"}} {seconds}", stage.name());
    }
    head(
        &mut out,
        "halo_conversation_tokens",
        "gauge",
        "Tokens of open conversations, in the window and in all.",
    );
    for (name, desk) in app.host.open_conversations() {
        let standing = desk.snapshot_cell().get().state;
        let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
        let (live, all) = (standing.live_tokens(), standing.timeline.len());
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",scope=\"live\"}} {live}");
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",scope=\"all\"}} {all}");
    }
    ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], out)
}

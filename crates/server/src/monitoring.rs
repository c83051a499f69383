//! `/health`, and `/metrics` in the text format of Prometheus.

use crate::app::App;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new().route("/health", get(health)).route("/metrics", get(metrics))
}

async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    Json(
        json!({ "status": "ok", "model": app.backend.model_info().name, "version": env!("CARGO_PKG_VERSION") }),
    )
}

async fn metrics(State(app): State<Arc<App>>) -> ([(&'static str, &'static str); 1], String) {
    let mut out = String::new();
    write_counters(&mut out, &app);
    write_conversations(&mut out, &app);
    ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], out)
}

fn write_header(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn write_counters(out: &mut String, app: &App) {
    let values = app.metrics.values();
    let scheduler = app.host.scheduler();
    write_header(out, "halo_requests_total", "counter", "Requests answered, by status class.");
    for (class, count) in values.requests.iter().enumerate().skip(1) {
        let _ = writeln!(out, "halo_requests_total{{status=\"{class}xx\"}} {count}");
    }
    let subscribers = app.events.subscriber_count() as u64;
    let unlabeled: [(&str, &str, &str, u64); 8] = [
        ("halo_turns_total", "counter", "Turns completed.", values.turns),
        ("halo_turns_failed_total", "counter", "Turns that failed.", values.failed_turns),
        ("halo_tokens_total", "counter", "Tokens generated.", values.generated_tokens),
        ("halo_chunks_resurrected_total", "counter", "Chunks resurrected.", values.resurrected),
        ("halo_chunks_pruned_total", "counter", "Chunks pruned.", values.pruned),
        ("halo_queued_requests", "gauge", "Requests queued for the model.", scheduler.queue_len() as u64),
        ("halo_busy", "gauge", "Whether the model is generating.", u64::from(scheduler.is_busy())),
        ("halo_event_subscribers", "gauge", "Subscribers of the event stream.", subscribers),
    ];
    for (name, kind, help, value) in unlabeled {
        write_header(out, name, kind, help);
        let _ = writeln!(out, "{name} {value}");
    }
    write_header(out, "halo_stage_seconds_total", "counter", "Time spent in each stage of a turn.");
    for (stage, seconds) in values.stage_seconds {
        let _ = writeln!(out, "halo_stage_seconds_total{{stage=\"{}\"}} {seconds}", stage.name());
    }
}

fn write_conversations(out: &mut String, app: &App) {
    let help = "Tokens of open conversations: in the context window, and all.";
    write_header(out, "halo_conversation_tokens", "gauge", help);
    for (name, handle) in app.host.open_conversations() {
        let state = handle.snapshot_cell().get().state;
        let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
        let (live, all) = (state.live_tokens(), state.timeline.len());
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",scope=\"live\"}} {live}");
        let _ = writeln!(out, "halo_conversation_tokens{{conversation=\"{name}\",scope=\"all\"}} {all}");
    }
}

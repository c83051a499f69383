//! `/health` with `/health/live` and `/health/ready`, and `/metrics` in the text format of OpenMetrics.

use crate::access_control::KeyAccess;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use axum::Extension;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConversationLabels {
    /// The id: a name can be made of what was said.
    conversation: String,
    /// `live`: in the context window; `all`: on the timeline.
    scope: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConversationLabel {
    conversation: String,
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/health", get(ready))
        .route("/health/live", get(live))
        .route("/health/ready", get(ready))
        .route("/metrics", get(metrics))
}

/// The process answers: restarting it would help nothing.
async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Requests can be served: the model is loaded, and the store answers.
async fn ready(State(app): State<Arc<App>>, access: Option<Extension<KeyAccess>>) -> Response {
    if !is_store_available(&app).await {
        let body = json!({ "status": "unavailable", "error": "the store does not answer; the log says why" });
        return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    }
    let mut health = json!({ "status": "ok" });
    if access.is_some() {
        health["model"] = app.backend.model_info().name.into();
        health["version"] = env!("CARGO_PKG_VERSION").into();
    }
    Json(health).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> ApiResult<impl IntoResponse> {
    let mut text = String::new();
    encode_registry(&mut text, app.metrics.registry())
        .and_then(|()| encode_registry(&mut text, &current_gauges(&app)))
        .and_then(|()| encode_eof(&mut text))
        .map_err(|e| ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?;
    Ok(([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text))
}

/// Values that are read when they are asked for: the queue, the subscribers, the open conversations.
fn current_gauges(app: &App) -> Registry {
    let mut registry = Registry::with_prefix("halo");
    let scheduler = app.host.scheduler();
    let gauges = [
        ("queued_requests", "Requests queued for the model", scheduler.queue_len()),
        ("busy", "Whether the model is generating", usize::from(scheduler.is_busy())),
        ("running_generations", "Answers that are generated at once now", scheduler.permits_in_use()),
        ("parallel_generations", "The most answers that are generated at once", scheduler.limit()),
        ("event_subscribers", "Subscribers of the event stream", app.events.subscriber_count()),
        ("cached_states", "Conversations whose rendered state is cached", app.state_cache.len()),
    ];
    for (name, help, value) in gauges {
        registry.register(name, help, ConstGauge::new(value as i64));
    }
    let tokens: Family<ConversationLabels, Gauge> = Family::default();
    let pressure: Family<ConversationLabel, Gauge<f64, AtomicU64>> = Family::default();
    for (_, handle) in app.host.open_conversations() {
        let state = handle.snapshot_cell().get().state;
        // Until its first message is stored, a conversation has no id.
        if state.id.is_empty() {
            continue;
        }
        let label = ConversationLabel { conversation: state.id.clone() };
        pressure.get_or_create(&label).set(state.pressure());
        for (scope, count) in [("live", state.live_tokens()), ("all", state.timeline.len())] {
            let labels = ConversationLabels { conversation: state.id.clone(), scope };
            tokens.get_or_create(&labels).set(count as i64);
        }
    }
    let help = "Context pressure of open conversations: tokens in the window divided by its size";
    registry.register("conversation_pressure", help, pressure);
    let help = "Tokens of open conversations, in the context window and all";
    registry.register("conversation_tokens", help, tokens);
    registry
}

/// How long `/health` waits for the store.
const STORE_PATIENCE: Duration = Duration::from_secs(2);

/// Whether the store answers now.
async fn is_store_available(app: &Arc<App>) -> bool {
    if let Some(available) = app.store_probe.recent_answer() {
        return available;
    }
    if app.store_probe.begin() {
        let app = Arc::clone(app);
        tokio::task::spawn_blocking(move || {
            // No conversation has this name; the lookup reads the index of names.
            let answer = app.with_reader(|store| store.find_conversation(""));
            if let Err(error) = &answer {
                tracing::warn!("the store is not available: {error}");
            }
            app.store_probe.end(answer.is_ok());
        });
    }
    let asked = Instant::now();
    while asked.elapsed() < STORE_PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
        if let Some(available) = app.store_probe.recent_answer() {
            return available;
        }
    }
    false
}

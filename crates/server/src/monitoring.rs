//! `/health`, and `/metrics` in the text format of OpenMetrics.

use crate::access_control::KeyAccess;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use axum::Extension;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConversationLabels {
    conversation: String,
    /// `live`: in the context window; `all`: on the timeline.
    scope: &'static str,
}

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new().route("/health", get(health)).route("/metrics", get(metrics))
}

async fn health(State(app): State<Arc<App>>, access: Option<Extension<KeyAccess>>) -> Json<Value> {
    let mut health = json!({ "status": "ok" });
    if access.is_some() {
        health["model"] = app.backend.model_info().name.into();
        health["version"] = env!("CARGO_PKG_VERSION").into();
    }
    Json(health)
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
        ("event_subscribers", "Subscribers of the event stream", app.events.subscriber_count()),
        ("cached_states", "Conversations whose rendered state is cached", app.state_cache.len()),
        ("cached_attention_tokens", "Tokens whose attention is cached", app.attention_cache.token_count()),
    ];
    for (name, help, value) in gauges {
        registry.register(name, help, ConstGauge::new(value as i64));
    }
    let tokens: Family<ConversationLabels, Gauge> = Family::default();
    for (name, handle) in app.host.open_conversations() {
        let state = handle.snapshot_cell().get().state;
        for (scope, count) in [("live", state.live_tokens()), ("all", state.timeline.len())] {
            tokens.get_or_create(&ConversationLabels { conversation: name.clone(), scope }).set(count as i64);
        }
    }
    let help = "Tokens of open conversations, in the context window and all";
    registry.register("conversation_tokens", help, tokens);
    registry
}

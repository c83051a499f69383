//! Streamed answers as server-sent events. The generating thread never waits for the client: unread events are buffered up to a
//! limit, and a client that is further behind counts as disconnected.

use crate::error::{ApiResult, ErrorResponse};
use axum::body::{Body, Bytes};
use axum::http::HeaderName;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use halo_core::model::StepFlow;
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, oneshot};

const MAX_UNREAD_BYTES: usize = 64 << 20;

pub(crate) struct SseSender {
    events: mpsc::UnboundedSender<Bytes>,
    /// Bytes that the connection has not taken yet.
    unread_bytes: Arc<AtomicUsize>,
}

impl SseSender {
    /// Whether to continue: stops when the client has disconnected or is too far behind.
    pub fn flow(&self) -> StepFlow {
        let disconnected =
            self.events.is_closed() || self.unread_bytes.load(Ordering::Relaxed) > MAX_UNREAD_BYTES;
        if disconnected { StepFlow::Stop } else { StepFlow::Continue }
    }

    pub fn send_json(&self, name: Option<&str>, value: &impl Serialize) -> StepFlow {
        let Ok(json) = serde_json::to_string(value) else { return StepFlow::Stop };
        self.send_text(name, &json)
    }

    pub fn send_text(&self, name: Option<&str>, data: &str) -> StepFlow {
        let bytes = format_event(name, data);
        self.unread_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        let _ = self.events.send(bytes);
        self.flow()
    }
}

/// The result of a stream. The task that fills the stream sends it before it drops its [`SseSender`].
pub(crate) type StreamResultSender = oneshot::Sender<ApiResult<()>>;

/// An error as the last event of a stream: the event's name, and its data.
pub(crate) type ErrorEvent = fn(&ErrorResponse) -> (Option<&'static str>, Value);

/// Runs `generate` on a blocking thread. An error before the first event becomes an error response. An error after it is sent as
/// an error event, and the connection is aborted, so that no client takes the stream for a complete answer.
pub(crate) async fn spawn_sse_stream(
    error: ErrorEvent,
    generate: impl FnOnce(&SseSender) -> ApiResult<()> + Send + 'static,
) -> ApiResult<Response> {
    let (out, ended, response) = sse_channel(error);
    tokio::task::spawn_blocking(move || {
        let _ = ended.send(generate(&out));
    });
    response.await
}

/// A stream that the caller fills, and its response.
pub(crate) fn sse_channel(
    error: ErrorEvent,
) -> (SseSender, StreamResultSender, impl Future<Output = ApiResult<Response>>) {
    let (events, receiver) = mpsc::unbounded_channel();
    let (ended, end) = oneshot::channel();
    let unread = Arc::new(AtomicUsize::new(0));
    (
        SseSender { events, unread_bytes: Arc::clone(&unread) },
        ended,
        sse_response(receiver, unread, end, error),
    )
}

enum SseStreamState {
    FirstEvent(Bytes),
    Events,
    Aborted,
}

async fn sse_response(
    mut events: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
    end: oneshot::Receiver<ApiResult<()>>,
    error: ErrorEvent,
) -> ApiResult<Response> {
    let Some(first) = events.recv().await else {
        return Err(end
            .await
            .unwrap_or_else(|_| Err(ErrorResponse::shutting_down()))
            .err()
            .unwrap_or_else(ErrorResponse::shutting_down));
    };
    let start = (SseStreamState::FirstEvent(first), events, unread, Some(end));
    let body = stream::unfold(start, move |(state, mut events, unread, mut end)| async move {
        let event = match state {
            SseStreamState::FirstEvent(first) => Some(first),
            SseStreamState::Events => events.recv().await,
            // An error instead of the last HTTP chunk closes the connection without a clean end.
            SseStreamState::Aborted => {
                let aborted = io::Error::other("the answer was aborted");
                return Some((Err(aborted), (SseStreamState::Aborted, events, unread, None)));
            }
        };
        if let Some(event) = event {
            unread.fetch_sub(event.len(), Ordering::Relaxed);
            return Some((Ok(event), (SseStreamState::Events, events, unread, end)));
        }
        let failure = match end.take()?.await {
            Ok(Ok(())) => return None,
            Ok(Err(failure)) => failure,
            Err(_) => ErrorResponse::shutting_down(),
        };
        let (name, data) = error(&failure);
        Some((Ok(format_event(name, &data.to_string())), (SseStreamState::Aborted, events, unread, None)))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

fn format_event(name: Option<&str>, data: &str) -> Bytes {
    let event = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{event}data: {data}\n\n"))
}

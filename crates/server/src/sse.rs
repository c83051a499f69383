//! Answers that come word by word, as server-sent events. Whoever speaks never waits for whoever reads: what is not read yet is
//! kept, up to a limit, and a reader who is further behind than that is taken for gone.

use crate::error::{ApiResult, ErrorResponse};
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use halo_core::model::StepFlow;
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, oneshot};

/// What a reader may be behind, in bytes.
const MAX_UNREAD_BYTES: usize = 64 << 20;

pub(crate) struct SseSender {
    events: mpsc::UnboundedSender<Bytes>,
    /// Bytes that were sent and not yet read.
    unread_bytes: Arc<AtomicUsize>,
}

impl SseSender {
    /// Whether anybody still reads.
    pub fn flow(&self) -> StepFlow {
        let gone = self.events.is_closed() || self.unread_bytes.load(Ordering::Relaxed) > MAX_UNREAD_BYTES;
        if gone { StepFlow::Stop } else { StepFlow::Continue }
    }

    pub fn send_json(&self, name: Option<&str>, value: &impl Serialize) -> StepFlow {
        let Ok(json) = serde_json::to_string(value) else { return StepFlow::Stop };
        self.send_text(name, &json)
    }

    /// Sends a line as it is.
    pub fn send_text(&self, name: Option<&str>, data: &str) -> StepFlow {
        let bytes = format_event(name, data);
        self.unread_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        let _ = self.events.send(bytes);
        self.flow()
    }
}

/// How a stream ended: sent by the task that fills it, before it drops [`Out`].
pub(crate) type StreamResultSender = oneshot::Sender<ApiResult<()>>;

/// An error as the last event of a stream: the event's name, and its data.
pub(crate) type ErrorEvent = fn(&ErrorResponse) -> (Option<&'static str>, Value);

/// Runs what generates on a thread of its own. What fails before the first event is answered as an error. What fails later is
/// told by an error event, and the connection is broken off: no client can take it for an answer that ended.
pub(crate) async fn spawn_sse_stream(
    error: ErrorEvent,
    speak: impl FnOnce(&SseSender) -> ApiResult<()> + Send + 'static,
) -> ApiResult<Response> {
    let (out, ended, response) = sse_channel(error);
    tokio::task::spawn_blocking(move || {
        let _ = ended.send(speak(&out));
    });
    response.await
}

/// The response to a stream that somebody else fills.
pub(crate) fn sse_channel(
    error: ErrorEvent,
) -> (SseSender, StreamResultSender, impl Future<Output = ApiResult<Response>>) {
    let (lines, heard) = mpsc::unbounded_channel();
    let (ended, end) = oneshot::channel();
    let unread = Arc::new(AtomicUsize::new(0));
    (
        SseSender { events: lines, unread_bytes: Arc::clone(&unread) },
        ended,
        sse_response(heard, unread, end, error),
    )
}

/// The task that fills a stream ended without a result: the program is ending, or has a fault.
fn shutting_down_error() -> ErrorResponse {
    ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending")
}

/// What is left to send.
enum SseStreamState {
    FirstEvent(Bytes),
    Events,
    Aborted,
}

async fn sse_response(
    mut heard: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
    end: oneshot::Receiver<ApiResult<()>>,
    error: ErrorEvent,
) -> ApiResult<Response> {
    let Some(first) = heard.recv().await else {
        return Err(end
            .await
            .unwrap_or_else(|_| Err(shutting_down_error()))
            .err()
            .unwrap_or_else(shutting_down_error));
    };
    let start = (SseStreamState::FirstEvent(first), heard, unread, Some(end));
    let lines = stream::unfold(start, move |(rest, mut heard, unread, mut end)| async move {
        let line = match rest {
            SseStreamState::FirstEvent(first) => Some(first),
            SseStreamState::Events => heard.recv().await,
            // An error instead of the last chunk: the connection is closed without a clean end.
            SseStreamState::Aborted => {
                let why = io::Error::other("the answer was broken off");
                return Some((Err(why), (SseStreamState::Aborted, heard, unread, None)));
            }
        };
        if let Some(line) = line {
            unread.fetch_sub(line.len(), Ordering::Relaxed);
            return Some((Ok(line), (SseStreamState::Events, heard, unread, end)));
        }
        let why = match end.take()?.await {
            Ok(Ok(())) => return None,
            Ok(Err(why)) => why,
            Err(_) => shutting_down_error(),
        };
        let (name, data) = error(&why);
        Some((Ok(format_event(name, &data.to_string())), (SseStreamState::Aborted, heard, unread, None)))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

fn format_event(name: Option<&str>, data: &str) -> Bytes {
    let named = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{named}data: {data}\n\n"))
}

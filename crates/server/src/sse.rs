//! Streamed answers as server-sent events, or as lines of JSON. The generating thread never waits for the client: unread events are
//! buffered up to a limit, and a client that is further behind counts as disconnected.
//!
//! The headers of the response are sent with the first event, so that an error before it can have an HTTP status; or after two
//! seconds, so that no proxy or client gives up on a request that waits its turn. Until the first event, comments keep the
//! connection alive.

use crate::error::{ApiResult, ErrorResponse};
use crate::request_log::StreamLabel;
use axum::Extension;
use axum::body::{Body, Bytes};
use axum::http::HeaderName;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use halo_core::model::StepFlow;
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

const MAX_UNREAD_BYTES: usize = 64 << 20;

/// How events are written into the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamFraming {
    ServerSentEvents,
    /// One JSON value per line. It has no comments.
    JsonLines,
}

/// How long a response waits for its first event.
#[derive(Clone, Copy, Debug)]
struct StreamPatience {
    /// After this time the headers are sent.
    headers: Duration,
    /// The time between two comments.
    comment: Duration,
}

const PATIENCE: StreamPatience =
    StreamPatience { headers: Duration::from_secs(2), comment: Duration::from_secs(5) };

/// The time between the last event of a stream that failed and the end of its connection: hyper drops what it has not yet written when
/// a body fails, so a client would get neither the event nor the headers of a stream that fails at once.
const FLUSH_TIME: Duration = Duration::from_millis(50);

const WAITING_COMMENT: &[u8] = b": waiting\n\n";

pub(crate) struct SseSender {
    framing: StreamFraming,
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
        let bytes = format_event(self.framing, name, data);
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
    stream_channel(StreamFraming::ServerSentEvents, PATIENCE, error)
}

/// The content type of lines of JSON.
pub(crate) const JSON_LINES: &str = "application/x-ndjson";

/// The same with one JSON value per line instead of events.
pub(crate) fn json_lines_channel(
    error: ErrorEvent,
) -> (SseSender, StreamResultSender, impl Future<Output = ApiResult<Response>>) {
    stream_channel(StreamFraming::JsonLines, PATIENCE, error)
}

fn stream_channel(
    framing: StreamFraming,
    patience: StreamPatience,
    error: ErrorEvent,
) -> (SseSender, StreamResultSender, impl Future<Output = ApiResult<Response>>) {
    let (events, receiver) = mpsc::unbounded_channel();
    let (ended, end) = oneshot::channel();
    let unread = Arc::new(AtomicUsize::new(0));
    let (unread_bytes, label) = (Arc::clone(&unread), StreamLabel::default());
    let stream = EventStream { framing, patience, events: receiver, unread, error, label };
    (SseSender { framing, events, unread_bytes }, ended, stream.response(end))
}

/// The reading side of a stream.
struct EventStream {
    framing: StreamFraming,
    patience: StreamPatience,
    events: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
    error: ErrorEvent,
    label: StreamLabel,
}

enum SseStreamState {
    /// The headers were sent before the first event.
    Waiting {
        commented: bool,
    },
    FirstEvent(Bytes),
    Events,
    Aborted,
}

impl EventStream {
    async fn response(mut self, end: oneshot::Receiver<ApiResult<()>>) -> ApiResult<Response> {
        let state = match tokio::time::timeout(self.patience.headers, self.events.recv()).await {
            Ok(Some(first)) => SseStreamState::FirstEvent(first),
            Ok(None) => {
                return Err(end
                    .await
                    .unwrap_or_else(|_| Err(ErrorResponse::shutting_down()))
                    .err()
                    .unwrap_or_else(ErrorResponse::shutting_down));
            }
            Err(_) => SseStreamState::Waiting { commented: false },
        };
        let content_type = match self.framing {
            StreamFraming::ServerSentEvents => "text/event-stream",
            StreamFraming::JsonLines => JSON_LINES,
        };
        let headers = [
            (CONTENT_TYPE, content_type),
            (CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        let label = Extension(self.label.clone());
        let body = stream::unfold((state, self, Some(end)), |(state, mut stream, mut end)| async move {
            let event = match state {
                SseStreamState::Waiting { commented } => match stream.first_event(commented).await {
                    FirstEvent::Comment => {
                        let comment = Ok(Bytes::from_static(WAITING_COMMENT));
                        return Some((comment, (SseStreamState::Waiting { commented: true }, stream, end)));
                    }
                    FirstEvent::Event(event) => event,
                },
                SseStreamState::FirstEvent(first) => Some(first),
                SseStreamState::Events => stream.events.recv().await,
                // An error instead of the last HTTP chunk closes the connection without a clean end.
                SseStreamState::Aborted => {
                    tokio::time::sleep(FLUSH_TIME).await;
                    let aborted = io::Error::other("the answer was aborted");
                    return Some((Err(aborted), (SseStreamState::Aborted, stream, None)));
                }
            };
            if let Some(event) = event {
                stream.unread.fetch_sub(event.len(), Ordering::Relaxed);
                return Some((Ok(event), (SseStreamState::Events, stream, end)));
            }
            let failure = match end.take()?.await {
                Ok(Ok(())) => return None,
                Ok(Err(failure)) => failure,
                Err(_) => ErrorResponse::shutting_down(),
            };
            // The status of the response was sent before.
            stream.label.log_failure(failure.kind());
            let (name, data) = (stream.error)(&failure);
            let event = format_event(stream.framing, name, &data.to_string());
            Some((Ok(event), (SseStreamState::Aborted, stream, None)))
        });
        // Layers may ask for more after the end.
        Ok((headers, label, Body::from_stream(body.fuse())).into_response())
    }

    /// Waits for the first event, and comments on it from time to time where the format has comments.
    async fn first_event(&mut self, commented: bool) -> FirstEvent {
        match self.framing {
            StreamFraming::JsonLines => FirstEvent::Event(self.events.recv().await),
            StreamFraming::ServerSentEvents if !commented => FirstEvent::Comment,
            StreamFraming::ServerSentEvents => {
                match tokio::time::timeout(self.patience.comment, self.events.recv()).await {
                    Ok(event) => FirstEvent::Event(event),
                    Err(_) => FirstEvent::Comment,
                }
            }
        }
    }
}

enum FirstEvent {
    Comment,
    /// None: the stream ended without one.
    Event(Option<Bytes>),
}

fn format_event(framing: StreamFraming, name: Option<&str>, data: &str) -> Bytes {
    if framing == StreamFraming::JsonLines {
        return Bytes::from(format!("{data}\n"));
    }
    let event = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{event}data: {data}\n\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn error_event(error: &ErrorResponse) -> (Option<&'static str>, Value) {
        (None, json!({ "error": error.message() }))
    }

    /// The body as text, and whether the stream ended cleanly.
    async fn body_text(response: Response) -> (String, bool) {
        use http_body_util::BodyExt;
        let (mut text, mut body) = (String::new(), response.into_body());
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return (text, false) };
            text.push_str(&String::from_utf8_lossy(frame.data_ref().map_or(&[], |data| data)));
        }
        (text, true)
    }

    const SHORT: StreamPatience =
        StreamPatience { headers: Duration::from_millis(20), comment: Duration::from_millis(30) };

    #[tokio::test]
    async fn stream_comments_while_it_waits() {
        let (out, ended, response) = stream_channel(StreamFraming::ServerSentEvents, SHORT, error_event);
        let writer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            out.send_json(None, &json!(1));
            let _ = ended.send(Ok(()));
        });
        let response = response.await.expect("the headers come before the first event");
        assert!(!writer.is_finished());
        let (text, clean) = body_text(response).await;
        let comments = text.matches(": waiting\n\n").count();
        assert!(clean && comments >= 2, "{text}");
        assert_eq!(text.replace(": waiting\n\n", ""), "data: 1\n\n", "no comment after the first event");
    }

    #[tokio::test]
    async fn stream_of_json_lines_has_no_comments() {
        let (out, ended, response) = stream_channel(StreamFraming::JsonLines, SHORT, error_event);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            out.send_json(None, &json!({ "a": 1 }));
            let _ = ended.send(Err(ErrorResponse::bad_request("late")));
        });
        let response = response.await.expect("the headers come before the first event");
        assert_eq!(response.headers()[CONTENT_TYPE], "application/x-ndjson");
        let (text, clean) = body_text(response).await;
        assert_eq!((text.as_str(), clean), ("{\"a\":1}\n{\"error\":\"late\"}\n", false));
    }

    #[tokio::test]
    async fn stream_error_before_the_headers_has_a_status() {
        let (out, ended, response) = stream_channel(StreamFraming::ServerSentEvents, SHORT, error_event);
        let _ = ended.send(Err(ErrorResponse::not_found("gone")));
        drop(out);
        assert_eq!(response.await.expect_err("no event was sent").status(), 404);
    }

    #[tokio::test]
    async fn stream_error_after_the_headers_is_an_event() {
        let (out, ended, response) = stream_channel(StreamFraming::ServerSentEvents, SHORT, error_event);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(60)).await;
            let _ = ended.send(Err(ErrorResponse::not_found("gone")));
            drop(out);
        });
        let (text, clean) = body_text(response.await.expect("the headers")).await;
        assert!(text.ends_with("data: {\"error\":\"gone\"}\n\n") && !clean, "{text}");
    }
}

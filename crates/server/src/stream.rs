//! Answers that come word by word, as server-sent events. Whoever speaks never waits for whoever reads: what is not read yet is
//! kept, up to a limit, and a reader who is further behind than that is taken for gone.

use crate::answer::{Answer, Refusal};
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use halo_core::seams::Flow;
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, oneshot};

/// What a reader may be behind, in bytes.
const BEHIND: usize = 64 << 20;

/// Where events go.
pub(crate) struct Out {
    lines: mpsc::UnboundedSender<Bytes>,
    /// Bytes that were sent and not yet read.
    unread: Arc<AtomicUsize>,
}

impl Out {
    /// Whether anybody still reads.
    pub fn flow(&self) -> Flow {
        let gone = self.lines.is_closed() || self.unread.load(Ordering::Relaxed) > BEHIND;
        if gone { Flow::Stop } else { Flow::Continue }
    }

    /// Sends an event.
    pub fn event(&self, name: Option<&str>, value: &impl Serialize) -> Flow {
        let Ok(json) = serde_json::to_string(value) else { return Flow::Stop };
        self.line(name, &json)
    }

    /// Sends a line as it is.
    pub fn line(&self, name: Option<&str>, data: &str) -> Flow {
        let bytes = event(name, data);
        self.unread.fetch_add(bytes.len(), Ordering::Relaxed);
        let _ = self.lines.send(bytes);
        self.flow()
    }
}

/// How a stream ended: sent by the task that fills it, before it drops [`Out`].
pub(crate) type Ended = oneshot::Sender<Answer<()>>;

/// An error as the last event of a stream: the event's name, and its data.
pub(crate) type ErrorEvent = fn(&Refusal) -> (Option<&'static str>, Value);

/// Runs what generates on a thread of its own. What fails before the first event is answered as an error. What fails later is
/// told by an error event, and the connection is broken off: no client can take it for an answer that ended.
pub(crate) async fn streamed(
    error: ErrorEvent,
    speak: impl FnOnce(&Out) -> Answer<()> + Send + 'static,
) -> Answer<Response> {
    let (out, ended, response) = channel(error);
    tokio::task::spawn_blocking(move || {
        let _ = ended.send(speak(&out));
    });
    response.await
}

/// The response to a stream that somebody else fills.
pub(crate) fn channel(error: ErrorEvent) -> (Out, Ended, impl Future<Output = Answer<Response>>) {
    let (lines, heard) = mpsc::unbounded_channel();
    let (ended, end) = oneshot::channel();
    let unread = Arc::new(AtomicUsize::new(0));
    (Out { lines, unread: Arc::clone(&unread) }, ended, from(heard, unread, end, error))
}

/// The task that fills a stream ended without a result: the program is ending, or has a fault.
fn broken_off() -> Refusal {
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending")
}

/// What is left to send.
enum Rest {
    First(Bytes),
    Lines,
    BrokenOff,
}

async fn from(
    mut heard: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
    end: oneshot::Receiver<Answer<()>>,
    error: ErrorEvent,
) -> Answer<Response> {
    let Some(first) = heard.recv().await else {
        return Err(end.await.unwrap_or_else(|_| Err(broken_off())).err().unwrap_or_else(broken_off));
    };
    let start = (Rest::First(first), heard, unread, Some(end));
    let lines = stream::unfold(start, move |(rest, mut heard, unread, mut end)| async move {
        let line = match rest {
            Rest::First(first) => Some(first),
            Rest::Lines => heard.recv().await,
            // An error instead of the last chunk: the connection is closed without a clean end.
            Rest::BrokenOff => {
                let why = io::Error::other("the answer was broken off");
                return Some((Err(why), (Rest::BrokenOff, heard, unread, None)));
            }
        };
        if let Some(line) = line {
            unread.fetch_sub(line.len(), Ordering::Relaxed);
            return Some((Ok(line), (Rest::Lines, heard, unread, end)));
        }
        let why = match end.take()?.await {
            Ok(Ok(())) => return None,
            Ok(Err(why)) => why,
            Err(_) => broken_off(),
        };
        let (name, data) = error(&why);
        Some((Ok(event(name, &data.to_string())), (Rest::BrokenOff, heard, unread, None)))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

fn event(name: Option<&str>, data: &str) -> Bytes {
    let named = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{named}data: {data}\n\n"))
}

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
use std::convert::Infallible;
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
        let named = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
        let bytes = Bytes::from(format!("{named}data: {data}\n\n"));
        self.unread.fetch_add(bytes.len(), Ordering::Relaxed);
        let _ = self.lines.send(bytes);
        self.flow()
    }
}

/// Runs what speaks on a thread of its own. What goes wrong before the first word is answered as an error; after it, the
/// stream ends.
pub(crate) async fn streamed(speak: impl FnOnce(&Out) -> Answer<()> + Send + 'static) -> Answer<Response> {
    let (out, failed, response) = channel();
    tokio::task::spawn_blocking(move || {
        if let Err(why) = speak(&out) {
            let _ = failed.send(why);
        }
    });
    response.await
}

/// The response to a stream that somebody else fills.
pub(crate) fn channel() -> (Out, oneshot::Sender<Refusal>, impl Future<Output = Answer<Response>>) {
    let (lines, heard) = mpsc::unbounded_channel();
    let (failed, failure) = oneshot::channel();
    let unread = Arc::new(AtomicUsize::new(0));
    (Out { lines, unread: Arc::clone(&unread) }, failed, from(heard, unread, failure))
}

async fn from(
    mut heard: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
    failure: oneshot::Receiver<Refusal>,
) -> Answer<Response> {
    let Some(first) = heard.recv().await else {
        let gone = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending");
        return Err(failure.await.unwrap_or(gone));
    };
    let lines = stream::unfold((Some(first), heard, unread), |(first, mut heard, unread)| async move {
        let line = match first {
            Some(first) => first,
            None => heard.recv().await?,
        };
        unread.fetch_sub(line.len(), Ordering::Relaxed);
        Some((Ok::<_, Infallible>(line), (None, heard, unread)))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

//! What happens, to everybody who listens. Each event is written down once, for all of them; whoever reads too slowly is told
//! that something was missed, and nobody waits for them.

use crate::halo::wire::{self, Told};
use crate::traces::{Export, Traces};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use halo_engine::board::Board;
use halo_engine::event::Event;
use halo_engine::host::Audience;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender, channel};

/// Where events go out from.
pub(crate) struct Hub {
    out: Sender<Arc<Line>>,
    traces: Option<Traces>,
}

/// An event as it is sent.
pub(crate) struct Line {
    conversation: String,
    json: String,
}

/// How many events a reader may be behind.
const BEHIND: usize = 4096;

impl Audience for Hub {
    fn hear(&self, conversation: &str, number: u64, event: &Event, board: &Board) {
        if let Some(traces) = &self.traces {
            traces.hear(conversation, number, event, board);
        }
        if self.out.receiver_count() > 0
            && let Some(told) = wire::told(event, board)
        {
            self.send(conversation, number, told);
        }
    }
}

impl Hub {
    /// With nobody listening yet.
    pub fn new(traces: Option<Export>) -> Self {
        Self { out: channel(BEHIND).0, traces: traces.map(Traces::new) }
    }

    /// Tells everybody who listens.
    pub fn send(&self, conversation: &str, number: u64, told: Told) {
        let numbered = wire::Numbered { conversation: conversation.to_owned(), number, told };
        if let Ok(json) = serde_json::to_string(&numbered) {
            // Nobody listening is no mistake.
            let _ = self.out.send(Arc::new(Line { conversation: conversation.to_owned(), json }));
        }
    }

    /// All that happens from now on, in one conversation or in all.
    pub fn listen(&self, conversation: Option<String>) -> Response {
        let first = stream::once(async { Ok(Sse::default().comment("listening")) });
        let events = first.chain(lines(self.out.subscribe(), conversation));
        axum::response::Sse::new(events)
            .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
            .into_response()
    }

    /// There will be no more: whoever listens is let go.
    pub fn end(&self) {
        let _ = self.out.send(Arc::new(Line { conversation: String::new(), json: String::new() }));
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.out.receiver_count()
    }
}

fn lines(
    heard: Receiver<Arc<Line>>,
    conversation: Option<String>,
) -> impl Stream<Item = Result<Sse, Infallible>> {
    stream::unfold((heard, conversation), |(mut heard, wanted)| async move {
        loop {
            match heard.recv().await {
                Ok(line) if line.json.is_empty() => return None,
                Ok(line) if wanted.as_ref().is_none_or(|wanted| *wanted == line.conversation) => {
                    return Some((Ok(Sse::default().data(&line.json)), (heard, wanted)));
                }
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => {
                    let lost = format!("{{\"type\":\"missed\",\"events\":{missed}}}");
                    return Some((Ok(Sse::default().data(lost)), (heard, wanted)));
                }
                Err(RecvError::Closed) => return None,
            }
        }
    })
}

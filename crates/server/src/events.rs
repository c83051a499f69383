//! What happens, to everybody who listens. Each event is written down once, for all of them; whoever reads too slowly is told
//! that something was missed, and nobody waits for them.

use crate::halo::wire::{self, ApiEventKind};
use crate::otlp::{TraceExporter, TurnTracer};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use halo_engine::event::Event;
use halo_engine::host::EventListener;
use halo_engine::snapshot::SnapshotCell;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender, channel};

/// Where events go out from.
pub(crate) struct EventHub {
    sender: Sender<Arc<SerializedEvent>>,
    tracer: Option<TurnTracer>,
}

/// An event as it is sent.
pub(crate) struct SerializedEvent {
    conversation: String,
    json: String,
}

/// How many events a reader may be behind.
const EVENT_BUFFER: usize = 4096;

impl EventListener for EventHub {
    fn on_event(&self, conversation: &str, number: u64, event: &Event, board: &SnapshotCell) {
        if let Some(traces) = &self.tracer {
            traces.record_event(conversation, number, event, board);
        }
        if self.sender.receiver_count() > 0
            && let Some(told) = wire::api_event(event, board)
        {
            self.publish(conversation, number, told);
        }
    }
}

impl EventHub {
    /// With nobody listening yet.
    pub fn new(traces: Option<TraceExporter>) -> Self {
        Self { sender: channel(EVENT_BUFFER).0, tracer: traces.map(TurnTracer::new) }
    }

    /// Tells everybody who listens.
    pub fn publish(&self, conversation: &str, number: u64, told: ApiEventKind) {
        let numbered = wire::ApiEvent { conversation: conversation.to_owned(), number, kind: told };
        if let Ok(json) = serde_json::to_string(&numbered) {
            // Nobody listening is no mistake.
            let _ =
                self.sender.send(Arc::new(SerializedEvent { conversation: conversation.to_owned(), json }));
        }
    }

    /// All that happens from now on, in one conversation or in all.
    pub fn subscribe(&self, conversation: Option<String>) -> Response {
        let first = stream::once(async { Ok(Sse::default().comment("listening")) });
        let events = first.chain(event_stream(self.sender.subscribe(), conversation));
        axum::response::Sse::new(events)
            .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
            .into_response()
    }

    /// There will be no more: whoever listens is let go.
    pub fn close(&self) {
        let _ =
            self.sender.send(Arc::new(SerializedEvent { conversation: String::new(), json: String::new() }));
    }

    pub fn subscriber_count(&self) -> usize {
        self.sender.receiver_count()
    }
}

fn event_stream(
    heard: Receiver<Arc<SerializedEvent>>,
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

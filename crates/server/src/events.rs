//! The event stream. Each event is serialized once for all subscribers. A subscriber that is too far behind gets a `missed` event;
//! the sender never waits.

use crate::otlp::{TraceExporter, TurnTracer};
use crate::wire::{ApiEvent, ApiEventKind, api_event};
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

pub(crate) struct EventHub {
    sender: Sender<Arc<SerializedEvent>>,
    tracer: Option<TurnTracer>,
}

/// An event as it is sent; without JSON it ends the stream.
pub(crate) struct SerializedEvent {
    conversation: String,
    json: String,
}

/// How many events a subscriber may be behind.
const EVENT_BUFFER: usize = 4096;

impl EventListener for EventHub {
    fn on_event(&self, conversation: &str, number: u64, event: &Event, snapshot: &SnapshotCell) {
        if let Some(tracer) = &self.tracer {
            tracer.record_event(conversation, number, event, snapshot);
        }
        if self.sender.receiver_count() > 0
            && let Some(kind) = api_event(event, snapshot)
        {
            self.publish(conversation, number, kind);
        }
    }
}

impl EventHub {
    pub fn new(exporter: Option<TraceExporter>) -> Self {
        Self { sender: channel(EVENT_BUFFER).0, tracer: exporter.map(TurnTracer::new) }
    }

    pub fn publish(&self, conversation: &str, number: u64, kind: ApiEventKind) {
        let event = ApiEvent { conversation: conversation.to_owned(), number, kind };
        if let Ok(json) = serde_json::to_string(&event) {
            // Sending fails when there is no subscriber, which is no error.
            let _ =
                self.sender.send(Arc::new(SerializedEvent { conversation: conversation.to_owned(), json }));
        }
    }

    /// The events from now on, of one conversation or of all.
    pub fn subscribe(&self, conversation: Option<String>) -> Response {
        let opening = stream::once(async { Ok(Sse::default().comment("listening")) });
        let events = opening.chain(event_stream(self.sender.subscribe(), conversation));
        axum::response::Sse::new(events)
            .keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
            .into_response()
    }

    /// Ends the stream of every subscriber.
    pub fn close(&self) {
        let _ =
            self.sender.send(Arc::new(SerializedEvent { conversation: String::new(), json: String::new() }));
    }

    pub fn subscriber_count(&self) -> usize {
        self.sender.receiver_count()
    }
}

fn event_stream(
    events: Receiver<Arc<SerializedEvent>>,
    conversation: Option<String>,
) -> impl Stream<Item = Result<Sse, Infallible>> {
    stream::unfold((events, conversation), |(mut events, conversation)| async move {
        loop {
            match events.recv().await {
                Ok(event) if event.json.is_empty() => return None,
                Ok(event) if conversation.as_ref().is_none_or(|name| *name == event.conversation) => {
                    return Some((Ok(Sse::default().data(&event.json)), (events, conversation)));
                }
                Ok(_) => {}
                Err(RecvError::Lagged(count)) => {
                    let missed = format!("{{\"type\":\"missed\",\"events\":{count}}}");
                    return Some((Ok(Sse::default().data(missed)), (events, conversation)));
                }
                Err(RecvError::Closed) => return None,
            }
        }
    })
}

//! OpenTelemetry traces: a span for each turn, with a child span for each stage. A trace contains no text of a conversation: no
//! messages, no name of the conversation, which can be made of them, and no error message, which names the conversation.

use halo_core::ErrorKind;
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::snapshot::SnapshotCell;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Exports one request of OTLP over HTTP, as JSON. It runs on a thread of its own, so it may block.
pub type TraceExporter = Box<dyn FnMut(&Value) -> Result<(), String> + Send>;

/// Collects the stages of running turns and exports each turn when it ends.
pub(crate) struct TurnTracer {
    queue: SyncSender<Value>,
    open_turns: Mutex<BTreeMap<String, Vec<StageSpan>>>,
}

#[derive(Clone, Copy)]
struct StageSpan {
    stage: TurnStage,
    from: SystemTime,
    to: SystemTime,
}

/// How many traces may be queued for the exporter; further ones are dropped.
const MAX_QUEUED_TRACES: usize = 256;

impl TurnTracer {
    pub fn new(mut export: TraceExporter) -> Self {
        let (queue, traces) = sync_channel::<Value>(MAX_QUEUED_TRACES);
        let work = move || {
            let mut works = true;
            for trace in traces {
                let exported = export(&trace);
                // A failing exporter is reported once, not at every turn.
                if let Err(message) = &exported
                    && works
                {
                    tracing::warn!("exporting traces failed: {message}");
                }
                works = exported.is_ok();
            }
        };
        if let Err(e) = std::thread::Builder::new().name("halo-traces".into()).spawn(work) {
            tracing::warn!("traces are off: starting the exporter thread failed: {e}");
        }
        Self { queue, open_turns: Mutex::default() }
    }

    pub fn record_event(&self, conversation: &str, number: u64, event: &Event, snapshot: &SnapshotCell) {
        let outcome = match event {
            Event::StageFinished(stage, duration) => {
                let to = SystemTime::now();
                let span = StageSpan { stage: *stage, from: to.checked_sub(*duration).unwrap_or(to), to };
                self.open_turns.lock().entry(conversation.to_owned()).or_default().push(span);
                return;
            }
            Event::Done(summary) => Ok(summary),
            Event::Failed { kind, .. } => Err(*kind),
            _ => return,
        };
        let stages = self.open_turns.lock().remove(conversation).unwrap_or_default();
        if !stages.is_empty() {
            let state = snapshot.get().state;
            let _ = self.queue.try_send(otlp_trace(&state.id, number, &state.model.name, &stages, outcome));
        }
    }
}

/// One turn as an OTLP request. Attribute names follow the semantic conventions of OpenTelemetry where they exist.
fn otlp_trace(
    conversation_id: &str,
    number: u64,
    model: &str,
    stages: &[StageSpan],
    outcome: Result<&TurnSummary, ErrorKind>,
) -> Value {
    let (from, to) = stages
        .iter()
        .fold((stages[0].from, stages[0].to), |(from, to), span| (from.min(span.from), to.max(span.to)));
    let seed = format!("{conversation_id}\0{number}\0{}", unix_nanos(from));
    let digest = Sha256::digest(seed.as_bytes());
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (trace_id, root_id) = (hex(&digest[..16]), hex(&digest[16..24]));
    let string = |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
    let integer = |key: &str, value: usize| json!({ "key": key, "value": { "intValue": value.to_string() } });
    let mut attributes = vec![
        string("gen_ai.operation.name", "chat"),
        string("gen_ai.provider.name", "halo"),
        string("gen_ai.request.model", model),
    ];
    // A turn that failed before its message was stored has no conversation.
    attributes
        .extend((!conversation_id.is_empty()).then(|| string("gen_ai.conversation.id", conversation_id)));
    let status = match outcome {
        Ok(summary) => {
            let finish = json!({ "arrayValue": { "values": [{ "stringValue": summary.finish.name() }] } });
            attributes.extend([
                json!({ "key": "gen_ai.response.finish_reasons", "value": finish }),
                integer("gen_ai.usage.output_tokens", summary.tokens),
                integer("halo.window.tokens", summary.live_tokens),
                integer("halo.chunks.resurrected", summary.resurrected),
                integer("halo.chunks.pruned", summary.pruned),
            ]);
            json!({})
        }
        Err(kind) => {
            attributes.push(string("error.type", &format!("{kind:?}")));
            json!({ "code": 2 })
        }
    };
    let span = |name: &str, id: &str, parent: &str, from: SystemTime, to: SystemTime| {
        json!({
            "traceId": trace_id,
            "spanId": id,
            "parentSpanId": parent,
            "name": name,
            "kind": 1,
            "startTimeUnixNano": unix_nanos(from).to_string(),
            "endTimeUnixNano": unix_nanos(to).to_string(),
        })
    };
    let mut turn = span(&format!("chat {model}"), &root_id, "", from, to);
    turn["attributes"] = attributes.into();
    turn["status"] = status;
    let children = stages.iter().enumerate().map(|(n, stage)| {
        let id = hex(&Sha256::digest(format!("{seed}\0{n}").as_bytes())[..8]);
        span(stage.stage.name(), &id, &root_id, stage.from, stage.to)
    });
    let spans: Vec<Value> = std::iter::once(turn.clone()).chain(children).collect();
    let version = env!("CARGO_PKG_VERSION");
    json!({ "resourceSpans": [{
        "resource": { "attributes": [string("service.name", "halo"), string("service.version", version)] },
        "scopeSpans": [{ "scope": { "name": "halo", "version": version }, "spans": spans }],
    }] })
}

fn unix_nanos(at: SystemTime) -> u128 {
    at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_nanos()
}

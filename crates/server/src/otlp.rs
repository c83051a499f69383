//! Turns as traces, for those who watch their programs with OpenTelemetry: a span for each turn, and within it one for each
//! stage. What was said is not in them.

use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::snapshot::SnapshotCell;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Sends traces away: a request of OTLP over HTTP, as JSON. It may take its time, and fail.
pub type TraceExporter = Box<dyn FnMut(&Value) -> Result<(), String> + Send>;

/// Makes traces of what happens.
pub(crate) struct TurnTracer {
    queue: SyncSender<Value>,
    open_turns: Mutex<BTreeMap<String, Vec<StageSpan>>>,
}

/// A stage that is over.
#[derive(Clone, Copy)]
struct StageSpan {
    stage: TurnStage,
    from: SystemTime,
    to: SystemTime,
}

/// How many traces may wait to be sent; what is more is lost, and nobody waits.
const MAX_QUEUED_TRACES: usize = 256;

impl TurnTracer {
    /// Traces that are sent away like that, by a thread of their own.
    pub fn new(mut export: TraceExporter) -> Self {
        let (out, todo) = sync_channel::<Value>(MAX_QUEUED_TRACES);
        let work = move || {
            let mut well = true;
            for trace in todo {
                let sent = export(&trace);
                // The same trouble is told once, not at every turn.
                if let Err(why) = &sent
                    && well
                {
                    tracing::warn!("traces cannot be sent: {why}");
                }
                well = sent.is_ok();
            }
        };
        if let Err(why) = std::thread::Builder::new().name("halo-traces".into()).spawn(work) {
            tracing::warn!("no traces are sent: {why}");
        }
        Self { queue: out, open_turns: Mutex::default() }
    }

    pub fn record_event(&self, conversation: &str, number: u64, event: &Event, board: &SnapshotCell) {
        let outcome = match event {
            Event::StageFinished(stage, took) => {
                let to = SystemTime::now();
                let part = StageSpan { stage: *stage, from: to.checked_sub(*took).unwrap_or(to), to };
                self.lock().entry(conversation.to_owned()).or_default().push(part);
                return;
            }
            Event::Done(summary) => Ok(summary),
            Event::Failed(why) => Err(why.as_str()),
            _ => return,
        };
        let parts = self.lock().remove(conversation).unwrap_or_default();
        if !parts.is_empty() {
            let model = &board.get().state.model.name;
            let _ = self.queue.try_send(otlp_trace(conversation, number, model, &parts, outcome));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<StageSpan>>> {
        self.open_turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn as OTLP has it. The names of what is told are OpenTelemetry's, where it has any.
fn otlp_trace(
    conversation: &str,
    number: u64,
    model: &str,
    parts: &[StageSpan],
    outcome: Result<&TurnSummary, &str>,
) -> Value {
    let (from, to) = parts
        .iter()
        .fold((parts[0].from, parts[0].to), |(from, to), part| (from.min(part.from), to.max(part.to)));
    let seed = format!("{conversation}\0{number}\0{}", unix_nanos(from));
    let digest = Sha256::digest(seed.as_bytes());
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (id, root) = (hex(&digest[..16]), hex(&digest[16..24]));
    let text = |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
    let whole = |key: &str, value: usize| json!({ "key": key, "value": { "intValue": value.to_string() } });
    let mut told = vec![
        text("gen_ai.operation.name", "chat"),
        text("gen_ai.provider.name", "halo"),
        text("gen_ai.request.model", model),
        text("gen_ai.conversation.id", conversation),
    ];
    let status = match outcome {
        Ok(summary) => {
            let finish = json!({ "arrayValue": { "values": [{ "stringValue": summary.finish.name() }] } });
            told.extend([
                json!({ "key": "gen_ai.response.finish_reasons", "value": finish }),
                whole("gen_ai.usage.output_tokens", summary.tokens),
                whole("halo.window.tokens", summary.live_tokens),
                whole("halo.chunks.resurrected", summary.resurrected),
                whole("halo.chunks.pruned", summary.pruned),
            ]);
            json!({})
        }
        Err(why) => json!({ "code": 2, "message": why }),
    };
    let span = |name: &str, id_of: &str, parent: &str, from: SystemTime, to: SystemTime| {
        json!({
            "traceId": id,
            "spanId": id_of,
            "parentSpanId": parent,
            "name": name,
            "kind": 1,
            "startTimeUnixNano": unix_nanos(from).to_string(),
            "endTimeUnixNano": unix_nanos(to).to_string(),
        })
    };
    let mut turn = span(&format!("chat {model}"), &root, "", from, to);
    turn["attributes"] = told.into();
    turn["status"] = status;
    let stages = parts.iter().enumerate().map(|(n, part)| {
        let own = hex(&Sha256::digest(format!("{seed}\0{n}").as_bytes())[..8]);
        span(part.stage.name(), &own, &root, part.from, part.to)
    });
    let spans: Vec<Value> = std::iter::once(turn.clone()).chain(stages).collect();
    let version = env!("CARGO_PKG_VERSION");
    json!({ "resourceSpans": [{
        "resource": { "attributes": [text("service.name", "halo"), text("service.version", version)] },
        "scopeSpans": [{ "scope": { "name": "halo", "version": version }, "spans": spans }],
    }] })
}

fn unix_nanos(at: SystemTime) -> u128 {
    at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_nanos()
}

//! Each mistake of a client leaves one line in the log, without a word of what was sent.

use crate::chat::chat_body;
use crate::fake::FakeServer;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::{Arc, Mutex, OnceLock};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

#[derive(Clone, Default)]
pub struct LogLines(Arc<Mutex<Vec<String>>>);

impl LogLines {
    /// The lines of all threads from now on, those of other tests too.
    pub fn of_process() -> &'static Self {
        static LINES: OnceLock<LogLines> = OnceLock::new();
        LINES.get_or_init(|| {
            let lines = LogLines::default();
            tracing::subscriber::set_global_default(lines.clone()).expect("nothing else sets it");
            lines
        })
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().expect("the lock is not poisoned").clone()
    }
}

struct MessageText(String);

impl Visit for MessageText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("halo_server") && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = MessageText(String::new());
        event.record(&mut message);
        self.0.lock().expect("the lock is not poisoned").push(message.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn log_has_one_line_for_each_mistake_of_a_client() {
    let lines = LogLines::default();
    let _guard = tracing::subscriber::set_default(lines.clone());
    let fake = FakeServer::in_memory();
    let take = || std::mem::take(&mut *lines.0.lock().expect("the lock is not poisoned"));
    fake.get("/nothing").await;
    fake.post("/v1/chat/completions", &chat_body(&["u Hello"])).await;
    assert_eq!(take(), Vec::<String>::new(), "the page and good requests leave no line");
    let secret = "Rumpelstilzchen";
    let temperature =
        json!({ "messages": [{ "role": "user", "content": secret }], "options": { "top_p": 7 } });
    for (method, path, body, expected) in [
        (
            "GET",
            format!("/api/halo/v1/conversations/{secret}"),
            String::new(),
            "GET /api/halo/v1/conversations/{name}: 404 NotFound, parameter -, client -",
        ),
        (
            "GET",
            format!("/v1/models/{secret}"),
            String::new(),
            "GET /v1/models/{model}: 404 NotFound, parameter model, client -",
        ),
        (
            "POST",
            "/v1/embeddings".into(),
            json!({ "input": { secret: 1 } }).to_string(),
            "POST /v1/embeddings: 400 InvalidInput, parameter input, client -",
        ),
        (
            "POST",
            "/api/chat".into(),
            temperature.to_string(),
            "POST /api/chat: 400 InvalidInput, parameter options, client -",
        ),
        (
            "POST",
            "/completion".into(),
            json!({ "prompt": { secret: secret } }).to_string(),
            "POST /completion: 400 InvalidInput, parameter prompt, client -",
        ),
        (
            "DELETE",
            "/v1/models".into(),
            String::new(),
            "DELETE /v1/models: 405 InvalidInput, parameter -, client -",
        ),
        (
            "GET",
            format!("/v1/{secret}"),
            String::new(),
            "GET an unknown route: 404 NotFound, parameter -, client -",
        ),
        // A wrong base URL.
        (
            "POST",
            format!("/openai/{secret}"),
            String::new(),
            "POST an unknown route: 404 NotFound, parameter -, client -",
        ),
    ] {
        fake.request(method, &path, &[], body).await;
        assert_eq!(take(), [format!("request refused: {expected}")], "{method} {path}");
    }
    // The HTTP status of these is 200.
    let call = |params: Value| {
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params }).to_string()
    };
    let headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")];
    for (params, expected) in [
        (json!({ "name": secret, "arguments": {} }), "an unknown tool: NotFound"),
        (json!({ "name": "recall", "arguments": { "query": 7 } }), "recall: InvalidInput"),
        (json!({ "name": "read_chunk", "arguments": { "chunk": secret } }), "read_chunk: InvalidInput"),
    ] {
        fake.request("POST", "/mcp", &headers, call(params)).await;
        assert_eq!(take(), [format!("MCP request refused: {expected}, client -")]);
    }
    fake.script_failure_after(secret);
    let body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "stream": true });
    let (events, clean) = fake.stream("/v1/chat/completions", &body).await;
    assert!(!clean, "{events:?}");
    let lines = take();
    let failed = "a stream failed after its headers: POST /v1/chat/completions: Internal, client -";
    assert!(lines.iter().any(|line| line == failed), "{lines:?}");
    assert!(!lines.concat().contains(secret), "{lines:?}");
}

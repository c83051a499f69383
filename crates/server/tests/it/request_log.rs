//! Each mistake of a client leaves one line in the log, without a word of what was sent.

use crate::chat::chat_body;
use crate::fake::FakeServer;
use serde_json::json;
use std::fmt::Write;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Collects the lines of this thread.
#[derive(Clone, Default)]
struct LogLines(Arc<Mutex<Vec<String>>>);

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
            json!({ "prompt": [secret, secret] }).to_string(),
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
    ] {
        fake.request(method, &path, &[], body).await;
        assert_eq!(take(), [format!("request refused: {expected}")], "{method} {path}");
    }
}

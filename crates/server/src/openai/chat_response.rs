//! The format of chat responses.

use super::protocol::{finish_reason, response_id, unix_seconds};
use crate::app::App;
use crate::sse::SseSender;
use halo_core::model::FinishReason;
use serde_json::{Value, json};

/// The fields that all chunks of one response share.
pub(super) struct ChatResponse {
    id: String,
    created: i64,
    model: String,
}

impl ChatResponse {
    pub fn new(app: &App) -> Self {
        Self { id: response_id("chatcmpl"), created: unix_seconds(), model: app.backend.model_info().name }
    }

    fn json(&self, object: &str, choice: &Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        })
    }

    /// A chunk of a stream.
    pub fn chunk(&self, delta: &Value, finish: Option<&str>) -> Value {
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish });
        self.json("chat.completion.chunk", &choice)
    }

    /// A response without streaming.
    pub fn message(&self, text: &str, finish: &str, usage: Value) -> Value {
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": finish });
        let mut json = self.json("chat.completion", &choice);
        json["usage"] = usage;
        json
    }

    /// The end of a stream: the withheld text, the finish reason, and the usage if the client wants it.
    pub fn send_end(&self, out: &SseSender, withheld: &str, finish: FinishReason, usage: Option<Value>) {
        if !withheld.is_empty() {
            out.send_json(None, &self.chunk(&json!({ "content": withheld }), None));
        }
        let mut last = self.chunk(&json!({}), Some(finish_reason(finish)));
        out.send_json(None, &last);
        if let Some(usage) = usage {
            last["choices"] = json!([]);
            last["usage"] = usage;
            out.send_json(None, &last);
        }
        out.send_text(None, "[DONE]");
    }
}

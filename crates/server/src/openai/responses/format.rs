//! The objects of the Responses API.

use super::record::ResponseRecord;
use super::request::CreateResponse;
use crate::app::App;
use crate::openai::chat_response::call_id;
use crate::openai::protocol::{response_id, unix_seconds};
use halo_core::answer_parser::AnswerParts;
use halo_core::model::FinishReason;
use halo_core::tool_call::FunctionCall;
use serde_json::{Value, json};

/// The fields that all versions of one response share.
#[derive(Clone)]
pub(super) struct ResponseFormat {
    pub id: String,
    pub created: i64,
    model: String,
    /// The parameters of the request, as the response repeats them.
    parameters: Value,
}

/// The figures of a finished response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ResponseUsage {
    pub input: usize,
    pub cached: usize,
    pub output: usize,
    pub reasoning: usize,
}

impl ResponseUsage {
    pub fn json(self) -> Value {
        json!({
            "input_tokens": self.input,
            "input_tokens_details": { "cached_tokens": self.cached },
            "output_tokens": self.output,
            "output_tokens_details": { "reasoning_tokens": self.reasoning },
            "total_tokens": self.input + self.output,
        })
    }
}

impl ResponseFormat {
    pub fn new(app: &App, request: &CreateResponse, tools: &Value) -> Self {
        let id = response_id("resp").replace('-', "_");
        let (model, parameters) = (app.backend.model_info().name, request.parameters_json(tools));
        Self { id, created: unix_seconds(), model, parameters }
    }

    /// A stored response. Its parameters are null where they were forgotten.
    pub fn stored(app: &App, id: &str, record: &ResponseRecord) -> Self {
        let parameters = match &record.parameters {
            Value::Object(parameters) => json!(parameters),
            _ => CreateResponse::unknown_parameters(record.previous.as_deref()),
        };
        let model = app.backend.model_info().name;
        Self { id: id.to_owned(), created: record.created, model, parameters }
    }

    /// The parameters of the request, which are stored with the response.
    pub fn parameters(&self) -> &Value {
        &self.parameters
    }

    /// The response in a state.
    pub fn object(&self, status: &str, output: &[Value], usage: Option<ResponseUsage>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut object = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "model": self.model,
            "output": output,
            "usage": usage.map(ResponseUsage::json),
            "background": false,
            "service_tier": "default",
        });
        if let (Some(object), Some(parameters)) = (object.as_object_mut(), self.parameters.as_object()) {
            object.extend(parameters.clone());
        }
        object
    }

    /// The id of an item of this response: `msg_…`.
    pub fn item_id(&self, prefix: &str, index: usize) -> String {
        let number = self.id.split_once('_').map_or(self.id.as_str(), |(_, number)| number);
        format!("{prefix}_{number}_{index}")
    }

    pub fn reasoning_item(&self, status: &str, text: &str) -> Value {
        let content =
            if text.is_empty() { json!([]) } else { json!([{ "type": "reasoning_text", "text": text }]) };
        json!({ "type": "reasoning", "id": self.item_id("rs", 0), "status": status, "summary": [], "content": content })
    }

    pub fn message_item(&self, status: &str, index: usize, content: &[Value]) -> Value {
        json!({
            "type": "message", "id": self.item_id("msg", index), "status": status, "role": "assistant", "content": content,
        })
    }

    pub fn call_item(&self, status: &str, index: usize, call: &FunctionCall) -> Value {
        json!({
            "type": "function_call", "id": self.item_id("fc", index), "status": status,
            "call_id": call_id(&self.id, index), "name": call.name, "arguments": call.arguments,
        })
    }

    /// The items of an answer.
    pub fn output(&self, answer: &AnswerParts, status: &str) -> Vec<Value> {
        let mut items = Vec::new();
        if !answer.reasoning.is_empty() {
            items.push(self.reasoning_item("completed", &answer.reasoning));
        }
        if !answer.text.is_empty() || (answer.calls.is_empty() && answer.reasoning.is_empty()) {
            items.push(self.message_item(status, 0, &[text_part(&answer.text)]));
        }
        let calls = answer.calls.iter().enumerate();
        items.extend(calls.map(|(n, call)| self.call_item(status, n, call)));
        items
    }
}

pub(super) fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

/// The status of an answer by how it ended.
pub(super) fn status_name(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "incomplete" } else { "completed" }
}

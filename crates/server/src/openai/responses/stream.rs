//! A response as a stream of events.

use super::format::{ResponseFormat, ResponseUsage, status_name, text_part};
use crate::error::ErrorResponse;
use crate::sse::SseSender;
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::model::{FinishReason, StepFlow};
use serde_json::{Value, json};

/// Writes the events of one response.
pub(super) struct ResponseStream {
    format: ResponseFormat,
    sequence: u64,
    started: bool,
    open: Option<OpenItem>,
    answer: AnswerParts,
    /// How many messages are complete, and where the text of the next one begins in the answer.
    messages: (usize, usize),
    /// The items that are complete.
    output: Vec<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenItem {
    Reasoning,
    /// The number of the message: text after a call is another one.
    Message(usize),
    Call(usize),
}

impl ResponseStream {
    pub fn new(format: ResponseFormat) -> Self {
        let (answer, output) = (AnswerParts::default(), Vec::new());
        Self { format, sequence: 0, started: false, open: None, answer, messages: (0, 0), output }
    }

    fn send(&mut self, out: &SseSender, name: &str, mut fields: Value) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.send_json(Some(name), &fields);
    }

    /// The first events, once.
    pub fn start(&mut self, out: &SseSender) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        for name in ["response.created", "response.in_progress"] {
            let response = self.format.object("in_progress", &[], None);
            self.send(out, name, json!({ "response": response }));
        }
    }

    /// The events of what a token adds.
    pub fn push(&mut self, out: &SseSender, deltas: &[AnswerDelta]) -> StepFlow {
        self.start(out);
        for delta in deltas {
            let item = match delta {
                AnswerDelta::Reasoning(_) => OpenItem::Reasoning,
                AnswerDelta::Text(_) => OpenItem::Message(self.messages.0),
                AnswerDelta::CallStart { index, .. } | AnswerDelta::CallArguments { index, .. } => {
                    OpenItem::Call(*index)
                }
            };
            if self.open != Some(item) {
                self.close_item(out, "completed");
            }
            self.answer.push(delta.clone());
            if self.open != Some(item) {
                self.open_item(out, item);
            }
            let (name, text) = match delta {
                AnswerDelta::Reasoning(text) => ("response.reasoning_text.delta", text),
                AnswerDelta::Text(text) => ("response.output_text.delta", text),
                AnswerDelta::CallArguments { text, .. } => ("response.function_call_arguments.delta", text),
                AnswerDelta::CallStart { .. } => continue,
            };
            let mut fields = self.place(item);
            fields["delta"] = text.as_str().into();
            if matches!(item, OpenItem::Message(_)) {
                fields["logprobs"] = json!([]);
            }
            self.send(out, name, fields);
        }
        out.flow()
    }

    /// Where in the response an event belongs.
    fn place(&self, item: OpenItem) -> Value {
        let index = self.output.len();
        match item {
            OpenItem::Reasoning => {
                json!({ "item_id": self.format.item_id("rs", 0), "output_index": index, "content_index": 0 })
            }
            OpenItem::Message(n) => {
                json!({ "item_id": self.format.item_id("msg", n), "output_index": index, "content_index": 0 })
            }
            OpenItem::Call(n) => json!({ "item_id": self.format.item_id("fc", n), "output_index": index }),
        }
    }

    /// The text of the open message.
    fn message_text(&self) -> &str {
        self.answer.text.get(self.messages.1..).unwrap_or_default()
    }

    fn item(&self, item: OpenItem, status: &str, is_new: bool) -> Value {
        match item {
            OpenItem::Reasoning if is_new => self.format.reasoning_item(status, ""),
            OpenItem::Reasoning => self.format.reasoning_item(status, &self.answer.reasoning),
            OpenItem::Message(n) if is_new => self.format.message_item(status, n, &[]),
            OpenItem::Message(n) => self.format.message_item(status, n, &[text_part(self.message_text())]),
            OpenItem::Call(n) => {
                self.answer.calls.get(n).map_or(Value::Null, |call| self.format.call_item(status, n, call))
            }
        }
    }

    fn open_item(&mut self, out: &SseSender, item: OpenItem) {
        self.open = Some(item);
        let added =
            json!({ "output_index": self.output.len(), "item": self.item(item, "in_progress", true) });
        self.send(out, "response.output_item.added", added);
        if matches!(item, OpenItem::Message(_)) {
            let mut part = self.place(item);
            part["part"] = text_part("");
            self.send(out, "response.content_part.added", part);
        }
    }

    fn close_item(&mut self, out: &SseSender, status: &str) {
        let Some(item) = self.open.take() else { return };
        let mut done = self.place(item);
        match item {
            OpenItem::Reasoning => {
                done["text"] = self.answer.reasoning.as_str().into();
                self.send(out, "response.reasoning_text.done", done);
            }
            OpenItem::Message(_) => {
                let mut part = done.clone();
                done["text"] = self.message_text().into();
                done["logprobs"] = json!([]);
                self.send(out, "response.output_text.done", done);
                part["part"] = text_part(self.message_text());
                self.send(out, "response.content_part.done", part);
            }
            OpenItem::Call(n) => {
                let call = self.answer.calls.get(n);
                done["name"] = call.map_or(Value::Null, |call| call.name.as_str().into());
                done["arguments"] = call.map_or(Value::Null, |call| call.arguments.as_str().into());
                self.send(out, "response.function_call_arguments.done", done);
            }
        }
        let closed = self.item(item, status, false);
        if let OpenItem::Message(n) = item {
            self.messages = (n + 1, self.answer.text.len());
        }
        self.send(
            out,
            "response.output_item.done",
            json!({ "output_index": self.output.len(), "item": closed }),
        );
        self.output.push(closed);
    }

    /// Ends the open item and the response.
    pub fn finish(
        &mut self,
        out: &SseSender,
        withheld: &[AnswerDelta],
        finish: FinishReason,
        usage: ResponseUsage,
    ) {
        self.push(out, withheld);
        let status = status_name(finish);
        if self.open.is_none() && self.output.is_empty() {
            self.open_item(out, OpenItem::Message(0));
        }
        self.close_item(out, status);
        let response = self.format.object(status, &self.output, Some(usage));
        self.send(out, &format!("response.{status}"), json!({ "response": response }));
    }

    /// The last event of a response that failed after its first event. Returns false where there was none.
    pub fn fail(&mut self, out: &SseSender, error: &ErrorResponse) -> bool {
        if self.started {
            let mut response = self.format.object("failed", &self.output, None);
            response["error"] = json!({ "code": "server_error", "message": error.message() });
            self.send(out, "response.failed", json!({ "response": response }));
        }
        self.started
    }
}

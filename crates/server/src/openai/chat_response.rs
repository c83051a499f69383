//! The format of chat responses.

use super::answer_reader::finish_name;
use super::protocol::{response_id, unix_seconds};
use super::usage::{system_fingerprint, timings, usage};
use crate::app::App;
use crate::generation_usage::GenerationUsage;
use crate::sampling::LogprobBuffer;
use crate::sse::SseSender;
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::model::{FinishReason, StepFlow};
use serde_json::{Value, json};

/// The fields that all chunks of one response share.
#[derive(Clone)]
pub(super) struct ChatResponse {
    id: String,
    created: i64,
    model: String,
    system_fingerprint: String,
    /// Whether calls have their old form, `function_call`.
    legacy: bool,
    /// The log-probabilities of tokens that were not yet sent.
    logprobs: LogprobBuffer,
}

impl ChatResponse {
    pub fn new(app: &App, legacy: bool, logprobs: LogprobBuffer) -> Self {
        Self {
            id: response_id("chatcmpl"),
            created: unix_seconds(),
            model: app.backend.model_info().name,
            system_fingerprint: system_fingerprint(app),
            legacy,
            logprobs,
        }
    }

    fn json(&self, object: &str, choice: &Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": [choice],
        })
    }

    /// A chunk of a stream.
    fn chunk(&self, delta: &Value, finish: Option<&str>) -> Value {
        // The first chunk has the role and no token.
        let has_tokens = finish.is_some() || delta["role"].is_null();
        let logprobs = if has_tokens { self.logprobs.take_chat() } else { Value::Null };
        let choice = json!({ "index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        self.json("chat.completion.chunk", &choice)
    }

    /// The id of a call: unique, and the same in all chunks.
    fn call_id(&self, choice: usize, index: usize) -> String {
        match choice {
            0 => call_id(&self.id, index),
            _ => call_id(&format!("{}_{choice}", self.id), index),
        }
    }

    fn delta(&self, delta: &AnswerDelta) -> Value {
        match delta {
            AnswerDelta::Text(text) => json!({ "content": text }),
            AnswerDelta::Reasoning(text) => json!({ "reasoning_content": text }),
            AnswerDelta::CallStart { name, .. } if self.legacy => {
                json!({ "function_call": { "name": name, "arguments": "" } })
            }
            AnswerDelta::CallArguments { text, .. } if self.legacy => {
                json!({ "function_call": { "arguments": text } })
            }
            AnswerDelta::CallStart { index, name } => {
                let function = json!({ "name": name, "arguments": "" });
                let call = json!({ "index": index, "id": self.call_id(0, *index), "type": "function", "function": function });
                json!({ "tool_calls": [call] })
            }
            AnswerDelta::CallArguments { index, text } => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
            }
        }
    }

    /// The first chunk of a stream.
    pub fn send_start(&self, out: &SseSender) {
        out.send_json(None, &self.chunk(&json!({ "role": "assistant", "content": "" }), None));
    }

    pub fn send_deltas(&self, out: &SseSender, deltas: &[AnswerDelta]) -> StepFlow {
        for delta in deltas {
            out.send_json(None, &self.chunk(&self.delta(delta), None));
        }
        out.flow()
    }

    /// A response without streaming.
    pub fn message(&self, answer: &AnswerParts, finish: FinishReason, measured: &GenerationUsage) -> Value {
        let mut json = self.json("chat.completion", &self.choice(0, answer, finish, &self.logprobs));
        json["usage"] = usage(measured);
        json["timings"] = timings(measured);
        json
    }

    /// A choice of a response without streaming.
    pub fn choice(
        &self,
        index: usize,
        answer: &AnswerParts,
        finish: FinishReason,
        logprobs: &LogprobBuffer,
    ) -> Value {
        let content = Some(&answer.text).filter(|text| answer.calls.is_empty() || !text.is_empty());
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        let calls: Vec<Value> = (answer.calls.iter().enumerate())
            .map(|(n, call)| {
                let function = json!({ "name": call.name, "arguments": call.arguments });
                json!({ "id": self.call_id(index, n), "type": "function", "function": function })
            })
            .collect();
        match calls.first() {
            None => {}
            Some(call) if self.legacy => message["function_call"] = call["function"].clone(),
            Some(_) => message["tool_calls"] = json!(calls),
        }
        let finish = finish_name(finish, answer.calls.len(), self.legacy);
        let logprobs = logprobs.take_chat();
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish })
    }

    /// The end of a stream: what was withheld, the finish reason, and the usage if the client wants it. The last chunk has the
    /// timings.
    pub fn send_end(
        &self,
        out: &SseSender,
        withheld: &[AnswerDelta],
        (finish, calls): (FinishReason, usize),
        measured: &GenerationUsage,
        include_usage: bool,
    ) {
        self.send_deltas(out, withheld);
        let mut last = self.chunk(&json!({}), Some(finish_name(finish, calls, self.legacy)));
        if include_usage {
            out.send_json(None, &last);
            last["choices"] = json!([]);
            last["usage"] = usage(measured);
        }
        last["timings"] = timings(measured);
        out.send_json(None, &last);
        out.send_text(None, "[DONE]");
    }
}

/// The id of a call of a response.
pub(super) fn call_id(response: &str, index: usize) -> String {
    let number = response.split_once(['-', '_']).map_or(response, |(_, number)| number);
    format!("call_{number}_{index}")
}

//! What Ollama's routes share: errors, times and the counts of the last object.

use crate::app::App;
use crate::error::{ErrorResponse, JsonBody};
use crate::generation_usage::GenerationUsage;
use crate::sampling::LogprobBuffer;
use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::AnswerParts;
use halo_core::model::FinishReason;
use halo_core::tool_call::FunctionCall;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// An error in Ollama's format: `{"error": "…"}`, with 400 instead of 422.
pub(super) struct OllamaError(ErrorResponse);

pub(super) type OllamaResult<T> = Result<T, OllamaError>;

impl<E: Into<ErrorResponse>> From<E> for OllamaError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for OllamaError {
    fn into_response(self) -> Response {
        self.0.with_bad_request_status().into_response()
    }
}

/// The last line of a stream that failed.
pub(super) fn error_line(error: &ErrorResponse) -> (Option<&'static str>, Value) {
    (None, json!({ "error": error.message() }))
}

/// A JSON body whose errors are in Ollama's format.
pub(super) struct OllamaJson<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for OllamaJson<T> {
    type Rejection = OllamaError;

    async fn from_request(request: Request, state: &S) -> Result<Self, OllamaError> {
        Ok(Self(JsonBody::from_request(request, state).await?.0))
    }
}

/// Where the text of an answer is: in a message, or in the object itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OllamaLayout {
    Chat,
    Generate,
}

/// The fields that all objects of one answer share.
pub(super) struct OllamaAnswer {
    model: String,
    started: Instant,
    layout: OllamaLayout,
    /// The log-probabilities of tokens that were not yet sent.
    logprobs: LogprobBuffer,
}

impl OllamaAnswer {
    pub fn new(app: &App, layout: OllamaLayout, logprobs: LogprobBuffer) -> Self {
        Self { model: app.backend.model_info().name, started: Instant::now(), layout, logprobs }
    }

    /// An object with a part of an answer, or the whole answer. Arguments of calls are objects in Ollama's format.
    pub fn object(&self, answer: &AnswerParts, done: bool) -> Map<String, Value> {
        let mut content = Map::new();
        if !answer.reasoning.is_empty() {
            content.insert("thinking".into(), json!(answer.reasoning));
        }
        let call = |call: &FunctionCall| {
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
            json!({ "function": { "name": call.name, "arguments": arguments } })
        };
        if !answer.calls.is_empty() {
            content.insert("tool_calls".into(), answer.calls.iter().map(call).collect());
        }
        let mut object = Map::new();
        object.insert("model".into(), json!(self.model));
        object.insert("created_at".into(), json!(jiff::Timestamp::now().to_string()));
        match self.layout {
            OllamaLayout::Chat => {
                content.insert("role".into(), json!("assistant"));
                content.insert("content".into(), json!(answer.text));
                object.insert("message".into(), Value::Object(content));
            }
            OllamaLayout::Generate => {
                content.insert("response".into(), json!(answer.text));
                object.extend(content);
            }
        }
        let logprobs = self.logprobs.take_chat();
        if let Some(tokens) = logprobs["content"].as_array() {
            object.insert("logprobs".into(), json!(tokens));
        }
        object.insert("done".into(), json!(done));
        object
    }

    /// The last object: why the answer ended, and what it cost. The model is loaded when the server starts, so loading takes no time.
    pub fn last_object(
        &self,
        answer: &AnswerParts,
        finish: FinishReason,
        usage: &GenerationUsage,
    ) -> Map<String, Value> {
        let mut object = self.object(answer, true);
        let counts = [
            ("done_reason", json!(done_reason(finish))),
            ("total_duration", nanos(self.started.elapsed())),
            ("load_duration", json!(0)),
            ("prompt_eval_count", json!(usage.prompt_tokens)),
            ("prompt_eval_duration", nanos(usage.prefill_time)),
            ("eval_count", json!(usage.completion_tokens)),
            ("eval_duration", nanos(usage.generate_time)),
        ];
        object.extend(counts.map(|(name, value)| (name.to_owned(), value)));
        object
    }

    /// An answer without a generation, such as to a request that only loads or unloads the model.
    pub fn empty(&self, reason: &str) -> Map<String, Value> {
        let mut object = self.object(&AnswerParts::default(), true);
        object.insert("done_reason".into(), json!(reason));
        object
    }
}

fn done_reason(finish: FinishReason) -> &'static str {
    if finish == FinishReason::Length { "length" } else { "stop" }
}

pub(super) fn nanos(time: Duration) -> Value {
    json!(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

//! Several choices for one chat request. The first one is the answer that is stored; the others are generated from the messages of
//! the request and leave no trace. With `stream`, each choice is sent as a whole when it is complete.

use super::chat_request::ParsedChatRequest;
use super::chat_response::ChatResponse;
use super::protocol::{OpenAiResult, error_event};
use super::unstored_chat::{UnstoredAnswer, answer_unstored};
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use crate::sse::{SseSender, sse_channel};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use halo_core::model::StepFlow;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Responds with all choices. `first` is the response that has the first one; `stream` says whether the last event of a stream reports
/// the usage; none: no stream. Waiting clients of a stream get headers and comments.
pub(super) async fn respond_with_choices(
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ChatResponse,
    first: impl Future<Output = ApiResult<Value>> + Send + 'static,
    stream: Option<bool>,
) -> OpenAiResult<Response> {
    let choices = ChoiceGenerator { app, request, format };
    let Some(include_usage) = stream else {
        let response = choices.generate(first.await?, &mut |_, _| {}).await?;
        return Ok(Json(response).into_response());
    };
    let (out, ended, response) = sse_channel(error_event);
    tokio::spawn(async move {
        let generated = async {
            let first = first.await?;
            choices.generate(first, &mut |response, choice| send_choice(&out, response, choice)).await
        };
        let result = tokio::select! {
            result = generated => result,
            () = disconnected(&out) => Err(ErrorResponse::new(StatusCode::CONFLICT, "the client disconnected")),
        };
        let _ = ended.send(result.map(|response| send_end(&out, &response, include_usage)));
    });
    Ok(response.await?)
}

struct ChoiceGenerator {
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ChatResponse,
}

impl ChoiceGenerator {
    /// Adds further choices to a response that has the first one. `on_choice` gets each of them, the first one too.
    async fn generate(
        &self,
        mut response: Value,
        on_choice: &mut (dyn FnMut(&Value, &Value) + Send),
    ) -> ApiResult<Value> {
        let mut choices = response["choices"].as_array().cloned().unwrap_or_default();
        choices.iter().for_each(|choice| on_choice(&response, choice));
        let mut all_tokens = 0;
        for index in choices.len()..self.request.choice_count {
            let other = self.request.for_choice(index);
            let logprobs = other.logprobs.clone();
            let UnstoredAnswer { answer, finish, usage, .. } =
                answer_unstored(Arc::clone(&self.app), other).await?;
            all_tokens += usage.completion_tokens;
            let choice = self.format.choice(index, &answer, finish, &logprobs);
            on_choice(&response, &choice);
            choices.push(choice);
        }
        for field in ["completion_tokens", "total_tokens"] {
            let sum = response["usage"][field].as_u64().unwrap_or(0) + all_tokens as u64;
            response["usage"][field] = json!(sum);
        }
        response["choices"] = Value::Array(choices);
        Ok(response)
    }
}

/// Returns when the client has left.
async fn disconnected(out: &SseSender) {
    while out.flow() == StepFlow::Continue {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn chunk(response: &Value, choices: Value) -> Value {
    let mut chunk = json!({});
    for field in ["id", "created", "model", "system_fingerprint"] {
        chunk[field] = response[field].clone();
    }
    chunk["object"] = json!("chat.completion.chunk");
    chunk["choices"] = choices;
    chunk
}

fn send_choice(out: &SseSender, response: &Value, choice: &Value) {
    let (index, finish) = (&choice["index"], &choice["finish_reason"]);
    let (mut delta, logprobs) = (choice["message"].clone(), &choice["logprobs"]);
    // In a stream, calls are numbered.
    for (n, call) in delta["tool_calls"].as_array_mut().into_iter().flatten().enumerate() {
        call["index"] = n.into();
    }
    let text = json!([{ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null }]);
    out.send_json(None, &chunk(response, text));
    let end = json!([{ "index": index, "delta": {}, "logprobs": null, "finish_reason": finish }]);
    out.send_json(None, &chunk(response, end));
}

fn send_end(out: &SseSender, response: &Value, include_usage: bool) {
    if include_usage {
        let mut last = chunk(response, json!([]));
        last["usage"] = response["usage"].clone();
        last["timings"] = response["timings"].clone();
        out.send_json(None, &last);
    }
    out.send_text(None, "[DONE]");
}

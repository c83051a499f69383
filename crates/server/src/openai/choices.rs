//! Several choices for one chat request. The first one is the answer that is stored; the others are generated from the messages of
//! the request and leave no trace. With `stream`, each choice is sent as a whole.

use super::chat_request::ParsedChatRequest;
use super::chat_response::ChatResponse;
use super::protocol::{OpenAiResult, error_event};
use super::unstored_chat::{UnstoredAnswer, answer_unstored};
use crate::app::App;
use crate::sse::spawn_sse_stream;
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Adds further choices to a response that has the first one. `stream` says whether the last event of a stream reports the usage;
/// none: no stream.
pub(super) async fn respond_with_choices(
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ChatResponse,
    mut response: Value,
    stream: Option<bool>,
) -> OpenAiResult<Response> {
    let mut choices = response["choices"].as_array().cloned().unwrap_or_default();
    let mut all_tokens = 0;
    for index in choices.len()..request.choice_count {
        let other = request.for_choice(index);
        let logprobs = other.logprobs.clone();
        let UnstoredAnswer { answer, finish, usage, .. } = answer_unstored(Arc::clone(&app), other).await?;
        all_tokens += usage.completion_tokens;
        choices.push(format.choice(index, &answer, finish, &logprobs));
    }
    for field in ["completion_tokens", "total_tokens"] {
        let sum = response["usage"][field].as_u64().unwrap_or(0) + all_tokens as u64;
        response["usage"][field] = json!(sum);
    }
    response["choices"] = Value::Array(choices);
    let Some(include_usage) = stream else { return Ok(Json(response).into_response()) };
    let streamed = spawn_sse_stream(error_event, move |out| {
        for event in stream_events(response, include_usage) {
            out.send_json(None, &event);
        }
        out.send_text(None, "[DONE]");
        Ok(())
    });
    Ok(streamed.await?)
}

/// The events of a stream with the same content as a response.
fn stream_events(mut response: Value, include_usage: bool) -> Vec<Value> {
    let (choices, usage) = (response["choices"].take(), response["usage"].take());
    response["object"] = json!("chat.completion.chunk");
    let chunk = |choices: Value| {
        let mut chunk = response.clone();
        chunk["choices"] = choices;
        chunk
    };
    let mut events = Vec::new();
    for choice in choices.as_array().into_iter().flatten() {
        let (index, finish) = (&choice["index"], &choice["finish_reason"]);
        let (delta, logprobs) = (&choice["message"], &choice["logprobs"]);
        events.push(chunk(json!([
            { "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null }
        ])));
        events.push(chunk(json!([
            { "index": index, "delta": {}, "logprobs": null, "finish_reason": finish }
        ])));
    }
    if include_usage {
        let mut last = chunk(json!([]));
        last["usage"] = usage;
        events.push(last);
    }
    events
}

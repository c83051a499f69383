//! `/api/chat`: a chat in its conversation, as OpenAI's chat completions store it.

use super::options::{add_logprobs, parse_options};
use super::protocol::{OllamaAnswer, OllamaJson, OllamaLayout, OllamaResult, error_line};
use crate::answer_source::AnswerSource;
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::error::{ApiResult, ErrorResponse, null_as_default};
use crate::openai::ForeignChat;
use crate::sampling::LogprobBuffer;
use crate::sse::{SseSender, json_lines_channel};
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::model::StepFlow;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `model` and `keep_alive` are accepted and have no effect: there is one model, and it stays loaded.
#[derive(Deserialize)]
pub(super) struct OllamaChatRequest {
    #[serde(default, deserialize_with = "null_as_default")]
    messages: Vec<OllamaMessage>,
    stream: Option<bool>,
    format: Option<Value>,
    options: Option<Map<String, Value>>,
    #[serde(default)]
    keep_alive: Value,
    #[serde(default)]
    tools: Value,
    #[serde(default)]
    think: Value,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    template: Option<String>,
}

#[derive(Deserialize)]
struct OllamaMessage {
    role: String,
    #[serde(default, deserialize_with = "null_as_default")]
    content: String,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<Map<String, Value>>>,
    tool_name: Option<String>,
    /// The older name of `tool_name`. Some clients send both.
    name: Option<String>,
    tool_call_id: Option<String>,
}

pub(super) async fn chat(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    headers: HeaderMap,
    OllamaJson(request): OllamaJson<OllamaChatRequest>,
) -> OllamaResult<Response> {
    check_template(request.template.as_deref())?;
    let thinking = parse_think(&app, &request.think)?;
    if request.messages.is_empty() {
        // Ollama loads or unloads the model then.
        let answer = OllamaAnswer::new(&app, OllamaLayout::Chat, LogprobBuffer::default());
        let object = answer.empty(load_reason(&request.keep_alive));
        return Ok(Json(object).into_response());
    }
    let body = request.openai_body(thinking)?;
    let mut requested = parse_options(request.options, request.format, &app.backend.rules().sampling)?;
    let logprobs = add_logprobs(&mut requested, request.logprobs, request.top_logprobs)?;
    let answer = OllamaAnswer::new(&app, OllamaLayout::Chat, logprobs.clone());
    let source = AnswerSource::Chat { chat: ForeignChat { body, requested, logprobs, client }, headers };
    respond(app, source, request.stream.unwrap_or(true), answer).await
}

impl OllamaChatRequest {
    /// The request in OpenAI's format. Tools are passed on as they are: Ollama has taken OpenAI's format for them.
    fn openai_body(&self, thinking: Option<bool>) -> ApiResult<Value> {
        let messages = self.messages.iter().enumerate().map(|(n, message)| message.openai_message(n));
        let mut body = json!({ "messages": messages.collect::<ApiResult<Vec<Value>>>()? });
        if self.tools.as_array().is_some_and(|tools| !tools.is_empty()) {
            body["tools"] = self.tools.clone();
        }
        set_thinking(&mut body, thinking);
        Ok(body)
    }
}

impl OllamaMessage {
    fn openai_message(&self, n: usize) -> ApiResult<Value> {
        check_images(&format!("messages[{n}].images"), self.images.as_deref())?;
        let mut message = json!({ "role": self.role, "content": self.content });
        if let Some(calls) = self.tool_calls.as_ref().filter(|calls| !calls.is_empty()) {
            message["tool_calls"] = calls.iter().enumerate().map(openai_tool_call).collect();
        }
        if let Some(name) = self.tool_name.as_ref().or(self.name.as_ref()) {
            message["name"] = json!(name);
        }
        if let Some(id) = &self.tool_call_id {
            message["tool_call_id"] = json!(id);
        }
        Ok(message)
    }
}

/// A tool call in OpenAI's format, where the arguments are a text and each call has an id and a type.
fn openai_tool_call((n, call): (usize, &Map<String, Value>)) -> Value {
    let mut call = call.clone();
    let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
    if let Some(arguments) = arguments.filter(|arguments| arguments.is_object()) {
        let text = arguments.to_string();
        *arguments = json!(text);
    }
    call.entry("id").or_insert_with(|| json!(format!("call_{n}")));
    call.insert("type".into(), json!("function"));
    Value::Object(call)
}

/// Generates an answer and writes it in Ollama's format.
pub(super) async fn respond(
    app: Arc<App>,
    source: AnswerSource,
    stream: bool,
    answer: OllamaAnswer,
) -> OllamaResult<Response> {
    if !stream {
        let (generated, started) = source.complete(app).await?;
        let object = answer.last_object(&generated.answer, generated.finish, &generated.usage);
        let mut response = Json(object).into_response();
        if let Some(started) = started {
            started.set_header(&mut response);
        }
        return Ok(response);
    }
    let answer = Arc::new(answer);
    let end_answer = Arc::clone(&answer);
    let streamed = source.stream(
        app,
        json_lines_channel(error_line),
        move |out, deltas| send_deltas(out, &answer, deltas),
        move |out, generated| {
            send_deltas(out, &end_answer, &generated.withheld);
            // A call is complete at the end, and is sent as a whole.
            if !generated.answer.calls.is_empty() {
                let calls = AnswerParts { calls: generated.answer.calls, ..AnswerParts::default() };
                out.send_json(None, &end_answer.object(&calls, false));
            }
            let last = end_answer.last_object(&AnswerParts::default(), generated.finish, &generated.usage);
            out.send_json(None, &last);
        },
    );
    Ok(streamed.await?)
}

/// Sends the text and the reasoning of deltas.
fn send_deltas(out: &SseSender, answer: &OllamaAnswer, deltas: &[AnswerDelta]) -> StepFlow {
    let mut part = AnswerParts::default();
    deltas.iter().cloned().for_each(|delta| part.push(delta));
    part.calls.clear();
    match part == AnswerParts::default() {
        true => out.flow(),
        false => out.send_json(None, &answer.object(&part, false)),
    }
}

/// What Ollama answers to a request without a prompt: a `keep_alive` of 0 unloads the model.
pub(super) fn load_reason(keep_alive: &Value) -> &'static str {
    let unloads =
        keep_alive.as_f64() == Some(0.0) || keep_alive.as_str().is_some_and(|text| text.starts_with('0'));
    if unloads { "unload" } else { "load" }
}

pub(super) fn check_images(field: &str, images: Option<&[Value]>) -> ApiResult<()> {
    match images {
        Some([_, ..]) => {
            let message = format!("{field}: images are not supported by this model, only text");
            Err(ErrorResponse::bad_request(message).with_param(field))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_template(template: Option<&str>) -> ApiResult<()> {
    match template.filter(|template| !template.is_empty()) {
        Some(_) => {
            let message = "template is not supported: the model's own chat template is used; leave it out, or use \
                           /api/generate with raw";
            Err(ErrorResponse::bad_request(message).with_param("template"))
        }
        None => Ok(()),
    }
}

/// Whether the model is to reason: `think` is false, true, or a level such as `high`, which counts as true.
pub(super) fn parse_think(app: &App, think: &Value) -> ApiResult<Option<bool>> {
    let thinking = match think {
        Value::Null => return Ok(None),
        Value::Bool(thinking) => *thinking,
        Value::String(level) if matches!(level.as_str(), "low" | "medium" | "high" | "max") => true,
        _ => {
            let message = "think must be true, false, low, medium, high or max";
            return Err(ErrorResponse::invalid_parameter("think", message));
        }
    };
    let info = app.backend.model_info();
    if thinking && info.template.reasoning.is_none() {
        // The words of Ollama, which clients look for.
        let message = format!("think: \"{}\" does not support thinking; leave it out", info.name);
        return Err(ErrorResponse::invalid_parameter("think", message));
    }
    Ok(Some(thinking))
}

/// Sets the parameter of the chat template in a request in OpenAI's format.
pub(super) fn set_thinking(body: &mut Value, thinking: Option<bool>) {
    if let Some(thinking) = thinking {
        body["chat_template_kwargs"] = json!({ "enable_thinking": thinking });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ollama_messages_become_messages_of_openai() {
        let request: OllamaChatRequest = serde_json::from_value(json!({
            "model": "x",
            "messages": [
                { "role": "user", "content": "hi", "images": [] },
                { "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": { "a": 1 } } }] },
                { "role": "tool", "content": "2", "tool_name": "f" },
            ],
            "tools": [{ "type": "function" }],
        }))
        .expect("parsed");
        let call = json!({
            "function": { "name": "f", "arguments": "{\"a\":1}" }, "id": "call_0", "type": "function",
        });
        let expected = json!({
            "messages": [
                { "role": "user", "content": "hi" },
                { "role": "assistant", "content": "", "tool_calls": [call] },
                { "role": "tool", "content": "2", "name": "f" },
            ],
            "tools": [{ "type": "function" }],
            "chat_template_kwargs": { "enable_thinking": false },
        });
        assert_eq!(request.openai_body(Some(false)).ok(), Some(expected));
    }

    #[test]
    fn ollama_request_without_prompt_loads_or_unloads() {
        for (keep_alive, reason) in [
            (json!(null), "load"),
            (json!("5m"), "load"),
            (json!(-1), "load"),
            (json!(0), "unload"),
            (json!("0"), "unload"),
            (json!("0s"), "unload"),
        ] {
            assert_eq!(load_reason(&keep_alive), reason, "{keep_alive}");
        }
    }
}

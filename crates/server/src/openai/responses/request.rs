//! The body of a request of the Responses API, and its checks.

use crate::error::{ApiResult, ErrorResponse};
use crate::openai::chat_request::{
    ChatParseContext, InputMessage, ParsedChatRequest, result_message, sent_call,
};
use crate::openai::protocol::SamplingParams;
use crate::openai::tools::ToolParams;
use crate::sampling::RequestedSampling;
use halo_core::model::Sampling;
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
pub(super) struct CreateResponse {
    input: Option<Value>,
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub store: Option<bool>,
    pub stream: Option<bool>,
    pub max_output_tokens: Option<i64>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    seed: Option<i64>,
    text: Option<Value>,
    reasoning: Option<Value>,
    background: Option<bool>,
    #[serde(flatten)]
    pub tools: ToolParams,
}

impl CreateResponse {
    pub fn parse(&self, context: &ChatParseContext) -> ApiResult<ParsedChatRequest> {
        if self.background == Some(true) {
            return Err(ErrorResponse::bad_request("background responses are not supported; leave it out"));
        }
        let items = match &self.input {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(text)) => {
                vec![InputMessage { message: SentMessage::new(Role::User, text.clone()), ids: Vec::new() }]
            }
            Some(Value::Array(items)) => parse_items(items)?,
            Some(_) => return Err(ErrorResponse::bad_request("input must be a text or a list of items")),
        };
        let instructions = self.instructions.iter().filter(|text| !text.trim().is_empty()).cloned();
        let parsed = ParsedChatRequest::from_messages(items, instructions.collect(), context)?;
        let parsed = parsed.with_options(&self.tools, self.sampling(&context.sampling)?, context)?;
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning["effort"].as_str());
        Ok(ParsedChatRequest { skip_reasoning: matches!(effort, Some("none" | "minimal")), ..parsed })
    }

    /// The parameters of a chat request with the same meaning.
    fn sampling(&self, defaults: &Sampling) -> ApiResult<RequestedSampling> {
        let mut params = json!({});
        let fields = [
            ("max_completion_tokens", self.max_output_tokens.map(Value::from)),
            ("temperature", self.temperature.map(Value::from)),
            ("top_p", self.top_p.map(Value::from)),
            ("seed", self.seed.map(Value::from)),
            ("response_format", self.response_format()),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                params[name] = value;
            }
        }
        let params: SamplingParams = serde_json::from_value(params)
            .map_err(|e| ErrorResponse::bad_request(format!("the parameters cannot be read: {e}")))?;
        params.sampling(defaults)
    }

    /// The format of the answer, where `text.format` names one.
    pub fn text_format(&self) -> Value {
        let format = self.text.as_ref().map(|text| text["format"].clone());
        format.filter(Value::is_object).unwrap_or_else(|| json!({ "type": "text" }))
    }

    fn response_format(&self) -> Option<Value> {
        let format = self.text_format();
        match format["type"].as_str() {
            Some("json_schema") => {
                Some(json!({ "type": "json_schema", "json_schema": { "schema": format["schema"] } }))
            }
            Some("text") | None => None,
            Some(other) => Some(json!({ "type": other })),
        }
    }
}

/// The messages of a list of items. Calls that follow an answer, or each other, belong to one message.
fn parse_items(items: &[Value]) -> ApiResult<Vec<InputMessage>> {
    let mut messages: Vec<InputMessage> = Vec::new();
    for (n, item) in items.iter().enumerate() {
        let place = format!("input[{n}]");
        let id = || item["call_id"].as_str().unwrap_or_default().to_owned();
        match item["type"].as_str().unwrap_or("message") {
            "message" => messages.push(parse_message(&place, item)?),
            // The reasoning of an earlier answer is on the timeline already.
            "reasoning" => {}
            "function_call" => {
                let name = item["name"].as_str().unwrap_or_default();
                let call = sent_call(&place, name, Some(&item["arguments"]))?;
                let last = messages.pop_if(|last| last.message.role == Role::Assistant);
                let (text, mut calls, mut ids) = last
                    .map_or_else(Default::default, |last| (last.message.text, last.message.calls, last.ids));
                calls.push(call);
                ids.push(id());
                messages.push(InputMessage { message: SentMessage::with_calls(text, calls), ids });
            }
            "function_call_output" => {
                let text = content_text(&place, &item["output"])?;
                messages.push(InputMessage { message: result_message(text), ids: vec![id()] });
            }
            other => {
                let message = format!(
                    "{place}: an item of type {other} is not supported; send messages, function_call and \
                     function_call_output items"
                );
                return Err(ErrorResponse::bad_request(message));
            }
        }
    }
    Ok(messages)
}

fn parse_message(place: &str, item: &Value) -> ApiResult<InputMessage> {
    let role = match item["role"].as_str() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        other => {
            let role = other.unwrap_or("none");
            let message = format!("{place}: unknown role '{role}'; use system, developer, user or assistant");
            return Err(ErrorResponse::bad_request(message));
        }
    };
    let text = content_text(place, &item["content"])?;
    Ok(InputMessage { message: SentMessage::new(role, text), ids: Vec::new() })
}

fn content_text(place: &str, content: &Value) -> ApiResult<String> {
    let parts = match content {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Ok(other.to_string()),
    };
    let mut text = String::new();
    for part in parts {
        match part["type"].as_str() {
            Some("input_text" | "output_text" | "text") => {
                text.push_str(part["text"].as_str().unwrap_or_default());
            }
            Some("refusal") => text.push_str(part["refusal"].as_str().unwrap_or_default()),
            other => {
                let kind = other.unwrap_or("none");
                let message = format!("{place}: content of type {kind} is not supported, only text");
                return Err(ErrorResponse::bad_request(message));
            }
        }
    }
    Ok(text)
}

//! The body of a request of the Responses API, and its checks.

use crate::error::{ApiResult, ErrorResponse, parse_json_value};
use crate::openai::chat_request::{
    ChatParseContext, InputMessage, ParsedChatRequest, result_message, sent_call,
};
use crate::openai::chat_target::ChatTarget;
use crate::openai::reasoning_params::ReasoningParams;
use crate::openai::tools::ToolParams;
use crate::sampling::{ApiDialect, RequestFields, RequestedSampling, parse_sampling};
use halo_core::model::Sampling;
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A request. Its sampling parameters are among the other fields.
#[derive(Deserialize)]
pub(super) struct CreateResponse {
    pub input: Option<Value>,
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub store: Option<bool>,
    pub stream: Option<bool>,
    text: Option<Value>,
    reasoning: Option<Value>,
    background: Option<bool>,
    metadata: Option<Map<String, Value>>,
    truncation: Option<String>,
    conversation: Option<Value>,
    include: Option<Vec<String>>,
    #[serde(flatten)]
    pub tools: ToolParams,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// Fields that say nothing about the answer, or only about tools that this server does not run.
const WITHOUT_EFFECT: [&str; 8] = [
    "model",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "stream_options",
    "max_tool_calls",
];

/// The sampling parameters that a response can have.
const SAMPLING: [&str; 14] = [
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "stop",
    "seed",
    "logit_bias",
    "typical_p",
    "ignore_eos",
];

/// The parameters of a request that a response repeats, and that are not read from it otherwise.
const REPEATED: [&str; 10] = [
    "max_output_tokens",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "max_tool_calls",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "seed",
];

const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY_CHARS: usize = 64;
const MAX_METADATA_VALUE_CHARS: usize = 512;

impl CreateResponse {
    pub fn parse(&self, context: &ChatParseContext) -> ApiResult<ParsedChatRequest> {
        self.check()?;
        let items = match &self.input {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(text)) => {
                vec![InputMessage::new(SentMessage::new(Role::User, text.clone()), Vec::new())]
            }
            Some(Value::Array(items)) => parse_items(items)?,
            Some(_) => {
                let message = "input must be a text or a list of items";
                return Err(ErrorResponse::invalid_parameter("input", message));
            }
        };
        let instructions = self.instructions.iter().filter(|text| !text.trim().is_empty()).cloned();
        let parsed = ParsedChatRequest::from_messages(items, instructions.collect(), context)?;
        let parsed = parsed.with_options(&self.tools, self.sampling(&context.sampling)?, context)?;
        let reasoning: ReasoningParams = match &self.reasoning {
            Some(reasoning) => parse_json_value(json!({ "reasoning": reasoning }))?,
            None => ReasoningParams::default(),
        };
        Ok(ParsedChatRequest { skip_reasoning: reasoning.skips_reasoning()?, ..parsed })
    }

    /// Refuses what has no effect here.
    fn check(&self) -> ApiResult<()> {
        let refuse = |param: &str, message: String| Err(ErrorResponse::invalid_parameter(param, message));
        if self.background == Some(true) {
            return refuse("background", "background responses are not supported; leave it out".into());
        }
        if let Some(truncation) = self.truncation.as_deref().filter(|t| !matches!(*t, "auto" | "disabled")) {
            return refuse(
                "truncation",
                format!("truncation is {truncation:?}; it must be auto or disabled"),
            );
        }
        // The others concern tools that run on the server, and reasoning, which is not encrypted here.
        if self.include.iter().flatten().any(|item| item == "message.output_text.logprobs") {
            let message = "include: log-probabilities are not supported here; use /v1/chat/completions";
            return refuse("include", message.into());
        }
        if self.metadata.iter().flatten().count() > MAX_METADATA {
            return refuse("metadata", format!("metadata may have at most {MAX_METADATA} entries"));
        }
        for (key, value) in self.metadata.iter().flatten() {
            let fits = value.as_str().is_some_and(|text| text.chars().count() <= MAX_METADATA_VALUE_CHARS)
                && key.chars().count() <= MAX_METADATA_KEY_CHARS;
            if !fits {
                let message = format!(
                    "metadata: keys have at most {MAX_METADATA_KEY_CHARS} characters, and values are texts of at most \
                     {MAX_METADATA_VALUE_CHARS}"
                );
                return refuse("metadata", message);
            }
        }
        for (name, value) in &self.fields {
            let name = name.as_str();
            let is_known = WITHOUT_EFFECT.contains(&name) || SAMPLING.contains(&name);
            let is_neutral = match (name, value) {
                (_, Value::Null) => true,
                ("n", value) => value.as_u64() == Some(1),
                ("top_logprobs", value) => value.as_u64() == Some(0),
                _ => false,
            };
            if !is_known && !is_neutral {
                let message = format!("{name} is not supported for responses; leave it out");
                return Err(ErrorResponse::unsupported_parameter(name, message));
            }
        }
        Ok(())
    }

    /// The conversation that the request names, in the place of the one that its history belongs to.
    pub fn in_conversation(&self, target: ChatTarget) -> ApiResult<ChatTarget> {
        let refuse = |message: &str| Err(ErrorResponse::invalid_parameter("conversation", message));
        let id = match &self.conversation {
            None | Some(Value::Null) => return Ok(target),
            Some(Value::String(id)) => id.as_str(),
            Some(conversation) => conversation["id"].as_str().unwrap_or_default(),
        };
        if id.is_empty() {
            return refuse("conversation must be the name of a conversation, or an object with it as id");
        }
        if self.previous_response_id.is_some() {
            return refuse("conversation and previous_response_id are both set; leave one of them out");
        }
        match target {
            ChatTarget::Unstored => refuse("conversation needs a stored response; leave out store: false"),
            ChatTarget::Conversation { name: Some(name), .. } if name != id => {
                refuse("conversation differs from the header x-halo-conversation; leave one of them out")
            }
            ChatTarget::Conversation { place, check, .. } => {
                Ok(ChatTarget::Conversation { name: Some(id.to_owned()), place, check })
            }
        }
    }

    /// The parameters of a chat request with the same meaning.
    fn sampling(&self, defaults: &Sampling) -> ApiResult<RequestedSampling> {
        let is_sampling = |name: &str| SAMPLING.contains(&name);
        let fields = self.fields.iter().filter(|(name, _)| is_sampling(name));
        let mut params: Map<String, Value> =
            fields.map(|(name, value)| (name.clone(), value.clone())).collect();
        params.extend(self.response_format().map(|format| ("response_format".to_owned(), format)));
        let parsed = parse_sampling(&RequestFields::from(params), defaults, ApiDialect::Responses);
        // The format has another name here.
        parsed.map_err(|e| if e.param() == Some("response_format") { e.with_param("text.format") } else { e })
    }

    /// The parameters of the request, as a response repeats them.
    pub fn parameters_json(&self, tools: &Value) -> Value {
        let mut json = Self::unknown_parameters(self.previous_response_id.as_deref());
        let reasoning = self.reasoning.clone().unwrap_or_default();
        json["instructions"] = json!(self.instructions);
        json["metadata"] = json!(self.metadata.clone().unwrap_or_default());
        json["parallel_tool_calls"] = json!(self.tools.is_parallel());
        json["reasoning"] = json!({ "effort": reasoning["effort"], "summary": reasoning["summary"] });
        json["store"] = json!(self.store.unwrap_or(true));
        json["text"]["format"] = self.text_format();
        json["tool_choice"] = self.tools.choice_json();
        json["tools"] = tools.clone();
        json["truncation"] = json!(self.truncation.as_deref().unwrap_or("disabled"));
        for name in REPEATED {
            if let Some(value) = self.fields.get(name) {
                json[name] = value.clone();
            }
        }
        json
    }

    /// The parameters of a response whose request is not known.
    pub fn unknown_parameters(previous: Option<&str>) -> Value {
        json!({
            "instructions": null,
            "max_output_tokens": null,
            "metadata": {},
            "parallel_tool_calls": true,
            "previous_response_id": previous,
            "reasoning": { "effort": null, "summary": null },
            "store": true,
            "temperature": null,
            "text": { "format": { "type": "text" } },
            "tool_choice": "auto",
            "tools": [],
            "top_p": null,
            "truncation": "disabled",
            "user": null,
        })
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
                messages.push(InputMessage::new(SentMessage::with_calls(text, calls), ids));
            }
            "function_call_output" => {
                let text = content_text(&place, &item["output"])?;
                messages.push(InputMessage::new(result_message(text), vec![id()]));
            }
            other => {
                let message = format!(
                    "{place}: an item of type {other} is not supported; send messages, function_call, \
                     function_call_output and item_reference items"
                );
                return Err(ErrorResponse::invalid_parameter("input", message));
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
            return Err(ErrorResponse::invalid_parameter("input", message));
        }
    };
    let text = content_text(place, &item["content"])?;
    Ok(InputMessage::new(SentMessage::new(role, text), Vec::new()))
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
                return Err(ErrorResponse::invalid_parameter("input", message));
            }
        }
    }
    Ok(text)
}

//! OpenAI-compatible servers: they get messages and stream text. They report neither tokens nor attention, so the text is
//! split here ([`crate::approx_tokenizer`]), and the chat template is the server's business.

use crate::address::{BaseUrl, RemoteAddress};
use crate::approx_tokenizer::ApproxTokenizer;
use crate::error_text::{error_code_kind, error_message, sanitize};
use crate::http::{RemoteClient, RemoteRequest, ignore_steps};
use crate::options::RemoteOptions;
use crate::sampling::openai_parameters;
use crate::schema::parse_schema;
use crate::stream_listener::{StreamEnd, StreamListener};
use crate::tool_messages::{CallText, add_tools, native_messages};
use halo_core::Error;
use halo_core::model::{
    ChatTemplate, FinishReason, KvEditing, ModelInfo, ModelStep, ModelToken, OutputConstraint, Prompt,
    PromptMessage, Sampling, StepFlow,
};
use halo_core::token::Role;
use reqwest::header::{self, HeaderValue};
use serde_json::{Value, json};
use std::fmt;

/// The context length where neither the server nor the options name one.
const DEFAULT_CONTEXT: usize = 8192;
/// The most stop sequences that OpenAI accepts.
const MAX_STOP_SEQUENCES: usize = 4;

/// An API key. Its `Debug` form does not show it.
pub struct OpenAiKey(HeaderValue);

impl fmt::Debug for OpenAiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenAiKey(…)")
    }
}

/// The API key in `HALO_OPENAI_KEY`, or else in `OPENAI_API_KEY`. A key comes only from the environment, so that it is in
/// no configuration file and no process list. `None` where it is unset, empty, or not valid in a header.
#[must_use]
pub fn openai_key_from_env() -> Option<OpenAiKey> {
    ["HALO_OPENAI_KEY", "OPENAI_API_KEY"].iter().find_map(|name| {
        let key = std::env::var(name).ok()?;
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).ok()?;
        value.set_sensitive(true);
        (!key.trim().is_empty()).then_some(OpenAiKey(value))
    })
}

#[derive(Debug)]
pub(crate) struct OpenAiModel {
    client: RemoteClient,
    base: BaseUrl,
    key: Option<OpenAiKey>,
    info: ModelInfo,
}

impl OpenAiModel {
    pub fn connect(
        address: RemoteAddress,
        key: Option<OpenAiKey>,
        options: &RemoteOptions,
    ) -> Result<Self, Error> {
        let RemoteAddress { base, model, .. } = address;
        if key.is_some() && !base.may_send_key() {
            let why = "an API key is set (HALO_OPENAI_KEY or OPENAI_API_KEY), and plain http would expose it; use \
                       https, or unset the key if the server needs none";
            return Err(Error::invalid_input(format!("connecting to {base}"), why));
        }
        let client = RemoteClient::new(&base, options)?;
        let template = ChatTemplate::default();
        let (name, kv_editing) = (String::new(), KvEditing::Unknown);
        let info = ModelInfo { name, context: DEFAULT_CONTEXT, attention: false, kv_editing, template };
        let mut openai = Self { client, base, key, info };
        let mut listen = ignore_steps;
        let request = openai.with_key(RemoteRequest::get("asking for the models", &openai.base, "/models"));
        let models = openai.client.fetch_json(
            &request.with_timeout(options.request_timeout),
            &mut StreamListener::without_listener(&mut listen),
        );
        // Some servers have no list of models; then the address must name the model.
        let models = models.map_err(StreamEnd::into_error)?.unwrap_or_default();
        openai.info.name = openai.choose_model(model, &models)?;
        let entry = models["data"]
            .as_array()
            .and_then(|all| all.iter().find(|m| m["id"] == openai.info.name.as_str()));
        let reported = entry.and_then(|model| {
            let fields = ["context_length", "max_model_len", "context_window"];
            fields.iter().find_map(|field| model[field].as_u64()).filter(|n| *n > 0)
        });
        let reported = reported.and_then(|n| usize::try_from(n).ok());
        openai.info.context = options.context.or(reported).unwrap_or(DEFAULT_CONTEXT);
        Ok(openai)
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn choose_model(&self, model: Option<String>, models: &Value) -> Result<String, Error> {
        if let Some(model) = model {
            return Ok(model);
        }
        let names: Vec<&str> =
            models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
        match names.as_slice() {
            [only] => Ok((*only).to_owned()),
            names => {
                let names =
                    if names.is_empty() { "no list of models".into() } else { sanitize(&names.join(", ")) };
                let why = format!("name the model behind a # in the address; the server has {names}");
                Err(Error::invalid_input(format!("connecting to {}", self.base), why))
            }
        }
    }

    fn with_key<'a>(&self, request: RemoteRequest<'a>) -> RemoteRequest<'a> {
        match &self.key {
            Some(OpenAiKey(value)) => request.header(header::AUTHORIZATION, value.clone()),
            None => request,
        }
    }

    pub fn generate(
        &self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        if sampling.max_tokens == 0 {
            return Ok(FinishReason::Length);
        }
        let mut body = self.request_body(&(prompt.messages)(), sampling)?;
        // Tokens are counted approximately here. A server refuses a maximum that exceeds its context by one token, so an
        // answer that may fill the context has none.
        if prompt.window.len().saturating_add(sampling.max_tokens) >= self.info.context
            && let Some(fields) = body.as_object_mut()
        {
            fields.remove("max_tokens");
        }
        let request = self
            .with_key(RemoteRequest::post("generating", &self.base, "/chat/completions", &body))
            .header(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
        let mut listener = StreamListener::new(listen, &sampling.stop, sampling.max_tokens);
        match self.stream_answer(&request, sampling, &mut listener) {
            Ok(finish) | Err(StreamEnd::Finished(finish)) => Ok(finish),
            Err(StreamEnd::Failed(error)) => Err(error),
        }
    }

    fn request_body(&self, messages: &[PromptMessage], sampling: &Sampling) -> Result<Value, Error> {
        // Many servers continue a last message of the assistant; the others answer after it. An empty one is left out.
        let count = messages.len() - usize::from(messages.last().is_some_and(is_empty_answer));
        let messages = native_messages(&messages[..count]);
        // OpenAI refuses parameters that it does not know, such as top_k, min_p and the repetition penalty.
        let mut body = json!({
            "model": self.info.name,
            "messages": messages,
            "stream": true,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed & (i64::MAX as u64),
        });
        if let Some(fields) = body.as_object_mut() {
            fields.extend(openai_parameters(sampling));
        }
        let stops: Vec<&String> =
            sampling.stop.iter().filter(|s| !s.is_empty()).take(MAX_STOP_SEQUENCES).collect();
        if !stops.is_empty() {
            body["stop"] = json!(stops);
        }
        if let Some(constraint) = &sampling.constraint {
            if let Some(schema) = parse_schema(constraint)? {
                body["response_format"] = json!({
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": true, "schema": schema},
                });
            }
            if let OutputConstraint::ToolCalls(options) = constraint {
                add_tools(&mut body, options)?;
            }
        }
        Ok(body)
    }

    fn stream_answer(
        &self,
        request: &RemoteRequest<'_>,
        sampling: &Sampling,
        listener: &mut StreamListener<'_>,
    ) -> Result<FinishReason, StreamEnd> {
        let mut events = self.client.open_events(request, listener)?;
        let mut tokenizer = ApproxTokenizer::default();
        let mut tokens: Vec<ModelToken> = Vec::new();
        let mut finish = None;
        let mut calls = CallText::default();
        while let Some(event) = events.next(listener)? {
            if event.trim_ascii() == b"[DONE]" {
                finish = finish.or(Some(FinishReason::EndOfText));
                break;
            }
            let value = events.parse_json(&event)?;
            if !value["error"].is_null() {
                let why = format!("the server stopped with an error: {}; try again", error_message(&event));
                return Err(events.error(&why).with_kind(error_code_kind(&event)).into());
            }
            let choice = &value["choices"][0];
            if let Some(text) = choice["delta"]["content"].as_str() {
                tokenizer.push(text, &mut |token| tokens.push(token));
            }
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                tokenizer.push(&calls.push(call), &mut |token| tokens.push(token));
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                // vLLM reports the stop sequence that it has cut off; it belongs to the answer.
                if let Some(stop) =
                    choice["stop_reason"].as_str().filter(|s| sampling.stop.iter().any(|t| t == s))
                {
                    tokenizer.push(stop, &mut |token| tokens.push(token));
                }
                tokenizer.push(&calls.finish(), &mut |token| tokens.push(token));
                tokenizer.finish(&mut |token| tokens.push(token));
                finish = Some(StreamListener::finish_from_reason(reason));
            }
            for token in tokens.drain(..) {
                listener.report_token(&token, None)?;
            }
        }
        tokenizer.finish(&mut |token| tokens.push(token));
        for token in tokens.drain(..) {
            listener.report_token(&token, None)?;
        }
        finish.ok_or_else(|| {
            events.error("the connection ended before the answer was complete; try again").into()
        })
    }
}

fn is_empty_answer(message: &PromptMessage) -> bool {
    message.role == Role::Assistant && message.text.is_empty()
}

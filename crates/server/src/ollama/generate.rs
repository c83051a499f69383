//! `/api/generate`: one prompt and its answer. Nothing is stored.

use super::chat::{check_images, check_template, load_reason, parse_think, respond, set_thinking};
use super::options::{add_logprobs, parse_options};
use super::protocol::{OllamaAnswer, OllamaJson, OllamaLayout, OllamaResult};
use crate::answer_source::AnswerSource;
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::CompletionRequest;
use crate::error::{ApiResult, ErrorResponse, null_as_default, spawn_blocking};
use crate::openai::{CONVERSATION_HEADER, ForeignChat, NOT_STORED};
use crate::raw_prompt::start_tokens;
use crate::running_completions::GenerationOwner;
use crate::sampling::{LogprobBuffer, check_supported};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use halo_core::attention::AttentionRequest;
use halo_core::model::Sampling;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `model` and `keep_alive` are accepted and have no effect: there is one model, and it stays loaded.
#[derive(Deserialize)]
pub(super) struct OllamaGenerateRequest {
    #[serde(default, deserialize_with = "null_as_default")]
    prompt: String,
    system: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    suffix: String,
    images: Option<Vec<Value>>,
    format: Option<Value>,
    options: Option<Map<String, Value>>,
    template: Option<String>,
    context: Option<Vec<u32>>,
    stream: Option<bool>,
    /// The prompt is written in the chat template already.
    raw: Option<bool>,
    #[serde(default)]
    keep_alive: Value,
    #[serde(default)]
    think: Value,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
}

pub(super) async fn generate(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    OllamaJson(request): OllamaJson<OllamaGenerateRequest>,
) -> OllamaResult<Response> {
    request.check()?;
    let thinking = parse_think(&app, &request.think)?;
    if request.prompt.is_empty() {
        let answer = OllamaAnswer::new(&app, OllamaLayout::Generate, LogprobBuffer::default());
        let object = answer.empty(load_reason(&request.keep_alive));
        return Ok(Json(object).into_response());
    }
    let mut requested = parse_options(request.options, request.format, &app.backend.rules().sampling)?;
    let logprobs = add_logprobs(&mut requested, request.logprobs, request.top_logprobs)?;
    let answer = OllamaAnswer::new(&app, OllamaLayout::Generate, logprobs.clone());
    let stream = request.stream.unwrap_or(true);
    let source = match request.raw.unwrap_or(false) {
        true => {
            check_supported(&app, &requested.parameters, requested.sampling.constraint.as_ref()).await?;
            let tokenizer = Arc::clone(&app);
            let completion =
                spawn_blocking(move || raw_completion(&tokenizer, request.prompt, requested.sampling));
            let owner = GenerationOwner::without_key(client);
            let request = CompletionRequest { owner, ..completion.await? };
            AnswerSource::Completion { request, logprobs }
        }
        false => {
            let mut messages = vec![json!({ "role": "user", "content": request.prompt })];
            if let Some(system) = request.system.filter(|system| !system.is_empty()) {
                messages.insert(0, json!({ "role": "system", "content": system }));
            }
            let mut body = json!({ "messages": messages });
            set_thinking(&mut body, thinking);
            let mut headers = HeaderMap::new();
            headers.insert(CONVERSATION_HEADER, HeaderValue::from_static(NOT_STORED));
            AnswerSource::Chat { chat: ForeignChat { body, requested, logprobs, client }, headers }
        }
    };
    respond(app, source, stream, answer).await
}

impl OllamaGenerateRequest {
    fn check(&self) -> ApiResult<()> {
        check_images("images", self.images.as_deref())?;
        check_template(self.template.as_deref())?;
        let refuse = |param: &str, message: &str| Err(ErrorResponse::bad_request(message).with_param(param));
        if !self.suffix.is_empty() {
            return refuse(
                "suffix",
                "suffix is not supported: this server does not fill in the middle of a text",
            );
        }
        if self.context.as_ref().is_some_and(|context| !context.is_empty()) {
            return refuse(
                "context",
                "context is not supported: send the conversation as messages to /api/chat",
            );
        }
        if self.raw == Some(true) && self.system.as_ref().is_some_and(|system| !system.is_empty()) {
            return refuse("system", "system has no effect with raw: write it into the prompt");
        }
        if self.raw == Some(true) && !matches!(self.think, Value::Null | Value::Bool(false)) {
            return refuse("think", "think has no effect with raw: write the reasoning into the prompt");
        }
        Ok(())
    }
}

/// A raw prompt is in the chat template, so names of special tokens in it are special tokens.
fn raw_completion(app: &App, prompt: String, sampling: Sampling) -> ApiResult<CompletionRequest> {
    let mut model = app.backend.model()?;
    let mut tokens = start_tokens(&mut *model, &prompt)?;
    tokens.extend(model.tokenize(&prompt, true)?);
    Ok(CompletionRequest {
        ids: tokens.iter().map(|token| token.id).collect(),
        text: prompt,
        messages: Vec::new(),
        sampling,
        attention: AttentionRequest::none(),
        client: "ollama".into(),
        owner: GenerationOwner::default(),
        ephemeral: false,
    })
}

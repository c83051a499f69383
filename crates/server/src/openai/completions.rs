//! Text completions, without a conversation. A request has one prompt or several, and each has `n` choices, which are generated one
//! after the other.

use super::protocol::{
    OpenAiJson, OpenAiResult, SamplingParams, error_event, finish_reason, response_id, unix_seconds,
};
use super::usage::{system_fingerprint, timings, usage};
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::{self, CompletionRequest, TextOptions, complete_text};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::generation_usage::{GenerationUsage, UsageMeter};
use crate::raw_prompt::RawPromptOptions;
use crate::running_completions::GenerationOwner;
use crate::sampling::{check_supported, completion_logprobs};
use crate::sse::{SseSender, spawn_sse_stream};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use halo_core::attention::AttentionRequest;
use halo_core::model::{Model, ModelStep, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
)]
enum CompletionPrompt {
    Text(String),
    Texts(Vec<String>),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
pub(super) struct OpenAiCompletionRequest {
    prompt: CompletionPrompt,
    echo: Option<bool>,
    #[serde(flatten)]
    params: SamplingParams,
}

/// The most prompts of a request.
const MAX_PROMPTS: usize = 64;

/// The fields that all chunks of one response share.
struct TextResponse {
    id: String,
    created: i64,
    model: String,
    system_fingerprint: String,
}

impl TextResponse {
    fn json(&self, choices: &[Value]) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            "usage": null,
        })
    }

    fn chunk(&self, index: usize, text: &str, logprobs: &Value, finish: Option<&str>) -> Value {
        self.json(&[choice(index, text, logprobs, finish)])
    }
}

fn choice(index: usize, text: &str, logprobs: &Value, finish: Option<&str>) -> Value {
    json!({ "text": text, "index": index, "logprobs": logprobs, "finish_reason": finish })
}

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    OpenAiJson(request): OpenAiJson<OpenAiCompletionRequest>,
) -> OpenAiResult<Response> {
    let OpenAiCompletionRequest { prompt, echo, params } = request;
    let (requested, choices) = (params.sampling(&app.backend.rules().sampling)?, params.choice_count()?);
    let (echo, mut sampling) = (echo.unwrap_or(false), requested.sampling);
    let options = RawPromptOptions::parse(params.fields())?;
    options.replace_stop_tags(&app.backend.model_info().template, &mut sampling);
    let text_options = options.text;
    if echo && sampling.logprobs.is_some() {
        let message = "echo with logprobs is not supported: only generated tokens have log-probabilities; \
                       leave one of them out";
        return Err(ErrorResponse::invalid_parameter("echo", message).into());
    }
    check_supported(&app, &requested.parameters, sampling.constraint.as_ref()).await?;
    let tokenizer = Arc::clone(&app);
    let mut prompts =
        spawn_blocking(move || completion_requests(&tokenizer, prompt, &options, &sampling)).await?;
    prompts.iter_mut().for_each(|prompt| prompt.owner.client = client);
    let requests: Vec<CompletionRequest> =
        prompts.iter().flat_map(|prompt| (0..choices).map(|n| prompt.for_choice(n))).collect();
    let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let response = TextResponse {
        id: response_id("cmpl"),
        created: unix_seconds(),
        model: app.backend.model_info().name,
        system_fingerprint: system_fingerprint(&app),
    };
    let (stream, include_usage) = (params.stream()?, params.include_usage()?);
    if !stream {
        let (mut choices, mut total) = (Vec::new(), GenerationUsage::default());
        for (index, request) in requests.into_iter().enumerate() {
            let prefix = if echo { request.text.clone() } else { String::new() };
            let result = complete_text(Arc::clone(&app), request, text_options).await?;
            let text = format!("{prefix}{}", result.text);
            let logprobs = completion_logprobs(&result.logprobs, 0);
            choices.push(choice(index, &text, &logprobs, Some(finish_reason(result.finish))));
            total = total.plus(&result.usage);
        }
        let total = GenerationUsage { prompt_tokens, ..total };
        let mut json = response.json(&choices);
        json["usage"] = usage(&total);
        json["timings"] = timings(&total);
        return Ok(Json(json).into_response());
    }
    let streamed = spawn_sse_stream(error_event, move |out| {
        let mut total = GenerationUsage::default();
        for (index, request) in requests.iter().enumerate() {
            total = total.plus(&stream_choice(&app, (request, text_options), (&response, index), echo, out)?);
        }
        if include_usage {
            let total = GenerationUsage { prompt_tokens, ..total };
            let mut last = response.json(&[]);
            last["usage"] = usage(&total);
            last["timings"] = timings(&total);
            out.send_json(None, &last);
        }
        out.send_text(None, "[DONE]");
        Ok(())
    });
    Ok(streamed.await?)
}

/// One request for each prompt.
fn completion_requests(
    app: &App,
    prompt: CompletionPrompt,
    options: &RawPromptOptions,
    sampling: &Sampling,
) -> ApiResult<Vec<CompletionRequest>> {
    let mut model = app.backend.model()?;
    let mut requests = Vec::new();
    match prompt {
        CompletionPrompt::Text(text) => requests.push(text_request(&mut *model, &text, options, sampling)?),
        CompletionPrompt::Texts(texts) => {
            check_prompt_count(texts.len())?;
            for text in texts {
                requests.push(text_request(&mut *model, &text, options, sampling)?);
            }
        }
        CompletionPrompt::TokenIds(ids) => {
            requests.push(token_request(&mut *model, &ids, options, sampling)?);
        }
        CompletionPrompt::TokenIdLists(lists) => {
            check_prompt_count(lists.len())?;
            for ids in lists {
                requests.push(token_request(&mut *model, &ids, options, sampling)?);
            }
        }
    }
    // All prompts are checked before the first one is answered.
    if requests.iter().any(|request| request.ids.is_empty()) {
        return Err(ErrorResponse::invalid_parameter("prompt", "the prompt is empty"));
    }
    Ok(requests)
}

fn check_prompt_count(count: usize) -> ApiResult<()> {
    match count {
        1..=MAX_PROMPTS => Ok(()),
        0 => Err(ErrorResponse::invalid_parameter("prompt", "the prompt is empty")),
        _ => {
            let message = format!("{count} prompts; a request may have at most {MAX_PROMPTS}");
            Err(ErrorResponse::invalid_parameter("prompt", message))
        }
    }
}

fn text_request(
    model: &mut dyn Model,
    text: &str,
    options: &RawPromptOptions,
    sampling: &Sampling,
) -> ApiResult<CompletionRequest> {
    let (ids, text) = options.tokenize(model, text, sampling)?;
    Ok(completion_request(ids, text, options, sampling))
}

/// Token ids are the whole prompt: nothing is put before them, and nothing is cut.
fn token_request(
    model: &mut dyn Model,
    ids: &[u32],
    options: &RawPromptOptions,
    sampling: &Sampling,
) -> ApiResult<CompletionRequest> {
    let ids: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
    let text =
        model.detokenize(&ids).map_err(|e| ErrorResponse::invalid_parameter("prompt", e.to_string()))?;
    Ok(completion_request(ids, text, options, sampling))
}

fn completion_request(
    ids: Vec<TokenId>,
    text: String,
    options: &RawPromptOptions,
    sampling: &Sampling,
) -> CompletionRequest {
    CompletionRequest {
        ids,
        text,
        messages: Vec::new(),
        sampling: sampling.clone(),
        attention: AttentionRequest::none(),
        client: "completions".into(),
        owner: GenerationOwner { key: options.generation_key.clone(), client: ClientNetwork::default() },
        ephemeral: false,
    }
}

/// Streams one choice. Returns its usage.
fn stream_choice(
    app: &App,
    (request, options): (&CompletionRequest, TextOptions),
    (response, index): (&TextResponse, usize),
    echo: bool,
    out: &SseSender,
) -> ApiResult<GenerationUsage> {
    let mut filter = options.filter(request);
    // The log-probabilities of tokens whose text is withheld are sent with the text after them.
    let (mut sent_chars, mut logprobs) = (0, Vec::new());
    let meter = RefCell::new(UsageMeter::new(request.ids.len()));
    if echo {
        out.send_json(None, &response.chunk(index, &request.text, &Value::Null, None));
    }
    let mut while_queued = |_| {
        meter.borrow_mut().restart();
        out.flow()
    };
    let finish = completion::complete(app, request, &mut while_queued, &mut |step| {
        meter.borrow_mut().observe(&step);
        match step {
            ModelStep::Token(token, _) => {
                let text = filter.push(app, token);
                if !text.is_empty() {
                    let sent = completion_logprobs(&std::mem::take(&mut logprobs), sent_chars);
                    sent_chars += text.chars().count();
                    return out.send_json(None, &response.chunk(index, &text, &sent, None));
                }
            }
            ModelStep::Logprobs(token) => logprobs.push(token.clone()),
            _ => {}
        }
        out.flow()
    })?;
    let sent = completion_logprobs(&logprobs, sent_chars);
    out.send_json(None, &response.chunk(index, &filter.finish(), &sent, Some(finish_reason(finish))));
    Ok(meter.into_inner().usage())
}

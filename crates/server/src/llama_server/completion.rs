//! `/completion`: a prompt as text or tokens, and its continuation.

use super::info::sampling_json;
use super::protocol::{LlamaServerJson, LlamaServerResult, error_event};
use crate::answer_source::AnswerSource;
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::{CompletedAnswer, CompletionRequest, OnAnswerProgress, complete_answer};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::openai::timings;
use crate::raw_prompt::start_tokens;
use crate::running_completions::GenerationOwner;
use crate::sampling::{
    ApiDialect, LogprobBuffer, RequestFields, RequestedSampling, check_supported, parse_sampling,
};
use crate::sse::{SseSender, sse_channel};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Model, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A request; its sampling parameters are among the other fields.
#[derive(Deserialize)]
pub(super) struct LlamaCompletionRequest {
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    /// With `false` the KV cache forgets the prompt afterwards.
    cache_prompt: Option<bool>,
    /// The fields that the response has; all if empty. A slash is before a field of a field.
    response_fields: Option<Vec<String>>,
    #[serde(flatten)]
    fields: RequestFields,
}

pub(super) async fn completion(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    LlamaServerJson(request): LlamaServerJson<LlamaCompletionRequest>,
) -> LlamaServerResult<Response> {
    let defaults = app.backend.rules().sampling;
    let RequestedSampling { sampling, parameters } =
        parse_sampling(&request.fields, &defaults, ApiDialect::LlamaServer)?;
    check_supported(&app, &parameters, sampling.constraint.as_ref()).await?;
    let (stream, ephemeral) = (request.stream.unwrap_or(false), request.cache_prompt == Some(false));
    let tokenizer = Arc::clone(&app);
    let prompt = request.prompt;
    let mut requests =
        spawn_blocking(move || completion_requests(&tokenizer, &prompt, &sampling, ephemeral)).await?;
    requests.iter_mut().for_each(|request| request.owner = GenerationOwner::without_key(client));
    let fields = request.response_fields.unwrap_or_default();
    let completions: Vec<LlamaCompletion> = (requests.into_iter().enumerate())
        .map(|(index, request)| LlamaCompletion::new(&app, index, request, &fields))
        .collect();
    if !stream {
        let mut objects = Vec::with_capacity(completions.len());
        for LlamaCompletion { request, logprobs, format } in completions {
            let source = AnswerSource::Completion { request, logprobs };
            let (answer, _) = source.complete(Arc::clone(&app)).await?;
            objects.push(format.last_object(&answer.answer.text, &answer));
        }
        // One prompt has an object, several have a list.
        let one = if objects.len() == 1 { objects.pop() } else { None };
        return Ok(Json(one.unwrap_or(Value::Array(objects))).into_response());
    }
    let (out, ended, response) = sse_channel(error_event);
    let out = Arc::new(out);
    tokio::task::spawn_blocking(move || {
        let result = completions.into_iter().try_for_each(|completion| completion.stream(&app, &out));
        let _ = ended.send(result);
    });
    Ok(response.await?)
}

/// One prompt of a request.
struct LlamaCompletion {
    request: CompletionRequest,
    logprobs: LogprobBuffer,
    format: Arc<LlamaAnswerFormat>,
}

impl LlamaCompletion {
    fn new(app: &App, index: usize, request: CompletionRequest, fields: &[String]) -> Self {
        let logprobs = LogprobBuffer::new(request.sampling.logprobs.is_some());
        let format = LlamaAnswerFormat {
            index,
            model: app.backend.model_info().name,
            prompt: request.text.clone(),
            sampling: request.sampling.clone(),
            logprobs: logprobs.clone(),
            fields: fields.to_vec(),
        };
        Self { request, logprobs, format: Arc::new(format) }
    }

    /// Sends the events of the answer. Blocks until it is complete.
    fn stream(self, app: &App, out: &Arc<SseSender>) -> ApiResult<()> {
        let (sender, format) = (Arc::clone(out), Arc::clone(&self.format));
        let mut on_progress: OnAnswerProgress = Box::new(move |deltas| match deltas.map(delta_text) {
            None => sender.flow(),
            Some(text) if text.is_empty() => sender.flow(),
            Some(text) => sender.send_json(None, &format.event(&text)),
        });
        let answer = complete_answer(app, &self.request, &self.logprobs, &mut on_progress)?;
        out.send_json(None, &self.format.last_object(&delta_text(&answer.withheld), &answer));
        Ok(())
    }
}

/// A completion has neither reasoning nor calls.
fn delta_text(deltas: &[AnswerDelta]) -> String {
    let mut answer = AnswerParts::default();
    deltas.iter().cloned().for_each(|delta| answer.push(delta));
    answer.text
}

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PromptPart {
    Text(String),
    Token(u32),
}

/// The most prompts of a request.
const MAX_PROMPTS: usize = 64;

fn refuse_prompt<T>(message: &str) -> ApiResult<T> {
    Err(ErrorResponse::bad_request(message).with_param("prompt"))
}

/// The prompts of a request: one, or a list of texts and of lists.
fn parse_prompts(prompt: &Value) -> ApiResult<Vec<Vec<PromptPart>>> {
    let Value::Array(items) = prompt else { return Ok(vec![parse_prompt(prompt)?]) };
    let is_prompt = |item: &Value| item.is_array() || item.is_string();
    let has_several = items.iter().any(Value::is_array) || items.iter().all(Value::is_string);
    match has_several && items.iter().all(is_prompt) && !items.is_empty() {
        true if items.len() > MAX_PROMPTS => {
            refuse_prompt(&format!("{} prompts; a request may have at most {MAX_PROMPTS}", items.len()))
        }
        true => items.iter().map(parse_prompt).collect(),
        false => Ok(vec![parse_prompt(prompt)?]),
    }
}

/// A prompt is a text, or a list of tokens and texts.
fn parse_prompt(prompt: &Value) -> ApiResult<Vec<PromptPart>> {
    let items = match prompt {
        Value::String(text) => return Ok(vec![PromptPart::Text(text.clone())]),
        Value::Array(items) => items,
        Value::Null => return refuse_prompt("prompt is missing"),
        _ => return refuse_prompt("prompt must be a text, or a list of token ids and texts"),
    };
    let part = |item: &Value| match item {
        Value::String(text) => Some(PromptPart::Text(text.clone())),
        item => item.as_u64().and_then(|id| u32::try_from(id).ok()).map(PromptPart::Token),
    };
    match items.iter().map(part).collect::<Option<Vec<_>>>() {
        Some(parts) => Ok(parts),
        None => refuse_prompt("prompt must be a text, or a list of token ids and texts"),
    }
}

/// Names of special tokens in the texts are special tokens: clients write the chat template as text.
fn completion_requests(
    app: &App,
    prompt: &Value,
    sampling: &Sampling,
    ephemeral: bool,
) -> ApiResult<Vec<CompletionRequest>> {
    let mut model = app.backend.model()?;
    let prompts = parse_prompts(prompt)?;
    prompts.into_iter().map(|parts| completion_request(&mut *model, parts, sampling, ephemeral)).collect()
}

fn completion_request(
    model: &mut dyn Model,
    parts: Vec<PromptPart>,
    sampling: &Sampling,
    ephemeral: bool,
) -> ApiResult<CompletionRequest> {
    let (mut ids, mut text) = (Vec::new(), String::new());
    if let Some(PromptPart::Text(first)) = parts.first() {
        ids.extend(start_tokens(model, first)?.iter().map(|token| token.id));
    }
    for part in parts {
        match part {
            PromptPart::Text(part) => {
                ids.extend(model.tokenize(&part, true)?.iter().map(|token| token.id));
                text.push_str(&part);
            }
            PromptPart::Token(id) => {
                let unknown =
                    |e: halo_core::Error| ErrorResponse::bad_request(e.to_string()).with_param("prompt");
                text.push_str(&model.detokenize(&[TokenId(id)]).map_err(unknown)?);
                ids.push(TokenId(id));
            }
        }
    }
    Ok(CompletionRequest {
        ids,
        text,
        messages: Vec::new(),
        sampling: sampling.clone(),
        attention: AttentionRequest::none(),
        client: "llama-server".into(),
        owner: GenerationOwner::default(),
        ephemeral,
    })
}

/// What the last object repeats of the request.
struct LlamaAnswerFormat {
    /// The number of the prompt.
    index: usize,
    model: String,
    prompt: String,
    sampling: Sampling,
    /// The log-probabilities of tokens that were not yet sent.
    logprobs: LogprobBuffer,
    /// The fields that the last object has; all if empty.
    fields: Vec<String>,
}

impl LlamaAnswerFormat {
    /// An event of a stream.
    fn event(&self, text: &str) -> Value {
        let mut event =
            json!({ "index": self.index, "content": text, "tokens": [], "stop": false, "id_slot": 0 });
        self.add_logprobs(&mut event);
        event
    }

    fn add_logprobs(&self, object: &mut Value) {
        if let Some(logprobs) = self.logprobs.take_llama_server() {
            object["completion_probabilities"] = logprobs.into();
        }
    }

    fn last_object(&self, content: &str, answer: &CompletedAnswer) -> Value {
        let usage = &answer.usage;
        let stop_type = match answer.finish {
            FinishReason::EndOfText => "eos",
            FinishReason::StopSequence => "word",
            FinishReason::Length => "limit",
            FinishReason::Cancelled => "none",
        };
        // With several stop sequences, the model does not report which one ended the text.
        let stopping_word = match self.sampling.stop.as_slice() {
            [only] if answer.finish == FinishReason::StopSequence => only.as_str(),
            _ => "",
        };
        let mut object = json!({
            "index": self.index,
            "content": content,
            "tokens": [],
            "id_slot": 0,
            "stop": true,
            "model": self.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": sampling_json(&self.sampling),
            "prompt": self.prompt,
            "has_new_line": answer.answer.text.contains('\n'),
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": timings(usage),
        });
        self.add_logprobs(&mut object);
        if self.fields.is_empty() { object } else { select_fields(&object, &self.fields) }
    }
}

/// The fields of an object that a client wants: `content`, or `generation_settings/top_k`, which becomes `top_k`.
fn select_fields(object: &Value, fields: &[String]) -> Value {
    let mut selected = Map::new();
    for field in fields {
        let mut steps = field.split('/');
        let value = steps.try_fold(object, |value, step| value.get(step));
        if let (Some(value), Some(name)) = (value, field.rsplit('/').next()) {
            selected.insert(name.to_owned(), value.clone());
        }
    }
    Value::Object(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_is_text_or_tokens_or_both() {
        let text = |text: &str| PromptPart::Text(text.to_owned());
        for (json, parts) in [
            (json!("a"), vec![text("a")]),
            (json!([1, 2]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([1, "a", 2]), vec![PromptPart::Token(1), text("a"), PromptPart::Token(2)]),
            (json!([]), vec![]),
            (json!(["a"]), vec![text("a")]),
            (json!([[1, 2]]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([["a", 7]]), vec![text("a"), PromptPart::Token(7)]),
        ] {
            assert_eq!(parse_prompts(&json).ok(), Some(vec![parts]), "{json}");
        }
        for (json, prompts) in [
            (json!(["a", "b"]), vec![vec![text("a")], vec![text("b")]]),
            (json!([[1], "b"]), vec![vec![PromptPart::Token(1)], vec![text("b")]]),
        ] {
            assert_eq!(parse_prompts(&json).ok(), Some(prompts), "{json}");
        }
        for invalid in
            [json!(null), json!(7), json!({}), json!([-1]), json!([1.5]), json!([true]), json!([[1], 2])]
        {
            assert_eq!(parse_prompts(&invalid).expect_err("refused").param(), Some("prompt"), "{invalid}");
        }
    }
}

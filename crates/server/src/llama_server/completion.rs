//! `/completion`: a prompt as text or tokens, and its continuation.

use super::info::sampling_json;
use super::protocol::{LlamaServerJson, LlamaServerResult, error_event};
use crate::answer_source::AnswerSource;
use crate::app::App;
use crate::completion::{CompletedAnswer, CompletionRequest};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::openai::timings;
use crate::sampling::{
    ApiDialect, LogprobBuffer, RequestFields, RequestedSampling, check_supported, parse_sampling,
};
use crate::sse::sse_channel;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// A request; its sampling parameters are among the other fields.
#[derive(Deserialize)]
pub(super) struct LlamaCompletionRequest {
    #[serde(default)]
    prompt: Value,
    stream: Option<bool>,
    /// With `false` the KV cache forgets the prompt afterwards.
    cache_prompt: Option<bool>,
    #[serde(flatten)]
    fields: RequestFields,
}

pub(super) async fn completion(
    State(app): State<Arc<App>>,
    LlamaServerJson(request): LlamaServerJson<LlamaCompletionRequest>,
) -> LlamaServerResult<Response> {
    let defaults = app.backend.rules().sampling;
    let RequestedSampling { sampling, parameters } =
        parse_sampling(&request.fields, &defaults, ApiDialect::LlamaServer)?;
    check_supported(&app, &parameters, sampling.constraint.as_ref()).await?;
    let (stream, ephemeral) = (request.stream.unwrap_or(false), request.cache_prompt == Some(false));
    let tokenizer = Arc::clone(&app);
    let prompt = request.prompt;
    let completion =
        spawn_blocking(move || completion_request(&tokenizer, &prompt, sampling, ephemeral)).await?;
    let logprobs = LogprobBuffer::new(completion.sampling.logprobs.is_some());
    let format = LlamaAnswerFormat::new(&app, &completion, logprobs.clone());
    let source = AnswerSource::Completion { request: completion, logprobs };
    if !stream {
        let (answer, _) = source.complete(app).await?;
        return Ok(Json(format.last_object(&answer.answer.text, &answer)).into_response());
    }
    let format = Arc::new(format);
    let end_format = Arc::clone(&format);
    let streamed = source.stream(
        app,
        sse_channel(error_event),
        move |out, deltas| match delta_text(deltas).as_str() {
            "" => out.flow(),
            text => out.send_json(None, &format.event(text)),
        },
        move |out, answer| {
            out.send_json(None, &end_format.last_object(&delta_text(&answer.withheld), &answer));
        },
    );
    Ok(streamed.await?)
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

/// A prompt is a text, or a list of tokens and texts. A list of one prompt is that prompt; several prompts are refused.
fn parse_prompt(prompt: &Value) -> ApiResult<Vec<PromptPart>> {
    let refuse = |message: &str| Err(ErrorResponse::bad_request(message).with_param("prompt"));
    let items = match prompt {
        Value::String(text) => return Ok(vec![PromptPart::Text(text.clone())]),
        Value::Array(items) => items,
        Value::Null => return refuse("prompt is missing"),
        _ => return refuse("prompt must be a text, or a list of token ids and texts"),
    };
    let is_prompt = |item: &Value| item.is_array() || item.is_string();
    if let [only] = items.as_slice()
        && is_prompt(only)
    {
        return parse_prompt(only);
    }
    if items.iter().any(Value::is_array) || (items.len() > 1 && items.iter().all(Value::is_string)) {
        return refuse("several prompts in one request are not supported; send one prompt per request");
    }
    let part = |item: &Value| match item {
        Value::String(text) => Some(PromptPart::Text(text.clone())),
        item => item.as_u64().and_then(|id| u32::try_from(id).ok()).map(PromptPart::Token),
    };
    match items.iter().map(part).collect::<Option<Vec<_>>>() {
        Some(parts) => Ok(parts),
        None => refuse("prompt must be a text, or a list of token ids and texts"),
    }
}

/// Names of special tokens in the texts are special tokens: clients write the chat template as text.
fn completion_request(
    app: &App,
    prompt: &Value,
    sampling: Sampling,
    ephemeral: bool,
) -> ApiResult<CompletionRequest> {
    let mut model = app.backend.model()?;
    let (mut ids, mut text) = (Vec::new(), String::new());
    for part in parse_prompt(prompt)? {
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
        sampling,
        attention: AttentionRequest::none(),
        client: "llama-server".into(),
        generation_key: None,
        ephemeral,
    })
}

/// What the last object repeats of the request.
struct LlamaAnswerFormat {
    model: String,
    prompt: String,
    sampling: Sampling,
    /// The log-probabilities of tokens that were not yet sent.
    logprobs: LogprobBuffer,
}

impl LlamaAnswerFormat {
    fn new(app: &App, request: &CompletionRequest, logprobs: LogprobBuffer) -> Self {
        Self {
            model: app.backend.model_info().name,
            prompt: request.text.clone(),
            sampling: request.sampling.clone(),
            logprobs,
        }
    }

    /// An event of a stream.
    fn event(&self, text: &str) -> Value {
        let mut event = json!({ "index": 0, "content": text, "tokens": [], "stop": false, "id_slot": 0 });
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
            "index": 0,
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
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_is_text_or_tokens_or_both() {
        let text = |text: &str| PromptPart::Text(text.to_owned());
        for (json, parts) in [
            (json!("a"), vec![text("a")]),
            (json!(["a"]), vec![text("a")]),
            (json!([1, 2]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([[1, 2]]), vec![PromptPart::Token(1), PromptPart::Token(2)]),
            (json!([1, "a", 2]), vec![PromptPart::Token(1), text("a"), PromptPart::Token(2)]),
            (json!([["a", 7]]), vec![text("a"), PromptPart::Token(7)]),
            (json!([]), vec![]),
        ] {
            assert_eq!(parse_prompt(&json).ok(), Some(parts), "{json}");
        }
        for invalid in [
            json!(null),
            json!(7),
            json!({}),
            json!([-1]),
            json!([1.5]),
            json!(["a", "b"]),
            json!([[1], [2]]),
            json!([true]),
        ] {
            assert_eq!(parse_prompt(&invalid).expect_err("refused").param(), Some("prompt"), "{invalid}");
        }
    }
}

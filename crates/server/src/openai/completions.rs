//! Text completions, without a conversation.

use super::protocol::{
    OpenAiJson, OpenAiResult, SamplingParams, error_event, finish_reason, response_id, unix_seconds, usage,
};
use crate::app::App;
use crate::completion::{self, CompletionRequest, complete_text};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::sse::{SseSender, spawn_sse_stream};
use crate::stop_sequences::StopSequenceFilter;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use halo_core::attention::AttentionRequest;
use halo_core::model::{ModelStep, Sampling};
use halo_core::token::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(untagged)]
enum CompletionPrompt {
    Text(String),
    Texts(Vec<String>),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
pub(super) struct OpenAiCompletionRequest {
    prompt: CompletionPrompt,
    #[serde(default)]
    echo: bool,
    #[serde(flatten)]
    params: SamplingParams,
}

/// The fields that all chunks of one response share.
struct TextResponse {
    id: String,
    created: i64,
    model: String,
}

impl TextResponse {
    fn json(&self, text: &str, finish: Option<&str>, usage: Option<&Value>) -> Value {
        let choice = json!({ "text": text, "index": 0, "logprobs": null, "finish_reason": finish });
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage,
        })
    }
}

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    OpenAiJson(request): OpenAiJson<OpenAiCompletionRequest>,
) -> OpenAiResult<Response> {
    let OpenAiCompletionRequest { prompt, echo, params } = request;
    let sampling = params.sampling(&app.backend.rules().sampling)?;
    let tokenizer = Arc::clone(&app);
    let completion = spawn_blocking(move || completion_request(&tokenizer, prompt, sampling)).await?;
    let response = TextResponse {
        id: response_id("cmpl"),
        created: unix_seconds(),
        model: app.backend.model_info().name,
    };
    let prompt_tokens = completion.ids.len();
    let prefix = if echo { completion.text.clone() } else { String::new() };
    if !params.stream {
        let result = complete_text(app, completion, true).await?;
        let text = format!("{prefix}{}", result.text);
        let usage = usage(prompt_tokens, result.tokens);
        let json = response.json(&text, Some(finish_reason(result.finish)), Some(&usage));
        return Ok(Json(json).into_response());
    }
    let include_usage = params.include_usage();
    let streamed = spawn_sse_stream(error_event, move |out| {
        stream_completion(&app, &completion, &response, &prefix, include_usage, out)
    });
    Ok(streamed.await?)
}

fn completion_request(
    app: &App,
    prompt: CompletionPrompt,
    sampling: Sampling,
) -> ApiResult<CompletionRequest> {
    let mut model = app.backend.model()?;
    let too_many = |n: usize| ErrorResponse::bad_request(format!("{n} prompts; send one prompt per request"));
    let (ids, text) = match prompt {
        CompletionPrompt::Text(text) => (None, text),
        CompletionPrompt::Texts(mut texts) if texts.len() == 1 => (None, texts.remove(0)),
        CompletionPrompt::Texts(texts) => return Err(too_many(texts.len())),
        CompletionPrompt::TokenIds(ids) => (Some(ids), String::new()),
        CompletionPrompt::TokenIdLists(mut lists) if lists.len() == 1 => {
            (Some(lists.remove(0)), String::new())
        }
        CompletionPrompt::TokenIdLists(lists) => return Err(too_many(lists.len())),
    };
    let (ids, text) = match ids {
        Some(ids) => {
            let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
            let text = model.detokenize(&ids).map_err(|e| ErrorResponse::bad_request(e.to_string()))?;
            (ids, text)
        }
        None => (model.tokenize(&text, true)?.into_iter().map(|token| token.id).collect(), text),
    };
    Ok(CompletionRequest {
        ids,
        text,
        messages: Vec::new(),
        sampling,
        attention: AttentionRequest::none(),
        client: "completions".into(),
        ephemeral: false,
    })
}

fn stream_completion(
    app: &App,
    request: &CompletionRequest,
    response: &TextResponse,
    prefix: &str,
    include_usage: bool,
    out: &SseSender,
) -> ApiResult<()> {
    let mut filter = StopSequenceFilter::new(&request.sampling.stop);
    let mut tokens = 0;
    if !prefix.is_empty() {
        out.send_json(None, &response.json(prefix, None, None));
    }
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        if let ModelStep::Token(token, _) = step {
            tokens += 1;
            let text = filter.push(&token.text);
            if !text.is_empty() {
                return out.send_json(None, &response.json(&text, None, None));
            }
        }
        out.flow()
    })?;
    let usage = include_usage.then(|| usage(request.ids.len(), tokens));
    out.send_json(None, &response.json(&filter.finish(), Some(finish_reason(finish)), usage.as_ref()));
    out.send_text(None, "[DONE]");
    Ok(())
}

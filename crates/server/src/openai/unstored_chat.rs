//! Chat without a conversation: nothing is stored, and the KV cache forgets the prompt.

use super::chat_request::ParsedChatRequest;
use super::chat_response::ChatResponse;
use super::protocol::{OpenAiResult, error_event, finish_reason, usage};
use crate::app::App;
use crate::completion::{self, CompletionRequest, complete_text};
use crate::error::{ApiResult, spawn_blocking};
use crate::sse::{SseSender, spawn_sse_stream};
use crate::stop_sequences::StopSequenceFilter;
use axum::Json;
use axum::response::{IntoResponse, Response};
use halo_core::attention::AttentionRequest;
use halo_core::model::{ModelStep, PromptMessage};
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use halo_engine::chat_format::ChatFormatter;
use serde_json::json;
use std::sync::Arc;

pub(super) async fn complete_unstored(
    app: Arc<App>,
    request: ParsedChatRequest,
    stream: bool,
    include_usage: bool,
) -> OpenAiResult<Response> {
    let tokenizer = Arc::clone(&app);
    let completion = spawn_blocking(move || completion_request(&tokenizer, request)).await?;
    let (format, prompt_tokens) = (ChatResponse::new(&app), completion.ids.len());
    if !stream {
        let result = complete_text(app, completion, true).await?;
        let usage = usage(prompt_tokens, result.tokens);
        let json = format.message(&result.text, finish_reason(result.finish), usage);
        return Ok(Json(json).into_response());
    }
    let streamed = spawn_sse_stream(error_event, move |out| {
        stream_completion(&app, &completion, &format, include_usage, out)
    });
    Ok(streamed.await?)
}

/// The prompt of the request in the chat template of the model.
fn completion_request(app: &App, request: ParsedChatRequest) -> ApiResult<CompletionRequest> {
    let mut model = app.backend.model()?;
    let rules = app.backend.rules();
    let system = request.system.unwrap_or(rules.system_prompt);
    let formatter = ChatFormatter {
        template: model.info().template.clone(),
        system_prompt: system.clone(),
        show_dates: false,
        names: rules.speaker_names,
    };
    let mut tokens = formatter.preamble().tokenize(&mut *model)?;
    let (mut previous_role, mut messages) = (None, Vec::new());
    if !system.trim().is_empty() {
        messages.push(PromptMessage { role: Role::System, text: system.trim().to_owned() });
    }
    for SentMessage { role, text, .. } in request.messages.iter().chain(&request.trailing_system) {
        tokens.extend(formatter.turn_header(*role, previous_role, None).tokenize(&mut *model)?);
        tokens.extend(model.tokenize(text, false)?);
        previous_role = Some(*role);
        messages.push(PromptMessage { role: *role, text: text.clone() });
    }
    tokens.extend(formatter.turn_header(Role::Assistant, previous_role, None).tokenize(&mut *model)?);
    Ok(CompletionRequest {
        ids: tokens.iter().map(|token| token.id).collect(),
        text: String::new(),
        messages,
        sampling: request.sampling,
        attention: AttentionRequest::none(),
        client: "once".to_owned(),
        ephemeral: true,
    })
}

fn stream_completion(
    app: &App,
    request: &CompletionRequest,
    format: &ChatResponse,
    include_usage: bool,
    out: &SseSender,
) -> ApiResult<()> {
    let mut filter = StopSequenceFilter::new(&request.sampling.stop);
    let mut tokens = 0;
    let finish = completion::complete(app, request, &mut |_| out.flow(), &mut |step| {
        let ModelStep::Token(token, _) = step else { return out.flow() };
        if tokens == 0 {
            out.send_json(None, &format.chunk(&json!({ "role": "assistant", "content": "" }), None));
        }
        tokens += 1;
        match filter.push(&token.text) {
            text if text.is_empty() => out.flow(),
            text => out.send_json(None, &format.chunk(&json!({ "content": text }), None)),
        }
    })?;
    let usage = include_usage.then(|| usage(request.ids.len(), tokens));
    format.send_end(out, &filter.finish(), finish, usage);
    Ok(())
}

//! Chat without a conversation: nothing is stored, and the KV cache forgets the prompt.

use super::answer_reader::AnswerReader;
use super::chat_request::ParsedChatRequest;
use super::chat_response::ChatResponse;
use super::choices::respond_with_choices;
use super::protocol::{OpenAiResult, error_event};
use crate::app::App;
use crate::completion::{self, CompletionRequest};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::generation_usage::{GenerationUsage, UsageMeter};
use crate::running_completions::GenerationOwner;
use crate::sse::spawn_sse_stream;
use axum::Json;
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, Model, ModelStep, ModelToken, PromptMessage, StepFlow};
use halo_core::token::Role;
use halo_core::tool_call::MessagePart;
use halo_engine::align::{SentMessage, answer_text};
use halo_engine::chat_format::{AnswerOpening, ChatFormatter};
use halo_engine::chat_options::ChatOptions;
use std::cell::RefCell;
use std::sync::Arc;
use tokio::sync::oneshot;

/// An answer that was not stored.
pub(super) struct UnstoredAnswer {
    pub answer: AnswerParts,
    pub withheld: Vec<AnswerDelta>,
    pub finish: FinishReason,
    pub usage: GenerationUsage,
    pub reasoning_tokens: usize,
}

/// `stream` says whether the last event of a stream reports the usage; none: no stream.
pub(super) async fn complete_unstored(
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ChatResponse,
    stream: Option<bool>,
) -> OpenAiResult<Response> {
    let choices = request.choice_count;
    let Some(include_usage) = stream.filter(|_| choices == 1) else {
        let answered = answer_unstored(Arc::clone(&app), request.clone());
        let message = format.clone();
        let first = async move {
            let UnstoredAnswer { answer, finish, usage, .. } = answered.await?;
            Ok(message.message(&answer, finish, &usage))
        };
        return match choices {
            1 => Ok(Json(first.await?).into_response()),
            _ => respond_with_choices(app, request, format, first, stream).await,
        };
    };
    let streamed = spawn_sse_stream(error_event, move |out| {
        let mut started = false;
        let result = generate_unstored(&app, &request, &mut |deltas| {
            let Some(deltas) = deltas else { return out.flow() };
            if !std::mem::replace(&mut started, true) {
                format.send_start(out);
            }
            format.send_deltas(out, deltas)
        })?;
        let finish = (result.finish, result.answer.calls.len());
        format.send_end(out, &result.withheld, finish, &result.usage, include_usage);
        Ok(())
    });
    Ok(streamed.await?)
}

/// The answer to a request without streaming. It stops when the client disconnects, which drops this future.
pub(super) async fn answer_unstored(app: Arc<App>, request: ParsedChatRequest) -> ApiResult<UnstoredAnswer> {
    let (connected, mut disconnected) = oneshot::channel::<()>();
    let result = spawn_blocking(move || {
        generate_unstored(&app, &request, &mut |_| match disconnected.try_recv() {
            Err(oneshot::error::TryRecvError::Closed) => StepFlow::Stop,
            _ => StepFlow::Continue,
        })
    })
    .await;
    drop(connected);
    result
}

/// Generates the answer to a request; blocks until it is complete. `on_progress` gets what each token adds, and nothing at all
/// other steps.
pub(super) fn generate_unstored(
    app: &App,
    request: &ParsedChatRequest,
    on_progress: &mut dyn FnMut(Option<&[AnswerDelta]>) -> StepFlow,
) -> ApiResult<UnstoredAnswer> {
    let (mut model, system) = answering_model(app, request)?;
    let completion = completion_request(app, request, &mut *model, &system)?;
    let mut reader = AnswerReader::new(request, &model.info().template);
    let meter = RefCell::new(UsageMeter::new(completion.ids.len()));
    let on_progress = RefCell::new(on_progress);
    let mut while_queued = |_| {
        meter.borrow_mut().restart();
        (on_progress.borrow_mut())(None)
    };
    let finish = completion::complete_with(app, model, &completion, &mut while_queued, &mut |step| {
        meter.borrow_mut().observe(&step);
        if let ModelStep::Logprobs(token) = step {
            request.logprobs.push(token);
        }
        let ModelStep::Token(token, _) = step else { return (on_progress.borrow_mut())(None) };
        let flow = (on_progress.borrow_mut())(Some(&reader.push(&token.text)));
        if reader.is_complete() && flow == StepFlow::Continue { StepFlow::Finish } else { flow }
    })?;
    let (withheld, reasoning_tokens) = (reader.finish(), reader.reasoning_tokens());
    let usage = meter.into_inner().usage();
    Ok(UnstoredAnswer { answer: reader.answer(), withheld, finish, usage, reasoning_tokens })
}

/// The model that answers a request, and its system prompt.
fn answering_model(app: &App, request: &ParsedChatRequest) -> ApiResult<(Box<dyn Model + Send>, String)> {
    let default = app.backend.rules().system_prompt;
    let Some(name) = &request.answers_as else {
        return Ok((app.backend.model()?, request.system.clone().unwrap_or(default)));
    };
    let options = app.with_reader(|store| ChatOptions::load(store, name))?;
    let system = request.system.clone().or(options.system_prompt).unwrap_or(default);
    let model = app.backend.chosen_model(name)?.map_or_else(|| app.backend.model(), Ok)?;
    Ok((model, options.persona.complete_prompt(&system)))
}

/// The prompt of the request in the chat template of the model.
fn completion_request(
    app: &App,
    request: &ParsedChatRequest,
    model: &mut dyn Model,
    system: &str,
) -> ApiResult<CompletionRequest> {
    let formatter = ChatFormatter {
        template: model.info().template.clone(),
        system_prompt: system.to_owned(),
        show_dates: false,
        names: app.backend.rules().speaker_names,
    };
    let mut tokens = Vec::new();
    // A remote model gets the functions with its request.
    let tools = if formatter.template.is_empty() { &[] } else { request.tools.as_slice() };
    for text in formatter.preamble_with_tools(tools) {
        tokens.extend(text.tokenize(model)?);
    }
    let (mut previous_role, mut messages) = (None, Vec::new());
    if !system.trim().is_empty() {
        messages.push(PromptMessage { role: Role::System, text: system.trim().to_owned() });
    }
    for message in request.messages.iter().chain(&request.trailing_system) {
        let role = message.role;
        tokens.extend(formatter.turn_header(role, previous_role, None).tokenize(model)?);
        tokens.extend(message_tokens(&formatter, message, model)?);
        previous_role = Some(role);
        messages.push(PromptMessage { role, text: answer_text(&message.text, &message.calls) });
    }
    tokens.extend(formatter.turn_header(Role::Assistant, previous_role, None).tokenize(model)?);
    let has_prefill = !request.prefill.is_empty();
    let opening =
        AnswerOpening::new(&formatter.template, &request.sampling, request.skip_reasoning, has_prefill);
    let opening = opening.text(&formatter.template);
    if !opening.is_empty() {
        tokens.extend(model.tokenize(&opening, true)?);
    }
    if has_prefill {
        tokens.extend(model.tokenize(&request.prefill, false)?);
        messages.push(PromptMessage { role: Role::Assistant, text: request.prefill.clone() });
    }
    if tokens.is_empty() {
        return Err(ErrorResponse::bad_request("the prompt is empty"));
    }
    Ok(CompletionRequest {
        ids: tokens.iter().map(|token| token.id).collect(),
        text: String::new(),
        messages,
        sampling: request.sampling.clone(),
        attention: AttentionRequest::none(),
        client: "once".to_owned(),
        owner: GenerationOwner::without_key(request.client),
        ephemeral: true,
    })
}

/// The tokens of a message with its calls in the format of the model.
fn message_tokens(
    formatter: &ChatFormatter,
    message: &SentMessage,
    model: &mut dyn Model,
) -> ApiResult<Vec<ModelToken>> {
    let mut tokens = Vec::new();
    for part in formatter.template.tools.call.render(&message.text, &message.calls) {
        tokens.extend(match part {
            MessagePart::Frame(text) => model.tokenize(&text, !formatter.template.is_empty())?,
            MessagePart::Content(text) => model.tokenize(&text, false)?,
        });
    }
    Ok(tokens)
}

//! Text completion without a conversation, for clients that keep their own history.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::stop_sequences::StopSequenceFilter;
use axum::http::StatusCode;
use halo_core::attention::AttentionRequest;
use halo_core::model::{FinishReason, ModelStep, Prompt, PromptMessage, Sampling, StepFlow, WindowToken};
use halo_core::token::{Role, TokenId};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::oneshot;

pub(crate) struct CompletionRequest {
    pub ids: Vec<TokenId>,
    /// The prompt as text, for models that take text.
    pub text: String,
    /// The prompt as messages; if empty, `text` is one message of the user.
    pub messages: Vec<PromptMessage>,
    pub sampling: Sampling,
    pub attention: AttentionRequest,
    /// Who waits in the queue of the model.
    pub client: String,
    /// Whether the KV cache forgets the prompt afterwards.
    pub ephemeral: bool,
}

pub(crate) struct CompletionResult {
    pub text: String,
    pub finish: FinishReason,
    pub tokens: usize,
}

/// Completes a prompt when the model is free; blocks until it is complete. `while_queued` is called while it waits, with the number
/// of requests ahead.
pub(crate) fn complete(
    app: &App,
    request: &CompletionRequest,
    while_queued: &mut dyn FnMut(usize) -> StepFlow,
    on_step: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
) -> ApiResult<FinishReason> {
    let place = app.reserve_queue_place()?;
    let mut model = app.backend.model()?;
    let context = model.info().context;
    check_prompt_len(request.ids.len(), context)?;
    let max_tokens = request.sampling.max_tokens.min(context - request.ids.len());
    let sampling = Sampling { max_tokens, ..request.sampling.clone() };
    // From here on the scheduler counts it.
    drop(place);
    let Some(_permit) = app.host.scheduler().acquire(&request.client, while_queued) else {
        return Err(ErrorResponse::new(StatusCode::CONFLICT, "cancelled while it was queued"));
    };
    let histories = &app.completion_histories;
    let stop_flag = histories.begin();
    let matched = histories.match_history(&request.ids, request.ephemeral);
    let window: Vec<WindowToken> = (request.ids.iter().zip(&matched.positions).enumerate())
        .map(|(n, (&id, &position))| WindowToken {
            position: Some(position),
            offset: 0,
            id,
            chunk_start: n % 64 == 0,
        })
        .collect();
    let messages = || match request.messages.is_empty() {
        true => vec![PromptMessage { role: Role::User, text: request.text.clone() }],
        false => request.messages.clone(),
    };
    let prompt = Prompt {
        conversation: &matched.key,
        window: &window,
        messages: &messages,
        next_position: matched.next_position,
        ephemeral: request.ephemeral,
    };
    let mut tokens = 0;
    let result = model.generate(&prompt, &sampling, &request.attention, &mut |step| {
        if let ModelStep::Token(token, _) = step {
            tokens += 1;
            if !request.ephemeral {
                histories.push_token(&matched.key, token.id);
            }
            histories.push_text(&token.text);
        }
        let flow = on_step(step);
        if stop_flag.load(Ordering::SeqCst) { StepFlow::Stop } else { flow }
    });
    app.metrics.record_generated_tokens(tokens);
    Ok(result?)
}

/// A prompt needs at least one token, and room for one more.
fn check_prompt_len(tokens: usize, context: usize) -> ApiResult<()> {
    if tokens == 0 {
        return Err(ErrorResponse::bad_request("the prompt is empty"));
    }
    if tokens + 1 > context {
        let message = format!(
            "context length exceeded: {tokens} tokens do not fit in {context}; shorten the prompt or raise model.context"
        );
        return Err(ErrorResponse::context_length_exceeded(message));
    }
    Ok(())
}

/// Completes a prompt and returns the whole text. Stops when the client disconnects, which drops this future.
pub(crate) async fn complete_text(
    app: Arc<App>,
    request: CompletionRequest,
    trim_stop: bool,
) -> ApiResult<CompletionResult> {
    let (connected, mut disconnected) = oneshot::channel::<()>();
    let result = spawn_blocking(move || {
        let stops: &[String] = if trim_stop { &request.sampling.stop } else { &[] };
        let mut filter = StopSequenceFilter::new(stops);
        let (mut text, mut tokens) = (String::new(), 0);
        let flow = RefCell::new(move || match disconnected.try_recv() {
            Err(oneshot::error::TryRecvError::Closed) => StepFlow::Stop,
            _ => StepFlow::Continue,
        });
        let finish = complete(&app, &request, &mut |_| (flow.borrow_mut())(), &mut |step| {
            if let ModelStep::Token(token, _) = step {
                text.push_str(&filter.push(&token.text));
                tokens += 1;
            }
            (flow.borrow_mut())()
        })?;
        text.push_str(&filter.finish());
        Ok(CompletionResult { text, finish, tokens })
    })
    .await;
    drop(connected);
    result
}

/// The seed of a request; a negative or missing one is random.
pub(crate) fn seed_or_random(seed: Option<i64>) -> u64 {
    let seed = seed.and_then(|seed| u64::try_from(seed).ok());
    seed.unwrap_or_else(|| jiff::Timestamp::now().as_nanosecond() as u64)
}

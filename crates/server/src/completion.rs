//! Text completion without a conversation, for clients that keep their own history.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::generation_log::FinishedGeneration;
use crate::generation_usage::{GenerationUsage, UsageMeter};
use crate::running_completions::GenerationOwner;
use crate::sampling::LogprobBuffer;
use crate::stop_sequences::StopSequenceFilter;
use axum::http::StatusCode;
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    FinishReason, Model, ModelStep, ModelToken, Prompt, PromptMessage, Sampling, StepFlow, TokenLogprobs,
    WindowToken,
};
use halo_core::token::{Role, TokenId};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

#[derive(Clone)]
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
    /// Who can watch and stop it.
    pub owner: GenerationOwner,
    /// Whether the KV cache forgets the prompt afterwards.
    pub ephemeral: bool,
}

impl CompletionRequest {
    /// The request of another choice: its seed differs.
    pub fn for_choice(&self, choice: usize) -> Self {
        let mut request = self.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
        request
    }
}

/// How the text of a completion is returned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextOptions {
    /// Whether the stop sequence is removed.
    pub trims_stop: bool,
    /// Whether special tokens are in the text.
    pub renders_special: bool,
}

impl TextOptions {
    pub fn filter(self, request: &CompletionRequest) -> CompletionTextFilter {
        let stops: &[String] = if self.trims_stop { &request.sampling.stop } else { &[] };
        CompletionTextFilter { stops: StopSequenceFilter::new(stops), options: self, ..Default::default() }
    }
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { trims_stop: true, renders_special: false }
    }
}

/// Withholds stop sequences and special tokens. A stop sequence can have special tokens, so they are removed behind it.
#[derive(Debug, Default)]
pub(crate) struct CompletionTextFilter {
    stops: StopSequenceFilter,
    options: TextOptions,
    pushed: usize,
    sent: usize,
    /// Where in the text special tokens are.
    hidden: VecDeque<Range<usize>>,
}

impl CompletionTextFilter {
    /// Adds a token and returns the text that can be sent.
    pub fn push(&mut self, app: &App, token: &ModelToken) -> String {
        let is_hidden = !self.options.renders_special && app.backend.is_special_token(token.id);
        self.push_text(&token.text, is_hidden)
    }

    fn push_text(&mut self, text: &str, is_hidden: bool) -> String {
        let start = self.pushed;
        self.pushed += text.len();
        if is_hidden {
            self.hidden.push_back(start..self.pushed);
        }
        let sendable = self.stops.push(text);
        self.visible(&sendable)
    }

    /// Ends the text and returns what was withheld and is no stop sequence.
    pub fn finish(mut self) -> String {
        let rest = std::mem::take(&mut self.stops).finish();
        self.visible(&rest)
    }

    fn visible(&mut self, text: &str) -> String {
        let (start, end) = (self.sent, self.sent + text.len());
        self.sent = end;
        let (mut out, mut at) = (String::with_capacity(text.len()), start);
        while let Some(hidden) = self.hidden.front().filter(|hidden| hidden.start < end) {
            out.push_str(&text[at - start..hidden.start.max(at) - start]);
            at = hidden.end.min(end).max(at);
            if hidden.end > end {
                break;
            }
            self.hidden.pop_front();
        }
        out.push_str(&text[at - start..]);
        out
    }
}

pub(crate) struct CompletionResult {
    pub text: String,
    pub finish: FinishReason,
    pub tokens: usize,
    /// The log-probabilities of the tokens, where they were requested.
    pub logprobs: Vec<TokenLogprobs>,
    pub usage: GenerationUsage,
}

/// A complete answer, of a conversation or without one.
pub(crate) struct CompletedAnswer {
    /// The answer without stop sequences.
    pub answer: AnswerParts,
    /// The end of the answer, which a stream has not sent yet.
    pub withheld: Vec<AnswerDelta>,
    pub finish: FinishReason,
    pub usage: GenerationUsage,
}

/// Gets what each token adds, and nothing at all other events.
pub(crate) type OnAnswerProgress = Box<dyn FnMut(Option<&[AnswerDelta]>) -> StepFlow + Send>;

pub(crate) type OnAnswerEnd = Box<dyn FnOnce(ApiResult<CompletedAnswer>) + Send>;

/// Completes a prompt with the default model.
pub(crate) fn complete(
    app: &App,
    request: &CompletionRequest,
    while_queued: &mut dyn FnMut(usize) -> StepFlow,
    on_step: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
) -> ApiResult<FinishReason> {
    complete_with(app, app.backend.model()?, request, while_queued, on_step)
}

/// Completes a prompt when the model is free; blocks until it is complete. `while_queued` is called while it waits, with the number
/// of requests ahead.
pub(crate) fn complete_with(
    app: &App,
    mut model: Box<dyn Model + Send>,
    request: &CompletionRequest,
    while_queued: &mut dyn FnMut(usize) -> StepFlow,
    on_step: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
) -> ApiResult<FinishReason> {
    let place = app.reserve_queue_place()?;
    let context = model.info().context;
    check_prompt_len(request.ids.len(), context)?;
    let max_tokens = request.sampling.max_tokens.min(context - request.ids.len());
    let sampling = Sampling { max_tokens, ..request.sampling.clone() };
    let histories = &app.completion_histories;
    let progress = app.running_completions.begin(request.owner.clone());
    // From here on the scheduler counts it.
    drop(place);
    let mut wait = |ahead: usize| match progress.is_stopped() {
        true => StepFlow::Stop,
        false => while_queued(ahead),
    };
    let Some(_permit) = app.host.scheduler().acquire(&request.client, &mut wait) else {
        return Err(ErrorResponse::new(StatusCode::CONFLICT, "cancelled while it was queued"));
    };
    progress.start();
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
    let (mut tokens, start, mut prefill) = (0, Instant::now(), None);
    let result = model.generate(&prompt, &sampling, &request.attention, &mut |step| {
        match step {
            ModelStep::Token(token, _) => {
                prefill.get_or_insert_with(|| start.elapsed());
                tokens += 1;
                if !request.ephemeral {
                    histories.push_token(&matched.key, token.id);
                }
                progress.push_text(&token.text);
            }
            ModelStep::Logprobs(logprobs) => progress.push_logprobs(logprobs),
            ModelStep::PrefillDone(_) => {
                prefill.get_or_insert_with(|| start.elapsed());
            }
            ModelStep::Prefill { .. } | ModelStep::Cooled(_) | ModelStep::PromptAttention(_) => {}
        }
        let flow = on_step(step);
        if progress.is_stopped() { StepFlow::Stop } else { flow }
    });
    app.metrics.record_generated_tokens(tokens);
    let prefill: Duration = prefill.unwrap_or_default();
    app.generation_log.record(FinishedGeneration {
        prompt_tokens: request.ids.len(),
        tokens,
        prefill,
        decode: start.elapsed().saturating_sub(prefill),
        finish: result.as_ref().ok().copied(),
        seed: Some(sampling.seed),
    });
    Ok(result?)
}

/// Completes a prompt and reports each token. Blocks until it is complete.
pub(crate) fn complete_answer(
    app: &App,
    request: &CompletionRequest,
    logprobs: &LogprobBuffer,
    on_progress: &mut OnAnswerProgress,
) -> ApiResult<CompletedAnswer> {
    let mut filter = TextOptions::default().filter(request);
    let mut answer = AnswerParts::default();
    let meter = RefCell::new(UsageMeter::new(request.ids.len()));
    let on_progress = RefCell::new(on_progress);
    let mut while_queued = |_| {
        meter.borrow_mut().restart();
        (on_progress.borrow_mut())(None)
    };
    let finish = complete(app, request, &mut while_queued, &mut |step| {
        meter.borrow_mut().observe(&step);
        if let ModelStep::Logprobs(token) = step {
            logprobs.push(token);
        }
        let ModelStep::Token(token, _) = step else { return (on_progress.borrow_mut())(None) };
        let sendable = filter.push(app, token);
        answer.text.push_str(&sendable);
        (on_progress.borrow_mut())(Some(&[AnswerDelta::Text(sendable)]))
    })?;
    let withheld = filter.finish();
    answer.text.push_str(&withheld);
    let withheld = vec![AnswerDelta::Text(withheld)];
    Ok(CompletedAnswer { answer, withheld, finish, usage: meter.into_inner().usage() })
}

/// A prompt needs at least one token, and room for one more.
fn check_prompt_len(tokens: usize, context: usize) -> ApiResult<()> {
    if tokens == 0 {
        return Err(ErrorResponse::invalid_parameter("prompt", "the prompt is empty"));
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
    options: TextOptions,
) -> ApiResult<CompletionResult> {
    let (connected, mut disconnected) = oneshot::channel::<()>();
    let result = spawn_blocking(move || {
        let mut filter = options.filter(&request);
        let (mut text, mut logprobs) = (String::new(), Vec::new());
        let meter = RefCell::new(UsageMeter::new(request.ids.len()));
        let flow = RefCell::new(move || match disconnected.try_recv() {
            Err(oneshot::error::TryRecvError::Closed) => StepFlow::Stop,
            _ => StepFlow::Continue,
        });
        let mut while_queued = |_| {
            meter.borrow_mut().restart();
            (flow.borrow_mut())()
        };
        let finish = complete(&app, &request, &mut while_queued, &mut |step| {
            meter.borrow_mut().observe(&step);
            match step {
                ModelStep::Token(token, _) => text.push_str(&filter.push(&app, token)),
                ModelStep::Logprobs(token) => logprobs.push(token.clone()),
                _ => {}
            }
            (flow.borrow_mut())()
        })?;
        text.push_str(&filter.finish());
        let usage = meter.into_inner().usage();
        Ok(CompletionResult { text, finish, tokens: usage.completion_tokens, usage, logprobs })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_are_hidden_behind_stop_sequences() {
        // Tokens, and whether they are special.
        type Tokens = &'static [(&'static str, bool)];
        let cases: [(&[&str], Tokens, &[&str]); 4] = [
            (&[], &[("a", false), ("<x>", true), ("b", false)], &["a", "", "b", ""]),
            (&["<x>user"], &[("a", false), ("<x>", true), ("user", false)], &["a", "", "", ""]),
            (&["<x>user"], &[("a", false), ("<x>", true), ("b", false)], &["a", "", "b", ""]),
            (
                &["\n<x>u"],
                &[("a\n", false), ("<x>", true), ("<x>", true), ("v", false)],
                &["a", "", "\n", "v", ""],
            ),
        ];
        for (stops, tokens, expected) in cases {
            let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
            let mut filter =
                CompletionTextFilter { stops: StopSequenceFilter::new(&stops), ..Default::default() };
            let mut sent: Vec<String> =
                tokens.iter().map(|&(text, special)| filter.push_text(text, special)).collect();
            sent.push(filter.finish());
            assert_eq!(sent, expected, "{tokens:?}");
        }
    }
}

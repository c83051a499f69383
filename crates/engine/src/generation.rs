//! Generates an answer: token by token, each committed and scored as it comes, with up to five tool calls.

use crate::answer_stream::AnswerStream;
use crate::chat_format::{self, AnswerOpening};
use crate::conversation::RUNNING_TURN_KEY;
use crate::event::{Event, TurnStage};
use crate::memory::attention::MemorySlots;
use crate::memory::segment::window_messages;
use crate::parts::{AnswerBegin, SessionParts};
use crate::tools;
use crate::turn_progress::TurnProgress;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::brightness::ScoringStrategy;
use halo_core::change::{Change, DeleteReason, NewToken};
use halo_core::model::{FinishReason, ModelStep, Prompt, Sampling, StepFlow, WindowToken};
use halo_core::store::{Durability, RecordKind};
use halo_core::token::{ChunkId, ContentKind, Role, TokenSource, TurnId};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The most tool calls in a turn.
const MAX_TOOL_ROUNDS: usize = 5;

/// An answer that was generated, whole or in part.
pub(crate) struct GeneratedAnswer {
    pub turn: TurnId,
    pub tokens: usize,
    /// The index of the last chunk of the reasoning, if it is complete.
    pub reasoning_end: Option<u32>,
    /// Tokens that were prefilled, and how long that took.
    pub prefill: Option<(usize, Duration)>,
    /// Why generation ended, or how the model failed after the tokens that are stored.
    pub finish: Result<FinishReason, Error>,
}

/// One call of the model: its tokens, and why it ended.
struct GenerationRound {
    tokens: usize,
    reasoning_end: Option<u32>,
    text: String,
    prefill: Option<(usize, Duration)>,
    finish: Result<FinishReason, Error>,
}

/// How long generation took in all, until its first token, and for the work per token.
#[derive(Default)]
struct GenerationTimings {
    total: Duration,
    prefill: Duration,
    overhead: Duration,
    /// Tokens until the first one came, and how long that took.
    prefilled: Option<(usize, Duration)>,
}

/// Generates the answer to the last message.
pub(crate) struct AnswerGenerator<'p, 'a> {
    pub parts: &'p mut SessionParts,
    pub progress: &'p mut TurnProgress<'a>,
}

impl AnswerGenerator<'_, '_> {
    /// Generates and runs tools in turns, until the answer calls no more of them.
    pub fn generate_answer(&mut self) -> Result<GeneratedAnswer, Error> {
        let continues = self.parts.next_answer.is_announced;
        let turn = self.begin_turn()?;
        let (mut finish, mut tokens, mut commands) = (Ok(FinishReason::EndOfText), 0, Vec::<String>::new());
        let (mut prefill, mut reasoning_end) = (None, None);
        for _ in 0..=MAX_TOOL_ROUNDS {
            let round = self.generate_round()?;
            (finish, tokens) = (round.finish, tokens + round.tokens);
            prefill = prefill.or(round.prefill);
            reasoning_end = reasoning_end.or(round.reasoning_end);
            // Only the model's own text can call a tool, and a repeated call does nothing.
            let command = tools::call::trailing_command(&round.text)
                .filter(|_| finish == Ok(FinishReason::StopSequence))
                .filter(|command| commands.len() < MAX_TOOL_ROUNDS && !commands.iter().any(|c| c == command));
            let Some(command) = command else { break };
            self.run_tool_call(command)?;
            commands.push(command.to_owned());
        }
        let ended =
            matches!(finish, Ok(FinishReason::EndOfText | FinishReason::StopSequence | FinishReason::Length));
        if tokens == 0 && !ended && !continues {
            // The model was stopped or failed before its first token: the message still waits for an answer. An answer that was to
            // be continued stays as it is.
            self.parts.delete_turns(&[turn], DeleteReason::NoAnswer)?;
        }
        Ok(GeneratedAnswer { turn, tokens, reasoning_end, prefill, finish })
    }

    /// Appends the header of the answer and what the client or the template has written of it, and marks its turn as running.
    fn begin_turn(&mut self) -> Result<TurnId, Error> {
        let parts = &mut *self.parts;
        let before = parts.conversation.turns_latest_first().next().map(|(_, role)| role);
        let AnswerBegin { text, skip_reasoning, is_announced } = std::mem::take(&mut parts.next_answer);
        let tokens = parts.model.tokenize_message(Role::Assistant, &text, before, None)?;
        let mut append =
            chat_format::plan_append(parts.timeline(), Role::Assistant, tokens, &parts.rules.context);
        let template = &parts.model.format.template;
        let opening = AnswerOpening::new(template, &parts.rules.sampling, skip_reasoning, !text.is_empty());
        let text = opening.text(template);
        // The beginning of the reasoning is pruned with it, so it is a chunk of its own.
        let chunk_index = u32::from(opening == AnswerOpening::Reasoning && !append.tokens.is_empty());
        let source = TokenSource::from_role(Role::Assistant, false);
        let brightness = parts.rules.context.strategy.initial_brightness(source);
        let kind = ContentKind::Template;
        let opening = if text.is_empty() { Vec::new() } else { parts.model.model.tokenize(&text, true)? };
        append.tokens.extend(opening.into_iter().map(|token| NewToken {
            id: token.id,
            text: token.text,
            chunk_index,
            brightness,
            kind,
        }));
        let turn = append.turn;
        let given: Vec<Event> = (append.tokens.iter().enumerate())
            .filter(|(_, token)| is_announced && token.kind == ContentKind::Message)
            .map(|(n, token)| Event::Token {
                chunk: ChunkId { role: Role::Assistant, turn, index: token.chunk_index },
                position: append.at.plus(n),
                text: token.text.clone(),
            })
            .collect();
        match parts.conversation.is_new() {
            // The client has sent nothing but a system prompt.
            true => parts.conversation.stage_setting(RUNNING_TURN_KEY, turn.0.to_string()),
            false => parts.conversation.put_setting(RUNNING_TURN_KEY, Some(&turn.0.to_string()))?,
        }
        parts.stage_system_prompt();
        parts.commit(&Change::Append(append), Durability::Deferred)?;
        given.into_iter().for_each(|event| self.progress.announce(event));
        Ok(turn)
    }

    /// Runs a tool call. Its result follows the call, as tokens of the kind [`ToolResult`](halo_core::token::ContentKind).
    fn run_tool_call(&mut self, command: &str) -> Result<(), Error> {
        let Some(runner) = self.parts.rules.tools.clone() else { return Ok(()) };
        let now = jiff::Timestamp::now().as_millisecond();
        let (store, name, _) = self.parts.conversation.body_loader();
        let result = tools::run_command(command, &runner, now, name, store)?;
        let tokens = self.parts.model.model.tokenize(&result.to_text(), false)?;
        let mut stream = self.answer_stream();
        for token in &tokens {
            let event = stream.push_tool_token(token, &mut self.parts.conversation)?;
            self.progress.announce(event);
        }
        self.progress.announce(Event::ToolCalled(result));
        Ok(())
    }

    /// Continues the last turn.
    fn answer_stream(&self) -> AnswerStream {
        let parts = &*self.parts;
        let system_len = parts.model.system_tokens.len();
        let reasoning = parts.model.format.template.reasoning.clone();
        let (timeline, rules) = (parts.timeline(), &parts.rules);
        AnswerStream::new(timeline, system_len, &rules.context, rules.watch.max, reasoning)
    }

    /// One round of generation. An error of the model is part of the result: the tokens before it are stored.
    fn generate_round(&mut self) -> Result<GenerationRound, Error> {
        let mut stream = self.answer_stream();
        self.begin_recording();
        let mut timings = GenerationTimings::default();
        let finish = match &self.parts.rules.context.strategy {
            ScoringStrategy::Magnitude(_) => self.generate(&self.sampling(0), &mut stream, &mut timings)?,
            ScoringStrategy::Ttl(_) => self.generate_token_by_token(&mut stream, &mut timings)?,
        };
        let GenerationTimings { total, prefill, overhead, prefilled } = timings;
        self.progress.record_stage(TurnStage::Prefill, prefill);
        self.progress
            .record_stage(TurnStage::Generate, total.saturating_sub(prefill).saturating_sub(overhead));
        self.progress.record_stage(TurnStage::Score, overhead);
        self.end_recording()?;
        let (tokens, text) = (stream.tokens, std::mem::take(&mut stream.text));
        let reasoning_end = stream.reasoning_end;
        self.progress.traces.append(&mut stream.traces);
        let (score, event) = stream.finish();
        self.parts.commit(&score, Durability::Deferred)?;
        self.progress.announce(event);
        Ok(GenerationRound { tokens, reasoning_end, text, prefill: prefilled, finish })
    }

    fn begin_recording(&mut self) {
        let SessionParts { recorder, attention_history, model, conversation, rules, .. } = &mut *self.parts;
        let timeline = conversation.timeline();
        let turn = timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let system_tokens = &model.system_tokens;
        let window = timeline.context_window(system_tokens.len());
        let error = recorder.call(|recorder| recorder.begin_answer(turn, system_tokens, window));
        // The TTL strategy prunes tokens while others are generated, so a slot has no position for the whole round.
        let has_fixed_slots = matches!(rules.context.strategy, ScoringStrategy::Magnitude(_));
        if has_fixed_slots && rules.attention_history_bytes > 0 {
            attention_history.begin_round(turn, system_tokens.len(), window);
        } else {
            attention_history.skip_round();
        }
        self.progress.announce_recorder_error(error);
    }

    fn end_recording(&mut self) -> Result<(), Error> {
        let mut capture = None;
        let error = self.parts.recorder.call(|recorder| recorder.end_answer().map(|ended| capture = ended));
        self.progress.announce_recorder_error(error);
        if let Some((folder, description)) = capture {
            self.parts.conversation.put_record(RecordKind::Capture, &folder, Some(&description))?;
        }
        let SessionParts { attention_history, conversation, rules, .. } = &mut *self.parts;
        attention_history.end_round(conversation, rules.attention_history_bytes)
    }

    /// The sampling of the token after `step` tokens. The seed depends on the turn and the step, so that every turn differs
    /// and the same turn repeats.
    fn sampling(&self, step: usize) -> Sampling {
        let rules = &self.parts.rules;
        let turn = u64::from(self.parts.timeline().next_turn().0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let step = (step as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
        let mut sampling = Sampling { seed: rules.sampling.seed ^ turn ^ step, ..rules.sampling.clone() };
        sampling.stop.extend(rules.tools.is_some().then(|| tools::call::CLOSE_TAG.to_owned()));
        sampling
    }

    /// The TTL strategy prunes tokens while others are generated, so the model is given a new window for each.
    fn generate_token_by_token(
        &mut self,
        stream: &mut AnswerStream,
        timings: &mut GenerationTimings,
    ) -> Result<Result<FinishReason, Error>, Error> {
        // Tokens are pruned while others are generated, so the context does not end an answer without a maximum.
        let max_tokens = self.parts.rules.sampling.max_tokens.min(self.parts.model.info().context);
        for step in 0..max_tokens {
            let sampling = self.sampling(step);
            let stop = sampling.stop.clone();
            let finish = self.generate(&Sampling { max_tokens: 1, ..sampling }, stream, timings)?;
            if finish != Ok(FinishReason::Length) || stream.tokens == step {
                return Ok(finish);
            }
            if stop.iter().any(|stop| stream.text.ends_with(stop.as_str())) {
                return Ok(Ok(FinishReason::StopSequence));
            }
        }
        Ok(Ok(FinishReason::Length))
    }

    /// Calls the model. The inner error is the model's; the outer one is of the store, which stops the model.
    fn generate(
        &mut self,
        sampling: &Sampling,
        stream: &mut AnswerStream,
        timings: &mut GenerationTimings,
    ) -> Result<Result<FinishReason, Error>, Error> {
        let window = self.parts.context_window();
        let memory_slots = MemorySlots::in_window(&window);
        let SessionParts { conversation, model, memories, recorder, attention_history, rules, .. } =
            &mut *self.parts;
        let progress = &mut *self.progress;
        let (kv_key, next_position) =
            (conversation.kv_key().to_owned(), conversation.timeline().next_position());
        let conversation = RefCell::new(conversation);
        let messages = || {
            window_messages(&model.format.system_prompt, conversation.borrow().timeline(), memories.placed())
        };
        let prompt = Prompt {
            conversation: &kv_key,
            window: &window,
            messages: &messages,
            next_position,
            ephemeral: false,
        };
        // The reserve for the answer may be smaller than its maximum.
        let free = model.info().context.saturating_sub(window.len());
        let sampling = &Sampling { max_tokens: sampling.max_tokens.min(free.max(1)), ..sampling.clone() };
        let (mut store_error, mut recorder_error) = (None, None);
        let is_first_call = timings.total.is_zero();
        let start = Instant::now();
        let finish = model.model.generate(&prompt, sampling, &rules.watch, &mut |step| {
            let step_start = Instant::now();
            let stripped = memory_slots.strip(&step);
            let step = stripped.as_ref().map_or(step, |stripped| stripped.replace_rows(step));
            let flow = match step {
                ModelStep::Prefill { done, total } => (progress.callback)(Event::Prefilling { done, total }),
                ModelStep::Cooled(messages) => {
                    progress.cooled_messages += messages;
                    StepFlow::Continue
                }
                ModelStep::PromptAttention(row) => {
                    stream.score_prompt_row(row);
                    StepFlow::Continue
                }
                ModelStep::PrefillDone(stats) if is_first_call => {
                    timings.prefill = start.elapsed();
                    timings.prefilled = Some((stats.prefilled + stats.recomputed, timings.prefill));
                    (progress.callback)(Event::Prefilled(stats))
                }
                ModelStep::PrefillDone(_) => StepFlow::Continue,
                ModelStep::Logprobs(logprobs) => (progress.callback)(Event::Logprobs(logprobs.clone())),
                ModelStep::Token(token, row) => {
                    // A model that does not report its prefill has read the whole window when its first token comes.
                    timings.prefilled.get_or_insert_with(|| (window.len(), start.elapsed()));
                    let is_recorded = recorder.is_recording() || attention_history.is_recording();
                    let recorded = row.filter(|_| is_recorded).map(|row| stream.select_row(row));
                    attention_history.record_token(recorded);
                    let failed = recorder.call(|recorder| recorder.record_token(token, recorded));
                    recorder_error = recorder_error.take().or(failed);
                    match stream.push_token(token, row, &mut conversation.borrow_mut()) {
                        Ok(events) => {
                            timings.overhead += step_start.elapsed();
                            let is_pruning = |event: &&Event| matches!(event, Event::Pruned { .. });
                            progress.pruned += events.iter().filter(is_pruning).count();
                            // The first event is the token's: its callback decides whether to continue.
                            let mut flows = events.into_iter().map(|event| (progress.callback)(event));
                            let flow = flows.next().unwrap_or(StepFlow::Continue);
                            flows.for_each(drop);
                            return flow;
                        }
                        Err(error) => {
                            store_error = Some(error);
                            StepFlow::Stop
                        }
                    }
                }
            };
            timings.overhead += step_start.elapsed();
            flow
        });
        timings.total += start.elapsed();
        progress.announce_recorder_error(recorder_error);
        store_error.map_or(Ok(finish), Err)
    }

    /// The beginning of an answer, generated in a fork, to search with. Empty where there is nothing to search for.
    pub fn preview_answer(&mut self, message: &str) -> Result<String, Error> {
        let parts = &mut *self.parts;
        let nothing_pruned = parts.timeline().live_len() == parts.timeline().len();
        if parts.rules.preview_tokens == 0 || nothing_pruned {
            return Ok(String::new());
        }
        let header = parts.model.answer_header_tokens()?;
        let (mut window, next) = (parts.context_window(), parts.timeline().next_position());
        window.extend(header.iter().enumerate().map(|(n, token)| WindowToken {
            position: Some(next.plus(n)),
            offset: 0,
            id: token.id,
            chunk_start: n == 0,
        }));
        let sampling = Sampling {
            max_tokens: parts.rules.preview_tokens,
            temperature: 0.0,
            constraint: None,
            logprobs: None,
            ignore_end: false,
            ..parts.rules.sampling.clone()
        };
        let SessionParts { conversation, model, memories, .. } = parts;
        let messages =
            || window_messages(&model.format.system_prompt, conversation.timeline(), memories.placed());
        let prompt = Prompt {
            conversation: conversation.kv_key(),
            window: &window,
            messages: &messages,
            next_position: next.plus(header.len()),
            ephemeral: true,
        };
        let (mut text, mut stopped) = (String::new(), false);
        let progress = &mut *self.progress;
        model.model.generate(&prompt, &sampling, &AttentionRequest::none(), &mut |step| match step {
            ModelStep::Token(token, _) => {
                text.push_str(&token.text);
                StepFlow::Continue
            }
            ModelStep::Prefill { done, total } => {
                let flow = (progress.callback)(Event::Prefilling { done, total });
                stopped |= flow != StepFlow::Continue;
                flow
            }
            _ => StepFlow::Continue,
        })?;
        // A preview that repeats the message adds nothing to the search.
        let text = if stopped || message.contains(text.trim()) { String::new() } else { text };
        progress.announce(Event::Previewed { text: text.clone() });
        Ok(text)
    }
}

//! The turn of a chat request in its conversation: what the request brings is appended, and the answer is generated.

use super::answer_reader::AnswerReader;
use super::chat_request::ParsedChatRequest;
use super::dispatch::{DispatchPlan, DispatchedChat, TailAction, dispatch_chat};
use super::model_check::ModelCheck;
use super::protocol::CONVERSATION_HEADER;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::generation_usage::GenerationUsage;
use halo_core::Error;
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::change::DeleteReason;
use halo_core::model::{CacheStats, StepFlow};
use halo_core::token::{Role, TurnId};
use halo_engine::align::{SentMessage, answer_text};
use halo_engine::event::{ChangeAction, Event, TurnSummary};
use halo_engine::host::{ConversationHandle, JobContext};
use halo_engine::scheduler::QueuePlace;
use halo_engine::session::{AnswerBegin, Session};
use halo_engine::turn::{EditAuthor, TurnInput};
use std::sync::Arc;

/// A chat request in its conversation.
pub(super) struct ChatTurn {
    pub app: Arc<App>,
    pub handle: Arc<ConversationHandle>,
    pub dispatched: DispatchedChat,
    pub request: ParsedChatRequest,
    /// Its place in the queue of the model, while it waits for the jobs before it.
    pub place: QueuePlace,
    /// Called with the result before the next job of the conversation, and with the first turn of the request.
    pub record: Option<TurnRecorder>,
}

impl ChatTurn {
    /// Finds the conversation of a request, or creates it, and opens it.
    pub async fn dispatch(
        app: Arc<App>,
        name: Option<String>,
        mut request: ParsedChatRequest,
        (place, check): (QueuePlace, ModelCheck),
    ) -> ApiResult<Self> {
        spawn_blocking(move || {
            let dispatched = dispatch_chat(&app, name.as_deref(), &mut request, &check)?;
            let handle = app.open_or_create_conversation(CONVERSATION_HEADER, &dispatched.name)?;
            Ok(Self { app, handle, dispatched, request, place, record: None })
        })
        .await
    }

    /// The name of its conversation.
    pub fn conversation(&self) -> &str {
        &self.dispatched.name
    }
}

/// Stores what belongs to a finished turn.
pub(super) type TurnRecorder =
    Box<dyn FnOnce(&mut Session, &ChatTurnResult, TurnId) -> Result<(), Error> + Send>;

pub(super) struct ChatTurnResult {
    pub summary: TurnSummary,
    pub usage: GenerationUsage,
    /// Tokens of the reasoning.
    pub reasoning_tokens: usize,
    /// The answer without stop sequences.
    pub answer: AnswerParts,
    /// The end of the answer, which was withheld because it could have been the beginning of something else.
    pub withheld: Vec<AnswerDelta>,
}

/// Runs the turn on the conversation's thread. `on_progress` gets what each token adds, and nothing at all other events.
pub(super) fn submit_chat_turn(
    turn: ChatTurn,
    mut on_progress: impl FnMut(Option<&[AnswerDelta]>) -> StepFlow + Send + 'static,
    on_end: impl FnOnce(ApiResult<ChatTurnResult>) + Send + 'static,
) -> ApiResult<()> {
    let ChatTurn { app, handle, dispatched, request, place, record } = turn;
    let job = move |session: &mut Session, context: &JobContext<'_>| {
        let DispatchedChat { name, plan, in_flight } = dispatched;
        let first_turn = session.timeline().next_turn();
        let synced = sync_history(session, &request, &plan, &mut || match context.is_cancelled() {
            true => StepFlow::Stop,
            false => on_progress(None),
        });
        // Open pages show the messages that the client has sent.
        context.announce_change(ChangeAction::MessagesAppended, Vec::new());
        // From here on the scheduler counts it.
        drop(place);
        let progress = app.running_completions.begin_chat(request.client);
        let mut on_progress = |deltas: Option<&[AnswerDelta]>| match progress.is_stopped() {
            true => StepFlow::Stop,
            false => on_progress(deltas),
        };
        let result = synced.and_then(|()| {
            let start = || progress.start();
            run_chat_turn(session, (context, name, &start), &request, &plan, &mut on_progress)
        });
        drop(progress);
        let recorded = result.as_ref().map(|result| result.summary.clone()).map_err(Error::clone);
        app.metrics.record_turn(&recorded);
        if let Ok(ChatTurnResult { summary, answer, .. }) = &result {
            let text = answer_text(&format!("{}{}", request.prefill, answer.text), &answer.calls);
            if let Err(e) = session.store_answer_key(summary.turn, &text) {
                // The error names the conversation, and a name can be made of what was said.
                let id = &session.state().id;
                tracing::warn!("the conversation {id} may not be found by its history: {:?}", e.kind);
            }
        }
        let result = result.and_then(|result| {
            record.map_or(Ok(()), |record| record(session, &result, first_turn))?;
            Ok(result)
        });
        drop(in_flight);
        on_end(result.map_err(ErrorResponse::from));
    };
    Ok(handle.submit(job)?)
}

fn run_chat_turn(
    session: &mut Session,
    (context, client, on_start): (&JobContext<'_>, String, &dyn Fn()),
    request: &ParsedChatRequest,
    plan: &DispatchPlan,
    on_progress: &mut dyn FnMut(Option<&[AnswerDelta]>) -> StepFlow,
) -> Result<ChatTurnResult, Error> {
    let mut reader = AnswerReader::new(request, &session.model().info().template);
    let mut cache_stats = CacheStats::default();
    let mut on_event = |event: &Event| match event {
        Event::Token { text, .. } => {
            let flow = on_progress(Some(&reader.push(text)));
            if reader.is_complete() && flow == StepFlow::Continue { StepFlow::Finish } else { flow }
        }
        Event::Logprobs(token) => {
            request.logprobs.push(token);
            on_progress(None)
        }
        Event::Prefilled(stats) => {
            cache_stats = *stats;
            on_progress(None)
        }
        _ => on_progress(None),
    };
    let sampling = Some(request.sampling.clone());
    let begin = |session: &mut Session| {
        on_start();
        let input = begin_turn(session, request, plan)?;
        let begin = AnswerBegin {
            text: request.prefill.clone(),
            skip_reasoning: request.skip_reasoning,
            is_announced: false,
        };
        session.set_next_answer(begin);
        Ok(input)
    };
    let summary = context.run_turn_with(session, (client, sampling), &mut on_event, begin);
    // A turn that failed before its answer began must not leave this to the next one.
    session.set_next_answer(AnswerBegin::default());
    let summary = summary?;
    let withheld = reader.finish();
    let reasoning_tokens = reader.reasoning_tokens();
    let answer = reader.answer();
    let usage = GenerationUsage::of_turn(&cache_stats, &summary);
    Ok(ChatTurnResult { summary, usage, reasoning_tokens, answer, withheld })
}

/// Applies the part of the request that replaces nothing and needs no model: the system prompt, and messages that the conversation
/// does not have. All of them are one commit.
fn sync_history(
    session: &mut Session,
    request: &ParsedChatRequest,
    plan: &DispatchPlan,
    on_progress: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    let summaries = plan.substitutes.iter().filter_map(|&n| request.messages.get(n));
    session.store_summaries(&summaries.collect::<Vec<&SentMessage>>())?;
    if let Some(system) = &request.system {
        session.set_system_prompt(system)?;
    }
    session.set_tools(&request.tools)?;
    match plan.tail {
        TailAction::Continue if request.appends_last_message() => {
            append_new_messages(session, request, plan, on_progress)
        }
        _ => Ok(()),
    }
}

/// Appends the new messages, except a last one that is the input of the turn.
fn append_new_messages(
    session: &mut Session,
    request: &ParsedChatRequest,
    plan: &DispatchPlan,
    on_progress: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    let end = request.messages.len() - usize::from(request.appends_last_message());
    let known = plan.known_messages.min(end);
    let new = request.messages[known..end].iter().chain(&request.trailing_system);
    let new: Vec<SentMessage> = new.cloned().collect();
    if session.timeline().turns().iter().any(|turn| turn.role == Role::System) {
        let resent = request.messages[..known].iter().filter(|message| message.role == Role::System);
        let resent: Vec<&str> = resent.map(|message| message.text.as_str()).collect();
        session.prune_system_messages(&resent)?;
    }
    session.append_sent_messages(&new, on_progress)
}

/// The input of the turn, once the model is free. The last exchange is replaced only now, and only if it is still the one that the
/// client has seen.
fn begin_turn(
    session: &mut Session,
    request: &ParsedChatRequest,
    plan: &DispatchPlan,
) -> Result<TurnInput, Error> {
    let message = request.messages.last().map(|message| message.text.clone()).unwrap_or_default();
    let is_unchanged = match &plan.tail {
        TailAction::Continue => true,
        TailAction::Regenerate(turns) | TailAction::EditLast(turns) => session.ends_with_turns(turns),
        TailAction::ChooseVariant { replaces, .. } => session.ends_with_turns(replaces),
    };
    let tail = if is_unchanged { &plan.tail } else { &TailAction::Continue };
    if request.appends_last_message() {
        return match tail {
            TailAction::Continue => Ok(TurnInput::ClientMessage(message)),
            // Calls and results after the message are part of the old answer: the client has not sent them.
            TailAction::Regenerate(turns) if turns.iter().any(|turn| is_result(session, *turn)) => {
                session.move_to_variant(turns, DeleteReason::ClientRegenerated)?;
                Ok(TurnInput::AnswerLast)
            }
            TailAction::Regenerate(_) => Ok(TurnInput::Regenerate(EditAuthor::Client)),
            TailAction::EditLast(_) => Ok(TurnInput::EditLast(message, EditAuthor::Client)),
            TailAction::ChooseVariant { chosen, replaces } => {
                session.choose_variant(chosen, replaces)?;
                append_new_messages(session, request, plan, &mut || StepFlow::Continue)?;
                Ok(TurnInput::ClientMessage(message))
            }
        };
    }
    // The last message is appended with the system messages after it, and the turn answers all of them.
    let mut known_messages = plan.known_messages;
    match tail {
        TailAction::Continue => {}
        TailAction::Regenerate(turns) => {
            session.move_to_variant(turns, DeleteReason::ClientRegenerated)?;
            known_messages = request.messages.len();
        }
        TailAction::EditLast(turns) => session.move_to_variant(turns, DeleteReason::ClientEdited)?,
        TailAction::ChooseVariant { chosen, replaces } => session.choose_variant(chosen, replaces)?,
    }
    let plan = DispatchPlan { known_messages, ..plan.clone() };
    append_new_messages(session, request, &plan, &mut || StepFlow::Continue)?;
    Ok(TurnInput::AnswerLast)
}

/// Whether a turn is the result of a function.
fn is_result(session: &Session, turn: TurnId) -> bool {
    let turns = session.timeline().turns();
    turns.binary_search_by_key(&turn, |known| known.id).is_ok_and(|n| turns[n].role == Role::Tool)
}

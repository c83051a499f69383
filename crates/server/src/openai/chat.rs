//! Chat completions. The conversation is named by a header, or found by the history of the request; only the new messages of the
//! request are appended to it.

use super::chat_request::{OpenAiChatRequest, ParsedChatRequest};
use super::chat_response::ChatResponse;
use super::dispatch::{DispatchPlan, DispatchedChat, TailAction, dispatch_chat};
use super::protocol::{
    CONVERSATION_HEADER, OpenAiJson, OpenAiResult, check_response_format, error_event, finish_reason, usage,
};
use super::unstored_chat::complete_unstored;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::sse::sse_channel;
use crate::stop_sequences::StopSequenceFilter;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use halo_core::Error;
use halo_core::change::DeleteReason;
use halo_core::model::StepFlow;
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use halo_engine::event::{ChangeAction, Event, TurnSummary};
use halo_engine::host::{ConversationHandle, JobContext};
use halo_engine::scheduler::QueuePlace;
use halo_engine::session::Session;
use halo_engine::turn::{EditAuthor, TurnInput};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

/// The name that stands for no conversation: nothing is stored.
const NOT_STORED: &str = "none";

pub(super) async fn chat_completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    OpenAiJson(body): OpenAiJson<OpenAiChatRequest>,
) -> OpenAiResult<Response> {
    let request = body.parse(&app.backend.rules().sampling, app.limits.max_messages)?;
    let place = app.reserve_queue_place()?;
    let name = conversation_name(&headers)?;
    check_response_format(&app, &request.sampling).await?;
    let (stream, include_usage) = (body.params.stream, body.params.include_usage());
    if name.as_deref() == Some(NOT_STORED) || body.store == Some(false) {
        // A completion takes a place of its own.
        drop(place);
        let mut response = complete_unstored(app, request, stream, include_usage).await?;
        set_conversation_header(&mut response, NOT_STORED);
        return Ok(response);
    }
    let dispatcher = Arc::clone(&app);
    let turn = spawn_blocking(move || {
        let dispatched = dispatch_chat(&dispatcher, name.as_deref(), &request)?;
        let handle = dispatcher.open_or_create_conversation(CONVERSATION_HEADER, &dispatched.name)?;
        Ok(ChatTurn { app: dispatcher, handle, dispatched, request, place })
    })
    .await?;
    let name = turn.dispatched.name.clone();
    let format = ChatResponse::new(&app);
    let mut response = match stream {
        true => stream_turn(turn, format, include_usage).await?,
        false => complete_turn(turn, format).await?,
    };
    set_conversation_header(&mut response, &name);
    Ok(response)
}

/// A chat request in its conversation.
struct ChatTurn {
    app: Arc<App>,
    handle: Arc<ConversationHandle>,
    dispatched: DispatchedChat,
    request: ParsedChatRequest,
    /// Its place in the queue of the model, while it waits for the jobs before it.
    place: QueuePlace,
}

async fn stream_turn(turn: ChatTurn, format: ChatResponse, include_usage: bool) -> OpenAiResult<Response> {
    let (out, ended, response) = sse_channel(error_event);
    let (out, format) = (Arc::new(out), Arc::new(format));
    let (end_out, end_format) = (Arc::clone(&out), Arc::clone(&format));
    let mut started = false;
    let on_progress = move |text: Option<&str>| {
        let Some(text) = text else { return out.flow() };
        if !std::mem::replace(&mut started, true) {
            out.send_json(None, &format.chunk(&json!({ "role": "assistant", "content": "" }), None));
        }
        match text.is_empty() {
            true => out.flow(),
            false => out.send_json(None, &format.chunk(&json!({ "content": text }), None)),
        }
    };
    submit_chat_turn(turn, on_progress, move |result| {
        let result = result.map(|ChatTurnResult { summary, prompt_tokens, withheld, .. }| {
            let usage = include_usage.then(|| usage(prompt_tokens, summary.tokens));
            end_format.send_end(&end_out, &withheld, summary.finish, usage);
        });
        let _ = ended.send(result);
    })?;
    Ok(response.await?)
}

async fn complete_turn(turn: ChatTurn, format: ChatResponse) -> OpenAiResult<Response> {
    let (sender, receiver) = oneshot::channel();
    // Dropped with this future, when the client disconnects.
    let guard = DisconnectGuard(Arc::new(AtomicBool::new(true)));
    let connected = Arc::clone(&guard.0);
    let on_progress = move |_: Option<&str>| match connected.load(Ordering::SeqCst) {
        true => StepFlow::Continue,
        false => StepFlow::Stop,
    };
    submit_chat_turn(turn, on_progress, move |result| drop(sender.send(result)))?;
    let result = receiver.await.map_err(|_| ErrorResponse::shutting_down())?;
    let ChatTurnResult { summary, prompt_tokens, text, .. } = result?;
    let usage = usage(prompt_tokens, summary.tokens);
    Ok(Json(format.message(&text, finish_reason(summary.finish), usage)).into_response())
}

struct DisconnectGuard(Arc<AtomicBool>);

impl Drop for DisconnectGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn conversation_name(headers: &HeaderMap) -> ApiResult<Option<String>> {
    match headers.get(CONVERSATION_HEADER).map(|name| name.to_str()) {
        None => Ok(None),
        Some(Ok(name)) => Ok(Some(percent_decode(name))),
        Some(Err(_)) => Err(ErrorResponse::bad_request(format!(
            "{CONVERSATION_HEADER} must be ASCII text; percent-encode other characters"
        ))),
    }
}

fn set_conversation_header(response: &mut Response, name: &str) {
    let encoded: String = name.bytes().map(percent_encode_byte).collect();
    if let Ok(value) = encoded.parse() {
        response.headers_mut().insert(CONVERSATION_HEADER, value);
    }
}

fn percent_encode_byte(byte: u8) -> String {
    match byte {
        b'%' => "%25".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    }
}

/// Decodes `%E2%82%AC` to `€`; a `%` without two hexadecimal digits stays as it is.
fn percent_decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, more @ ..] = rest {
        let digits = more.get(..2).and_then(|two| str::from_utf8(two).ok());
        match digits.filter(|_| *first == b'%').and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

struct ChatTurnResult {
    summary: TurnSummary,
    prompt_tokens: usize,
    /// The answer without stop sequences.
    text: String,
    /// The end of the answer, which was withheld because it could have been the start of a stop sequence.
    withheld: String,
}

/// Runs the turn on the conversation's thread. `on_progress` gets the new text at each token, and nothing at all other events.
fn submit_chat_turn(
    turn: ChatTurn,
    mut on_progress: impl FnMut(Option<&str>) -> StepFlow + Send + 'static,
    on_end: impl FnOnce(ApiResult<ChatTurnResult>) + Send + 'static,
) -> ApiResult<()> {
    let ChatTurn { app, handle, dispatched, request, place } = turn;
    let job = move |session: &mut Session, context: &JobContext<'_>| {
        let DispatchedChat { name, plan, in_flight } = dispatched;
        let synced = sync_history(session, &request, &plan, &mut || match context.is_cancelled() {
            true => StepFlow::Stop,
            false => on_progress(None),
        });
        // Open pages show the messages that the client has sent.
        context.announce_change(ChangeAction::MessagesAppended, Vec::new());
        // From here on the scheduler counts it.
        drop(place);
        let result =
            synced.and_then(|()| run_chat_turn(session, context, name, &request, &plan, &mut on_progress));
        let recorded = result.as_ref().map(|result| result.summary.clone()).map_err(Error::clone);
        app.metrics.record_turn(&recorded);
        if let Ok(ChatTurnResult { summary, text, .. }) = &result
            && let Err(e) = session.store_answer_key(summary.turn, text)
        {
            // The error names the conversation, and a name can be made of what was said.
            let id = &session.state().id;
            tracing::warn!("the conversation {id} may not be found by its history: {:?}", e.kind);
        }
        drop(in_flight);
        on_end(result.map_err(ErrorResponse::from));
    };
    Ok(handle.submit(job)?)
}

fn run_chat_turn(
    session: &mut Session,
    context: &JobContext<'_>,
    client: String,
    request: &ParsedChatRequest,
    plan: &DispatchPlan,
    on_progress: &mut dyn FnMut(Option<&str>) -> StepFlow,
) -> Result<ChatTurnResult, Error> {
    let mut filter = StopSequenceFilter::new(&request.sampling.stop);
    let (mut text, mut prompt_tokens) = (String::new(), 0);
    let mut on_event = |event: &Event| match event {
        Event::Token { text: token, .. } => {
            let sendable = filter.push(token);
            text.push_str(&sendable);
            on_progress(Some(&sendable))
        }
        Event::Prefilled(stats) => {
            prompt_tokens = stats.reused + stats.restored + stats.recomputed + stats.prefilled;
            on_progress(None)
        }
        _ => on_progress(None),
    };
    let sampling = Some(request.sampling.clone());
    let begin = |session: &mut Session| begin_turn(session, request, plan);
    let summary = context.run_turn_with(session, (client, sampling), &mut on_event, begin)?;
    let withheld = filter.finish();
    text.push_str(&withheld);
    Ok(ChatTurnResult { summary, prompt_tokens, text, withheld })
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
    let new: Vec<(Role, String)> = new.map(|message| (message.role, message.text.clone())).collect();
    if session.timeline().turns().iter().any(|turn| turn.role == Role::System) {
        let resent = request.messages[..known].iter().filter(|message| message.role == Role::System);
        let resent: Vec<&str> = resent.map(|message| message.text.as_str()).collect();
        session.prune_system_messages(&resent)?;
    }
    session.append_messages(&new, on_progress)
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
            TailAction::Continue => Ok(TurnInput::Message(message)),
            TailAction::Regenerate(_) => Ok(TurnInput::Regenerate(EditAuthor::Client)),
            TailAction::EditLast(_) => Ok(TurnInput::EditLast(message, EditAuthor::Client)),
            TailAction::ChooseVariant { chosen, replaces } => {
                session.choose_variant(chosen, replaces)?;
                append_new_messages(session, request, plan, &mut || StepFlow::Continue)?;
                Ok(TurnInput::Message(message))
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

//! Which conversation a chat request belongs to, and what it changes there. The request is aligned with the stored conversations
//! (`halo_engine::lookup`). Only the last exchange is ever replaced, and it becomes a variant.

use super::chat_request::ParsedChatRequest;
use super::model_check::ModelCheck;
use super::protocol::CONVERSATION_HEADER;
use crate::app::{App, check_conversation_name};
use crate::chat_dispatcher::InFlightRequest;
use crate::error::{ApiResult, ErrorResponse};
use axum::http::StatusCode;
use halo_core::store::Access;
use halo_core::token::{Role, TurnId};
use halo_engine::align::{AlignVerdict, Alignment, SentMessage};
use halo_engine::branch::BranchPoint;
use halo_engine::chat_options::ChatOptions;
use halo_engine::lookup::{AlignOptions, ConversationMatch, align_with_conversation, find_conversation};
use halo_engine::title::conversation_title;
use parking_lot::MutexGuard;
use std::collections::BTreeSet;

/// The conversation of a request, and what the request changes there.
pub(super) struct DispatchedChat {
    pub name: String,
    pub plan: DispatchPlan,
    pub in_flight: InFlightRequest,
}

/// What a request changes in its conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DispatchPlan {
    /// How many messages of the request the conversation has already.
    pub known_messages: usize,
    pub tail: TailAction,
    /// Messages of the request that replace older text of the conversation, such as a client's summary.
    pub substitutes: Vec<usize>,
}

/// What happens to the last exchange before the new message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum TailAction {
    #[default]
    Continue,
    /// The last answer becomes a variant, and its message is answered again.
    Regenerate(Vec<TurnId>),
    /// The last message and its answer become a variant.
    EditLast(Vec<TurnId>),
    /// A variant replaces the last exchange.
    ChooseVariant { chosen: Vec<TurnId>, replaces: Vec<TurnId> },
}

impl DispatchPlan {
    fn from_alignment(alignment: &Alignment) -> Self {
        let (known_messages, tail) = match &alignment.verdict {
            AlignVerdict::Continue { first_new } => (*first_new, TailAction::Continue),
            AlignVerdict::Regenerate { replaces } => {
                (alignment.first_unmatched, TailAction::Regenerate(replaces.clone()))
            }
            AlignVerdict::EditLast { replaces } => {
                (alignment.first_unmatched, TailAction::EditLast(replaces.clone()))
            }
            AlignVerdict::ChooseVariant { chosen_turns: chosen, replaces, first_new } => {
                (*first_new, TailAction::ChooseVariant { chosen: chosen.clone(), replaces: replaces.clone() })
            }
            // A branch ends with the last shared turn, so there is nothing to replace.
            AlignVerdict::Branch { first_new, .. } => (*first_new, TailAction::Continue),
        };
        Self { known_messages, tail, substitutes: alignment.summaries.clone() }
    }
}

/// Takes the place of the user's message if the request has none; no real message has this text.
const NO_USER_MESSAGE: &str = "\u{0}";

/// A request, as it is aligned with stored conversations.
struct AlignRequest<'a> {
    messages: Vec<SentMessage>,
    system: Option<&'a str>,
    default_system: String,
    /// In a group chat another character speaks next, or there is only a system prompt: all messages of the request are history.
    without_user_message: bool,
}

/// Finds the conversation of a request, or names a new one. A branch is created here; everything else changes when the turn runs.
pub(super) fn dispatch_chat(
    app: &App,
    name: Option<&str>,
    request: &mut ParsedChatRequest,
    check: &ModelCheck,
) -> ApiResult<DispatchedChat> {
    let is_answered = |message: &SentMessage| matches!(message.role, Role::User | Role::Tool);
    let without_user_message = !request.messages.last().is_some_and(is_answered);
    let mut messages = request.messages.clone();
    if without_user_message {
        messages.push(SentMessage::new(Role::User, NO_USER_MESSAGE.to_owned()));
    }
    let system = request.system.clone();
    let align = AlignRequest {
        messages,
        system: system.as_deref(),
        default_system: app.backend.rules().system_prompt,
        without_user_message,
    };
    let (_guard, name, plan) = match name {
        Some(name) => {
            check.apply(app, Some(name), request)?;
            let guard = app.dispatcher.lock();
            (guard, name.to_owned(), plan_for_named(app, name, &align)?)
        }
        None => {
            let (guard, found) = find_checked(app, &align, request, check)?;
            let (name, plan) = continue_or_create(app, &align, found, &request.messages)?;
            (guard, name, plan)
        }
    };
    let in_flight = app.dispatcher.register(&name);
    Ok(DispatchedChat { name, plan, in_flight })
}

/// Continues a conversation after a turn: in a branch, if others follow it or an answer is being generated.
pub(super) fn dispatch_after(app: &App, name: &str, turn: TurnId) -> ApiResult<DispatchedChat> {
    let _guard = app.dispatcher.lock();
    let timeline = app.with_reader(|store| store.load(name, Access::Read))?;
    let has_text = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
    if !has_text(turn) {
        let message =
            "the previous response is no longer part of its conversation; send the whole input instead";
        return Err(ErrorResponse::not_found(message));
    }
    let is_last = !timeline.turns().iter().any(|other| other.id > turn && has_text(other.id));
    let name = match is_last && !is_busy(app, name) {
        true => name.to_owned(),
        false => {
            let branch = unused_name(app, name, " · branch ")?;
            let point = BranchPoint::after(turn);
            app.backend.create_branch(name, &branch, &point)?;
            branch
        }
    };
    let in_flight = app.dispatcher.register(&name);
    Ok(DispatchedChat { name, plan: DispatchPlan::default(), in_flight })
}

/// The plan for a conversation that the client names: the request continues there, whatever its history is.
fn plan_for_named(app: &App, name: &str, request: &AlignRequest<'_>) -> ApiResult<DispatchPlan> {
    if app.with_reader(|store| store.find_conversation(name))?.is_none() {
        check_conversation_name(CONVERSATION_HEADER, name)?;
        return Ok(DispatchPlan::default());
    }
    let options = AlignOptions {
        system: request.system,
        default_system: &request.default_system,
        unique_hashes: &BTreeSet::new(),
        named: true,
    };
    let sent = &request.messages;
    let alignment = app.with_reader(|store| align_with_conversation(store, name, sent, options))?;
    let last = sent.len() - 1;
    let mut plan = match &alignment {
        Some(alignment) if !matches!(alignment.verdict, AlignVerdict::Branch { .. }) => {
            DispatchPlan::from_alignment(alignment)
        }
        // Messages that the conversation does not have are stored beside it.
        other => {
            let first = other.as_ref().map_or(0, |alignment| alignment.first_unmatched);
            let substitutes = (first..last).collect();
            DispatchPlan { known_messages: last, tail: TailAction::Continue, substitutes }
        }
    };
    if is_busy(app, name) {
        // The client has not seen the answer that is being generated, so its request replaces nothing.
        plan.known_messages = plan.known_messages.min(last);
        plan.tail = TailAction::Continue;
    }
    Ok(plan)
}

/// The conversation that the history of the request belongs to, whose model supports the request; and the dispatcher, locked.
fn find_checked<'a>(
    app: &'a App,
    align: &AlignRequest<'_>,
    request: &mut ParsedChatRequest,
    check: &ModelCheck,
) -> ApiResult<(MutexGuard<'a, ()>, Option<ConversationMatch>)> {
    let mut checked = None;
    loop {
        let guard = app.dispatcher.lock();
        let found = app.with_reader(|store| {
            let found = find_conversation(store, &align.messages, align.system, &align.default_system)?;
            let chosen = match &found {
                None => None,
                Some(found) => ChatOptions::load(store, &found.name)?.model.map(|_| found.name.clone()),
            };
            Ok((found, chosen))
        });
        let (found, chosen) = found?;
        match chosen {
            None => {
                check.apply(app, None, request)?;
                return Ok((guard, found));
            }
            chosen if chosen == checked => return Ok((guard, found)),
            // Its model may have to be loaded, and other requests must not wait for that.
            Some(name) => {
                drop(guard);
                check.apply(app, Some(&name), request)?;
                checked = Some(name);
            }
        }
    }
}

/// Where the request continues: in the conversation that was found, in a new branch of it, or in a new one.
fn continue_or_create(
    app: &App,
    request: &AlignRequest<'_>,
    found: Option<ConversationMatch>,
    messages: &[SentMessage],
) -> ApiResult<(String, DispatchPlan)> {
    let new = || ApiResult::Ok((unused_name(app, &first_title(messages), " ")?, DispatchPlan::default()));
    let Some(found) = found else { return new() };
    let plan = DispatchPlan::from_alignment(&found.alignment);
    match branch_decision(app, request, &found) {
        BranchDecision::Stay => Ok((found.name, plan)),
        BranchDecision::NewConversation => new(),
        BranchDecision::Branch(point) => {
            let plan = match found.alignment.verdict {
                AlignVerdict::Branch { .. } => plan,
                _ => DispatchPlan {
                    known_messages: found.alignment.first_unmatched,
                    tail: TailAction::Continue,
                    substitutes: plan.substitutes,
                },
            };
            let name = unused_name(app, &found.name, " · branch ")?;
            app.backend.create_branch(&found.name, &name, &point)?;
            Ok((name, plan))
        }
    }
}

enum BranchDecision {
    Stay,
    Branch(BranchPoint),
    NewConversation,
}

/// Two requests with the same history at the same time go to different branches; and a request without a user message cannot edit
/// one.
fn branch_decision(app: &App, request: &AlignRequest<'_>, found: &ConversationMatch) -> BranchDecision {
    let busy = is_busy(app, &found.name);
    match (&found.alignment.verdict, found.alignment.last_shared_turn) {
        (AlignVerdict::Branch { last_shared_turn, chosen_turns, .. }, _) => {
            let (last_shared_turn, chosen_turns) = (*last_shared_turn, chosen_turns.clone());
            BranchDecision::Branch(BranchPoint { chosen_turns, ..BranchPoint::after(last_shared_turn) })
        }
        (verdict, Some(last_shared_turn))
            if busy || (request.without_user_message && matches!(verdict, AlignVerdict::EditLast { .. })) =>
        {
            BranchDecision::Branch(BranchPoint::after(last_shared_turn))
        }
        (_, None) if busy => BranchDecision::NewConversation,
        _ => BranchDecision::Stay,
    }
}

/// Whether another request is in flight in the conversation, or an answer is being generated there.
fn is_busy(app: &App, name: &str) -> bool {
    let is_answering = || {
        let handle = app.host.find_open(name);
        handle.is_some_and(|handle| handle.snapshot_cell().get().answer.is_some())
    };
    app.dispatcher.has_in_flight(name) || is_answering()
}

/// The name of a new conversation: the first words of the first user message.
fn first_title(messages: &[SentMessage]) -> String {
    let first = messages.iter().find(|message| message.role == Role::User).or(messages.first());
    first.map(|message| conversation_title(&message.text)).unwrap_or_default()
}

/// A name that no conversation has: the wanted one, or with a number after it.
fn unused_name(app: &App, wanted: &str, separator: &str) -> ApiResult<String> {
    let base = wanted.split(separator).next().filter(|_| separator.len() > 1).unwrap_or(wanted);
    let mut stem = base.trim().to_owned();
    while stem.len() > 160 {
        stem.pop();
    }
    if stem.trim().is_empty() || check_conversation_name(CONVERSATION_HEADER, &stem).is_err() {
        "chat".clone_into(&mut stem);
    }
    let name = |n: u64| match n {
        1 if separator.len() == 1 => stem.clone(),
        n => format!("{stem}{separator}{n}"),
    };
    let is_free = |name: &str| -> ApiResult<bool> {
        Ok(!app.dispatcher.has_in_flight(name) && app.is_name_free(name)?)
    };
    // Doubling, then bisection: a free number is found in a few steps, however many names are taken.
    let (mut taken, mut free) = (0, 1);
    while !is_free(&name(free))? {
        taken = free;
        free *= 2;
        if free > 1 << 40 {
            let message = "no free name for another conversation: name it with x-halo-conversation";
            return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
        }
    }
    while taken + 1 < free {
        let middle = (taken + free) / 2;
        match is_free(&name(middle))? {
            true => free = middle,
            false => taken = middle,
        }
    }
    Ok(name(free))
}

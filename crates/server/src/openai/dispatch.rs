//! Which conversation a chat request is answered in, and what it changes there. The request is compared with what is stored
//! (`halo_engine::find`); nothing is deleted but the last exchange, and that is kept as a variant.

use super::chat::ParsedChatRequest;
use crate::app::{App, check_conversation_name};
use crate::error::{ApiResult, ErrorResponse};
use axum::http::StatusCode;
use halo_core::token::{Role, TurnId};
use halo_engine::align::{AlignVerdict, Alignment, SentMessage};
use halo_engine::branch::BranchPoint;
use halo_engine::lookup::{AlignOptions, align_with_conversation, find_conversation};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The requests that are on their way, by conversation.
#[derive(Default)]
pub(crate) struct ChatDispatcher {
    /// Requests are placed one at a time: of two on one history, the second finds the first.
    dispatch_lock: Mutex<()>,
    in_flight: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// A request that is on its way in a conversation, until this is dropped.
pub(super) struct InFlightRequest {
    name: String,
    in_flight: Arc<Mutex<BTreeMap<String, usize>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ChatDispatcher {
    fn has_in_flight(&self, name: &str) -> bool {
        lock(&self.in_flight).contains_key(name)
    }

    fn register(&self, name: &str) -> InFlightRequest {
        *lock(&self.in_flight).entry(name.to_owned()).or_default() += 1;
        InFlightRequest { name: name.to_owned(), in_flight: Arc::clone(&self.in_flight) }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut all = lock(&self.in_flight);
        if let Some(count) = all.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.name);
            }
        }
    }
}

/// Where a request is answered, and what it changes there.
pub(super) struct DispatchedChat {
    pub name: String,
    pub plan: DispatchPlan,
    pub in_flight: InFlightRequest,
}

/// What a request changes in its conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DispatchPlan {
    /// Messages of the request that the conversation has already.
    pub known_messages: usize,
    /// What happens to its end.
    pub tail: TailAction,
    /// Messages of the request that stand in the place of text that the conversation has.
    pub substitutes: Vec<usize>,
}

/// What happens to the end of a conversation before the last message is said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum TailAction {
    #[default]
    Continue,
    /// The answer to the last message is set aside, and the message answered again.
    Regenerate(Vec<TurnId>),
    /// The last message is set aside with its answer.
    EditLast(Vec<TurnId>),
    /// A variant takes the place of what stands there.
    ChooseVariant { chosen: Vec<TurnId>, replaces: Vec<TurnId> },
}

impl DispatchPlan {
    fn from_alignment(alignment: &Alignment) -> Self {
        let asides = alignment.summaries.clone();
        let (known, end) = match &alignment.verdict {
            AlignVerdict::Continue { first_new: from } => (*from, TailAction::Continue),
            AlignVerdict::Regenerate { replaces } => {
                (alignment.first_unmatched, TailAction::Regenerate(replaces.clone()))
            }
            AlignVerdict::EditLast { replaces } => {
                (alignment.first_unmatched, TailAction::EditLast(replaces.clone()))
            }
            AlignVerdict::ChooseVariant { chosen_turns: chosen, replaces, first_new: from } => {
                (*from, TailAction::ChooseVariant { chosen: chosen.clone(), replaces: replaces.clone() })
            }
            // In the branch, nothing stands behind what both share.
            AlignVerdict::Branch { first_new: from, .. } => (*from, TailAction::Continue),
        };
        Self { known_messages: known, tail: end, substitutes: asides }
    }
}

/// In the place of a message of the user's, where there is none: no message is this.
const NO_USER_MESSAGE: &str = "\u{0}";

/// Decides where a request is answered. A branch is made here; everything else is changed when the request's turn comes.
pub(super) fn dispatch_chat(
    app: &App,
    named: Option<&str>,
    wanted: &ParsedChatRequest,
) -> ApiResult<DispatchedChat> {
    let usual = app.backend.rules().system_prompt;
    // Where somebody else is to speak next, everything that was sent is history.
    let speaks_next = wanted.messages.last().is_some_and(|message| message.role != Role::User);
    let mut sent = wanted.messages.clone();
    if speaks_next {
        sent.push(SentMessage::new(Role::User, NO_USER_MESSAGE.to_owned()));
    }
    let system = wanted.system.as_deref();
    let _one = lock(&app.dispatcher.dispatch_lock);
    let placed = |name: &str, plan: DispatchPlan| DispatchedChat {
        name: name.to_owned(),
        plan,
        in_flight: app.dispatcher.register(name),
    };
    if let Some(name) = named {
        check_conversation_name(name)?;
        if app.with_reader(|store| store.find_conversation(name))?.is_none() {
            return Ok(placed(name, DispatchPlan::default()));
        }
        let how =
            AlignOptions { system, default_system: &usual, unique_hashes: &BTreeSet::new(), named: true };
        let alignment = app.with_reader(|store| align_with_conversation(store, name, &sent, how))?;
        let mut plan = match &alignment {
            Some(alignment) if !matches!(alignment.verdict, AlignVerdict::Branch { .. }) => {
                DispatchPlan::from_alignment(alignment)
            }
            // The conversation is named, so it goes on there: what the client has that is not known is kept beside it.
            other => {
                let from = other.as_ref().map_or(0, |alignment| alignment.first_unmatched);
                let last = sent.len() - 1;
                DispatchPlan {
                    known_messages: last,
                    tail: TailAction::Continue,
                    substitutes: (from..last).collect(),
                }
            }
        };
        if app.dispatcher.has_in_flight(name) || is_answering(app, name) {
            // What is on its way there was not seen by this client: it replaces nothing.
            plan.known_messages = plan.known_messages.min(sent.len() - 1);
            plan.tail = TailAction::Continue;
        }
        return Ok(placed(name, plan));
    }
    let found = app.with_reader(|store| find_conversation(store, &sent, system, &usual))?;
    let Some(found) = found else {
        return Ok(placed(
            &unused_name(app, &conversation_title(&wanted.messages), " ")?,
            DispatchPlan::default(),
        ));
    };
    let busy = app.dispatcher.has_in_flight(&found.name) || is_answering(app, &found.name);
    let point = match (&found.alignment.verdict, found.alignment.last_shared_turn) {
        (AlignVerdict::Branch { last_shared_turn: through, chosen_turns: chosen, .. }, _) => {
            Some(BranchPoint { last_shared_turn: *through, chosen_turns: chosen.clone() })
        }
        // Requests on one history at the same time go different ways; and a message that is not there replaces none.
        (verdict, Some(through))
            if busy || (speaks_next && matches!(verdict, AlignVerdict::EditLast { .. })) =>
        {
            Some(BranchPoint { last_shared_turn: through, chosen_turns: Vec::new() })
        }
        (_, None) if busy => {
            return Ok(placed(
                &unused_name(app, &conversation_title(&wanted.messages), " ")?,
                DispatchPlan::default(),
            ));
        }
        _ => None,
    };
    let Some(point) = point else {
        return Ok(placed(&found.name, DispatchPlan::from_alignment(&found.alignment)));
    };
    let mut plan = DispatchPlan::from_alignment(&found.alignment);
    if !matches!(found.alignment.verdict, AlignVerdict::Branch { .. }) {
        plan = DispatchPlan {
            known_messages: found.alignment.first_unmatched,
            tail: TailAction::Continue,
            substitutes: plan.substitutes,
        };
    }
    let name = unused_name(app, &found.name, " · branch ")?;
    app.backend.create_branch(&found.name, &name, &point)?;
    Ok(placed(&name, plan))
}

/// Whether an answer is being given there that some other request asked for.
fn is_answering(app: &App, name: &str) -> bool {
    app.host.find_open(name).is_some_and(|desk| desk.snapshot_cell().get().answer.is_some())
}

/// What a new conversation is called: by the first words of its first message that a person has said.
fn conversation_title(messages: &[SentMessage]) -> String {
    let first = messages.iter().find(|message| message.role == Role::User).or(messages.first());
    let words: String = first.map_or("", |message| &message.text).chars().take(400).collect();
    let words: String = words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let words: String = words.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(48).collect();
    words.trim().to_owned()
}

/// A name that no conversation has: as it is, or with a number behind it.
fn unused_name(app: &App, wanted: &str, before_number: &str) -> ApiResult<String> {
    // A number is found in a few steps, however many of that name there are.
    let base = wanted.split(before_number).next().filter(|_| before_number.len() > 1).unwrap_or(wanted);
    let mut stem = base.trim().to_owned();
    while stem.len() > 160 {
        stem.pop();
    }
    if stem.trim().is_empty() || check_conversation_name(&stem).is_err() {
        "chat".clone_into(&mut stem);
    }
    let name = |n: u64| match n {
        1 if before_number.len() == 1 => stem.clone(),
        n => format!("{stem}{before_number}{n}"),
    };
    let is_free = |name: &str| -> ApiResult<bool> {
        Ok(!app.dispatcher.has_in_flight(name) && app.is_name_free(name)?)
    };
    let (mut taken, mut free) = (0, 1);
    while !is_free(&name(free))? {
        taken = free;
        free *= 2;
        if free > 1 << 40 {
            let why = "no name is left for another conversation: name it with x-halo-conversation";
            return Err(ErrorResponse::new(StatusCode::CONFLICT, why));
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

//! Which conversation a chat request is answered in, and what it changes there. The request is compared with what is stored
//! (`halo_engine::find`); nothing is deleted but the last exchange, and that is kept as a variant.

use super::chat::Wanted;
use crate::answer::{Answer, Refusal};
use crate::app::{App, check_name};
use axum::http::StatusCode;
use halo_core::token::{Role, TurnId};
use halo_engine::align::{Alignment, SentMessage, Verdict};
use halo_engine::branch::BranchPoint;
use halo_engine::find::{Comparison, align_with, find_conversation};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The requests that are on their way, by conversation.
#[derive(Default)]
pub(crate) struct Placing {
    /// Requests are placed one at a time: of two on one history, the second finds the first.
    one: Mutex<()>,
    on_their_way: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// A request that is on its way in a conversation, until this is dropped.
pub(super) struct OnItsWay {
    name: String,
    all: Arc<Mutex<BTreeMap<String, usize>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Placing {
    fn is_busy(&self, name: &str) -> bool {
        lock(&self.on_their_way).contains_key(name)
    }

    fn enter(&self, name: &str) -> OnItsWay {
        *lock(&self.on_their_way).entry(name.to_owned()).or_default() += 1;
        OnItsWay { name: name.to_owned(), all: Arc::clone(&self.on_their_way) }
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        if let Some(count) = all.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.name);
            }
        }
    }
}

/// Where a request is answered, and what it changes there.
pub(super) struct Placed {
    pub name: String,
    pub plan: Plan,
    pub on_its_way: OnItsWay,
}

/// What a request changes in its conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Messages of the request that the conversation has already.
    pub known: usize,
    /// What happens to its end.
    pub end: End,
    /// Messages of the request that stand in the place of text that the conversation has.
    pub asides: Vec<usize>,
}

/// What happens to the end of a conversation before the last message is said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// It goes on.
    #[default]
    GoesOn,
    /// The answer to the last message is set aside, and the message answered again.
    AnsweredAgain(Vec<TurnId>),
    /// The last message is set aside with its answer.
    Edited(Vec<TurnId>),
    /// A variant takes the place of what stands there.
    Variant { chosen: Vec<TurnId>, replaces: Vec<TurnId> },
}

impl Plan {
    fn of(alignment: &Alignment) -> Self {
        let asides = alignment.asides.clone();
        let (known, end) = match &alignment.verdict {
            Verdict::Continue { from } => (*from, End::GoesOn),
            Verdict::Regenerate { replaces } => (alignment.behind, End::AnsweredAgain(replaces.clone())),
            Verdict::EditLast { replaces } => (alignment.behind, End::Edited(replaces.clone())),
            Verdict::ChooseVariant { chosen, replaces, from } => {
                (*from, End::Variant { chosen: chosen.clone(), replaces: replaces.clone() })
            }
            // In the branch, nothing stands behind what both share.
            Verdict::Branch { from, .. } => (*from, End::GoesOn),
        };
        Self { known, end, asides }
    }
}

/// In the place of a message of the user's, where there is none: no message is this.
const NOTHING_SAID: &str = "\u{0}";

/// Decides where a request is answered. A branch is made here; everything else is changed when the request's turn comes.
pub(super) fn place(app: &App, named: Option<&str>, wanted: &Wanted) -> Answer<Placed> {
    let usual = app.parts.rules().system;
    // Where somebody else is to speak next, everything that was sent is history.
    let speaks_next = wanted.messages.last().is_some_and(|message| message.role != Role::User);
    let mut sent = wanted.messages.clone();
    if speaks_next {
        sent.push(SentMessage::new(Role::User, NOTHING_SAID.to_owned()));
    }
    let system = wanted.system.as_deref();
    let _one = lock(&app.placing.one);
    let placed =
        |name: &str, plan: Plan| Placed { name: name.to_owned(), plan, on_its_way: app.placing.enter(name) };
    if let Some(name) = named {
        check_name(name)?;
        if app.read(|store| store.find(name))?.is_none() {
            return Ok(placed(name, Plan::default()));
        }
        let how = Comparison { system, usual: &usual, unique: &BTreeSet::new(), named: true };
        let alignment = app.read(|store| align_with(store, name, &sent, how))?;
        let mut plan = match &alignment {
            Some(alignment) if !matches!(alignment.verdict, Verdict::Branch { .. }) => Plan::of(alignment),
            // The conversation is named, so it goes on there: what the client has that is not known is kept beside it.
            other => {
                let from = other.as_ref().map_or(0, |alignment| alignment.behind);
                let last = sent.len() - 1;
                Plan { known: last, end: End::GoesOn, asides: (from..last).collect() }
            }
        };
        if app.placing.is_busy(name) || is_running(app, name) {
            // What is on its way there was not seen by this client: it replaces nothing.
            plan.known = plan.known.min(sent.len() - 1);
            plan.end = End::GoesOn;
        }
        return Ok(placed(name, plan));
    }
    let found = app.read(|store| find_conversation(store, &sent, system, &usual))?;
    let Some(found) = found else {
        return Ok(placed(&free_name(app, &title(&wanted.messages), " ")?, Plan::default()));
    };
    let busy = app.placing.is_busy(&found.name) || is_running(app, &found.name);
    let point = match (&found.alignment.verdict, found.alignment.through) {
        (Verdict::Branch { through, chosen, .. }, _) => {
            Some(BranchPoint { through: *through, chosen: chosen.clone() })
        }
        // Requests on one history at the same time go different ways; and a message that is not there replaces none.
        (verdict, Some(through)) if busy || (speaks_next && matches!(verdict, Verdict::EditLast { .. })) => {
            Some(BranchPoint { through, chosen: Vec::new() })
        }
        (_, None) if busy => {
            return Ok(placed(&free_name(app, &title(&wanted.messages), " ")?, Plan::default()));
        }
        _ => None,
    };
    let Some(point) = point else { return Ok(placed(&found.name, Plan::of(&found.alignment))) };
    let mut plan = Plan::of(&found.alignment);
    if !matches!(found.alignment.verdict, Verdict::Branch { .. }) {
        plan = Plan { known: found.alignment.behind, end: End::GoesOn, asides: plan.asides };
    }
    let name = free_name(app, &found.name, " · branch ")?;
    app.parts.branch(&found.name, &name, &point)?;
    Ok(placed(&name, plan))
}

/// Whether an answer is being given there that some other request asked for.
fn is_running(app: &App, name: &str) -> bool {
    app.host.find(name).is_some_and(|desk| desk.board().look().running.is_some())
}

/// What a new conversation is called: by the first words of its first message that a person has said.
fn title(messages: &[SentMessage]) -> String {
    let first = messages.iter().find(|message| message.role == Role::User).or(messages.first());
    let words: String = first.map_or("", |message| &message.text).chars().take(400).collect();
    let words: String = words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let words: String = words.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(48).collect();
    words.trim().to_owned()
}

/// A name that no conversation has: as it is, or with a number behind it.
fn free_name(app: &App, wanted: &str, before_number: &str) -> Answer<String> {
    // A number is found in a few steps, however many of that name there are.
    let base = wanted.split(before_number).next().filter(|_| before_number.len() > 1).unwrap_or(wanted);
    let mut stem = base.trim().to_owned();
    while stem.len() > 160 {
        stem.pop();
    }
    if stem.trim().is_empty() || check_name(&stem).is_err() {
        "chat".clone_into(&mut stem);
    }
    let name = |n: u64| match n {
        1 if before_number.len() == 1 => stem.clone(),
        n => format!("{stem}{before_number}{n}"),
    };
    let is_free = |name: &str| -> Answer<bool> { Ok(!app.placing.is_busy(name) && app.is_free(name)?) };
    let (mut taken, mut free) = (0, 1);
    while !is_free(&name(free))? {
        taken = free;
        free *= 2;
        if free > 1 << 40 {
            let why = "no name is left for another conversation: name it with x-halo-conversation";
            return Err(Refusal::new(StatusCode::CONFLICT, why));
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

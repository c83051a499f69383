//! A model as an agent: what wraps agents wraps this too.

use crate::frame::Frame;
use halo_agents::agent::Agent;
use halo_agents::content::{Said, Whose};
use halo_core::attention::Watch;
use halo_core::seams::{Flow, Message, Model, ModelStep, Prompt, Sampling, SeamError, Seen};
use halo_core::token::{Position, Role};
use std::borrow::BorrowMut;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// A model that is asked and answers, and remembers nothing of it. It blocks while it does: whoever needs to go on meanwhile
/// gives it a thread.
pub struct Speaker<M> {
    model: Mutex<M>,
    /// What stands before everything; empty: nothing.
    pub system: String,
    /// How answers are drawn.
    pub sampling: Sampling,
    /// Beside which conversation it is asked: what a model has of that in memory stays there.
    pub beside: String,
}

impl<M: BorrowMut<dyn Model + Send>> Speaker<M> {
    /// A model, here or far away.
    pub fn new(model: M, system: impl Into<String>, sampling: Sampling) -> Self {
        Self { model: Mutex::new(model), system: system.into(), sampling, beside: ASIDE.to_owned() }
    }

    fn ask(&self, said: &[Said]) -> Result<String, SeamError> {
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let model: &mut (dyn Model + Send) = (*model).borrow_mut();
        let template = model.info().template.clone();
        let frame = Frame {
            template,
            system: self.system.clone(),
            dates: false,
            names: crate::frame::Names::default(),
        };
        let role = |said: &Said| if said.whose == Whose::User { Role::User } else { Role::Assistant };
        let mut pieces = model.tokenize(&frame.before_all(), true)?;
        let mut before = None;
        for one in said {
            pieces.extend(model.tokenize(&frame.opening(role(one), before, None), true)?);
            pieces.extend(model.tokenize(&one.text, false)?);
            before = Some(role(one));
        }
        pieces.extend(model.tokenize(&frame.opening(Role::Assistant, before, None), true)?);
        let seen = |(n, piece): (usize, &halo_core::seams::Piece)| Seen {
            position: Some(Position(n as u64)),
            behind: 0,
            id: piece.id,
            begins: n == 0,
        };
        let window: Vec<Seen> = pieces.iter().enumerate().map(seen).collect();
        let messages = || {
            let system =
                (!self.system.is_empty()).then(|| Message { role: Role::System, text: self.system.clone() });
            let said = said.iter().map(|one| Message { role: role(one), text: one.text.clone() });
            system.into_iter().chain(said).collect()
        };
        let next = Position(window.len() as u64);
        let prompt =
            Prompt { conversation: &self.beside, window: &window, messages: &messages, next, aside: true };
        let mut text = String::new();
        model.generate(&prompt, &self.sampling, &Watch::nothing(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                text.push_str(&piece.text);
            }
            Flow::Continue
        })?;
        Ok(text.trim().to_owned())
    }
}

/// What belongs to no conversation.
const ASIDE: &str = "\0aside";

impl<M: BorrowMut<dyn Model + Send> + Send> Agent<Vec<Said>> for Speaker<M> {
    type Out = String;

    async fn invoke(&self, said: Vec<Said>) -> Result<String, SeamError> {
        self.ask(&said)
    }
}

impl<M: BorrowMut<dyn Model + Send> + Send> Agent<String> for Speaker<M> {
    type Out = String;

    async fn invoke(&self, asked: String) -> Result<String, SeamError> {
        self.ask(&[Said::user(asked)])
    }
}

/// What comes of agents that never wait for anything: those of this crate block instead.
///
/// # Errors
/// As the agent's own; also when it waits after all.
pub(crate) fn at_once<T>(agent: impl Future<Output = Result<T, SeamError>>) -> Result<T, SeamError> {
    match std::pin::pin!(agent).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => Err(SeamError::new("asking an agent", "it waits for something that never comes")),
    }
}

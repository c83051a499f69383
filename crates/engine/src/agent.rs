//! A model as an [`Agent`], so that the wrappers of `halo-agents` apply to it.

use crate::chat_format::ChatFormatter;
use halo_agents::agent::Agent;
use halo_agents::content::{AuthoredMessage, TextAuthor};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{Model, ModelStep, Prompt, PromptMessage, Sampling, StepFlow, WindowToken};
use halo_core::token::{Position, Role};
use parking_lot::Mutex;
use std::borrow::BorrowMut;
use std::task::{Context, Poll, Waker};

/// A model that answers without a history. It blocks while it generates: callers that must not block run it on a thread.
pub struct CompletionAgent<M> {
    model: Mutex<M>,
    pub system_prompt: String,
    pub sampling: Sampling,
    /// The KV key of the conversation that it runs beside: the KV cells of that conversation stay in the model.
    pub conversation: String,
}

impl<M: BorrowMut<dyn Model + Send>> CompletionAgent<M> {
    pub fn new(model: M, system_prompt: impl Into<String>, sampling: Sampling) -> Self {
        Self {
            model: Mutex::new(model),
            system_prompt: system_prompt.into(),
            sampling,
            conversation: NO_CONVERSATION.to_owned(),
        }
    }

    fn complete(&self, history: &[AuthoredMessage]) -> Result<String, Error> {
        let mut model = self.model.lock();
        let model: &mut (dyn Model + Send) = (*model).borrow_mut();
        let template = model.info().template.clone();
        let format = ChatFormatter {
            template,
            system_prompt: self.system_prompt.clone(),
            show_dates: false,
            names: crate::chat_format::SpeakerNames::default(),
        };
        let role = |message: &AuthoredMessage| {
            if message.author == TextAuthor::User { Role::User } else { Role::Assistant }
        };
        let mut tokens = format.preamble().tokenize(model)?;
        let mut before = None;
        for message in history {
            tokens.extend(format.turn_header(role(message), before, None).tokenize(model)?);
            tokens.extend(model.tokenize(&message.text, false)?);
            before = Some(role(message));
        }
        tokens.extend(format.turn_header(Role::Assistant, before, None).tokenize(model)?);
        let window_token = |(n, token): (usize, &halo_core::model::ModelToken)| WindowToken {
            position: Some(Position(n as u64)),
            offset: 0,
            id: token.id,
            chunk_start: n == 0,
        };
        let window: Vec<WindowToken> = tokens.iter().enumerate().map(window_token).collect();
        let messages = || {
            let system = (!self.system_prompt.is_empty())
                .then(|| PromptMessage { role: Role::System, text: self.system_prompt.clone() });
            let messages = history
                .iter()
                .map(|message| PromptMessage { role: role(message), text: message.text.clone() });
            system.into_iter().chain(messages).collect()
        };
        let next = Position(window.len() as u64);
        let prompt = Prompt {
            conversation: &self.conversation,
            window: &window,
            messages: &messages,
            next_position: next,
            ephemeral: true,
        };
        let mut text = String::new();
        model.generate(&prompt, &self.sampling, &AttentionRequest::none(), &mut |step| {
            if let ModelStep::Token(token, _) = step {
                text.push_str(&token.text);
            }
            StepFlow::Continue
        })?;
        Ok(text.trim().to_owned())
    }
}

/// The KV key of requests without a conversation.
const NO_CONVERSATION: &str = "\0aside";

impl<M: BorrowMut<dyn Model + Send> + Send> Agent<Vec<AuthoredMessage>> for CompletionAgent<M> {
    type Out = String;

    async fn invoke(&self, history: Vec<AuthoredMessage>) -> Result<String, Error> {
        self.complete(&history)
    }
}

impl<M: BorrowMut<dyn Model + Send> + Send> Agent<String> for CompletionAgent<M> {
    type Out = String;

    async fn invoke(&self, message: String) -> Result<String, Error> {
        self.complete(&[AuthoredMessage::user(message)])
    }
}

/// The result of an agent that never awaits: those of this crate block instead.
pub fn poll_ready<T>(agent: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match std::pin::pin!(agent).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(Error::internal(
            "running an agent",
            "internal error: an agent that must not await did, please report it",
        )),
    }
}

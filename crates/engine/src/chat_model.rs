//! A model together with the way messages are written for it.

use crate::chat_format::{ChatFormatter, MessageTime};
use halo_core::Error;
use halo_core::model::{Model, ModelInfo, ModelToken};
use halo_core::token::{ContentKind, Role};

/// A model, its chat template, and the system prompt as tokens.
pub struct ChatModel {
    pub(crate) model: Box<dyn Model + Send>,
    pub(crate) format: ChatFormatter,
    pub(crate) system_tokens: Vec<ModelToken>,
}

impl ChatModel {
    pub(crate) fn new(mut model: Box<dyn Model + Send>, format: ChatFormatter) -> Result<Self, Error> {
        let system_tokens = format.preamble().tokenize(&mut *model)?;
        Ok(Self { model, format, system_tokens })
    }

    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    pub(crate) fn set_system_prompt(&mut self, system_prompt: String) -> Result<(), Error> {
        self.format.system_prompt = system_prompt;
        self.system_tokens = self.format.preamble().tokenize(&mut *self.model)?;
        Ok(())
    }

    /// The tokens of a new turn: its header, then the message. `before` is the role of the turn before it.
    pub(crate) fn tokenize_message(
        &mut self,
        role: Role,
        text: &str,
        before: Option<Role>,
        at: Option<MessageTime>,
    ) -> Result<Vec<(ModelToken, ContentKind)>, Error> {
        let header = self.format.turn_header(role, before, at).tokenize(&mut *self.model)?;
        let mut tokens: Vec<_> = header.into_iter().map(|token| (token, ContentKind::Template)).collect();
        if !text.is_empty() {
            let message = self.model.tokenize(text, false)?;
            tokens.extend(message.into_iter().map(|token| (token, ContentKind::Message)));
        }
        Ok(tokens)
    }

    /// The header of the answer to a user message.
    pub(crate) fn answer_header_tokens(&mut self) -> Result<Vec<ModelToken>, Error> {
        let header = self.format.turn_header(Role::Assistant, Some(Role::User), None);
        header.tokenize(&mut *self.model)
    }
}

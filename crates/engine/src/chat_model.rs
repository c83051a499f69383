//! A model together with the way messages are written for it.

use crate::align::SentMessage;
use crate::chat_format::{ChatFormatter, MessageTime};
use halo_core::Error;
use halo_core::model::{Model, ModelInfo, ModelToken};
use halo_core::token::{ContentKind, Role};
use halo_core::tool_call::{MessagePart, ToolDefinition};
use xxhash_rust::xxh3::Xxh3;

/// A model, its chat template, and the system prompt as tokens.
pub struct ChatModel {
    pub(crate) model: Box<dyn Model + Send>,
    pub(crate) format: ChatFormatter,
    pub(crate) system_tokens: Vec<ModelToken>,
    /// The functions that a client offers: they are part of the system prompt.
    pub(crate) tools: Vec<ToolDefinition>,
}

impl ChatModel {
    pub(crate) fn new(mut model: Box<dyn Model + Send>, format: ChatFormatter) -> Result<Self, Error> {
        let system_tokens = format.preamble().tokenize(&mut *model)?;
        Ok(Self { model, format, system_tokens, tools: Vec::new() })
    }

    #[must_use]
    pub fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    pub(crate) fn set_system_prompt(&mut self, system_prompt: String) -> Result<(), Error> {
        self.format.system_prompt = system_prompt;
        self.tokenize_preamble()
    }

    /// Sets the functions that a client offers.
    pub(crate) fn set_tools(&mut self, tools: &[ToolDefinition]) -> Result<(), Error> {
        self.tools = tools.to_vec();
        self.tokenize_preamble()
    }

    /// The functions as a short text that differs between lists; none where there are none.
    pub(crate) fn tools_fingerprint(tools: &[ToolDefinition]) -> Option<String> {
        let mut hash = Xxh3::new();
        for tool in tools {
            hash.update(tool.function.as_bytes());
            hash.update(b"\0");
        }
        (!tools.is_empty()).then(|| format!("{:016x}", hash.digest()))
    }

    fn tokenize_preamble(&mut self) -> Result<(), Error> {
        // A remote model gets the functions with its request.
        let tools = if self.is_remote() { &[] } else { self.tools.as_slice() };
        let mut tokens = Vec::new();
        for text in self.format.preamble_with_tools(tools) {
            tokens.extend(text.tokenize(&mut *self.model)?);
        }
        self.system_tokens = tokens;
        Ok(())
    }

    /// Whether the chat template is the business of a server.
    fn is_remote(&self) -> bool {
        self.format.template.is_empty()
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

    /// The tokens of a message of a client's history: its header, then the text, then its calls in the format of the model.
    pub(crate) fn tokenize_sent(
        &mut self,
        message: &SentMessage,
        before: Option<Role>,
    ) -> Result<Vec<(ModelToken, ContentKind)>, Error> {
        let mut tokens = self.tokenize_message(message.role, "", before, None)?;
        for part in self.format.template.tools.call.render(&message.text, &message.calls) {
            let part = match part {
                MessagePart::Frame(text) if !self.is_remote() => self.model.tokenize(&text, true)?,
                MessagePart::Frame(text) | MessagePart::Content(text) => self.model.tokenize(&text, false)?,
            };
            tokens.extend(part.into_iter().map(|token| (token, ContentKind::Message)));
        }
        Ok(tokens)
    }

    /// The header of the answer to a user message.
    pub(crate) fn answer_header_tokens(&mut self) -> Result<Vec<ModelToken>, Error> {
        let header = self.format.turn_header(Role::Assistant, Some(Role::User), None);
        header.tokenize(&mut *self.model)
    }
}

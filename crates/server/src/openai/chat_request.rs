//! The body of a chat request, and its checks.

use super::protocol::SamplingParams;
use crate::error::{ApiResult, ErrorResponse};
use halo_core::model::Sampling;
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
pub(super) struct OpenAiChatRequest {
    messages: Vec<OpenAiChatMessage>,
    tool_choice: Option<Value>,
    /// OpenAI's parameter; with `false` nothing is stored.
    pub store: Option<bool>,
    #[serde(flatten)]
    pub params: SamplingParams,
}

#[derive(Deserialize)]
struct OpenAiChatMessage {
    role: String,
    content: Option<OpenAiChatContent>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OpenAiChatContent {
    Text(String),
    Parts(Vec<OpenAiContentPart>),
}

#[derive(Deserialize)]
struct OpenAiContentPart {
    r#type: String,
    text: Option<String>,
}

/// A chat request after its checks.
#[derive(Clone)]
pub(super) struct ParsedChatRequest {
    pub system: Option<String>,
    /// Ends with the message to answer.
    pub messages: Vec<SentMessage>,
    /// System messages after the last message: they apply to the next answer.
    pub trailing_system: Vec<SentMessage>,
    pub sampling: Sampling,
}

impl ParsedChatRequest {
    /// Whether the last message is the input of the turn. With system messages after it, it is appended before the turn instead.
    pub fn appends_last_message(&self) -> bool {
        self.trailing_system.is_empty()
    }
}

impl OpenAiChatRequest {
    pub fn parse(&self, defaults: &Sampling, max_messages: usize) -> ApiResult<ParsedChatRequest> {
        if self.tool_choice.as_ref().is_some_and(|choice| *choice == json!("required") || choice.is_object())
        {
            return Err(ErrorResponse::bad_request(
                "tool_choice cannot force a tool call on this server; leave it out",
            ));
        }
        if self.messages.len() > max_messages {
            let count = self.messages.len();
            let message = format!("{count} messages; a request may have at most {max_messages} messages");
            return Err(ErrorResponse::bad_request(message));
        }
        let (mut system, mut messages): (Vec<String>, Vec<SentMessage>) = (Vec::new(), Vec::new());
        for (n, message) in self.messages.iter().enumerate() {
            let (role, text) = (message.role(n)?, message.text(n)?);
            if text.trim().is_empty() {
                continue;
            }
            // System messages before all others are the system prompt; later ones keep their position.
            match role {
                Role::System if messages.is_empty() => system.push(text),
                role => messages.push(SentMessage::new(role, text)),
            }
        }
        let last = messages.iter().rposition(|message| message.role != Role::System);
        let trailing_system = messages.split_off(last.map_or(0, |last| last + 1));
        match messages.last() {
            Some(SentMessage { role: Role::User, .. }) => {}
            // In a group chat another character speaks next: a system message says which one.
            Some(_) if !trailing_system.is_empty() => {}
            _ => {
                let message = "the last message must be a user message with text";
                return Err(ErrorResponse::bad_request(message));
            }
        }
        let system = (!system.is_empty()).then(|| system.join("\n\n"));
        Ok(ParsedChatRequest { system, messages, trailing_system, sampling: self.params.sampling(defaults)? })
    }
}

impl OpenAiChatMessage {
    fn role(&self, n: usize) -> ApiResult<Role> {
        match self.role.as_str() {
            "system" | "developer" => Ok(Role::System),
            "user" | "tool" | "function" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            other => Err(ErrorResponse::bad_request(format!(
                "messages[{n}]: unknown role '{other}'; use system, user, assistant or tool"
            ))),
        }
    }

    fn text(&self, n: usize) -> ApiResult<String> {
        match &self.content {
            None => Ok(String::new()),
            Some(OpenAiChatContent::Text(text)) => Ok(text.clone()),
            Some(OpenAiChatContent::Parts(parts)) => match parts.iter().find(|part| part.r#type != "text") {
                Some(part) => Err(ErrorResponse::bad_request(format!(
                    "messages[{n}]: content of type {} is not supported, only text",
                    part.r#type
                ))),
                None => Ok(parts.iter().filter_map(|part| part.text.as_deref()).collect()),
            },
        }
    }
}

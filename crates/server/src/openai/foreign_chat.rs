//! Chats that come through another API. They belong to conversations like OpenAI's chats: the same dispatcher, the same history,
//! the same header.

use super::chat::{NOT_STORED, set_conversation_header};
use super::chat_request::{ChatParseContext, OpenAiChatRequest, ParsedChatRequest};
use super::chat_target::ChatTarget;
use super::chat_turn::{ChatTurn, ChatTurnResult, submit_chat_turn};
use super::unstored_chat::{UnstoredAnswer, generate_unstored};
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::completion::{CompletedAnswer, OnAnswerEnd, OnAnswerProgress};
use crate::error::{ApiResult, parse_json_value};
use crate::sampling::{LogprobBuffer, RequestedSampling};
use axum::http::HeaderMap;
use axum::response::Response;
use halo_core::token::Role;
use halo_core::tool_call::MessagePart;
use halo_engine::align::SentMessage;
use halo_engine::chat_format::{AnswerOpening, ChatFormatter, FramedText, SpeakerNames};
use serde_json::Value;
use std::sync::Arc;

/// A chat request of another API.
pub(crate) struct ForeignChat {
    /// The request in OpenAI's format: `messages`, and later whatever else a chat request has, such as `tools`.
    pub body: Value,
    /// The sampling parameters; those of the body are not read.
    pub requested: RequestedSampling,
    /// Gets the log-probabilities of the answer.
    pub logprobs: LogprobBuffer,
    pub client: ClientNetwork,
}

/// The conversation of a chat that has begun.
pub(crate) struct StartedChat(String);

impl StartedChat {
    pub fn set_header(&self, response: &mut Response) {
        set_conversation_header(response, &self.0);
    }
}

/// Begins a chat. `on_progress` gets what each token adds, and nothing at all other events; `on_end` gets the result. An
/// error that is found before the request is queued is returned instead.
pub(crate) async fn start_foreign_chat(
    app: Arc<App>,
    headers: &HeaderMap,
    chat: ForeignChat,
    mut on_progress: OnAnswerProgress,
    on_end: OnAnswerEnd,
) -> ApiResult<StartedChat> {
    let request = parse_request(&app, chat)?;
    let target = ChatTarget::of_request(&app, headers, None, &request).await?;
    let ChatTarget::Conversation { name, place, check } = target else {
        tokio::task::spawn_blocking(move || {
            let result = generate_unstored(&app, &request, &mut *on_progress);
            on_end(result.map(|UnstoredAnswer { answer, withheld, finish, usage, .. }| CompletedAnswer {
                answer,
                withheld,
                finish,
                usage,
            }));
        });
        return Ok(StartedChat(NOT_STORED.to_owned()));
    };
    let turn = ChatTurn::dispatch(app, name, request, (place, check)).await?;
    let started = StartedChat(turn.conversation().to_owned());
    submit_chat_turn(turn, on_progress, move |result| {
        on_end(result.map(|ChatTurnResult { summary, usage, answer, withheld, .. }| CompletedAnswer {
            answer,
            withheld,
            finish: summary.finish,
            usage,
        }));
    })?;
    Ok(started)
}

fn parse_request(app: &App, chat: ForeignChat) -> ApiResult<ParsedChatRequest> {
    let body: OpenAiChatRequest = parse_json_value(chat.body)?;
    let request = body.parse_with(chat.requested, &ChatParseContext::new(app))?;
    Ok(ParsedChatRequest { logprobs: chat.logprobs, client: chat.client, ..request })
}

/// A chat request in the chat template of the model, as text: functions, calls, results, and the answer that the client has begun.
/// Nothing is added but the template. Blocks.
pub(crate) fn chat_prompt_text(app: &App, body: Value) -> ApiResult<String> {
    let body: OpenAiChatRequest = parse_json_value(body)?;
    let request = body.parse(&ChatParseContext::new(app))?;
    let formatter = ChatFormatter {
        template: app.backend.model_info().template,
        system_prompt: request.system.clone().unwrap_or_default(),
        show_dates: false,
        names: SpeakerNames::default(),
    };
    let mut prompt: String =
        formatter.preamble_with_tools(&request.tools).iter().map(FramedText::text).collect();
    let mut previous_role = None;
    for SentMessage { role, text, calls, .. } in request.messages.iter().chain(&request.trailing_system) {
        prompt.push_str(&formatter.turn_header(*role, previous_role, None).text());
        for part in formatter.template.tools.call.render(text, calls) {
            match part {
                MessagePart::Frame(text) | MessagePart::Content(text) => prompt.push_str(&text),
            }
        }
        previous_role = Some(*role);
    }
    prompt.push_str(&formatter.turn_header(Role::Assistant, previous_role, None).text());
    let has_prefill = !request.prefill.is_empty();
    let opening =
        AnswerOpening::new(&formatter.template, &request.sampling, request.skip_reasoning, has_prefill);
    prompt.push_str(&opening.text(&formatter.template));
    prompt.push_str(&request.prefill);
    Ok(prompt)
}

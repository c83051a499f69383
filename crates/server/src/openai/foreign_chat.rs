//! Chats that come through another API. They belong to conversations like OpenAI's chats: the same dispatcher, the same history,
//! the same header.

use super::chat::{NOT_STORED, conversation_name, set_conversation_header};
use super::chat_request::{OpenAiChatRequest, ParsedChatRequest};
use super::chat_turn::{ChatTurn, ChatTurnResult, submit_chat_turn};
use super::unstored_chat::{UnstoredAnswer, generate_unstored};
use crate::app::App;
use crate::completion::{CompletedAnswer, OnAnswerEnd, OnAnswerProgress};
use crate::error::{ApiResult, parse_json_value};
use crate::generation_usage::GenerationUsage;
use crate::sampling::check_supported;
use axum::http::HeaderMap;
use axum::response::Response;
use halo_core::answer_parser::{AnswerDelta, AnswerParts};
use halo_core::model::{FinishReason, OutputConstraint, Sampling};
use halo_core::token::Role;
use halo_engine::align::SentMessage;
use halo_engine::chat_format::{ChatFormatter, SpeakerNames};
use serde_json::Value;
use std::sync::Arc;

/// A chat request of another API.
pub(crate) struct ForeignChat {
    /// The request in OpenAI's format: `messages`, and later whatever else a chat request has, such as `tools`.
    pub body: Value,
    /// The sampling parameters, which replace those of the body.
    pub sampling: Sampling,
}

/// The conversation of a chat that has begun.
pub(crate) struct StartedChat(String);

impl StartedChat {
    pub fn set_header(&self, response: &mut Response) {
        set_conversation_header(response, &self.0);
    }
}

/// Begins a chat. `on_progress` gets the new text at each token, and nothing at all other events; `on_end` gets the result. An
/// error that is found before the request is queued is returned instead.
pub(crate) async fn start_foreign_chat(
    app: Arc<App>,
    headers: &HeaderMap,
    chat: ForeignChat,
    mut on_progress: OnAnswerProgress,
    on_end: OnAnswerEnd,
) -> ApiResult<StartedChat> {
    let request = parse_request(&app, chat)?;
    let place = app.reserve_queue_place()?;
    let name = conversation_name(headers)?;
    check_supported(&app, &request.parameters, request.sampling.constraint.as_ref()).await?;
    let mut on_deltas = move |deltas: Option<&[AnswerDelta]>| on_progress(deltas.map(delta_text).as_deref());
    if name.as_deref() == Some(NOT_STORED) {
        // A completion takes a place of its own.
        drop(place);
        tokio::task::spawn_blocking(move || {
            let result = generate_unstored(&app, &request, &mut on_deltas);
            on_end(result.map(|UnstoredAnswer { answer, withheld, finish, usage, .. }| {
                completed_answer(answer, &withheld, finish, usage)
            }));
        });
        return Ok(StartedChat(NOT_STORED.to_owned()));
    }
    let turn = ChatTurn::dispatch(app, name, request, place).await?;
    let started = StartedChat(turn.conversation().to_owned());
    submit_chat_turn(turn, on_deltas, move |result| {
        on_end(result.map(|ChatTurnResult { summary, usage, answer, withheld, .. }| {
            completed_answer(answer, &withheld, summary.finish, usage)
        }));
    })?;
    Ok(started)
}

/// The text of deltas. Reasoning and calls come with the whole answer.
fn delta_text(deltas: &[AnswerDelta]) -> String {
    let texts = deltas.iter().filter_map(|delta| match delta {
        AnswerDelta::Text(text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

fn completed_answer(
    answer: AnswerParts,
    withheld: &[AnswerDelta],
    finish: FinishReason,
    usage: GenerationUsage,
) -> CompletedAnswer {
    CompletedAnswer { text: answer.text, withheld: delta_text(withheld), calls: answer.calls, finish, usage }
}

fn parse_request(app: &App, chat: ForeignChat) -> ApiResult<ParsedChatRequest> {
    let body: OpenAiChatRequest = parse_json_value(chat.body)?;
    let template = app.backend.model_info().template;
    let request = body.parse(&app.backend.rules().sampling, app.limits.max_messages, &template)?;
    let mut sampling = chat.sampling;
    // The functions of the request constrain its answer, and a schema of the other API counts for an answer without a call.
    if let Some(OutputConstraint::ToolCalls(mut options)) = request.sampling.constraint.clone() {
        options.answer_schema = match sampling.constraint.take() {
            Some(OutputConstraint::JsonSchema(schema)) => Some(schema),
            _ => None,
        };
        sampling.constraint = Some(OutputConstraint::ToolCalls(options));
    }
    Ok(ParsedChatRequest { sampling, ..request })
}

/// The messages of a chat request in the chat template of the model, as text. Nothing is added but the template. Blocks.
pub(crate) fn chat_prompt_text(app: &App, body: Value) -> ApiResult<String> {
    let chat = ForeignChat { body, sampling: app.backend.rules().sampling };
    let request = parse_request(app, chat)?;
    let formatter = ChatFormatter {
        template: app.backend.model_info().template,
        system_prompt: request.system.unwrap_or_default(),
        show_dates: false,
        names: SpeakerNames::default(),
    };
    let mut prompt = formatter.preamble().text();
    let mut previous_role = None;
    for SentMessage { role, text, .. } in request.messages.iter().chain(&request.trailing_system) {
        prompt.push_str(&formatter.turn_header(*role, previous_role, None).text());
        prompt.push_str(text);
        previous_role = Some(*role);
    }
    prompt.push_str(&formatter.turn_header(Role::Assistant, previous_role, None).text());
    Ok(prompt)
}

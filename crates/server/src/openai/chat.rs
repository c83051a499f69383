//! Chat completions. The conversation is named by a header, or found by the history of the request; only the new messages of the
//! request are appended to it.

use super::chat_request::{ChatParseContext, OpenAiChatRequest, ParsedChatRequest};
use super::chat_response::ChatResponse;
use super::chat_target::ChatTarget;
use super::chat_turn::{ChatTurn, ChatTurnResult, submit_chat_turn};
use super::choices::respond_with_choices;
use super::protocol::{CONVERSATION_HEADER, OpenAiJson, OpenAiResult, error_event};
use super::unstored_chat::complete_unstored;
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::error::{ApiResult, ErrorResponse};
use crate::sse::sse_channel;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use halo_core::answer_parser::AnswerDelta;
use halo_core::model::StepFlow;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

/// The name that stands for no conversation: nothing is stored.
pub(crate) const NOT_STORED: &str = "none";

pub(super) async fn chat_completions(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    headers: HeaderMap,
    OpenAiJson(body): OpenAiJson<OpenAiChatRequest>,
) -> OpenAiResult<Response> {
    let request = ParsedChatRequest { client, ..body.parse(&ChatParseContext::new(&app))? };
    let target = ChatTarget::of_request(&app, &headers, body.store, &request).await?;
    let (stream, include_usage) = (body.params.stream()?, body.params.include_usage()?);
    let format = ChatResponse::new(&app, body.tools.is_legacy(), request.logprobs.clone());
    let ChatTarget::Conversation { name, place, check } = target else {
        let mut response = complete_unstored(app, request, format, stream.then_some(include_usage)).await?;
        set_conversation_header(&mut response, NOT_STORED);
        return Ok(response);
    };
    let turn = ChatTurn::dispatch(Arc::clone(&app), name, request, (place, check)).await?;
    let name = turn.conversation().to_owned();
    let others = (turn.request.choice_count > 1)
        .then(|| ParsedChatRequest { answers_as: Some(name.clone()), ..turn.request.clone() });
    let mut response = match (others, stream) {
        (None, true) => stream_turn(turn, format, include_usage).await?,
        (None, false) => Json(complete_turn(turn, &format).await?).into_response(),
        (Some(request), stream) => {
            let first = format.clone();
            let first = async move { complete_turn(turn, &first).await };
            respond_with_choices(app, request, format, first, stream.then_some(include_usage)).await?
        }
    };
    set_conversation_header(&mut response, &name);
    Ok(response)
}

async fn stream_turn(turn: ChatTurn, format: ChatResponse, include_usage: bool) -> OpenAiResult<Response> {
    let (out, ended, response) = sse_channel(error_event);
    let (out, format) = (Arc::new(out), Arc::new(format));
    let (end_out, end_format) = (Arc::clone(&out), Arc::clone(&format));
    let mut started = false;
    let on_progress = move |deltas: Option<&[AnswerDelta]>| {
        let Some(deltas) = deltas else { return out.flow() };
        if !std::mem::replace(&mut started, true) {
            format.send_start(&out);
        }
        format.send_deltas(&out, deltas)
    };
    submit_chat_turn(turn, on_progress, move |result| {
        let result = result.map(|ChatTurnResult { summary, usage, withheld, answer, .. }| {
            let finish = (summary.finish, answer.calls.len());
            end_format.send_end(&end_out, &withheld, finish, &usage, include_usage);
        });
        let _ = ended.send(result);
    })?;
    Ok(response.await?)
}

async fn complete_turn(turn: ChatTurn, format: &ChatResponse) -> ApiResult<Value> {
    let ChatTurnResult { summary, usage, answer, .. } = run_to_end(turn).await?;
    Ok(format.message(&answer, summary.finish, &usage))
}

/// Runs a turn without streaming. It stops when the client disconnects, which drops this future.
pub(super) async fn run_to_end(turn: ChatTurn) -> ApiResult<ChatTurnResult> {
    let (sender, receiver) = oneshot::channel();
    let guard = DisconnectGuard(Arc::new(AtomicBool::new(true)));
    let connected = Arc::clone(&guard.0);
    let on_progress = move |_: Option<&[AnswerDelta]>| match connected.load(Ordering::SeqCst) {
        true => StepFlow::Continue,
        false => StepFlow::Stop,
    };
    submit_chat_turn(turn, on_progress, move |result| drop(sender.send(result)))?;
    receiver.await.map_err(|_| ErrorResponse::shutting_down())?
}

struct DisconnectGuard(Arc<AtomicBool>);

impl Drop for DisconnectGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

pub(super) fn conversation_name(headers: &HeaderMap) -> ApiResult<Option<String>> {
    match headers.get(CONVERSATION_HEADER).map(|name| name.to_str()) {
        None => Ok(None),
        Some(Ok(name)) => Ok(Some(percent_decode(name))),
        Some(Err(_)) => Err(ErrorResponse::bad_request(format!(
            "{CONVERSATION_HEADER} must be ASCII text; percent-encode other characters"
        ))),
    }
}

pub(super) fn set_conversation_header(response: &mut Response, name: &str) {
    let encoded: String = name.bytes().map(percent_encode_byte).collect();
    if let Ok(value) = encoded.parse() {
        response.headers_mut().insert(CONVERSATION_HEADER, value);
    }
}

fn percent_encode_byte(byte: u8) -> String {
    match byte {
        b'%' => "%25".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    }
}

/// Decodes `%E2%82%AC` to `€`; a `%` without two hexadecimal digits stays as it is.
fn percent_decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, more @ ..] = rest {
        let digits = more.get(..2).and_then(|two| str::from_utf8(two).ok());
        match digits.filter(|_| *first == b'%').and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

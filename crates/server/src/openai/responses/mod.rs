//! The Responses API. A response is a turn of a conversation: `previous_response_id` continues it, in a branch if other turns
//! follow it.

mod format;
mod input_items;
mod item_reference;
mod record;
mod request;
mod stream;

use super::chat::{NOT_STORED, run_to_end, set_conversation_header};
use super::chat_request::{ChatParseContext, ParsedChatRequest};
use super::chat_target::ChatTarget;
use super::chat_turn::{ChatTurn, ChatTurnResult, TurnRecorder, submit_chat_turn};
use super::dispatch::{dispatch_after, dispatch_chat};
use super::protocol::{CONVERSATION_HEADER, OpenAiJson, OpenAiPath, OpenAiQuery, OpenAiResult, error_event};
use super::unstored_chat::{UnstoredAnswer, answer_unstored, generate_unstored};
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::session_job::run_in_session;
use crate::sse::{spawn_sse_stream, sse_channel};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use format::{ResponseFormat, ResponseUsage, status_name};
use halo_core::answer_parser::{AnswerDelta, AnswerMarkers, AnswerParts};
use halo_core::store::RecordKind;
use halo_core::token::Role;
use halo_engine::conversation::load_messages;
use input_items::input_items;
use item_reference::{has_references, resolve_references};
use parking_lot::Mutex;
use record::{ResponseRecord, find_response, kept_ids};
use request::CreateResponse;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use stream::ResponseStream;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/responses", post(create_response))
        .route("/v1/responses/{id}", get(get_response).delete(delete_response))
        .route("/v1/responses/{id}/input_items", get(list_input_items))
}

async fn create_response(
    State(app): State<Arc<App>>,
    client: ClientNetwork,
    headers: HeaderMap,
    OpenAiJson(body): OpenAiJson<CreateResponse>,
) -> OpenAiResult<Response> {
    let body = with_referenced_items(&app, body).await?;
    let request = ParsedChatRequest { client, ..body.parse(&ChatParseContext::new(&app))? };
    let target = ChatTarget::of_request(&app, &headers, body.store, &request).await?;
    let target = body.in_conversation(target)?;
    let format = ResponseFormat::new(&app, &body, &tools_json(&request));
    let stream = body.stream == Some(true);
    let ChatTarget::Conversation { name, place, check } = target else {
        if body.previous_response_id.is_some() {
            let message = "previous_response_id needs a stored response; leave out store: false";
            return Err(ErrorResponse::bad_request(message).into());
        }
        let mut response = match stream {
            true => stream_unstored(app, request, format).await?,
            false => complete_unstored(app, request, format).await?,
        };
        set_conversation_header(&mut response, NOT_STORED);
        return Ok(response);
    };
    let previous = body.previous_response_id;
    let record = response_recorder(&app, &format, &request, previous.clone());
    let dispatcher = Arc::clone(&app);
    let turn = spawn_blocking(move || {
        let mut request = request;
        let dispatched = match &previous {
            None => dispatch_chat(&dispatcher, name.as_deref(), &mut request, &check)?,
            Some(id) => {
                let (name, record) = find_response(&dispatcher, id)?;
                check.apply(&dispatcher, Some(&name), &mut request)?;
                dispatch_after(&dispatcher, &name, record.turn)?
            }
        };
        let handle = dispatcher.open_or_create_conversation(CONVERSATION_HEADER, &dispatched.name)?;
        Ok(ChatTurn { app: dispatcher, handle, dispatched, request, place, record: Some(record) })
    })
    .await?;
    let name = turn.dispatched.name.clone();
    let mut response = match stream {
        true => stream_turn(turn, format).await?,
        false => {
            let result = run_to_end(turn).await?;
            let (usage, finish) = (turn_usage(&result), result.summary.finish);
            Json(finished(&format, &result.answer, status_name(finish), usage)).into_response()
        }
    };
    set_conversation_header(&mut response, &name);
    Ok(response)
}

/// The request with the items that it refers to by their ids.
async fn with_referenced_items(app: &Arc<App>, mut body: CreateResponse) -> ApiResult<CreateResponse> {
    if !has_references(body.input.as_ref()) {
        return Ok(body);
    }
    let app = Arc::clone(app);
    spawn_blocking(move || {
        let previous = body.previous_response_id.as_deref();
        let previous = previous.map(|id| find_response(&app, id)).transpose()?;
        let input = body.input.take().unwrap_or_default();
        body.input = Some(resolve_references(&app, &input, previous.as_ref())?);
        Ok(body)
    })
    .await
}

fn tools_json(request: &ParsedChatRequest) -> Value {
    let tool = |tool: &halo_core::tool_call::ToolDefinition| {
        let mut json: Value = serde_json::from_str(&tool.function).unwrap_or_default();
        json["type"] = "function".into();
        json["strict"] = true.into();
        json
    };
    request.tools.iter().map(tool).collect()
}

fn finished(format: &ResponseFormat, answer: &AnswerParts, status: &str, usage: ResponseUsage) -> Value {
    format.object(status, &format.output(answer, status), Some(usage))
}

fn turn_usage(result: &ChatTurnResult) -> ResponseUsage {
    ResponseUsage {
        input: result.usage.prompt_tokens,
        cached: result.usage.cached_tokens,
        output: result.summary.tokens,
        reasoning: result.reasoning_tokens,
    }
}

fn unstored_usage(result: &UnstoredAnswer) -> ResponseUsage {
    let UnstoredAnswer { usage, reasoning_tokens, .. } = result;
    ResponseUsage {
        input: usage.prompt_tokens,
        cached: usage.cached_tokens,
        output: usage.completion_tokens,
        reasoning: *reasoning_tokens,
    }
}

/// Stores which turn the response is, so that it can be continued and read.
fn response_recorder(
    app: &Arc<App>,
    format: &ResponseFormat,
    request: &ParsedChatRequest,
    previous: Option<String>,
) -> TurnRecorder {
    let (app, id, created) = (Arc::clone(app), format.id.clone(), format.created);
    let parameters = format.parameters().clone();
    let sent = request.messages.iter().chain(&request.trailing_system);
    let sent: Vec<(Role, Vec<String>)> =
        sent.map(|message| (message.role, kept_ids(&message.call_ids))).collect();
    Box::new(move |session, result, first| {
        let answer = result.summary.turn;
        // What is new in the request is the end of it: it is compared from there.
        let turns = session.timeline().turns().iter().rev();
        let input = turns.filter(|turn| (first..answer).contains(&turn.id));
        let call_ids = (input.zip(sent.into_iter().rev()))
            .take_while(|(turn, (role, _))| turn.role == *role)
            .filter(|(_, (_, ids))| !ids.is_empty())
            .map(|(turn, (_, ids))| (turn.id.0, ids))
            .collect();
        let record = ResponseRecord {
            first,
            turn: answer,
            created,
            status: status_name(result.summary.finish).to_owned(),
            usage: turn_usage(result),
            previous,
            call_ids,
            parameters,
        };
        let name = session.name().to_owned();
        session.store().put_record(&name, RecordKind::Response, &id, Some(&record.to_json()))?;
        app.response_index.insert(&id, &name);
        Ok(())
    })
}

async fn stream_turn(turn: ChatTurn, format: ResponseFormat) -> OpenAiResult<Response> {
    let (out, ended, response) = sse_channel(error_event);
    let out = Arc::new(out);
    let events = Arc::new(Mutex::new(ResponseStream::new(format)));
    let (end_out, end_events) = (Arc::clone(&out), Arc::clone(&events));
    let on_progress = move |deltas: Option<&[AnswerDelta]>| match deltas {
        None => out.flow(),
        Some(deltas) => events.lock().push(&out, deltas),
    };
    submit_chat_turn(turn, on_progress, move |result| {
        let mut events = end_events.lock();
        let result = match result {
            Ok(result) => {
                events.finish(&end_out, &result.withheld, result.summary.finish, turn_usage(&result));
                Ok(())
            }
            Err(error) if events.fail(&end_out, &error) => Ok(()),
            Err(error) => Err(error),
        };
        let _ = ended.send(result);
    })?;
    Ok(response.await?)
}

async fn stream_unstored(
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ResponseFormat,
) -> OpenAiResult<Response> {
    let streamed = spawn_sse_stream(error_event, move |out| {
        let mut events = ResponseStream::new(format);
        let result = generate_unstored(&app, &request, &mut |deltas| match deltas {
            None => out.flow(),
            Some(deltas) => events.push(out, deltas),
        });
        match result {
            Ok(result) => {
                events.finish(out, &result.withheld, result.finish, unstored_usage(&result));
                Ok(())
            }
            Err(error) if events.fail(out, &error) => Ok(()),
            Err(error) => Err(error),
        }
    });
    Ok(streamed.await?)
}

async fn complete_unstored(
    app: Arc<App>,
    request: ParsedChatRequest,
    format: ResponseFormat,
) -> OpenAiResult<Response> {
    let result = answer_unstored(app, request).await?;
    let usage = unstored_usage(&result);
    Ok(Json(finished(&format, &result.answer, status_name(result.finish), usage)).into_response())
}

async fn get_response(
    State(app): State<Arc<App>>,
    OpenAiPath(id): OpenAiPath<String>,
) -> OpenAiResult<Json<Value>> {
    let response = spawn_blocking(move || {
        let (name, record) = find_response(&app, &id)?;
        let answer = stored_answer(&app, &id, &name, &record)?;
        let format = ResponseFormat::stored(&app, &id, &record);
        Ok(finished(&format, &answer, &record.status, record.usage))
    });
    Ok(Json(response.await?))
}

/// The answer of a response, from the timeline.
fn stored_answer(app: &App, id: &str, name: &str, record: &ResponseRecord) -> ApiResult<AnswerParts> {
    let messages = app.with_reader(|store| load_messages(store, name, record.turn..=record.turn))?;
    let text = messages.into_iter().map(|(_, _, text)| text).next();
    let gone = || ErrorResponse::not_found(format!("the text of the response '{id}' was deleted"));
    Ok(parse_stored(app, &text.ok_or_else(gone)?, record.offered_functions()))
}

/// Splits a stored answer. Where the functions that it could call are not known, any may have been called in it.
fn parse_stored(app: &App, text: &str, functions: Option<Vec<String>>) -> AnswerParts {
    let template = app.backend.model_info().template;
    // The template may have written the first marker of the reasoning, which is no part of the text.
    let starts_in_reasoning = template.reasoning.as_ref().is_some_and(|reasoning| {
        text.contains(reasoning.close.as_str()) && !text.trim_start().starts_with(reasoning.open.as_str())
    });
    let has_functions = functions.as_ref().is_none_or(|functions| !functions.is_empty());
    let calls = has_functions.then_some(template.tools.call);
    let markers = AnswerMarkers { reasoning: template.reasoning, starts_in_reasoning, calls, functions };
    markers.parse(text)
}

async fn delete_response(
    State(app): State<Arc<App>>,
    OpenAiPath(id): OpenAiPath<String>,
) -> OpenAiResult<Json<Value>> {
    let (opener, opened) = (Arc::clone(&app), id.clone());
    let (name, handle) = spawn_blocking(move || {
        let (name, _) = find_response(&opener, &opened)?;
        let handle = opener.open_or_create_conversation(CONVERSATION_HEADER, &name)?;
        Ok((name, handle))
    })
    .await?;
    let deleted = id.clone();
    run_in_session(&handle, move |session| {
        session.store().put_record(&name, RecordKind::Response, &deleted, None)?;
        Ok(((), None))
    })
    .await?;
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}

/// All of them are texts here, so that an error names its parameter.
#[derive(Deserialize)]
struct ListParams {
    order: Option<String>,
    limit: Option<String>,
    /// The id of the last item of the page before.
    after: Option<String>,
}

impl ListParams {
    fn limit(&self) -> ApiResult<usize> {
        let Some(text) = &self.limit else { return Ok(DEFAULT_ITEMS) };
        let limit = text.parse::<usize>().map(|limit| limit.clamp(1, MAX_ITEMS));
        limit.map_err(|_| {
            let message = format!("limit is {text:?}; it must be a number from 1 to {MAX_ITEMS}");
            ErrorResponse::invalid_parameter("limit", message)
        })
    }

    fn is_ascending(&self) -> ApiResult<bool> {
        match self.order.as_deref() {
            Some("asc") => Ok(true),
            None | Some("desc") => Ok(false),
            Some(other) => {
                let message = format!("order is {other:?}; it must be asc or desc");
                Err(ErrorResponse::invalid_parameter("order", message))
            }
        }
    }
}

const DEFAULT_ITEMS: usize = 20;
const MAX_ITEMS: usize = 100;

async fn list_input_items(
    State(app): State<Arc<App>>,
    OpenAiPath(id): OpenAiPath<String>,
    OpenAiQuery(params): OpenAiQuery<ListParams>,
) -> OpenAiResult<Json<Value>> {
    let (limit, ascending) = (params.limit()?, params.is_ascending()?);
    let items = spawn_blocking(move || {
        let (name, record) = find_response(&app, &id)?;
        input_items(&app, &name, &id, &record)
    });
    let mut items: Vec<Value> = items.await?;
    if !ascending {
        items.reverse();
    }
    if let Some(after) = &params.after {
        let last = items.iter().position(|item| item["id"] == after.as_str());
        let unknown = || {
            let message = format!("after: the response has no input item '{after}'");
            ErrorResponse::invalid_parameter("after", message)
        };
        items.drain(..=last.ok_or_else(unknown)?);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id_of = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id_of(items.first()), id_of(items.last()));
    Ok(Json(json!({
        "object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more,
    })))
}

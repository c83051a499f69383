//! Commands: turns, manual edits, variants, branches, notes.

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, spawn_blocking};
use crate::session_job::run_in_session;
use crate::wire::{
    ApiBranchRequest, ApiCreatedConversation, ApiEditRequest, ApiEditResult, ApiFirstRole, ApiNewAnswer,
    ApiNewConversation, ApiNewMessage, ApiNote, ApiRenameRequest, ApiTurnAccepted, ApiUndoRequest,
    ApiVariantChoice,
};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use halo_core::Error;
use halo_core::model::StepFlow;
use halo_core::store::RecordKind;
use halo_core::token::{ChunkId, Role};
use halo_engine::chat_options::ChatOptions;
use halo_engine::event::{ChangeAction, Event};
use halo_engine::host::{ConversationHandle, TurnRequest};
use halo_engine::manual_edit::ManualEdit;
use halo_engine::title::conversation_title;
use halo_engine::tools::notes;
use halo_engine::turn::{EditAuthor, TurnInput};
use parking_lot::Mutex;
use serde_json::json;
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(create_conversation))
        .routes(routes!(send_message))
        .routes(routes!(regenerate))
        .routes(routes!(edit_last_message))
        .routes(routes!(continue_answer))
        .routes(routes!(replace_answer))
        .routes(routes!(stop_answer))
        .routes(routes!(edit_chunks))
        .routes(routes!(undo_edit))
        .routes(routes!(choose_variant))
        .routes(routes!(create_branch))
        .routes(routes!(rename_conversation))
        .routes(routes!(write_notes))
}

/// Creates a conversation, with a system prompt and first messages that are not answered. `POST /conversations/{name}/messages`
/// creates one too
#[utoipa::path(post, path = "/conversations", request_body = ApiNewConversation,
    responses((status = 201, body = ApiCreatedConversation), (status = 400, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn create_conversation(
    State(app): State<Arc<App>>,
    JsonBody(new): JsonBody<ApiNewConversation>,
) -> ApiResult<(StatusCode, Json<ApiCreatedConversation>)> {
    let ApiNewConversation { name, system_prompt, messages } = new;
    if let Some(at) = messages.iter().position(|message| message.text.trim().is_empty()) {
        return Err(ErrorResponse::bad_request(format!("messages[{at}].text is empty")));
    }
    let name = match (name, messages.first()) {
        (Some(name), _) => name,
        (None, Some(first)) => free_title(&app, &first.text).await?,
        (None, None) => {
            return Err(ErrorResponse::bad_request("a conversation without messages needs a name"));
        }
    };
    check_name_is_free(&app, &name).await?;
    let (opener, opened_name) = (Arc::clone(&app), name.clone());
    let handle = spawn_blocking(move || opener.open_or_create_conversation("name", &opened_name)).await?;
    let count = messages.len();
    run_in_session(&handle, move |session| {
        session.set_chat_options(&ChatOptions { system_prompt, ..ChatOptions::default() })?;
        let messages: Vec<(Role, String)> = messages.into_iter().map(|m| (m.role.into(), m.text)).collect();
        session.append_messages(&messages, &mut || StepFlow::Continue)?;
        Ok(((), Some((ChangeAction::Replaced, Vec::new()))))
    })
    .await?;
    Ok((StatusCode::CREATED, Json(ApiCreatedConversation { name, messages: count })))
}

/// The beginning of a message as a name, with a number if it is taken.
async fn free_title(app: &Arc<App>, message: &str) -> ApiResult<String> {
    let (app, title) = (Arc::clone(app), conversation_title(message));
    spawn_blocking(move || {
        let title = if title.is_empty() { "Chat".to_owned() } else { title };
        for n in 1.. {
            let name = if n == 1 { title.clone() } else { format!("{title} {n}") };
            if app.is_name_free(&name)? {
                return Ok(name);
            }
        }
        Ok(title)
    })
    .await
}

impl From<ApiFirstRole> for Role {
    fn from(role: ApiFirstRole) -> Self {
        match role {
            ApiFirstRole::System => Self::System,
            ApiFirstRole::User => Self::User,
            ApiFirstRole::Assistant => Self::Assistant,
        }
    }
}

/// Sends a message. The answer comes as events; a refused message is not stored
#[utoipa::path(post, path = "/conversations/{name}/messages", params(("name" = String, Path)), request_body = ApiNewMessage,
    responses((status = 202, body = ApiTurnAccepted), (status = 400, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn send_message(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(message): JsonBody<ApiNewMessage>,
) -> ApiResult<Response> {
    let (opener, opened_name) = (Arc::clone(&app), name.clone());
    let (handle, is_duplicate, message) = spawn_blocking(move || {
        let is_duplicate = match &message.id {
            Some(id) => opener.is_duplicate_message(&opened_name, id)?,
            None => false,
        };
        Ok((opener.open_or_create_conversation("name", &opened_name)?, is_duplicate, message))
    })
    .await?;
    if is_duplicate {
        return Ok((StatusCode::ACCEPTED, Json(ApiTurnAccepted { ahead: 0 })).into_response());
    }
    if let Some(id) = &message.id {
        app.record_message_id(&name, id);
    }
    let started =
        start_turn(&app, &handle, &name, TurnInput::Message(message.text), message.id.clone()).await;
    if let (Err(_), Some(id)) = (&started, &message.id) {
        app.release_message_id(&name, id);
    }
    started
}

/// Generates another answer to the last message
#[utoipa::path(post, path = "/conversations/{name}/regenerate", params(("name" = String, Path)),
    responses((status = 202, body = ApiTurnAccepted), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn regenerate(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Response> {
    let handle = open_existing(&app, &name).await?;
    start_turn(&app, &handle, &name, TurnInput::Regenerate(EditAuthor::User), None).await
}

/// Replaces the last message; it and its answer become a variant
#[utoipa::path(post, path = "/conversations/{name}/edit_last", params(("name" = String, Path)), request_body = ApiNewMessage,
    responses((status = 202, body = ApiTurnAccepted), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn edit_last_message(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(message): JsonBody<ApiNewMessage>,
) -> ApiResult<Response> {
    let handle = open_existing(&app, &name).await?;
    start_turn(&app, &handle, &name, TurnInput::EditLast(message.text, EditAuthor::User), None).await
}

/// Generates more of the last answer; the answer as it was becomes a variant
#[utoipa::path(post, path = "/conversations/{name}/continue", params(("name" = String, Path)),
    responses((status = 202, body = ApiTurnAccepted), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn continue_answer(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Response> {
    let handle = open_existing(&app, &name).await?;
    start_turn(&app, &handle, &name, TurnInput::ContinueLast, None).await
}

/// Replaces the answer to the last message by a text; the replaced one becomes a variant
#[utoipa::path(put, path = "/conversations/{name}/answer", params(("name" = String, Path)), request_body = ApiNewAnswer,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn replace_answer(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(answer): JsonBody<ApiNewAnswer>,
) -> ApiResult<StatusCode> {
    let handle = open_existing(&app, &name).await?;
    run_in_session(&handle, move |session| {
        session.replace_answer(&answer.text)?;
        Ok(((), Some((ChangeAction::Replaced, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops the running answer; its tokens are stored
#[utoipa::path(post, path = "/conversations/{name}/stop", params(("name" = String, Path)), responses((status = 204)))]
async fn stop_answer(State(app): State<Arc<App>>, PathParams(name): PathParams<String>) -> StatusCode {
    if let Some(handle) = app.host.find_open(&name) {
        handle.stop();
    }
    StatusCode::NO_CONTENT
}

async fn open_existing(app: &Arc<App>, name: &str) -> ApiResult<Arc<ConversationHandle>> {
    let (app, name) = (Arc::clone(app), name.to_owned());
    spawn_blocking(move || app.open_conversation(&name)).await
}

/// Starts a turn. Responds at its first event, so that the client knows that the message is stored or queued.
async fn start_turn(
    app: &Arc<App>,
    handle: &ConversationHandle,
    name: &str,
    input: TurnInput,
    message_id: Option<String>,
) -> ApiResult<Response> {
    let place = Some(app.reserve_queue_place()?);
    let (sender, receiver) = oneshot::channel::<Result<usize, Error>>();
    let at_first_event = Arc::new(Mutex::new(Some(sender)));
    let at_end = Arc::clone(&at_first_event);
    let respond = |sender: &Mutex<Option<oneshot::Sender<_>>>, result| {
        let sender = sender.lock().take();
        sender.map(|sender| sender.send(result))
    };
    let metrics = app.metrics.clone();
    let request = TurnRequest { input, client: name.to_owned(), sampling: None, message_id, place };
    let on_event = Box::new(move |event: &Event| {
        let ahead = match event {
            Event::Queued { ahead } => *ahead,
            _ => 0,
        };
        respond(&at_first_event, Ok(ahead));
        StepFlow::Continue
    });
    handle.submit_turn(request, on_event, move |result| {
        metrics.record_turn(&result);
        respond(&at_end, result.map(|_| 0));
    })?;
    let ahead = receiver.await.map_err(|_| ErrorResponse::shutting_down())??;
    Ok((StatusCode::ACCEPTED, Json(ApiTurnAccepted { ahead })).into_response())
}

/// Pins, unpins, prunes, resurrects, deletes, undeletes or merges chunks: all of them, or none if one fails
#[utoipa::path(post, path = "/conversations/{name}/edits", params(("name" = String, Path)), request_body = ApiEditRequest,
    responses((status = 200, body = ApiEditResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn edit_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiEditRequest>,
) -> ApiResult<Json<ApiEditResult>> {
    let edit = ManualEdit::ALL.into_iter().find(|edit| edit.name() == request.edit);
    let edit = edit.ok_or_else(|| {
        let names = ManualEdit::ALL.map(ManualEdit::name).join(", ");
        ErrorResponse::bad_request(format!("there is no edit '{}'; use one of {names}", request.edit))
    })?;
    let chunks: Result<Vec<ChunkId>, _> = request.chunks.iter().map(|chunk| chunk.parse()).collect();
    let chunks = chunks.map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
    if chunks.is_empty() {
        return Err(ErrorResponse::bad_request("chunks is empty; list at least one chunk id, such as u4.0"));
    }
    let handle = open_existing(&app, &name).await?;
    let result = run_in_session(&handle, move |session| {
        let result = session.apply_edit(edit, &chunks)?;
        let changed = result.change.named_chunks().into_iter().collect();
        Ok((result, Some((edit.action(), changed))))
    })
    .await?;
    let chunks = result.change.named_chunks().iter().map(ToString::to_string).collect();
    let undo = app.record_undo(&name, result.undo);
    Ok(Json(ApiEditResult { action: edit.action().as_str(), chunks, undo }))
}

/// Undoes a manual edit, unless its chunks have changed since
#[utoipa::path(post, path = "/conversations/{name}/undo", params(("name" = String, Path)), request_body = ApiUndoRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn undo_edit(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiUndoRequest>,
) -> ApiResult<StatusCode> {
    let undo = app.find_undo(&name, request.undo);
    let undo = undo.ok_or_else(|| {
        let message = format!("there is no edit with the undo id {} in '{name}'", request.undo);
        ErrorResponse::not_found(message)
    })?;
    let handle = open_existing(&app, &name).await?;
    run_in_session(&handle, move |session| {
        session.undo(&undo)?;
        Ok(((), Some((ChangeAction::Undone, undo.named_chunks().into_iter().collect()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Replaces the last exchange by a variant; the replaced one becomes a variant
#[utoipa::path(post, path = "/conversations/{name}/variants", params(("name" = String, Path)), request_body = ApiVariantChoice,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn choose_variant(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiVariantChoice>,
) -> ApiResult<StatusCode> {
    let handle = open_existing(&app, &name).await?;
    run_in_session(&handle, move |session| {
        let choices = session.variant_choices()?;
        let current = choices.iter().find(|choice| choice.is_current).map_or(&[][..], |choice| &choice.turns);
        let chosen = choices.iter().find(|choice| choice.turns.first().is_some_and(|t| t.0 == request.turn));
        let chosen = chosen.ok_or_else(|| {
            ErrorResponse::not_found(format!("there is no variant that begins with turn {}", request.turn))
        })?;
        if !chosen.is_current {
            session.choose_variant(&chosen.turns, current)?;
        }
        Ok(((), Some((ChangeAction::VariantChosen, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Creates a conversation that shares the turns of this one, up to one of them
#[utoipa::path(post, path = "/conversations/{name}/branch", params(("name" = String, Path)), request_body = ApiBranchRequest,
    responses((status = 201, body = Object), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError)))]
async fn create_branch(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiBranchRequest>,
) -> ApiResult<Response> {
    check_name_is_free(&app, &request.name).await?;
    let handle = open_existing(&app, &name).await?;
    let ApiBranchRequest { name: branch, turn } = request;
    let shared = run_in_session(&handle, move |session| Ok((session.branch(&branch, turn)?, None))).await?;
    Ok((StatusCode::CREATED, Json(json!({ "messages": shared }))).into_response())
}

/// Gives a conversation a new name
#[utoipa::path(post, path = "/conversations/{name}/rename", params(("name" = String, Path)), request_body = ApiRenameRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError)))]
async fn rename_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiRenameRequest>,
) -> ApiResult<StatusCode> {
    check_name_is_free(&app, &request.name).await?;
    let handle = open_existing(&app, &name).await?;
    let (from, to) = (name.clone(), request.name);
    run_in_session(&handle, move |session| {
        session.store().rename(&from, &to)?;
        Ok(((), Some((ChangeAction::Renamed, Vec::new()))))
    })
    .await?;
    // The open session has the old name.
    app.host.close(&name);
    app.drop_cached(&name);
    Ok(StatusCode::NO_CONTENT)
}

async fn check_name_is_free(app: &Arc<App>, name: &str) -> ApiResult<()> {
    crate::app::check_conversation_name("name", name)?;
    let (app, name) = (Arc::clone(app), name.to_owned());
    spawn_blocking(move || match app.is_name_free(&name)? {
        true => Ok(()),
        false => {
            let message = format!("the conversation '{name}' exists already; choose another name");
            Err(ErrorResponse::new(StatusCode::CONFLICT, message))
        }
    })
    .await
}

/// Replaces the notes; they must be JSON
#[utoipa::path(put, path = "/conversations/{name}/notes", params(("name" = String, Path)), request_body = ApiNote,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn write_notes(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(note): JsonBody<ApiNote>,
) -> ApiResult<StatusCode> {
    if note.file != notes::NOTES_FILE {
        let message = format!("there is no note '{}'; use {}", note.file, notes::NOTES_FILE);
        return Err(ErrorResponse::not_found(message));
    }
    if let Err(e) = serde_json::from_str::<serde_json::Value>(&note.text) {
        return Err(ErrorResponse::bad_request(format!("the notes are not valid JSON: {e}")));
    }
    notes::check_size(&note.text)?;
    let handle = open_existing(&app, &name).await?;
    run_in_session(&handle, move |session| {
        session.store().put_record(&name, RecordKind::Note, notes::NOTES_FILE, Some(&note.text))?;
        Ok(((), Some((ChangeAction::NotesWritten, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

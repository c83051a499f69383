//! Talking, and the user's own hand.

use super::wire::{
    ApiBranchRequest, ApiEditRequest, ApiEditResult, ApiNewMessage, ApiNote, ApiRenameRequest,
    ApiTurnAccepted, ApiUndoRequest, ApiVariantChoice,
};
use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, spawn_blocking};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use halo_core::Error;
use halo_core::model::StepFlow;
use halo_core::store::RecordKind;
use halo_core::token::ChunkId;
use halo_engine::event::ChangeAction;
use halo_engine::host::{ConversationHandle, TurnRequest};
use halo_engine::manual_edit::ManualEdit;
use halo_engine::session::Session;
use halo_engine::tools::notes;
use halo_engine::turn::{EditAuthor, TurnInput};
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(send_message))
        .routes(routes!(regenerate))
        .routes(routes!(edit_last_message))
        .routes(routes!(stop_answer))
        .routes(routes!(edit_chunks))
        .routes(routes!(undo_edit))
        .routes(routes!(choose_variant))
        .routes(routes!(create_branch))
        .routes(routes!(rename_conversation))
        .routes(routes!(write_notes))
}

/// Says something. The answer comes as events; what is refused is not stored
#[utoipa::path(post, path = "/conversations/{name}/messages", params(("name" = String, Path)), request_body = ApiNewMessage,
    responses((status = 202, body = ApiTurnAccepted), (status = 400, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn send_message(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(message): JsonBody<ApiNewMessage>,
) -> ApiResult<Response> {
    let opened = Arc::clone(&app);
    let named = name.clone();
    let (desk, known) = spawn_blocking(move || {
        let known = match &message.id {
            Some(id) => opened.is_duplicate_message(&named, id)?,
            None => false,
        };
        Ok((opened.open_or_create_conversation(&named)?, (known, message)))
    })
    .await?;
    let (taken, message) = known;
    if taken {
        return Ok((StatusCode::ACCEPTED, Json(ApiTurnAccepted { ahead: 0 })).into_response());
    }
    if let Some(id) = &message.id {
        app.record_message_id(&name, id);
    }
    let asked = start_turn(&app, &desk, &name, TurnInput::Message(message.text), message.id.clone()).await;
    if let (Err(_), Some(id)) = (&asked, &message.id) {
        app.release_message_id(&name, id);
    }
    asked
}

/// Answers the last message again
#[utoipa::path(post, path = "/conversations/{name}/regenerate", params(("name" = String, Path)),
    responses((status = 202, body = ApiTurnAccepted), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn regenerate(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Response> {
    let desk = open_existing(&app, &name).await?;
    start_turn(&app, &desk, &name, TurnInput::Regenerate(EditAuthor::User), None).await
}

/// Takes the last message back, with its answer, and says another in its place
#[utoipa::path(post, path = "/conversations/{name}/edit_last", params(("name" = String, Path)), request_body = ApiNewMessage,
    responses((status = 202, body = ApiTurnAccepted), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn edit_last_message(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(message): JsonBody<ApiNewMessage>,
) -> ApiResult<Response> {
    let desk = open_existing(&app, &name).await?;
    start_turn(&app, &desk, &name, TurnInput::EditLast(message.text, EditAuthor::User), None).await
}

/// Stops the answer that is being given; what was said of it stays
#[utoipa::path(post, path = "/conversations/{name}/stop", params(("name" = String, Path)), responses((status = 204)))]
async fn stop_answer(State(app): State<Arc<App>>, PathParams(name): PathParams<String>) -> StatusCode {
    if let Some(desk) = app.host.find_open(&name) {
        desk.stop();
    }
    StatusCode::NO_CONTENT
}

async fn open_existing(app: &Arc<App>, name: &str) -> ApiResult<Arc<ConversationHandle>> {
    let (app, name) = (Arc::clone(app), name.to_owned());
    spawn_blocking(move || app.open_conversation(&name)).await
}

/// Begins a turn. Answers when the first thing has happened, so that whoever asked knows that it is stored or in line.
async fn start_turn(
    app: &Arc<App>,
    desk: &ConversationHandle,
    name: &str,
    say: TurnInput,
    id: Option<String>,
) -> ApiResult<Response> {
    app.check_queue_capacity()?;
    let (begun, heard) = oneshot::channel::<Result<usize, Error>>();
    let begun = Arc::new(Mutex::new(Some(begun)));
    let first = |begun: &Mutex<Option<oneshot::Sender<_>>>, what| {
        let sender = begun.lock().ok().and_then(|mut sender| sender.take());
        sender.map(|sender| sender.send(what))
    };
    let ended = Arc::clone(&begun);
    let metrics = app.metrics.clone();
    let request = TurnRequest { input: say, client: name.to_owned(), sampling: None, message_id: id };
    let asker = Box::new(move |event: &halo_engine::event::Event| {
        let ahead = match event {
            halo_engine::event::Event::Queued { ahead } => *ahead,
            _ => 0,
        };
        first(&begun, Ok(ahead));
        StepFlow::Continue
    });
    desk.submit_turn(request, asker, move |done| {
        metrics.record_turn(&done);
        first(&ended, done.map(|_| 0));
    })?;
    let ahead = heard
        .await
        .map_err(|_| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))??;
    Ok((StatusCode::ACCEPTED, Json(ApiTurnAccepted { ahead })).into_response())
}

/// Does something with an open conversation, after what is being done there, and waits for what comes of it.
pub(crate) async fn run_in_session<T: Send + 'static>(
    desk: &ConversationHandle,
    work: impl FnOnce(&mut Session) -> ApiResult<(T, Option<(ChangeAction, Vec<ChunkId>)>)> + Send + 'static,
) -> ApiResult<T> {
    let (done, heard) = oneshot::channel();
    desk.submit(move |session, teller| {
        let worked = work(session).map(|(value, told)| {
            if let Some((what, chunks)) = told {
                teller.announce_change(what, chunks);
            }
            value
        });
        let _ = done.send(worked);
    })?;
    heard.await.map_err(|_| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))?
}

/// Pins, unpins, prunes, resurrects, deletes, restores or merges chunks: all of them, or on an error none
#[utoipa::path(post, path = "/conversations/{name}/edits", params(("name" = String, Path)), request_body = ApiEditRequest,
    responses((status = 200, body = ApiEditResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn edit_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiEditRequest>,
) -> ApiResult<Json<ApiEditResult>> {
    let words = || ManualEdit::ALL.map(ManualEdit::name).join(", ");
    let signal = ManualEdit::ALL.into_iter().find(|signal| signal.name() == wanted.edit);
    let signal = signal.ok_or_else(|| {
        ErrorResponse::bad_request(format!("there is no signal '{}': there are {}", wanted.edit, words()))
    })?;
    let chunks: Result<Vec<ChunkId>, _> = wanted.chunks.iter().map(|chunk| chunk.parse()).collect();
    let chunks = chunks.map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
    if chunks.is_empty() {
        return Err(ErrorResponse::bad_request("name at least one chunk, such as u4.0"));
    }
    let desk = open_existing(&app, &name).await?;
    let sent = run_in_session(&desk, move |session| {
        let sent = session.apply_edit(signal, &chunks)?;
        let names = sent.change.named_chunks().into_iter().collect();
        Ok((sent, Some((signal.action(), names))))
    });
    let sent = sent.await?;
    let names = sent.change.named_chunks().iter().map(ToString::to_string).collect();
    let undo = app.record_undo(&name, sent.undo);
    Ok(Json(ApiEditResult { action: signal.action().as_str(), chunks: names, undo }))
}

/// Takes back what was done by hand, as long as nothing has happened since that it does not fit
#[utoipa::path(post, path = "/conversations/{name}/undo", params(("name" = String, Path)), request_body = ApiUndoRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn undo_edit(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiUndoRequest>,
) -> ApiResult<StatusCode> {
    let undo = app.find_undo(&name, wanted.undo);
    let undo = undo.ok_or_else(|| {
        ErrorResponse::not_found(format!("nothing that was done here has the number {}", wanted.undo))
    })?;
    let desk = open_existing(&app, &name).await?;
    run_in_session(&desk, move |session| {
        session.undo(&undo)?;
        Ok(((), Some((ChangeAction::Undone, undo.named_chunks().into_iter().collect()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Puts a variant in the place of what stands there, which becomes a variant itself
#[utoipa::path(post, path = "/conversations/{name}/variants", params(("name" = String, Path)), request_body = ApiVariantChoice,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn choose_variant(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiVariantChoice>,
) -> ApiResult<StatusCode> {
    let desk = open_existing(&app, &name).await?;
    run_in_session(&desk, move |session| {
        let choices = session.variant_choices()?;
        let stands = choices.iter().find(|choice| choice.is_current).map_or(&[][..], |choice| &choice.turns);
        let chosen = choices.iter().find(|choice| choice.turns.first().is_some_and(|t| t.0 == wanted.turn));
        let chosen = chosen.ok_or_else(|| {
            ErrorResponse::not_found(format!("there is no variant that begins with turn {}", wanted.turn))
        })?;
        if !chosen.is_current {
            session.choose_variant(&chosen.turns, stands)?;
        }
        Ok(((), Some((ChangeAction::VariantChosen, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Begins another conversation that shares the past of this one
#[utoipa::path(post, path = "/conversations/{name}/branch", params(("name" = String, Path)), request_body = ApiBranchRequest,
    responses((status = 201, body = Object), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError)))]
async fn create_branch(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiBranchRequest>,
) -> ApiResult<Response> {
    check_name_is_free(&app, &wanted.name).await?;
    let desk = open_existing(&app, &name).await?;
    let ApiBranchRequest { name: to, turn } = wanted;
    let shared = run_in_session(&desk, move |session| Ok((session.branch(&to, turn)?, None))).await?;
    Ok((StatusCode::CREATED, Json(json!({ "messages": shared }))).into_response())
}

/// Gives a conversation another name
#[utoipa::path(post, path = "/conversations/{name}/rename", params(("name" = String, Path)), request_body = ApiRenameRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError)))]
async fn rename_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiRenameRequest>,
) -> ApiResult<StatusCode> {
    check_name_is_free(&app, &wanted.name).await?;
    let desk = open_existing(&app, &name).await?;
    let (from, to) = (name.clone(), wanted.name);
    run_in_session(&desk, move |session| {
        session.store().rename(&from, &to)?;
        Ok(((), Some((ChangeAction::Renamed, Vec::new()))))
    })
    .await?;
    // It goes by its old name until it is opened again.
    app.host.close(&name);
    Ok(StatusCode::NO_CONTENT)
}

/// A name for a conversation that there is not yet.
async fn check_name_is_free(app: &Arc<App>, name: &str) -> ApiResult<()> {
    crate::app::check_conversation_name(name)?;
    let (app, name) = (Arc::clone(app), name.to_owned());
    spawn_blocking(move || match !app.is_name_free(&name)? {
        true => {
            Err(ErrorResponse::new(StatusCode::CONFLICT, format!("there is a conversation '{name}' already")))
        }
        false => Ok(()),
    })
    .await
}

/// Writes the model's notes; they must be JSON
#[utoipa::path(put, path = "/conversations/{name}/notes", params(("name" = String, Path)), request_body = ApiNote,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn write_notes(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(note): JsonBody<ApiNote>,
) -> ApiResult<StatusCode> {
    if note.file != notes::NOTES_FILE {
        return Err(ErrorResponse::not_found(format!(
            "there is no note '{}': there is {}",
            note.file,
            notes::NOTES_FILE
        )));
    }
    if let Err(why) = serde_json::from_str::<serde_json::Value>(&note.text) {
        return Err(ErrorResponse::bad_request(format!("the notes are no JSON: {why}")));
    }
    let desk = open_existing(&app, &name).await?;
    let named = name.clone();
    run_in_session(&desk, move |session| {
        session.store().put_record(&named, RecordKind::Note, notes::NOTES_FILE, Some(&note.text))?;
        Ok(((), Some((ChangeAction::NotesWritten, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

//! Talking, and the user's own hand.

use super::wire::{Begun, Branch, Chosen, Message, Name, Note, Signals, SignalsDone, Undo};
use crate::answer::{Answer, Body, Named, Refusal, Wrong, aside};
use crate::app::App;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use halo_core::seams::{Flow, Kind, SeamError};
use halo_core::token::ChunkId;
use halo_engine::host::{Desk, Request};
use halo_engine::session::Session;
use halo_engine::signal::Signal;
use halo_engine::tools::notes;
use halo_engine::turn::{AskedBy, Say};
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(say))
        .routes(routes!(again))
        .routes(routes!(instead))
        .routes(routes!(stop))
        .routes(routes!(signals))
        .routes(routes!(undo))
        .routes(routes!(choose))
        .routes(routes!(branch))
        .routes(routes!(rename))
        .routes(routes!(write_note))
}

/// Says something. The answer comes as events; what is refused is not stored
#[utoipa::path(post, path = "/conversations/{name}/say", params(("name" = String, Path)), request_body = Message,
    responses((status = 202, body = Begun), (status = 400, body = Wrong), (status = 422, body = Wrong), (status = 503, body = Wrong)))]
async fn say(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(message): Body<Message>,
) -> Answer<Response> {
    let opened = Arc::clone(&app);
    let named = name.clone();
    let (desk, known) = aside(move || {
        let known = match &message.id {
            Some(id) => opened.is_taken(&named, id)?,
            None => false,
        };
        Ok((opened.desk_or_new(&named)?, (known, message)))
    })
    .await?;
    let (taken, message) = known;
    if taken {
        return Ok((StatusCode::ACCEPTED, Json(Begun { ahead: 0 })).into_response());
    }
    if let Some(id) = &message.id {
        app.take(&name, id);
    }
    let asked = ask(&app, &desk, &name, Say::Message(message.text), message.id.clone()).await;
    if let (Err(_), Some(id)) = (&asked, &message.id) {
        app.give_back(&name, id);
    }
    asked
}

/// Answers the last message again
#[utoipa::path(post, path = "/conversations/{name}/again", params(("name" = String, Path)),
    responses((status = 202, body = Begun), (status = 404, body = Wrong), (status = 422, body = Wrong), (status = 503, body = Wrong)))]
async fn again(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Response> {
    let desk = existing(&app, &name).await?;
    ask(&app, &desk, &name, Say::Again(AskedBy::User), None).await
}

/// Takes the last message back, with its answer, and says another in its place
#[utoipa::path(post, path = "/conversations/{name}/instead", params(("name" = String, Path)), request_body = Message,
    responses((status = 202, body = Begun), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong), (status = 503, body = Wrong)))]
async fn instead(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(message): Body<Message>,
) -> Answer<Response> {
    let desk = existing(&app, &name).await?;
    ask(&app, &desk, &name, Say::Instead(message.text, AskedBy::User), None).await
}

/// Stops the answer that is being given; what was said of it stays
#[utoipa::path(post, path = "/conversations/{name}/stop", params(("name" = String, Path)), responses((status = 204)))]
async fn stop(State(app): State<Arc<App>>, Named(name): Named<String>) -> StatusCode {
    if let Some(desk) = app.host.find(&name) {
        desk.stop();
    }
    StatusCode::NO_CONTENT
}

async fn existing(app: &Arc<App>, name: &str) -> Answer<Arc<Desk>> {
    let (app, name) = (Arc::clone(app), name.to_owned());
    aside(move || app.desk(&name)).await
}

/// Begins a turn. Answers when the first thing has happened, so that whoever asked knows that it is stored or in line.
async fn ask(app: &Arc<App>, desk: &Desk, name: &str, say: Say, id: Option<String>) -> Answer<Response> {
    app.room_in_line()?;
    let (begun, heard) = oneshot::channel::<Result<usize, SeamError>>();
    let begun = Arc::new(Mutex::new(Some(begun)));
    let first = |begun: &Mutex<Option<oneshot::Sender<_>>>, what| {
        let sender = begun.lock().ok().and_then(|mut sender| sender.take());
        sender.map(|sender| sender.send(what))
    };
    let ended = Arc::clone(&begun);
    let metrics = app.metrics.clone();
    let request = Request { say, who: name.to_owned(), sampling: None, id };
    let asker = Box::new(move |event: &halo_engine::event::Event| {
        let ahead = match event {
            halo_engine::event::Event::Waiting { ahead } => *ahead,
            _ => 0,
        };
        first(&begun, Ok(ahead));
        Flow::Continue
    });
    desk.ask(request, asker, move |done| {
        metrics.turn(&done);
        first(&ended, done.map(|_| 0));
    })?;
    let ahead =
        heard.await.map_err(|_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))??;
    Ok((StatusCode::ACCEPTED, Json(Begun { ahead })).into_response())
}

/// Does something with an open conversation, after what is being done there, and waits for what comes of it.
pub(crate) async fn within<T: Send + 'static>(
    desk: &Desk,
    work: impl FnOnce(&mut Session) -> Answer<(T, Option<(&'static str, Vec<ChunkId>)>)> + Send + 'static,
) -> Answer<T> {
    let (done, heard) = oneshot::channel();
    desk.send(move |session, teller| {
        let worked = work(session).map(|(value, told)| {
            if let Some((what, chunks)) = told {
                teller.changed(what, chunks);
            }
            value
        });
        let _ = done.send(worked);
    })?;
    heard.await.map_err(|_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))?
}

/// Pins, unpins, prunes, resurrects, deletes, restores or merges chunks: all of them, or on an error none
#[utoipa::path(post, path = "/conversations/{name}/signals", params(("name" = String, Path)), request_body = Signals,
    responses((status = 200, body = SignalsDone), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn signals(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Signals>,
) -> Answer<Json<SignalsDone>> {
    let words = || Signal::ALL.map(Signal::name).join(", ");
    let signal = Signal::ALL.into_iter().find(|signal| signal.name() == wanted.signal);
    let signal = signal.ok_or_else(|| {
        Refusal::bad(format!("there is no signal '{}': there are {}", wanted.signal, words()))
    })?;
    let chunks: Result<Vec<ChunkId>, _> = wanted.chunks.iter().map(|chunk| chunk.parse()).collect();
    let chunks = chunks.map_err(|e| Refusal::bad(format!("{e}")))?;
    if chunks.is_empty() {
        return Err(Refusal::bad("name at least one chunk, such as u4.0"));
    }
    let desk = existing(&app, &name).await?;
    let sent = within(&desk, move |session| {
        let sent = session.signal(signal, &chunks)?;
        let names = sent.done.names().into_iter().collect();
        Ok((sent, Some((signal.done(), names))))
    });
    let sent = sent.await?;
    let names = sent.done.names().iter().map(ToString::to_string).collect();
    let undo = app.remember(&name, sent.undo);
    Ok(Json(SignalsDone { done: signal.done().to_owned(), chunks: names, undo }))
}

/// Takes back what was done by hand, as long as nothing has happened since that it does not fit
#[utoipa::path(post, path = "/conversations/{name}/undo", params(("name" = String, Path)), request_body = Undo,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn undo(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Undo>,
) -> Answer<StatusCode> {
    let undo = app.undo(&name, wanted.undo);
    let undo = undo.ok_or_else(|| {
        Refusal::missing(format!("nothing that was done here has the number {}", wanted.undo))
    })?;
    let desk = existing(&app, &name).await?;
    within(&desk, move |session| {
        session.undo(&undo)?;
        Ok(((), Some(("taken back", undo.names().into_iter().collect()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Puts a variant in the place of what stands there, which becomes a variant itself
#[utoipa::path(post, path = "/conversations/{name}/variants", params(("name" = String, Path)), request_body = Chosen,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong), (status = 503, body = Wrong)))]
async fn choose(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Chosen>,
) -> Answer<StatusCode> {
    let desk = existing(&app, &name).await?;
    within(&desk, move |session| {
        let choices = session.choices()?;
        let stands = choices.iter().find(|choice| choice.stands).map_or(&[][..], |choice| &choice.turns);
        let chosen = choices.iter().find(|choice| choice.turns.first().is_some_and(|t| t.0 == wanted.turn));
        let chosen = chosen.ok_or_else(|| {
            Refusal::missing(format!("there is no variant that begins with turn {}", wanted.turn))
        })?;
        if !chosen.stands {
            session.choose_variant(&chosen.turns, stands)?;
        }
        Ok(((), Some(("variant chosen", Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Begins another conversation that shares the past of this one
#[utoipa::path(post, path = "/conversations/{name}/branch", params(("name" = String, Path)), request_body = Branch,
    responses((status = 201, body = Object), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 409, body = Wrong), (status = 422, body = Wrong)))]
async fn branch(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Branch>,
) -> Answer<Response> {
    free(&app, &wanted.name).await?;
    let desk = existing(&app, &name).await?;
    let Branch { name: to, turn } = wanted;
    let shared = within(&desk, move |session| Ok((session.branch(&to, turn)?, None))).await?;
    Ok((StatusCode::CREATED, Json(json!({ "messages": shared }))).into_response())
}

/// Gives a conversation another name
#[utoipa::path(post, path = "/conversations/{name}/rename", params(("name" = String, Path)), request_body = Name,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 409, body = Wrong), (status = 422, body = Wrong)))]
async fn rename(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Name>,
) -> Answer<StatusCode> {
    free(&app, &wanted.name).await?;
    let desk = existing(&app, &name).await?;
    let (from, to) = (name.clone(), wanted.name);
    within(&desk, move |session| {
        session.store().rename(&from, &to)?;
        Ok(((), Some(("renamed", Vec::new()))))
    })
    .await?;
    // It goes by its old name until it is opened again.
    app.host.close(&name);
    Ok(StatusCode::NO_CONTENT)
}

/// A name for a conversation that there is not yet.
async fn free(app: &Arc<App>, name: &str) -> Answer<()> {
    crate::app::check_name(name)?;
    let (app, name) = (Arc::clone(app), name.to_owned());
    aside(move || match !app.is_free(&name)? {
        true => Err(Refusal::new(StatusCode::CONFLICT, format!("there is a conversation '{name}' already"))),
        false => Ok(()),
    })
    .await
}

/// Writes the model's notes; they must be JSON
#[utoipa::path(put, path = "/conversations/{name}/notes", params(("name" = String, Path)), request_body = Note,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn write_note(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(note): Body<Note>,
) -> Answer<StatusCode> {
    if note.file != notes::FILE {
        return Err(Refusal::missing(format!("there is no note '{}': there is {}", note.file, notes::FILE)));
    }
    if let Err(why) = serde_json::from_str::<serde_json::Value>(&note.text) {
        return Err(Refusal::bad(format!("the notes are no JSON: {why}")));
    }
    let desk = existing(&app, &name).await?;
    let named = name.clone();
    within(&desk, move |session| {
        session.store().put_record(&named, Kind::Note, notes::FILE, Some(&note.text))?;
        Ok(((), Some(("noted", Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

//! Captures: answers that are recorded with what each of their words looked at, to be kept and looked at again.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::talk::within;
use crate::answer::{Answer, Body, Named, Refusal, Wrong, aside};
use crate::app::App;
use crate::parts::Captured;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::seams::Kind;
use halo_engine::record::Purpose;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(captures)).routes(routes!(captured)).routes(routes!(record))
}

/// What was recorded of a conversation.
#[derive(Serialize, ToSchema)]
struct Captures {
    /// Whether its answers are recorded now.
    recording: bool,
    /// Whether they can be: the model must tell what it looks at.
    possible: bool,
    /// What was, the latest first.
    captures: Vec<Kept>,
}

/// A capture that is kept.
#[derive(Serialize, ToSchema)]
struct Kept {
    /// Its name here.
    capture: String,
    /// The answer's turn.
    turn: u32,
    /// Its tokens.
    steps: usize,
    /// The model that gave it.
    model: String,
    /// When, in milliseconds since 1970.
    at: i64,
    /// The folder, for `halo replay`.
    place: String,
}

/// Whether answers are to be recorded.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// Whether they are.
    recording: bool,
}

/// What a capture is called here, and a conversation's folder of them: no path is ever made of what somebody writes.
fn id(name: &str) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(name.as_bytes()))
}

/// What was recorded, and whether more will be
#[utoipa::path(get, path = "/conversations/{name}/captures", params(("name" = String, Path)),
    responses((status = 200, body = Captures), (status = 404, body = Wrong)))]
async fn captures(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Json<Captures>> {
    aside(move || {
        let standing = app.look_at_begun(&name)?.seen.standing;
        let records = app.read(|store| store.records(&name, Kind::Capture))?;
        let mut captures: Vec<Kept> = (records.into_iter())
            .map(|record| {
                let told: serde_json::Value = serde_json::from_str(&record.value).unwrap_or_default();
                Kept {
                    capture: id(&record.key),
                    turn: told["turn"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    steps: told["steps"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    model: told["model"].as_str().unwrap_or_default().to_owned(),
                    at: record.at,
                    place: record.key,
                }
            })
            .collect();
        captures.sort_by_key(|kept| std::cmp::Reverse((kept.at, kept.turn)));
        Ok(Json(Captures { recording: standing.recording, possible: standing.model.attention, captures }))
    })
    .await
}

/// What each word of a recorded answer looked at, paragraph by paragraph
#[utoipa::path(get, path = "/conversations/{name}/captures/{capture}", params(("name" = String, Path), ("capture" = String, Path)),
    responses((status = 200, body = Captured), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn captured(
    State(app): State<Arc<App>>,
    Named((name, capture)): Named<(String, String)>,
) -> Answer<Json<Captured>> {
    aside(move || {
        app.look_at_begun(&name)?;
        let records = app.read(|store| store.records(&name, Kind::Capture))?;
        let found = records.into_iter().find(|record| id(&record.key) == capture);
        let found = found.ok_or_else(|| Refusal::missing(format!("there is no capture '{capture}'")))?;
        Ok(Json(app.parts.captured(&found.key)?))
    })
    .await
}

/// Begins to record a conversation's answers, or ends it
#[utoipa::path(put, path = "/conversations/{name}/recording", params(("name" = String, Path)), request_body = Wanted,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn record(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wanted): Body<Wanted>,
) -> Answer<StatusCode> {
    let (opener, named) = (Arc::clone(&app), name.clone());
    let (desk, recorder) = aside(move || {
        let desk = opener.desk(&named)?;
        let recorder = wanted.recording.then(|| opener.parts.recorder(&id(&named))).transpose()?;
        Ok((desk, recorder))
    })
    .await?;
    within(&desk, move |session| {
        session.record(Purpose::Capture, recorder);
        Ok(((), Some(("recording", Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

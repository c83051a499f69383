//! Captures: answers that are recorded with what each of their words looked at, to be kept and looked at again.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::commands::run_in_session;
use crate::app::App;
use crate::backend::AttentionCapture;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, spawn_blocking};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::store::RecordKind;
use halo_engine::event::ChangeAction;
use halo_engine::recorder::RecorderPurpose;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_captures))
        .routes(routes!(get_capture))
        .routes(routes!(set_recording))
}

/// What was recorded of a conversation.
#[derive(Serialize, ToSchema)]
#[schema(as = CaptureList)]
struct ApiCaptureList {
    /// Whether its answers are recorded now.
    recording: bool,
    /// Whether they can be: the model must tell what it looks at.
    supported: bool,
    /// What was, the latest first.
    captures: Vec<ApiCaptureSummary>,
}

/// A capture that is kept.
#[derive(Serialize, ToSchema)]
#[schema(as = CaptureSummary)]
struct ApiCaptureSummary {
    id: String,
    turn: u32,
    steps: usize,
    /// The model that gave it.
    model: String,
    /// When, in milliseconds since 1970.
    at: i64,
    /// The folder, for `halo replay`.
    path: String,
}

/// Whether answers are to be recorded.
#[derive(Deserialize, ToSchema)]
#[schema(as = RecordingRequest)]
#[serde(deny_unknown_fields)]
struct ApiRecordingRequest {
    recording: bool,
}

/// What a capture is called here, and a conversation's folder of them: no path is ever made of what somebody writes.
fn capture_id(name: &str) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(name.as_bytes()))
}

/// What was recorded, and whether more will be
#[utoipa::path(get, path = "/conversations/{name}/captures", params(("name" = String, Path)),
    responses((status = 200, body = ApiCaptureList), (status = 404, body = ApiError)))]
async fn list_captures(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiCaptureList>> {
    spawn_blocking(move || {
        let standing = app.view_nonempty_conversation(&name)?.snapshot.state;
        let records = app.with_reader(|store| store.records(&name, RecordKind::Capture))?;
        let mut captures: Vec<ApiCaptureSummary> = (records.into_iter())
            .map(|record| {
                let told: serde_json::Value = serde_json::from_str(&record.value).unwrap_or_default();
                ApiCaptureSummary {
                    id: capture_id(&record.key),
                    turn: told["turn"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    steps: told["steps"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    model: told["model"].as_str().unwrap_or_default().to_owned(),
                    at: record.updated_at,
                    path: record.key,
                }
            })
            .collect();
        captures.sort_by_key(|kept| std::cmp::Reverse((kept.at, kept.turn)));
        Ok(Json(ApiCaptureList {
            recording: standing.recording,
            supported: standing.model.attention,
            captures,
        }))
    })
    .await
}

/// What each word of a recorded answer looked at, paragraph by paragraph
#[utoipa::path(get, path = "/conversations/{name}/captures/{capture}", params(("name" = String, Path), ("capture" = String, Path)),
    responses((status = 200, body = AttentionCapture), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn get_capture(
    State(app): State<Arc<App>>,
    PathParams((name, capture)): PathParams<(String, String)>,
) -> ApiResult<Json<AttentionCapture>> {
    spawn_blocking(move || {
        app.view_nonempty_conversation(&name)?;
        let records = app.with_reader(|store| store.records(&name, RecordKind::Capture))?;
        let found = records.into_iter().find(|record| capture_id(&record.key) == capture);
        let found =
            found.ok_or_else(|| ErrorResponse::not_found(format!("there is no capture '{capture}'")))?;
        Ok(Json(app.backend.read_capture(&found.key)?))
    })
    .await
}

/// Begins to record a conversation's answers, or ends it
#[utoipa::path(put, path = "/conversations/{name}/recording", params(("name" = String, Path)), request_body = ApiRecordingRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn set_recording(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(wanted): JsonBody<ApiRecordingRequest>,
) -> ApiResult<StatusCode> {
    let (opener, named) = (Arc::clone(&app), name.clone());
    let (desk, recorder) = spawn_blocking(move || {
        let desk = opener.open_conversation(&named)?;
        let recorder =
            wanted.recording.then(|| opener.backend.capture_recorder(&capture_id(&named))).transpose()?;
        Ok((desk, recorder))
    })
    .await?;
    run_in_session(&desk, move |session| {
        session.set_recorder(RecorderPurpose::Capture, recorder);
        Ok(((), Some((ChangeAction::RecordingChanged, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

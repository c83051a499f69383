//! Captures: answers recorded with the attention of each token.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::backend::{AttentionCapture, CaptureSegment};
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, spawn_blocking};
use crate::session_job::run_in_session;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::store::{ConversationSummary, RecordKind};
use halo_engine::event::ChangeAction;
use halo_engine::forget::pending as pending_forget;
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

#[derive(Serialize, ToSchema)]
#[schema(as = CaptureList)]
struct ApiCaptureList {
    /// Whether new answers are recorded.
    recording: bool,
    /// Whether the model reports attention, which recording needs.
    supported: bool,
    /// The latest capture first.
    captures: Vec<ApiCaptureSummary>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = CaptureSummary)]
struct ApiCaptureSummary {
    id: String,
    turn: u32,
    steps: usize,
    model: String,
    /// When it was recorded, in milliseconds since 1970.
    at: i64,
    /// The folder of the capture, which can be replayed.
    path: String,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = RecordingRequest)]
#[serde(deny_unknown_fields)]
struct ApiRecordingRequest {
    recording: bool,
}

/// The id of a capture: a hash, because no path may contain text from a request.
fn capture_id(note: &str) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(note.as_bytes()))
}

/// The folders with the captures of a conversation: that of its id, and that of earlier versions, which used its name.
#[must_use]
pub fn capture_folder_names(conversation: &ConversationSummary) -> [String; 2] {
    [conversation.id.clone(), capture_id(&conversation.name)]
}

/// Lists the captures of a conversation, and whether it is being recorded
#[utoipa::path(get, path = "/conversations/{name}/captures", params(("name" = String, Path)),
    responses((status = 200, body = ApiCaptureList), (status = 404, body = ApiError)))]
async fn list_captures(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiCaptureList>> {
    spawn_blocking(move || {
        let state = app.view_nonempty_conversation(&name)?.snapshot.state;
        let records = app.with_reader(|store| store.records(&name, RecordKind::Capture))?;
        let mut captures: Vec<ApiCaptureSummary> = (records.into_iter())
            .map(|record| {
                let json: serde_json::Value = serde_json::from_str(&record.value).unwrap_or_default();
                ApiCaptureSummary {
                    id: capture_id(&record.key),
                    turn: json["turn"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    steps: json["steps"].as_u64().and_then(|n| n.try_into().ok()).unwrap_or(0),
                    model: json["model"].as_str().unwrap_or_default().to_owned(),
                    at: record.updated_at,
                    path: app.backend.capture_folder(&record.key).display().to_string(),
                }
            })
            .collect();
        captures.sort_by_key(|capture| std::cmp::Reverse((capture.at, capture.turn)));
        Ok(Json(ApiCaptureList { recording: state.recording, supported: state.model.attention, captures }))
    })
    .await
}

/// A capture: the attention of each token to each segment of the context
#[utoipa::path(get, path = "/conversations/{name}/captures/{capture}", params(("name" = String, Path), ("capture" = String, Path)),
    responses((status = 200, body = AttentionCapture), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn get_capture(
    State(app): State<Arc<App>>,
    PathParams((name, capture)): PathParams<(String, String)>,
) -> ApiResult<Json<AttentionCapture>> {
    spawn_blocking(move || {
        app.view_nonempty_conversation(&name)?;
        let records = app.with_reader(|store| store.records(&name, RecordKind::Capture))?;
        let record = records.into_iter().find(|record| capture_id(&record.key) == capture);
        let record =
            record.ok_or_else(|| ErrorResponse::not_found(format!("there is no capture '{capture}'")))?;
        let mut capture = app.backend.read_capture(&record.key)?;
        // Text that is pending deletion is hidden everywhere.
        let pending = app.with_reader(|store| pending_forget::pending_chunks(store, &name))?;
        let is_pending =
            |segment: &&mut CaptureSegment| pending.keys().any(|id| id.to_string() == segment.chunk);
        capture.segments.iter_mut().filter(is_pending).for_each(|segment| segment.text.clear());
        Ok(Json(capture))
    })
    .await
}

/// Turns the recording of a conversation's answers on or off
#[utoipa::path(put, path = "/conversations/{name}/recording", params(("name" = String, Path)), request_body = ApiRecordingRequest,
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn set_recording(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiRecordingRequest>,
) -> ApiResult<StatusCode> {
    let opener = Arc::clone(&app);
    let (handle, recorder) = spawn_blocking(move || {
        let handle = opener.open_conversation(&name)?;
        let id = handle.snapshot_cell().get().state.id.clone();
        let folder = if id.is_empty() { capture_id(&name) } else { id };
        let recorder = request.recording.then(|| opener.backend.capture_recorder(&folder)).transpose()?;
        Ok((handle, recorder))
    })
    .await?;
    run_in_session(&handle, move |session| {
        session.set_recorder(recorder);
        Ok(((), Some((ChangeAction::RecordingChanged, Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

//! Export and import of conversations, and the list of deleted ones.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use super::transcript::{ApiTranscriptMessage, read_messages};
use crate::app::{App, check_conversation_name};
use crate::backend::ImportResult;
use crate::error::{ApiError, ApiResult, ErrorResponse, PathParams, QueryParams, body_error, spawn_blocking};
use crate::originals::load_recorded_originals;
use crate::wire::{ApiEventKind, ApiImportProgress};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use halo_core::store::ConversationSummary;
use halo_engine::forget::pending::load_pending;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(export_conversation))
        .routes(routes!(import_file))
        .routes(routes!(list_deleted_conversations))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ExportQuery {
    /// `halo`: a file that can be imported, with everything. `markdown`: the messages, for reading
    #[serde(default)]
    #[param(inline)]
    format: ExportFormat,
}

#[derive(Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ExportFormat {
    #[default]
    Halo,
    Markdown,
}

/// A conversation as a file
#[utoipa::path(get, path = "/conversations/{name}/export", params(("name" = String, Path), ExportQuery),
    responses((status = 200, content((String = "application/x-ndjson"), (String = "text/markdown"))), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn export_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<ExportQuery>,
) -> ApiResult<Response> {
    spawn_blocking(move || {
        let (content, content_type, file_name) = match query.format {
            ExportFormat::Halo => {
                if app.with_reader(|store| store.find_conversation(&name))?.is_none() {
                    return Err(ErrorResponse::not_found(format!("there is no conversation '{name}'")));
                }
                let mut content = Vec::new();
                app.backend.export_conversation(&name, &mut content)?;
                (content, "application/x-ndjson", "chat.jsonl")
            }
            ExportFormat::Markdown => {
                let state = app.view_nonempty_conversation(&name)?.snapshot.state;
                let messages = app.with_reader(|store| {
                    let overview = app.transcripts.overview(store, &state)?;
                    let all = 0..overview.visible.len();
                    read_messages(store, &state, &overview, all)
                })?;
                (markdown(&name, &messages).into_bytes(), "text/markdown; charset=utf-8", "chat.md")
            }
        };
        // The name of the conversation may contain anything, so the client names the file.
        let disposition = HeaderValue::from_str(&format!("attachment; filename=\"{file_name}\""));
        let mut response = content.into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.extend(disposition.ok().map(|value| (CONTENT_DISPOSITION, value)));
        Ok(response)
    })
    .await
}

fn markdown(name: &str, messages: &[ApiTranscriptMessage]) -> String {
    let mut text = format!("# {name}\n");
    for message in messages {
        let speaker = match message.role {
            "user" => "You",
            "assistant" => "Model",
            other => other,
        };
        let body: String = message.chunks.iter().map(|chunk| chunk.text.as_str()).collect();
        let _ = write!(text, "\n## {speaker}\n\n{}\n", body.trim());
    }
    text
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// The name of the file, which may decide its format
    file_name: String,
    /// The name of the conversation, for a file with one conversation; without it, the name in the file
    name: Option<String>,
    /// Events tell how much of the file is read, and have this id; without it there are none
    id: Option<String>,
}

/// Imports the conversations of a file of any format that `halo import` reads: all of it, or on an error nothing. The file can have
/// as many bytes as `server.max_import` allows
#[utoipa::path(post, path = "/import", params(ImportQuery), request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 201, body = ImportResult), (status = 400, body = ApiError), (status = 408, body = ApiError), (status = 409, body = ApiError), (status = 413, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn import_file(
    State(app): State<Arc<App>>,
    QueryParams(query): QueryParams<ImportQuery>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    if let Some(name) = &query.name {
        check_conversation_name("name", name)?;
    }
    let permit = Arc::clone(&app.import_permits).try_acquire_owned().map_err(|_| {
        let message = format!("{MAX_IMPORTS} files are being imported already: try again when one is done");
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, message)
    })?;
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let file = receive_file(&app, body, length).await?;
    spawn_blocking(move || {
        // A client that has left does not end the import.
        let _permit = permit;
        let UploadedFile { file, bytes } = file;
        let progress = |done| {
            if let Some(id) = query.id.clone() {
                let event = ApiEventKind::ImportProgress(ApiImportProgress { id, done, all: bytes });
                app.events.publish("", app.host.next_event_number(), event);
            }
        };
        let reader = ProgressReader { file, done: 0, reported_at: Instant::now(), report: &progress };
        let mut content = BufReader::with_capacity(1 << 16, reader);
        let result =
            app.backend.import_conversations(&query.file_name, query.name.as_deref(), &mut content)?;
        Ok((StatusCode::CREATED, Json(result)).into_response())
    })
    .await
}

/// A file that a client has sent, at its beginning.
struct UploadedFile {
    file: File,
    bytes: u64,
}

/// How many files can be received and imported at once. Each has a file on the disk and a thread.
pub(crate) const MAX_IMPORTS: usize = 2;

/// Parts of an upload that wait to be written.
const MAX_WAITING_PARTS: usize = 16;

/// Writes the body of a request to a temporary file, part by part: an import can be larger than the memory.
async fn receive_file(app: &Arc<App>, body: Body, length: Option<u64>) -> ApiResult<UploadedFile> {
    let limit = app.limits.max_import_bytes;
    let too_large = || {
        let message = format!(
            "the file is larger than {limit} bytes, which this server imports at most: raise server.max_import, or import \
             it with `halo import`"
        );
        ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if length.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let creator = Arc::clone(app);
    let file = spawn_blocking(move || Ok(creator.backend.temporary_file()?)).await?;
    let (sender, parts) = mpsc::channel(MAX_WAITING_PARTS);
    let writing = spawn_blocking(move || write_parts(file, parts).map_err(|error| unwritten(&error)));
    let receiving = async move {
        let mut stream = body.into_data_stream();
        let mut received = 0;
        while let Some(part) = stream.next().await {
            let part = part.map_err(|error| body_error("the file cannot be received", &error))?;
            received += part.len() as u64;
            if received > limit {
                return Err(too_large());
            }
            if sender.send(part).await.is_err() {
                // The writer has failed, and says why.
                break;
            }
        }
        Ok::<(), ErrorResponse>(())
    };
    let (received, written) = tokio::join!(receiving, writing);
    received.and(written)
}

fn write_parts(mut file: File, mut parts: mpsc::Receiver<Bytes>) -> io::Result<UploadedFile> {
    let mut bytes = 0;
    while let Some(part) = parts.blocking_recv() {
        file.write_all(&part)?;
        bytes += part.len() as u64;
    }
    file.rewind()?;
    Ok(UploadedFile { file, bytes })
}

fn unwritten(error: &io::Error) -> ErrorResponse {
    let message =
        format!("the file cannot be stored while it is imported: {error}; make room in the data folder");
    ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, message)
}

/// How often the progress of an import is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// A file that reports how much of it has been read.
struct ProgressReader<'a> {
    file: File,
    done: u64,
    reported_at: Instant,
    report: &'a dyn Fn(u64),
}

impl Read for ProgressReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.done += count as u64;
        if self.reported_at.elapsed() >= PROGRESS_INTERVAL {
            self.reported_at = Instant::now();
            (self.report)(self.done);
        }
        Ok(count)
    }
}

/// A deleted conversation within its grace period.
#[derive(Serialize, ToSchema)]
#[schema(as = DeletedConversation)]
struct ApiDeletedConversation {
    name: String,
    /// When it is erased, in milliseconds since 1970.
    due: i64,
}

/// Lists the deleted conversations that can be restored with `POST /conversations/{name}/forget/cancel`
#[utoipa::path(get, path = "/deleted_conversations", responses((status = 200, body = Vec<ApiDeletedConversation>)))]
async fn list_deleted_conversations(
    State(app): State<Arc<App>>,
) -> ApiResult<Json<Vec<ApiDeletedConversation>>> {
    spawn_blocking(move || {
        let deleted = app.with_reader(|store| {
            let mut deleted = Vec::new();
            let summaries = store.list_conversations()?;
            let originals = load_recorded_originals(store, &summaries)?;
            // Only a conversation without live tokens can be deleted as a whole. Originals are restored with theirs.
            let is_listed =
                |summary: &ConversationSummary| summary.live == 0 && !originals.contains_key(&summary.name);
            for summary in summaries.into_iter().filter(is_listed) {
                let pending = load_pending(store, &summary.name)?;
                let pending = pending.iter().find(|pending| pending.whole_conversation && !pending.started);
                let due = pending.map(|pending| pending.due_at);
                deleted.extend(due.map(|due| ApiDeletedConversation { name: summary.name, due }));
            }
            Ok(deleted)
        })?;
        Ok(Json(deleted))
    })
    .await
}

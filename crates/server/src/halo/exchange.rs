//! Export and import of conversations, and the list of deleted ones.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use super::transcript::{ApiTranscriptMessage, read_messages};
use crate::app::{App, check_conversation_name};
use crate::backend::ImportResult;
use crate::error::{ApiError, ApiResult, ErrorResponse, PathParams, QueryParams, spawn_blocking};
use crate::originals::load_recorded_originals;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use halo_core::store::ConversationSummary;
use halo_engine::forget::pending::load_pending;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::sync::Arc;
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
    responses((status = 200, content_type = "application/octet-stream", body = String), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
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
}

/// Imports the conversations of a file of any format that `halo import` reads: all of it, or on an error nothing
#[utoipa::path(post, path = "/import", params(ImportQuery), request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 201, body = ImportResult), (status = 400, body = ApiError), (status = 409, body = ApiError), (status = 413, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn import_file(
    State(app): State<Arc<App>>,
    QueryParams(query): QueryParams<ImportQuery>,
    content: Result<Bytes, BytesRejection>,
) -> ApiResult<Response> {
    let content = content.map_err(|rejection| {
        let message = format!("the file cannot be read: {rejection}; import large files with `halo import`");
        ErrorResponse::new(rejection.status(), message)
    })?;
    if let Some(name) = &query.name {
        check_conversation_name("name", name)?;
    }
    spawn_blocking(move || {
        let result = app.backend.import_conversations(&query.file_name, query.name.as_deref(), &content)?;
        Ok((StatusCode::CREATED, Json(result)).into_response())
    })
    .await
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

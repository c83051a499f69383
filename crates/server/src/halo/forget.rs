//! Forgetting permanently: what is erased is hidden for a grace period first, in which it can be cancelled.

// The macro that describes the routes qualifies names that it need not.
#![allow(unused_qualifications)]

use crate::app::{App, conversation_not_found};
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use crate::originals::{load_recorded_originals, originals_of};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::token::ChunkId;
use halo_core::{Error, ErrorKind};
use halo_engine::event::ChangeAction;
use halo_engine::forget::{
    ForgetPlan, ForgetQuery, ForgetReport, ForgetSelection, ForgetService, ForgetSubject, ForgetTiming,
    WholeWordMatcher,
};
use halo_engine::host::JobContext;
use halo_engine::memory::Memory;
use halo_engine::session::{Session, kv_cache_key};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_pending_forgets))
        .routes(routes!(forget))
        .routes(routes!(cancel_forget))
        .routes(routes!(delete_conversation))
        .routes(routes!(list_proofs))
}

/// What to forget: chunks and turns, text that contains words, or everything.
#[derive(Deserialize, ToSchema)]
#[schema(as = ForgetRequest)]
#[serde(deny_unknown_fields)]
struct ApiForgetRequest {
    /// Chunks, such as `u4.0`.
    #[serde(default)]
    chunks: Vec<String>,
    /// Whole turns, by number.
    #[serde(default)]
    turns: Vec<u32>,
    /// Every chunk and memory that contains these words (whole words, case-insensitive); with chunks or turns, only among
    /// those.
    matching: Option<String>,
    /// The whole conversation, including its name.
    #[serde(default)]
    all: bool,
    /// Erase immediately, without the grace period. This cannot be cancelled.
    #[serde(default)]
    now: bool,
}

/// What a request has forgotten, or will forget.
#[derive(Serialize, ToSchema)]
#[schema(as = ForgetResult)]
struct ApiForgetResult {
    chunks: Vec<String>,
    /// Memories that contain the words, or may mention the chunks.
    memories: Vec<u64>,
    /// How many notes, clients' summaries, system prompts and names contain the words.
    other_texts: usize,
    tokens: usize,
    /// The new name of the conversation, where the old one was made of forgotten text.
    new_name: Option<String>,
    /// When the text is erased, in milliseconds since 1970; null: it is erased already.
    due: Option<i64>,
    /// Where the same text still is.
    warnings: Vec<String>,
}

/// Text that is hidden, and erased at the end of its grace period.
#[derive(Serialize, ToSchema)]
#[schema(as = PendingForget)]
struct ApiPendingForget {
    /// When it is erased, in milliseconds since 1970.
    due: i64,
    chunks: Vec<String>,
    memories: Vec<u64>,
    /// How many notes, clients' summaries, system prompts and names are erased then; they are not hidden.
    other_texts: usize,
    /// Whether it is the whole conversation.
    all: bool,
}

/// What to keep after all; nothing selected: everything that is pending.
#[derive(Deserialize, ToSchema)]
#[schema(as = ForgetCancelRequest)]
#[serde(deny_unknown_fields)]
struct ApiForgetCancelRequest {
    /// Chunks, such as `u4.0`.
    #[serde(default)]
    chunks: Vec<String>,
    /// Whole turns, by number.
    #[serde(default)]
    turns: Vec<u32>,
}

/// How much is kept after all.
#[derive(Serialize, ToSchema)]
#[schema(as = ForgetCancelResult)]
struct ApiForgetCancelResult {
    chunks: usize,
    memories: usize,
}

/// The proofs that text was forgotten.
#[derive(Serialize, ToSchema)]
#[schema(as = ForgetProofs)]
struct ApiForgetProofs {
    proofs: Vec<ApiForgetProof>,
    /// Lines of the log that are no proof: writing them was interrupted, or they were changed.
    unreadable_lines: Vec<usize>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ForgetProof)]
struct ApiForgetProof {
    /// The id of the conversation, and the chunk or memory.
    subject: String,
    requested_by: String,
    /// In milliseconds since 1970.
    forgotten_at: i64,
    tokens: u64,
    salt: String,
    /// SHA-256 of salt and text.
    content_hash: String,
    signature: String,
    /// Whether the signature is valid.
    valid: bool,
}

fn parse_selection(chunks: &[String], turns: Vec<u32>) -> ApiResult<ForgetSelection> {
    let chunks: Result<Vec<ChunkId>, _> = chunks.iter().map(|chunk| chunk.parse()).collect();
    let chunks = chunks.map_err(|error| ErrorResponse::bad_request(format!("{error}")))?;
    Ok(ForgetSelection { chunks, turns, turn_range: None })
}

fn parse_query(request: ApiForgetRequest) -> ApiResult<ForgetQuery> {
    let selection = parse_selection(&request.chunks, request.turns)?;
    let is_part = !selection.is_empty() || request.matching.is_some();
    match (request.all, is_part) {
        (true, false) => Ok(ForgetQuery::All),
        (true, true) => Err(ErrorResponse::bad_request("all goes without chunks, turns and matching")),
        (false, false) => Err(ErrorResponse::bad_request("select chunks, turns, matching or all")),
        (false, true) => {
            let matching = request.matching.as_deref().map(WholeWordMatcher::new).transpose()?;
            Ok(ForgetQuery::Part { selection, matching })
        }
    }
}

/// List what is pending: hidden, and erased at the end of its grace period
#[utoipa::path(get, path = "/conversations/{name}/forget", params(("name" = String, Path)),
    responses((status = 200, body = Vec<ApiPendingForget>), (status = 404, body = ApiError)))]
async fn list_pending_forgets(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<ApiPendingForget>>> {
    spawn_blocking(move || {
        let pending = ForgetService::new(app.backend.forget_backend()).list_pending(&name)?;
        let pending = pending.into_iter().map(|item| ApiPendingForget {
            due: item.due_at,
            chunks: item.chunks.iter().map(|(chunk, _)| chunk.to_string()).collect(),
            memories: item.memories,
            other_texts: item.other_texts,
            all: item.whole_conversation,
        });
        Ok(Json(pending.collect()))
    })
    .await
}

/// Forget text permanently: it is hidden now, and erased at the end of the grace period or at once
#[utoipa::path(post, path = "/conversations/{name}/forget", params(("name" = String, Path)), request_body = ApiForgetRequest,
    responses((status = 200, body = ApiForgetResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn forget(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiForgetRequest>,
) -> ApiResult<Json<ApiForgetResult>> {
    let timing = if request.now { ForgetTiming::Now } else { ForgetTiming::AfterGrace };
    let query = parse_query(request)?;
    forget_with_originals(&app, &name, query, timing).await.map(Json)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct DeleteQuery {
    /// The name of the conversation once more: a request that does not repeat it deletes nothing
    confirm: Option<String>,
    /// Erase immediately, without the grace period. This cannot be cancelled.
    #[serde(default)]
    now: bool,
}

/// Delete a conversation: it is hidden now, and erased at the end of the grace period or at once
///
/// The request must repeat the name: `DELETE /conversations/main?confirm=main`. `POST /conversations/{name}/forget/cancel`
/// cancels it within the grace period.
#[utoipa::path(delete, path = "/conversations/{name}", params(("name" = String, Path), DeleteQuery),
    responses((status = 200, body = ApiForgetResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn delete_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<DeleteQuery>,
) -> ApiResult<Json<ApiForgetResult>> {
    let timing = if query.now { ForgetTiming::Now } else { ForgetTiming::AfterGrace };
    let stored = {
        let (app, name) = (Arc::clone(&app), name.clone());
        spawn_blocking(move || Ok(app.with_reader(|store| store.find_conversation(&name))?)).await?
    };
    if stored.is_none() {
        return Err(ErrorResponse::not_found(format!("there is no conversation '{name}'")));
    }
    if query.confirm.as_deref() != Some(name.as_str()) {
        let message = format!("nothing was deleted: repeat the name of the conversation, ?confirm={name}");
        return Err(ErrorResponse::new(StatusCode::UNPROCESSABLE_ENTITY, message));
    }
    forget_with_originals(&app, &name, ForgetQuery::All, timing).await.map(Json)
}

/// The originals that were kept when a conversation was retokenized.
async fn find_originals(app: &Arc<App>, name: &str) -> ApiResult<Vec<String>> {
    let (app, name) = (Arc::clone(app), name.to_owned());
    spawn_blocking(move || {
        let originals = app.with_reader(|store| {
            let conversations = store.list_conversations()?;
            load_recorded_originals(store, &conversations)
        })?;
        Ok(originals_of(&originals, &name))
    })
    .await
}

/// Forgets what a query selects; of a whole conversation also the originals, which have the same messages.
async fn forget_with_originals(
    app: &Arc<App>,
    name: &str,
    query: ForgetQuery,
    timing: ForgetTiming,
) -> ApiResult<ApiForgetResult> {
    let is_whole = matches!(query, ForgetQuery::All);
    let originals = if is_whole { find_originals(app, name).await? } else { Vec::new() };
    let mut warnings = Vec::new();
    // The originals first: the warnings of the conversation name what still has its text.
    for original in &originals {
        let opening = OpenSession::IfOpen;
        if let Err(error) = plan_and_forget(app, original, ForgetQuery::All, timing, opening).await {
            warnings.push(format!(
                "'{original}' has the same messages and was not forgotten: {}",
                error.message()
            ));
        }
    }
    let mut result = plan_and_forget(app, name, query, timing, OpenSession::IfPossible).await?;
    result.warnings.extend(warnings);
    Ok(result)
}

/// Forgets what a query selects, on the thread of the conversation.
async fn plan_and_forget(
    app: &Arc<App>,
    name: &str,
    query: ForgetQuery,
    timing: ForgetTiming,
    opening: OpenSession,
) -> ApiResult<ApiForgetResult> {
    let erases_all = matches!(query, ForgetQuery::All);
    let conversation = name.to_owned();
    let (plan, report) = run_forget(app, name, opening, move |mut job| {
        let plan = job.service.plan(&conversation, &query)?;
        if plan.rows.is_empty() {
            return Err(ErrorResponse::not_found("nothing matches: nothing was forgotten"));
        }
        let now = jiff::Timestamp::now().as_millisecond();
        let plans = [plan];
        let report = job.run(|service| service.forget(&plans, timing, now))?;
        if report.due_at.is_none() {
            job.delete_kv()?;
        }
        let [plan] = plans;
        job.announce_change(ChangeAction::Deleted, planned_chunks(&plan));
        Ok((plan, report))
    })
    .await?;
    if report.due_at.is_none() {
        app.drop_cached(name);
        close_conversations_with_copies(app);
        // A conversation with another name is opened by that one.
        if erases_all || !report.new_names.is_empty() {
            app.host.close(name);
        }
    }
    Ok(forget_result(&plan, &report))
}

/// Closes the conversations that memories were carried into: copies of forgotten ones were deleted from the store.
fn close_conversations_with_copies(app: &App) {
    for (name, handle) in app.host.open_conversations() {
        let state = handle.snapshot_cell().get().state;
        if state.memories.iter().any(Memory::is_carried) {
            app.drop_cached(&name);
            app.host.close(&name);
        }
    }
}

fn planned_chunks(plan: &ForgetPlan) -> Vec<ChunkId> {
    let chunk = |subject: &ForgetSubject| match subject {
        ForgetSubject::Chunk(chunk) => Some(*chunk),
        _ => None,
    };
    plan.rows.iter().filter_map(|row| chunk(&row.subject)).collect()
}

fn forget_result(plan: &ForgetPlan, report: &ForgetReport) -> ApiForgetResult {
    let memory = |subject: &ForgetSubject| match subject {
        ForgetSubject::Memory(memory) => Some(memory.id),
        _ => None,
    };
    ApiForgetResult {
        chunks: planned_chunks(plan).iter().map(ToString::to_string).collect(),
        memories: plan.rows.iter().filter_map(|row| memory(&row.subject)).collect(),
        other_texts: report.other_texts,
        tokens: report.tokens,
        new_name: report.new_names.first().map(|(_, new_name)| new_name.clone()),
        due: report.due_at,
        warnings: report.warnings.iter().map(ToString::to_string).collect(),
    }
}

/// Cancel pending erasures: the text is visible again
#[utoipa::path(post, path = "/conversations/{name}/forget/cancel", params(("name" = String, Path)), request_body = ApiForgetCancelRequest,
    responses((status = 200, body = ApiForgetCancelResult), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 503, body = ApiError)))]
async fn cancel_forget(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(request): JsonBody<ApiForgetCancelRequest>,
) -> ApiResult<Json<ApiForgetCancelResult>> {
    let is_whole = request.chunks.is_empty() && request.turns.is_empty();
    if is_whole {
        for original in find_originals(&app, &name).await? {
            let conversation = original.clone();
            run_forget(&app, &original, OpenSession::IfOpen, move |mut job| {
                Ok(job.run(|service| service.cancel(&conversation, &ForgetSelection::default()))?)
            })
            .await?;
        }
    }
    let selection = parse_selection(&request.chunks, request.turns)?;
    let conversation = name.clone();
    let cancelled = run_forget(&app, &name, OpenSession::IfPossible, move |mut job| {
        let cancelled = job.run(|service| service.cancel(&conversation, &selection))?;
        job.announce_change(ChangeAction::Undeleted, Vec::new());
        Ok(cancelled)
    })
    .await?;
    Ok(Json(ApiForgetCancelResult { chunks: cancelled.chunks, memories: cancelled.memories }))
}

/// List the proofs that text was forgotten
#[utoipa::path(get, path = "/forget/proofs", responses((status = 200, body = ApiForgetProofs)))]
async fn list_proofs(State(app): State<Arc<App>>) -> ApiResult<Json<ApiForgetProofs>> {
    spawn_blocking(move || {
        let list = ForgetService::new(app.backend.forget_backend()).proofs()?;
        let proofs = list.proofs.into_iter().map(|(proof, valid)| ApiForgetProof {
            subject: proof.subject,
            requested_by: proof.requested_by,
            forgotten_at: proof.forgotten_at,
            tokens: proof.tokens,
            salt: proof.salt,
            content_hash: proof.content_hash,
            signature: proof.signature,
            valid,
        });
        Ok(Json(ApiForgetProofs { proofs: proofs.collect(), unreadable_lines: list.unreadable_lines }))
    })
    .await
}

/// What is forgotten of one conversation, and the session that has it open.
struct ForgetJob<'a> {
    app: &'a App,
    service: ForgetService<'a>,
    kv_key: String,
    /// None where the conversation is not open: it can be forgotten all the same.
    open: Option<(&'a mut Session, &'a JobContext<'a>)>,
}

impl ForgetJob<'_> {
    /// Runs work that takes the lease itself.
    fn run<T>(&mut self, work: impl FnOnce(&ForgetService<'_>) -> T) -> T {
        let Self { service, open, .. } = self;
        match open {
            Some((session, context)) => context.run_without_lease(session, || work(service)),
            None => work(service),
        }
    }

    /// Deletes the KV cells in memory; those on disk are deleted with the text.
    fn delete_kv(&mut self) -> Result<(), Error> {
        match &mut self.open {
            Some((session, _)) => session.delete_kv(&self.kv_key),
            None => self.app.backend.model()?.delete_kv(&self.kv_key),
        }
    }

    fn announce_change(&self, action: ChangeAction, chunks: Vec<ChunkId>) {
        if let Some((_, context)) = &self.open {
            context.announce_change(action, chunks);
        }
    }
}

/// Whether a conversation is opened to forget something of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenSession {
    /// If its model can be loaded.
    IfPossible,
    /// Only if it is open: opening an original would tokenize it again for the model that its successor has chosen.
    IfOpen,
}

/// Runs work on the thread of a conversation; without one where it is not opened.
async fn run_forget<T: Send + 'static>(
    app: &Arc<App>,
    name: &str,
    opening: OpenSession,
    work: impl FnOnce(ForgetJob<'_>) -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let opened = match opening {
        OpenSession::IfOpen => app.host.find_open(name).ok_or(None),
        OpenSession::IfPossible => {
            let (app, name) = (Arc::clone(app), name.to_owned());
            spawn_blocking(move || app.open_conversation(&name)).await.map_err(Some)
        }
    };
    let app = Arc::clone(app);
    let handle = match opened {
        Ok(handle) => handle,
        Err(Some(error)) if [ErrorKind::Busy, ErrorKind::Conflict].contains(&error.kind()) => {
            return Err(error);
        }
        Err(error) => {
            let name = name.to_owned();
            return spawn_blocking(move || {
                let kv_key = app.with_reader(|store| {
                    let summary = store.find_conversation(&name)?;
                    summary.map(|summary| kv_cache_key(store, &summary)).transpose()
                })?;
                let Some(kv_key) = kv_key else {
                    return Err(error.unwrap_or_else(|| conversation_not_found(&name)));
                };
                let service = ForgetService::new(app.backend.forget_backend());
                work(ForgetJob { app: &app, service, kv_key, open: None })
            })
            .await;
        }
    };
    let (done, result) = oneshot::channel();
    handle.submit(move |session, context| {
        let kv_key = session.kv_key().to_owned();
        let service = ForgetService::new(app.backend.forget_backend());
        let _ = done.send(work(ForgetJob { app: &app, service, kv_key, open: Some((session, context)) }));
    })?;
    let closed = |_| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "the program is shutting down");
    result.await.map_err(closed)?
}

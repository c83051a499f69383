//! Queries: they change nothing and do not wait for a running answer.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::{App, ConversationView};
use crate::error::{ApiError, ApiResult, ErrorResponse, PathParams, QueryParams, spawn_blocking};
use crate::originals::load_originals;
use crate::search::{load_bodies, search_index};
use crate::wire::{
    self, ApiAttendedToken, ApiChunk, ApiChunkDetail, ApiChunkPage, ApiContextAtTurn, ApiConversation,
    ApiConversationSummary, ApiNote, ApiSearchHit, ApiSnapshot, ApiToken, ApiTokenAttention, ApiTurn,
    ApiVariant,
};
use axum::Json;
use axum::extract::State;
use halo_core::Error;
use halo_core::change::AttentionTally;
use halo_core::manual_edit;
use halo_core::prune::RankBy;
use halo_core::store::{RecordKind, Store};
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, ContentKind, Position, TurnId};
use halo_engine::attention_history::load_answer_attention;
use halo_engine::forget::pending as pending_forget;
use halo_engine::forgetting_record::ForgettingRecord;
use halo_engine::history::{self, ChunkAction};
use halo_engine::snapshot::ConversationState;
use halo_engine::turn_record::TurnRecord;
use halo_engine::variant;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_conversations))
        .routes(routes!(get_conversation))
        .routes(routes!(get_chunk))
        .routes(routes!(list_pruned_chunks))
        .routes(routes!(list_deleted_chunks))
        .routes(routes!(list_variants))
        .routes(routes!(search_conversation))
        .routes(routes!(list_turns))
        .routes(routes!(get_context_at_turn))
        .routes(routes!(get_token_attention))
        .routes(routes!(list_notes))
}

/// Lists the conversations, the latest first
#[utoipa::path(get, path = "/conversations", responses((status = 200, body = Vec<ApiConversationSummary>)))]
async fn list_conversations(State(app): State<Arc<App>>) -> ApiResult<Json<Vec<ApiConversationSummary>>> {
    spawn_blocking(move || {
        let (mut conversations, mut originals) = app.with_reader(|store| {
            let conversations = store.list_conversations()?;
            let originals = load_originals(store, &conversations)?;
            Ok((conversations, originals))
        })?;
        conversations.sort_by_key(|conversation| std::cmp::Reverse(conversation.updated));
        let listed = conversations.into_iter().map(|summary| {
            let original_of = originals.remove(&summary.name);
            ApiConversationSummary::new(summary, original_of)
        });
        Ok(Json(listed.collect()))
    })
    .await
}

/// A conversation with its context window
#[utoipa::path(get, path = "/conversations/{name}", params(("name" = String, Path)),
    responses((status = 200, body = ApiConversation), (status = 404, body = ApiError)))]
async fn get_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiConversation>> {
    let api_conversation = |view: ConversationView, rendered: Arc<ApiSnapshot>| {
        let ConversationView { snapshot, notices } = view;
        let (last_event, running) = (snapshot.last_event, snapshot.answer.as_deref().map(Into::into));
        Ok(Json(ApiConversation { snapshot: rendered, last_event, notices, running }))
    };
    // Many clients may read while an answer is generated: a rendered snapshot needs no blocking thread.
    if let Some(handle) = app.host.find_open(&name) {
        let view =
            ConversationView { snapshot: handle.snapshot_cell().get(), notices: handle.notices().to_vec() };
        if view.snapshot.answer.is_some()
            && let Some(rendered) = app.state_cache.get(&view.snapshot)
        {
            return api_conversation(view, rendered);
        }
    }
    spawn_blocking(move || {
        let view = app.view_conversation(&name)?;
        let render = || render_snapshot(&app, &view.snapshot.state);
        let rendered = app.state_cache.get_or_render(&view.snapshot, render)?;
        api_conversation(view, rendered)
    })
    .await
}

/// A snapshot with the times, premises, finish reasons and forgetting cycles from the store.
fn render_snapshot(app: &App, state: &ConversationState) -> ApiResult<ApiSnapshot> {
    let mut snapshot = ApiSnapshot::from_state(state);
    if snapshot.tokens == 0 {
        // The first message is queued: the store does not have the conversation yet.
        return Ok(snapshot);
    }
    let name = &state.name;
    let (times, records, forgetting) = app.with_reader(|store| {
        let forgetting = ForgettingRecord::load(store, name)?;
        Ok((store.turn_times(name)?, store.records(name, RecordKind::Turn)?, forgetting))
    })?;
    snapshot.forgetting = forgetting.map(Into::into);
    let live_turns: BTreeSet<u32> = snapshot.chunks.iter().map(|chunk| chunk.turn).collect();
    let times = times.into_iter().map(|(turn, at)| (turn.0, at));
    snapshot.times = times.filter(|(turn, _)| live_turns.contains(turn)).collect();
    for record in records {
        let Ok(turn) = record.key.parse::<u32>() else { continue };
        if !live_turns.contains(&turn) {
            continue;
        }
        let Some(record) = TurnRecord::from_json(&record.value) else { continue };
        if !record.is_complete() {
            snapshot.finish_reasons.insert(turn, record.finish);
        }
        if let Some(premise) = record.premise {
            snapshot.premises.insert(turn, premise);
        }
    }
    Ok(snapshot)
}

/// A chunk with its tokens, its attention and its history
#[utoipa::path(get, path = "/conversations/{name}/chunks/{chunk}",
    params(("name" = String, Path), ("chunk" = String, Path, description = "Role, turn and index, such as u4.0")),
    responses((status = 200, body = ApiChunkDetail), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_chunk(
    State(app): State<Arc<App>>,
    PathParams((name, chunk)): PathParams<(String, String)>,
) -> ApiResult<Json<ApiChunkDetail>> {
    let id: ChunkId = chunk.parse().map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
    spawn_blocking(move || {
        let mut timeline = app.view_nonempty_conversation(&name)?.snapshot.state.timeline.clone();
        let (history, pending) = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &[id])?;
            Ok((history::chunk_history(store, &name, id)?, pending_forget::pending_chunks(store, &name)?))
        })?;
        if pending.contains_key(&id) && timeline.chunk(id).is_some_and(|chunk| chunk.is_deleted()) {
            let message = format!("{id} is pending deletion and is not shown; cancel the deletion to see it");
            return Err(ErrorResponse::not_found(message));
        }
        let chunk = timeline.chunk(id);
        let chunk =
            chunk.ok_or_else(|| ErrorResponse::not_found(format!("there is no chunk {id} in '{name}'")))?;
        let positions = chunk.run().positions();
        let tokens = positions.filter_map(|position| Some((position, timeline.token(position)?)));
        let tokens = tokens.map(|(position, token)| ApiToken {
            position: position.0,
            id: token.id.0,
            text: token.text.to_owned(),
            brightness: token.brightness.0,
            live: token.flags.is_live(),
            template: token.flags.kind() == ContentKind::Template,
        });
        let tally = chunk.tally();
        let dependents =
            manual_edit::delete(&timeline, id).map(|change| change.named_chunks()).unwrap_or_default();
        let dependents: Vec<ChunkId> = dependents.into_iter().filter(|&other| other != id).collect();
        Ok(Json(ApiChunkDetail {
            tokens: tokens.collect(),
            votes: tally.votes,
            attention: tally.mass as f64 / AttentionTally::MASS_UNIT,
            share: tally.share(),
            history: history.into_iter().map(Into::into).collect(),
            pair: timeline.partner(id).map(|pair| pair.id().to_string()),
            dependents: chunks_with_text(&app, &name, &timeline, &dependents)?,
            chunk: ApiChunk::from_chunk(chunk, &timeline, 0),
        }))
    })
    .await
}

fn chunks_with_text(
    app: &App,
    name: &str,
    timeline: &Timeline,
    chunks: &[ChunkId],
) -> ApiResult<Vec<ApiChunk>> {
    let mut timeline = timeline.clone();
    app.with_reader(|store| load_bodies(store, name, &mut timeline, chunks))?;
    let chunks = chunks.iter().filter_map(|&id| timeline.chunk(id));
    Ok(chunks.map(|chunk| ApiChunk::from_chunk(chunk, &timeline, 0)).collect())
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct GraveyardQuery {
    /// Only chunks that match these words or their meaning, the best match first
    #[serde(default)]
    q: String,
    #[serde(default)]
    #[param(inline)]
    sort: GraveyardSort,
    /// How many chunks to skip
    #[serde(default)]
    offset: usize,
    /// How many chunks to return, at most 200
    #[serde(default = "fifty")]
    limit: usize,
}

#[derive(Clone, Copy, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum GraveyardSort {
    #[default]
    Newest,
    Oldest,
    Brightest,
    Dimmest,
    Longest,
}

/// The maximum number of chunks in one response.
const MAX_PAGE: usize = 200;

fn fifty() -> usize {
    50
}

/// Lists the pruned chunks, with the reason of each
#[utoipa::path(get, path = "/conversations/{name}/graveyard", params(("name" = String, Path), GraveyardQuery),
    responses((status = 200, body = ApiChunkPage), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn list_pruned_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<GraveyardQuery>,
) -> ApiResult<Json<ApiChunkPage>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        let mut timeline = state.timeline.clone();
        let pruned = if query.q.trim().is_empty() {
            sorted_pruned_chunks(&timeline, query.sort)
        } else {
            let hits = search_index(&app, &state, &query.q, 1000)?;
            // Everything is a hit of some score; what is unlikely to be meant is no match.
            let relevant = hits.iter().filter(|hit| state.search_options.is_relevant(hit));
            let ids = relevant.map(|hit| hit.hit.chunk);
            ids.filter(|&id| timeline.chunk(id).is_some_and(wire::is_pruned)).collect()
        };
        let page = pruned.iter().skip(query.offset).take(query.limit.min(MAX_PAGE));
        let page: Vec<ChunkId> = page.copied().collect();
        let chunks = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &page)?;
            chunks_with_reason(store, &name, &timeline, &page, ChunkAction::Pruned)
        })?;
        Ok(Json(ApiChunkPage { total: pruned.len(), chunks }))
    })
    .await
}

fn sorted_pruned_chunks(timeline: &Timeline, sort: GraveyardSort) -> Vec<ChunkId> {
    let mut chunks: Vec<_> = timeline.chunks().filter(|c| wire::is_pruned(*c)).collect();
    match sort {
        GraveyardSort::Newest => chunks.reverse(),
        GraveyardSort::Oldest => {}
        GraveyardSort::Brightest => chunks.sort_by(|a, b| b.peak().0.total_cmp(&a.peak().0)),
        GraveyardSort::Dimmest => chunks.sort_by(|a, b| a.peak().0.total_cmp(&b.peak().0)),
        GraveyardSort::Longest => chunks.sort_by_key(|c| std::cmp::Reverse(c.len())),
    }
    chunks.iter().map(|c| c.id()).collect()
}

/// Chunks with the reason of the latest such action.
fn chunks_with_reason(
    store: &mut dyn Store,
    name: &str,
    timeline: &Timeline,
    chunks: &[ChunkId],
    action: ChunkAction,
) -> Result<Vec<ApiChunk>, Error> {
    let mut rows = Vec::new();
    for chunk in chunks.iter().filter_map(|&id| timeline.chunk(id)) {
        let history = history::chunk_history(store, name, chunk.id())?;
        let latest = history.into_iter().rev().find(|entry| entry.action == action);
        let (reason, reason_kind) = latest.map(|entry| (entry.reason, entry.reason_kind)).unzip();
        rows.push(ApiChunk { reason, reason_kind, ..ApiChunk::from_chunk(chunk, timeline, 0) });
    }
    Ok(rows)
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct DeletedQuery {
    /// How many chunks to skip
    #[serde(default)]
    offset: usize,
    /// How many chunks to return, at most 200
    #[serde(default = "fifty")]
    limit: usize,
}

/// Lists the deleted chunks and the variants that are not current, the latest first, with the reason of each
#[utoipa::path(get, path = "/conversations/{name}/deleted", params(("name" = String, Path), DeletedQuery),
    responses((status = 200, body = ApiChunkPage), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn list_deleted_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<DeletedQuery>,
) -> ApiResult<Json<ApiChunkPage>> {
    spawn_blocking(move || {
        let mut timeline = app.view_conversation(&name)?.snapshot.state.timeline.clone();
        if timeline.is_empty() {
            return Ok(Json(ApiChunkPage { total: 0, chunks: Vec::new() }));
        }
        let is_deleted = |c: &ChunkRef<'_>| c.deleted_len() > 0 && !c.is_forgotten();
        let deleted: Vec<ChunkId> = timeline.chunks().filter(is_deleted).map(|c| c.id()).collect();
        app.with_reader(|store| {
            let pending = pending_forget::pending_chunks(store, &name)?;
            let deleted: Vec<ChunkId> =
                deleted.into_iter().rev().filter(|id| !pending.contains_key(id)).collect();
            // An answer that was stopped before its first token has no text.
            load_bodies(store, &name, &mut timeline, &deleted)?;
            let has_text = |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| !c.text().trim().is_empty());
            let deleted: Vec<ChunkId> = deleted.into_iter().filter(has_text).collect();
            let page = deleted.iter().skip(query.offset).take(query.limit.min(MAX_PAGE));
            let page: Vec<ChunkId> = page.copied().collect();
            let chunks = chunks_with_reason(store, &name, &timeline, &page, ChunkAction::Deleted)?;
            Ok(ApiChunkPage { total: deleted.len(), chunks })
        })
        .map(Json)
        .map_err(ErrorResponse::from)
    })
    .await
}

/// Lists the variants of the last answer or exchange; empty if there is only one
#[utoipa::path(get, path = "/conversations/{name}/variants", params(("name" = String, Path)),
    responses((status = 200, body = Vec<ApiVariant>), (status = 404, body = ApiError)))]
async fn list_variants(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<ApiVariant>>> {
    spawn_blocking(move || {
        let mut timeline = app.view_conversation(&name)?.snapshot.state.timeline.clone();
        let choices = app.with_reader(|store| variant::load_variant_choices(store, &name, &mut timeline))?;
        Ok(Json(choices.into_iter().map(Into::into).collect()))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ApiSearchQuery {
    /// Words or their meaning
    q: String,
    /// How many chunks to return, at most 100
    #[serde(default = "ten")]
    limit: usize,
}

fn ten() -> usize {
    10
}

/// Searches the conversation, in and out of the context window
#[utoipa::path(get, path = "/conversations/{name}/search", params(("name" = String, Path), ApiSearchQuery),
    responses((status = 200, body = Vec<ApiSearchHit>), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn search_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<ApiSearchQuery>,
) -> ApiResult<Json<Vec<ApiSearchHit>>> {
    spawn_blocking(move || {
        if query.q.trim().is_empty() {
            return Err(ErrorResponse::bad_request("the query is empty: set ?q=…"));
        }
        let state = app.view_conversation(&name)?.snapshot.state;
        let mut timeline = state.timeline.clone();
        let ranked = search_index(&app, &state, &query.q, query.limit.min(100))?;
        let chunks: Vec<ChunkId> = ranked.iter().map(|ranked| ranked.hit.chunk).collect();
        app.with_reader(|store| load_bodies(store, &name, &mut timeline, &chunks))?;
        let hits = ranked.iter().filter_map(|ranked| {
            let chunk = timeline.chunk(ranked.hit.chunk)?;
            Some(ApiSearchHit {
                chunk: ApiChunk::from_chunk(chunk, &timeline, 0),
                score: ranked.hit.score,
                reason: ranked.explain(3),
                relevance: ranked.relevance,
                below_floor: !state.search_options.is_relevant(ranked),
            })
        });
        Ok(Json(hits.collect()))
    })
    .await
}

/// Lists the records of all turns: chunks pruned and resurrected, times of the stages, statistics of attention
#[utoipa::path(get, path = "/conversations/{name}/turns", params(("name" = String, Path)),
    responses((status = 200, body = Vec<ApiTurn>), (status = 404, body = ApiError)))]
async fn list_turns(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<ApiTurn>>> {
    spawn_blocking(move || {
        app.view_nonempty_conversation(&name)?;
        let records = app.with_reader(|store| store.records(&name, RecordKind::Turn))?;
        let mut turns: Vec<ApiTurn> = records
            .into_iter()
            .filter_map(|record| {
                let turn_record = TurnRecord::from_json(&record.value)?;
                Some(ApiTurn::new(record.key.parse().ok()?, record.updated_at, turn_record))
            })
            .collect();
        turns.sort_by_key(|turn| turn.turn);
        Ok(Json(turns))
    })
    .await
}

/// The context window as it was after a turn
#[utoipa::path(get, path = "/conversations/{name}/turns/{turn}/context", params(("name" = String, Path), ("turn" = u32, Path)),
    responses((status = 200, body = ApiContextAtTurn), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_context_at_turn(
    State(app): State<Arc<App>>,
    PathParams((name, turn)): PathParams<(String, u32)>,
) -> ApiResult<Json<ApiContextAtTurn>> {
    spawn_blocking(move || {
        let state = app.view_nonempty_conversation(&name)?.snapshot.state;
        if !state.timeline.turns().iter().any(|other| other.id == TurnId(turn)) {
            return Err(ErrorResponse::not_found(format!("there is no turn {turn} in '{name}'")));
        }
        let (then, pending) = app.with_reader(|store| {
            Ok((store.load_as_of(&name, TurnId(turn))?, pending_forget::pending_chunks(store, &name)?))
        })?;
        let is_live_now = |id: ChunkId| state.timeline.chunk(id).is_some_and(|chunk| chunk.is_live());
        let removed = then.live_chunks().map(|chunk| chunk.id());
        let removed = removed.filter(|id| !is_live_now(*id) && !pending.contains_key(id));
        Ok(Json(ApiContextAtTurn {
            turn,
            live: then.live_len() + state.system_tokens.len(),
            removed_since: removed.map(|id| id.to_string()).collect(),
            chunks: wire::context_window(&then, RankBy::Peak)
                .into_iter()
                .filter(|chunk| !pending.keys().any(|id| id.to_string() == chunk.id))
                .collect(),
        }))
    })
    .await
}

/// The attention of a token of an answer, by chunk and token, as far as `trace.attention` keeps it
#[utoipa::path(get, path = "/conversations/{name}/attention/{position}", params(("name" = String, Path), ("position" = u64, Path)),
    responses((status = 200, body = ApiTokenAttention), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_token_attention(
    State(app): State<Arc<App>>,
    PathParams((name, position)): PathParams<(String, u64)>,
) -> ApiResult<Json<ApiTokenAttention>> {
    spawn_blocking(move || {
        let state = app.view_nonempty_conversation(&name)?.snapshot.state;
        let missing = "no attention data for this token: it is of no answer, its model does not report attention, or the answer \
                       is older than what trace.attention keeps";
        let missing = || ErrorResponse::not_found(missing);
        let position = Position(position);
        let chunk = state.timeline.chunk_of(position).ok_or_else(missing)?.id();
        let (stored, pending) = app.with_reader(|store| {
            let pending = pending_forget::pending_chunks(store, &name)?;
            Ok((load_answer_attention(store, &name, chunk.turn)?, pending))
        })?;
        if pending.contains_key(&chunk) {
            return Err(missing());
        }
        let attention = stored.and_then(|stored| stored.get(position)).ok_or_else(missing)?;
        let shown = |id: ChunkId| {
            let chunk = state.timeline.chunk(id);
            chunk.is_some_and(|chunk| !chunk.is_deleted()) && !pending.contains_key(&id)
        };
        let attended = attention.tokens.iter().filter_map(|&(at, _)| Some(state.timeline.chunk_of(at)?.id()));
        let wanted: BTreeSet<ChunkId> = attended.chain([chunk]).collect();
        let is_unloaded = |id: &ChunkId| state.timeline.chunk(*id).is_some_and(|chunk| !chunk.is_loaded());
        let unloaded: Vec<ChunkId> = wanted.into_iter().filter(is_unloaded).collect();
        // A timeline whose chunks are all live can be large, so it is copied only if something is missing.
        let mut timeline = Cow::Borrowed(&state.timeline);
        if !unloaded.is_empty() {
            app.with_reader(|store| load_bodies(store, &name, timeline.to_mut(), &unloaded))?;
        }
        let tokens = attention.tokens.iter().filter_map(|&(position, share)| {
            let chunk = timeline.chunk_of(position).filter(|chunk| shown(chunk.id()) && chunk.is_loaded())?;
            Some(ApiAttendedToken {
                position: position.0,
                chunk: chunk.id().to_string(),
                text: timeline.token(position).map(|token| token.text.to_owned()).unwrap_or_default(),
                range: wire::token_range(chunk, &timeline, position),
                share,
            })
        });
        Ok(Json(ApiTokenAttention {
            turn: chunk.turn.0,
            text: timeline.token(position).map(|token| token.text.to_owned()).unwrap_or_default(),
            system_prompt: attention.system_prompt,
            answer: attention.answer,
            chunks: (attention.chunks.iter())
                .filter(|(chunk, _)| shown(*chunk))
                .map(|(chunk, share)| (chunk.to_string(), *share))
                .collect(),
            tokens: tokens.collect(),
        }))
    })
    .await
}

#[utoipa::path(get, path = "/conversations/{name}/notes", params(("name" = String, Path)),
    responses((status = 200, body = Vec<ApiNote>), (status = 404, body = ApiError)))]
async fn list_notes(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<ApiNote>>> {
    spawn_blocking(move || {
        app.view_nonempty_conversation(&name)?;
        let notes = app.with_reader(|store| store.records(&name, RecordKind::Note))?;
        Ok(Json(notes.into_iter().map(|note| ApiNote { file: note.key, text: note.value }).collect()))
    })
    .await
}

//! Looking: nothing here waits for an answer that is being given, or changes anything.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::wire::{
    self, ApiAttendedToken, ApiChunk, ApiChunkDetail, ApiChunkPage, ApiContextAtTurn, ApiConversationSummary,
    ApiNote, ApiSearchHit, ApiSnapshot, ApiToken, ApiTokenAttention, ApiTurn,
};
use crate::app::{App, ConversationView};
use crate::error::{ApiError, ApiResult, ErrorResponse, PathParams, QueryParams, spawn_blocking};
use axum::Json;
use axum::extract::State;
use halo_core::Error;
use halo_core::change::AttentionTally;
use halo_core::manual_edit;
use halo_core::prune::RankBy;
use halo_core::store::{RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, ContentKind, Position, TurnId};
use halo_engine::forget::pending as pending_forget;
use halo_engine::history::{self, ChunkAction};
use halo_engine::snapshot::ConversationState;
use halo_engine::variant;
use halo_recall::rank;
use halo_recall::recall::{self, SearchOptions};
use serde::Deserialize;
use std::collections::BTreeMap;
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

/// The conversations, the last used first
#[utoipa::path(get, path = "/conversations", responses((status = 200, body = Vec<ApiConversationSummary>)))]
async fn list_conversations(State(app): State<Arc<App>>) -> ApiResult<Json<Vec<ApiConversationSummary>>> {
    spawn_blocking(move || {
        let mut known = app.with_reader(|store| store.list_conversations())?;
        known.sort_by_key(|known| std::cmp::Reverse(known.updated));
        Ok(Json(known.into_iter().map(ApiConversationSummary::from).collect()))
    })
    .await
}

/// A conversation: what is in the window, and how it stands
#[utoipa::path(get, path = "/conversations/{name}", params(("name" = String, Path)),
    responses((status = 200, body = wire::ApiConversation), (status = 404, body = ApiError)))]
async fn get_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<wire::ApiConversation>> {
    let told = |looked: ConversationView, stood: Arc<ApiSnapshot>| {
        let ConversationView { snapshot: seen, notices } = looked;
        let (last_event, running) = (seen.last_event, seen.answer.as_deref().map(Into::into));
        Ok(Json(wire::ApiConversation { snapshot: stood, last_event, notices, running }))
    };
    // While an answer is given, many may look: where it is in words already, there is nothing to wait for.
    if let Some(desk) = app.host.find_open(&name) {
        let looked =
            ConversationView { snapshot: desk.snapshot_cell().get(), notices: desk.notices().to_vec() };
        if looked.snapshot.answer.is_some()
            && let Some(stood) = app.state_cache.get(&looked.snapshot)
        {
            return told(looked, stood);
        }
    }
    spawn_blocking(move || {
        let looked = app.view_conversation(&name)?;
        let stood = app
            .state_cache
            .get_or_render(&looked.snapshot, || render_snapshot(&app, &looked.snapshot.state))?;
        told(looked, stood)
    })
    .await
}

/// How a conversation stands, with what the store knows of it.
fn render_snapshot(app: &App, standing: &ConversationState) -> ApiResult<ApiSnapshot> {
    let mut stood = ApiSnapshot::from_state(standing);
    if stood.tokens == 0 {
        // Its first message waits for the model: the store does not know of it yet.
        return Ok(stood);
    }
    let name = &standing.name;
    let (times, records) =
        app.with_reader(|store| Ok((store.turn_times(name)?, store.records(name, RecordKind::Turn)?)))?;
    let shown: std::collections::BTreeSet<u32> = stood.chunks.iter().map(|chunk| chunk.turn).collect();
    stood.times =
        times.into_iter().map(|(turn, at)| (turn.0, at)).filter(|(turn, _)| shown.contains(turn)).collect();
    for record in records {
        let Ok(turn) = record.key.parse::<u32>() else { continue };
        let told: serde_json::Value = serde_json::from_str(&record.value).unwrap_or_default();
        if let Some(premise) = told["premise"].as_str().filter(|_| shown.contains(&turn)) {
            stood.premises.insert(turn, premise.to_owned());
        }
        let finish = told["finish"].as_str().unwrap_or("end");
        if shown.contains(&turn) && !["end", "stop"].contains(&finish) {
            stood.finish_reasons.insert(turn, finish.to_owned());
        }
    }
    Ok(stood)
}

/// All that is known of a chunk: its tokens, how bright each is, and what happened to it
#[utoipa::path(get, path = "/conversations/{name}/chunks/{chunk}",
    params(("name" = String, Path), ("chunk" = String, Path, description = "Role, turn and sentence, such as u4.0")),
    responses((status = 200, body = ApiChunkDetail), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_chunk(
    State(app): State<Arc<App>>,
    PathParams((name, chunk)): PathParams<(String, String)>,
) -> ApiResult<Json<ApiChunkDetail>> {
    let id: ChunkId = chunk.parse().map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
    spawn_blocking(move || {
        let mut timeline = app.view_nonempty_conversation(&name)?.snapshot.state.timeline.clone();
        let (history, hidden) = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &[id])?;
            Ok((history::chunk_history(store, &name, id)?, pending_forget::pending_chunks(store, &name)?))
        })?;
        if hidden.contains_key(&id) && timeline.chunk(id).is_some_and(|chunk| chunk.is_deleted()) {
            let why = format!("{id} is pending deletion and is not shown; cancel the deletion to see it");
            return Err(ErrorResponse::not_found(why));
        }
        let chunk = timeline.chunk(id);
        let chunk =
            chunk.ok_or_else(|| ErrorResponse::not_found(format!("there is no chunk {id} in '{name}'")))?;
        let positions = chunk.run().positions();
        let tokens = positions.filter_map(|position| Some((position, timeline.token(position)?)));
        let words = tokens.map(|(position, token)| ApiToken {
            position: position.0,
            id: token.id.0,
            text: token.text.to_owned(),
            brightness: token.brightness.0,
            live: token.flags.is_live(),
            template: token.flags.kind() == ContentKind::Template,
        });
        let tally = chunk.tally();
        let along =
            manual_edit::delete(&timeline, id).map(|change| change.named_chunks()).unwrap_or_default();
        let along: Vec<ChunkId> = along.into_iter().filter(|&other| other != id).collect();
        Ok(Json(ApiChunkDetail {
            tokens: words.collect(),
            votes: tally.votes,
            attention: tally.mass as f64 / AttentionTally::MASS_UNIT,
            share: tally.share(),
            history: history.into_iter().map(Into::into).collect(),
            pair: timeline.partner(id).map(|pair| pair.id().to_string()),
            dependents: chunks_with_text(&app, &name, &timeline, &along)?,
            chunk: ApiChunk::from_chunk(chunk, &timeline, 0),
        }))
    })
    .await
}

/// Chunks with what they say.
fn chunks_with_text(
    app: &App,
    name: &str,
    timeline: &Timeline,
    chunks: &[ChunkId],
) -> ApiResult<Vec<ApiChunk>> {
    let mut timeline = timeline.clone();
    app.with_reader(|store| load_bodies(store, name, &mut timeline, chunks))?;
    let found = chunks.iter().filter_map(|&id| timeline.chunk(id));
    Ok(found.map(|chunk| ApiChunk::from_chunk(chunk, &timeline, 0)).collect())
}

/// Which of what has left.
#[derive(Deserialize, IntoParams)]
struct GraveyardQuery {
    /// Words, or what is meant: only what fits, the best first
    #[serde(default)]
    q: String,
    #[serde(default)]
    #[param(inline)]
    sort: GraveyardSort,
    /// How many of them are left out before the first
    #[serde(default)]
    offset: usize,
    /// How many are wanted, at most 200
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

fn fifty() -> usize {
    50
}

/// What has left the window and can come back, and why it left
#[utoipa::path(get, path = "/conversations/{name}/graveyard", params(("name" = String, Path), GraveyardQuery),
    responses((status = 200, body = ApiChunkPage), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn list_pruned_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(which): QueryParams<GraveyardQuery>,
) -> ApiResult<Json<ApiChunkPage>> {
    spawn_blocking(move || {
        let standing = app.view_conversation(&name)?.snapshot.state;
        let mut timeline = standing.timeline.clone();
        let dead: Vec<ChunkId> = if which.q.trim().is_empty() {
            let mut dead: Vec<_> = timeline.chunks().filter(|c| wire::is_pruned(*c)).collect();
            match which.sort {
                GraveyardSort::Newest => dead.reverse(),
                GraveyardSort::Oldest => {}
                GraveyardSort::Brightest => dead.sort_by(|a, b| b.peak().0.total_cmp(&a.peak().0)),
                GraveyardSort::Dimmest => dead.sort_by(|a, b| a.peak().0.total_cmp(&b.peak().0)),
                GraveyardSort::Longest => dead.sort_by_key(|c| std::cmp::Reverse(c.len())),
            }
            dead.iter().map(|c| c.id()).collect()
        } else {
            let found = search_index(&app, &standing, &which.q, 1000)?;
            let hits = found.iter().map(|found| found.hit.chunk);
            hits.filter(|&id| timeline.chunk(id).is_some_and(wire::is_pruned)).collect()
        };
        let most = which.limit.min(200);
        let shown: Vec<ChunkId> = dead.iter().skip(which.offset).take(most).copied().collect();
        let whys: BTreeMap<ChunkId, String> = app.with_reader(|store| {
            load_bodies(store, &name, &mut timeline, &shown)?;
            let mut whys = BTreeMap::new();
            for &id in &shown {
                let left = history::chunk_history(store, &name, id)?
                    .into_iter()
                    .rev()
                    .find(|h| h.action == ChunkAction::Pruned);
                whys.extend(left.map(|left| (id, left.reason)));
            }
            Ok(whys)
        })?;
        let rows = shown.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| {
            let why = whys.get(&chunk.id()).cloned();
            ApiChunk { reason: why, ..ApiChunk::from_chunk(chunk, &timeline, 0) }
        });
        Ok(Json(ApiChunkPage { total: dead.len(), chunks: rows.collect() }))
    })
    .await
}

/// Which of what was deleted.
#[derive(Deserialize, IntoParams)]
struct DeletedQuery {
    /// How many of them are left out before the first
    #[serde(default)]
    offset: usize,
    /// How many are wanted, at most 200
    #[serde(default = "fifty")]
    limit: usize,
}

/// What was deleted, by hand or as a variant, and why, the latest first. All of it can be restored until it is forgotten
#[utoipa::path(get, path = "/conversations/{name}/deleted", params(("name" = String, Path), DeletedQuery),
    responses((status = 200, body = ApiChunkPage), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn list_deleted_chunks(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(page): QueryParams<DeletedQuery>,
) -> ApiResult<Json<ApiChunkPage>> {
    spawn_blocking(move || {
        let mut timeline = app.view_conversation(&name)?.snapshot.state.timeline.clone();
        if timeline.is_empty() {
            return Ok(Json(ApiChunkPage { total: 0, chunks: Vec::new() }));
        }
        let gone = |c: &halo_core::timeline::ChunkRef<'_>| c.deleted_len() > 0 && !c.is_forgotten();
        let all: Vec<ChunkId> = timeline.chunks().filter(gone).map(|c| c.id()).collect();
        app.with_reader(|store| {
            let hidden = pending_forget::pending_chunks(store, &name)?;
            let all: Vec<ChunkId> = all.into_iter().rev().filter(|id| !hidden.contains_key(id)).collect();
            // An answer that ended before its first token says nothing.
            load_bodies(store, &name, &mut timeline, &all)?;
            let says = |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| !c.text().trim().is_empty());
            let all: Vec<ChunkId> = all.into_iter().filter(says).collect();
            let mut rows = Vec::new();
            for &id in all.iter().skip(page.offset).take(page.limit.min(200)) {
                let happened = history::chunk_history(store, &name, id)?
                    .into_iter()
                    .rev()
                    .find(|h| h.action == ChunkAction::Deleted);
                let Some(chunk) = timeline.chunk(id) else { continue };
                rows.push(ApiChunk {
                    reason: happened.map(|h| h.reason),
                    ..ApiChunk::from_chunk(chunk, &timeline, 0)
                });
            }
            Ok(ApiChunkPage { total: all.len(), chunks: rows })
        })
        .map(Json)
        .map_err(ErrorResponse::from)
    })
    .await
}

/// The answers, or versions of the last exchange, that can be chosen from; empty where there is only one
#[utoipa::path(get, path = "/conversations/{name}/variants", params(("name" = String, Path)),
    responses((status = 200, body = Vec<wire::ApiVariant>), (status = 404, body = ApiError)))]
async fn list_variants(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Vec<wire::ApiVariant>>> {
    spawn_blocking(move || {
        let mut timeline = app.view_conversation(&name)?.snapshot.state.timeline.clone();
        let choices = app.with_reader(|store| variant::load_variant_choices(store, &name, &mut timeline))?;
        Ok(Json(choices.into_iter().map(Into::into).collect()))
    })
    .await
}

/// What to look for.
#[derive(Deserialize, IntoParams)]
struct ApiSearchQuery {
    /// Words, or what is meant
    q: String,
    /// How many are wanted, at most 100
    #[serde(default = "ten")]
    limit: usize,
}

fn ten() -> usize {
    10
}

/// Finds what was said, live or not, and says why
#[utoipa::path(get, path = "/conversations/{name}/search", params(("name" = String, Path), ApiSearchQuery),
    responses((status = 200, body = Vec<ApiSearchHit>), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn search_conversation(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(asked): QueryParams<ApiSearchQuery>,
) -> ApiResult<Json<Vec<ApiSearchHit>>> {
    spawn_blocking(move || {
        if asked.q.trim().is_empty() {
            return Err(ErrorResponse::bad_request("say what to look for: ?q=…"));
        }
        let standing = app.view_conversation(&name)?.snapshot.state;
        let mut timeline = standing.timeline.clone();
        let found = search_index(&app, &standing, &asked.q, asked.limit.min(100))?;
        let chunks: Vec<ChunkId> = found.iter().map(|found| found.hit.chunk).collect();
        app.with_reader(|store| load_bodies(store, &name, &mut timeline, &chunks))?;
        let rows = found.iter().filter_map(|found| {
            let chunk = timeline.chunk(found.hit.chunk)?;
            Some(ApiSearchHit {
                chunk: ApiChunk::from_chunk(chunk, &timeline, 0),
                score: found.hit.score,
                reason: found.explain(3),
            })
        });
        Ok(Json(rows.collect()))
    })
    .await
}

/// What answers a query best in a conversation as it stands.
pub(crate) fn search_index(
    app: &App,
    standing: &ConversationState,
    text: &str,
    most: usize,
) -> ApiResult<Vec<rank::RankedChunk>> {
    let manner = SearchOptions { limit: most, ..standing.search_options };
    let mut embedder = app.backend.embedder();
    let embedder =
        embedder.as_mut().map(|embedder| &mut **embedder as &mut dyn halo_core::embedder::Embedder);
    let today = Some(jiff::Zoned::now().date());
    Ok(recall::search(&standing.index, embedder, text, today, manner)?)
}

/// What chunks say, and whether each is in the window.
pub(crate) fn chunk_texts(
    app: &App,
    name: &str,
    timeline: &Timeline,
    chunks: &[ChunkId],
) -> ApiResult<Vec<(String, bool)>> {
    let mut timeline = timeline.clone();
    app.with_reader(|store| load_bodies(store, name, &mut timeline, chunks))?;
    let text = |&id: &ChunkId| timeline.chunk(id).map(|chunk| (chunk.text().into_owned(), chunk.is_live()));
    Ok(chunks.iter().map(|id| text(id).unwrap_or_default()).collect())
}

/// Brings the tokens of chunks into memory, where they are not.
fn load_bodies(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<(), Error> {
    let away = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_loaded()));
    let away: Vec<ChunkId> = away.copied().collect();
    store.load_bodies(name, timeline, &away)
}

/// How each turn went: what came and left, what each part took, and the shape of the attention
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
                let told: serde_json::Value = serde_json::from_str(&record.value).ok()?;
                Some(ApiTurn { turn: record.key.parse().ok()?, at: record.updated_at, record: told })
            })
            .collect();
        turns.sort_by_key(|turn| turn.turn);
        Ok(Json(turns))
    })
    .await
}

/// What the model saw when it had said a turn, and what it said: the window as it was then
#[utoipa::path(get, path = "/conversations/{name}/turns/{turn}/context", params(("name" = String, Path), ("turn" = u32, Path)),
    responses((status = 200, body = ApiContextAtTurn), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_context_at_turn(
    State(app): State<Arc<App>>,
    PathParams((name, turn)): PathParams<(String, u32)>,
) -> ApiResult<Json<ApiContextAtTurn>> {
    spawn_blocking(move || {
        let standing = app.view_nonempty_conversation(&name)?.snapshot.state;
        if !standing.timeline.turns().iter().any(|known| known.id == TurnId(turn)) {
            return Err(ErrorResponse::not_found(format!("there is no turn {turn} in '{name}'")));
        }
        let (then, hidden) = app.with_reader(|store| {
            Ok((store.load_as_of(&name, TurnId(turn))?, pending_forget::pending_chunks(store, &name)?))
        })?;
        let live_now = |id: ChunkId| standing.timeline.chunk(id).is_some_and(|chunk| chunk.is_live());
        let gone =
            then.live_chunks().filter(|chunk| !live_now(chunk.id())).map(|chunk| chunk.id().to_string());
        Ok(Json(ApiContextAtTurn {
            turn,
            live: then.live_len() + standing.system_tokens.len(),
            removed_since: gone.collect(),
            chunks: wire::context_window(&then, RankBy::Peak)
                .into_iter()
                .filter(|chunk| !hidden.keys().any(|id| id.to_string() == chunk.id))
                .collect(),
        }))
    })
    .await
}

/// What a token of the latest answer looked at when it was made: which paragraphs, and which words
#[utoipa::path(get, path = "/conversations/{name}/attention/{position}", params(("name" = String, Path), ("position" = u64, Path)),
    responses((status = 200, body = ApiTokenAttention), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_token_attention(
    State(app): State<Arc<App>>,
    PathParams((name, position)): PathParams<(String, u64)>,
) -> ApiResult<Json<ApiTokenAttention>> {
    spawn_blocking(move || {
        let standing = app.view_nonempty_conversation(&name)?.snapshot.state;
        let missing = "only what the latest answer looked at is kept, since the program was started";
        let look = app
            .attention_cache
            .get(&name, Position(position))
            .ok_or_else(|| ErrorResponse::not_found(missing))?;
        let timeline = &standing.timeline;
        let tokens = look.tokens.iter().map(|&(position, share)| {
            let chunk = timeline.chunk_of(position);
            let here = chunk.is_some_and(|chunk| chunk.is_loaded());
            let text = timeline.token(position).filter(|_| here).map(|token| token.text.to_owned());
            ApiAttendedToken {
                position: position.0,
                chunk: chunk.map(|chunk| chunk.id().to_string()).unwrap_or_default(),
                text: text.unwrap_or_default(),
                share,
            }
        });
        Ok(Json(ApiTokenAttention {
            turn: look.turn,
            text: look.text.clone(),
            system_prompt: look.system_prompt,
            answer: look.answer,
            chunks: look.chunks.iter().map(|(chunk, share)| (chunk.to_string(), *share)).collect(),
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

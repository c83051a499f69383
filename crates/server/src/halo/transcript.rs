//! The transcript: everything that was said, by range, whether it is in the context window or not. It changes nothing and does
//! not wait for a running answer.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, PathParams, QueryParams, spawn_blocking};
use crate::search::load_bodies;
use crate::transcript_cache::{TranscriptOverview, VisibleTurn};
use crate::wire::{self, ApiChunk};
use axum::Json;
use axum::extract::State;
use halo_core::Error;
use halo_core::store::{RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::attention_history::load_answer_attention;
use halo_engine::chat_options::SPEAKERS_KEY;
use halo_engine::snapshot::ConversationState;
use halo_engine::turn_record::TurnRecord;
use halo_engine::variant;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_transcript)).routes(routes!(get_transcript_outline))
}

/// A range of the messages of a conversation, oldest first. Deleted messages are left out.
#[derive(Serialize, ToSchema)]
#[schema(as = Transcript)]
pub(super) struct ApiTranscript {
    /// The number of messages of the whole conversation.
    pub total: usize,
    /// The index of the first message of this range.
    pub offset: usize,
    pub messages: Vec<ApiTranscriptMessage>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = TranscriptMessage)]
pub(super) struct ApiTranscriptMessage {
    pub turn: u32,
    /// user, assistant or system.
    pub role: &'static str,
    /// When it began, in milliseconds since 1970; null if that is unknown.
    pub at: Option<i64>,
    /// A finish reason; null if the answer ended normally.
    pub finish_reason: Option<String>,
    /// Why the premise of the question is false.
    pub premise: Option<String>,
    /// The chunks that were resurrected for this answer.
    pub used: Vec<ApiUsedChunk>,
    /// The name of who said it, in an imported conversation.
    pub speaker: Option<String>,
    /// The variants of the exchange that ends with this message, in the order in which they were generated; empty if there
    /// is only one. One of an older message can be chosen in a branch.
    pub variants: Vec<ApiMessageVariant>,
    /// Whether it is stored what its tokens attended to.
    pub has_attention: bool,
    pub chunks: Vec<ApiChunk>,
}

/// A variant of an exchange, without its text.
#[derive(Serialize, ToSchema)]
#[schema(as = MessageVariant)]
pub(super) struct ApiMessageVariant {
    /// Its first turn, which identifies it.
    pub turn: u32,
    /// The number of its messages: 1 for an answer.
    pub messages: usize,
    /// Whether the conversation contains it now.
    pub current: bool,
}

/// A chunk that was resurrected for an answer.
#[derive(Serialize, ToSchema)]
#[schema(as = UsedChunk)]
pub(super) struct ApiUsedChunk {
    pub id: String,
    pub turn: u32,
    /// The beginning of its text.
    pub text: String,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TranscriptQuery {
    /// The index of the first message; without it and without `around`, the range ends with the last message
    offset: Option<usize>,
    /// A turn that the range is around
    around: Option<u32>,
    /// How many messages to return, at most 200
    #[serde(default = "default_limit")]
    limit: usize,
}

const MAX_MESSAGES: usize = 200;

fn default_limit() -> usize {
    60
}

/// Characters of a used chunk that are returned.
const USED_TEXT_CHARS: usize = 120;

/// A range of the messages of a conversation, in and out of the context window
#[utoipa::path(get, path = "/conversations/{name}/transcript", params(("name" = String, Path), TranscriptQuery),
    responses((status = 200, body = ApiTranscript), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_transcript(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<TranscriptQuery>,
) -> ApiResult<Json<ApiTranscript>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        if state.timeline.is_empty() {
            return Ok(Json(ApiTranscript { total: 0, offset: 0, messages: Vec::new() }));
        }
        let transcript = app.with_reader(|store| {
            let overview = app.transcripts.overview(store, &state)?;
            let range = message_range(&overview.visible, &query);
            let messages = read_messages(store, &state, &overview, range.clone())?;
            Ok(ApiTranscript { total: overview.visible.len(), offset: range.start, messages })
        })?;
        Ok(Json(transcript))
    })
    .await
}

fn message_range(visible: &[VisibleTurn], query: &TranscriptQuery) -> Range<usize> {
    let limit = query.limit.clamp(1, MAX_MESSAGES);
    let latest_start = visible.len().saturating_sub(limit);
    let start = match (query.offset, query.around) {
        (Some(offset), _) => offset.min(visible.len()),
        (None, Some(turn)) => {
            let index = visible.partition_point(|(other, _)| other.0 < turn);
            index.saturating_sub(limit / 2).min(latest_start)
        }
        (None, None) => latest_start,
    };
    start..(start + limit).min(visible.len())
}

/// A range of the messages, with their texts, times and records.
pub(super) fn read_messages(
    store: &mut dyn Store,
    state: &ConversationState,
    overview: &TranscriptOverview,
    range: Range<usize>,
) -> Result<Vec<ApiTranscriptMessage>, Error> {
    let name = &state.name;
    let mut variants = message_variants(store, state, &overview.visible, range.clone())?;
    let turns = &overview.visible[range];
    let mut records = turn_records(store, name, turns)?;
    let speakers = load_speakers(store, name)?;
    let attended = turns_with_attention(store, name, turns)?;
    let used = records.values().flat_map(used_chunks);
    let chunks = turns.iter().flat_map(|(_, chunks)| chunks.iter().copied());
    let unloaded: Vec<ChunkId> = (chunks.chain(used))
        .filter(|&id| state.timeline.chunk(id).is_some_and(|chunk| !chunk.is_loaded()))
        .collect();
    // A timeline whose chunks are all live can be large, so it is copied only if something is missing.
    let mut timeline = Cow::Borrowed(&state.timeline);
    if !unloaded.is_empty() {
        load_bodies(store, name, timeline.to_mut(), &unloaded)?;
    }
    let brightness = wire::relative_brightness(&state.timeline, state.rank);
    let wanted: BTreeSet<TurnId> = turns.iter().map(|(turn, _)| *turn).collect();
    let brightness: BTreeMap<ChunkId, f32> = (state.timeline.live_chunks().map(|chunk| chunk.id()))
        .zip(brightness)
        .filter(|(id, _)| wanted.contains(&id.turn))
        .collect();
    let message = |(turn, chunks): &VisibleTurn| {
        let record = records.remove(&turn.0);
        let used = record.as_ref().map(used_chunks).unwrap_or_default();
        let chunks = chunks.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| ApiChunk {
            relative_brightness: brightness.get(&chunk.id()).copied(),
            ..ApiChunk::from_chunk(chunk, &timeline, 0)
        });
        let chunks: Vec<ApiChunk> = chunks.collect();
        ApiTranscriptMessage {
            turn: turn.0,
            role: chunks.first().map_or(Role::User.name(), |chunk| chunk.role),
            at: overview.time_of(*turn),
            finish_reason: record.as_ref().filter(|r| !r.is_complete()).map(|r| r.finish.clone()),
            premise: record.and_then(|record| record.premise),
            used: used.iter().filter_map(|&id| used_chunk(&timeline, id)).collect(),
            speaker: speakers.get(&turn.0).cloned(),
            variants: variants.remove(turn).unwrap_or_default(),
            has_attention: attended.contains(turn),
            chunks,
        }
    };
    Ok(turns.iter().map(message).collect())
}

/// The variants of each exchange that ends in a range of messages, by its last turn.
fn message_variants(
    store: &mut dyn Store,
    state: &ConversationState,
    visible: &[VisibleTurn],
    range: Range<usize>,
) -> Result<BTreeMap<TurnId, Vec<ApiMessageVariant>>, Error> {
    let all = variant::load_variants(store, &state.name, &state.timeline)?;
    let mut found = BTreeMap::new();
    if all.is_empty() {
        return Ok(found);
    }
    let role = |(_, chunks): &VisibleTurn| chunks.first().map_or(Role::User, |chunk| chunk.role);
    let is_end = |at: usize| {
        role(&visible[at]) != Role::User && visible.get(at + 1).is_none_or(|next| role(next) == Role::User)
    };
    for at in range.filter(|&at| is_end(at)) {
        let latest_first = visible[..=at].iter().rev().take(variant::MAX_EXCHANGE_TURNS + 1);
        let latest_first: Vec<(TurnId, Role)> = latest_first.map(|turn| (turn.0, role(turn))).collect();
        let groups =
            variant::group_variants(&all, &latest_first).into_iter().map(|group| ApiMessageVariant {
                turn: group.turns.first().map_or(0, |turn| turn.0),
                messages: group.turns.len(),
                current: group.is_current,
            });
        found.insert(visible[at].0, groups.collect());
    }
    Ok(found)
}

/// The names of the speakers of an imported conversation, by turn.
fn load_speakers(store: &mut dyn Store, name: &str) -> Result<BTreeMap<u32, String>, Error> {
    let speakers = store.record(name, RecordKind::Setting, SPEAKERS_KEY)?;
    let speakers: BTreeMap<String, String> =
        speakers.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default();
    Ok(speakers.into_iter().filter_map(|(turn, name)| Some((turn.parse().ok()?, name))).collect())
}

fn turn_records(
    store: &mut dyn Store,
    name: &str,
    turns: &[VisibleTurn],
) -> Result<BTreeMap<u32, TurnRecord>, Error> {
    let mut records = BTreeMap::new();
    for (turn, _) in turns {
        // One by one: a long conversation has as many records as answers, and a page has few.
        let record = store.record(name, RecordKind::Turn, &turn.0.to_string())?;
        if let Some(record) = record.and_then(|record| TurnRecord::from_json(&record.value)) {
            records.insert(turn.0, record);
        }
    }
    Ok(records)
}

/// The answers of a page whose attention is stored.
fn turns_with_attention(
    store: &mut dyn Store,
    name: &str,
    turns: &[VisibleTurn],
) -> Result<BTreeSet<TurnId>, Error> {
    let mut attended = BTreeSet::new();
    for (turn, _) in turns.iter().filter(|(_, chunks)| chunks.iter().any(|id| id.role == Role::Assistant)) {
        if load_answer_attention(store, name, *turn)?.is_some() {
            attended.insert(*turn);
        }
    }
    Ok(attended)
}

fn used_chunks(record: &TurnRecord) -> Vec<ChunkId> {
    let chunks = record.figures.iter().flat_map(|figures| &figures.resurrected_chunks);
    chunks.filter_map(|id| id.parse().ok()).collect()
}

/// None for a chunk that is deleted or forgotten since.
fn used_chunk(timeline: &Timeline, id: ChunkId) -> Option<ApiUsedChunk> {
    let chunk = timeline.chunk(id).filter(|chunk| !chunk.is_deleted() && !chunk.is_forgotten())?;
    let text = ApiChunk::from_chunk(chunk, timeline, 0).text;
    let text = text.trim().chars().take(USED_TEXT_CHARS).collect();
    Some(ApiUsedChunk { id: id.to_string(), turn: id.turn.0, text })
}

/// How the whole conversation is distributed over the context window, in equal parts.
#[derive(Serialize, ToSchema)]
#[schema(as = TranscriptOutline)]
struct ApiTranscriptOutline {
    /// The number of messages of the whole conversation.
    total: usize,
    parts: Vec<ApiOutlinePart>,
}

#[derive(Default, Serialize, ToSchema)]
#[schema(as = OutlinePart)]
struct ApiOutlinePart {
    /// The index of its first message.
    offset: usize,
    /// The turn of its first message.
    turn: u32,
    tokens: usize,
    /// Tokens in the context window.
    live: usize,
    /// Tokens of the user.
    user: usize,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct OutlineQuery {
    /// The number of parts, at most 1000
    #[serde(default = "default_parts")]
    parts: usize,
}

fn default_parts() -> usize {
    200
}

/// Where the context window is in the whole conversation, in equal parts
#[utoipa::path(get, path = "/conversations/{name}/outline", params(("name" = String, Path), OutlineQuery),
    responses((status = 200, body = ApiTranscriptOutline), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_transcript_outline(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<OutlineQuery>,
) -> ApiResult<Json<ApiTranscriptOutline>> {
    spawn_blocking(move || {
        let state = app.view_conversation(&name)?.snapshot.state;
        if state.timeline.is_empty() {
            return Ok(Json(ApiTranscriptOutline { total: 0, parts: Vec::new() }));
        }
        let visible = app.with_reader(|store| app.transcripts.overview(store, &state))?.visible;
        let size = visible.len().div_ceil(query.parts.clamp(1, 1000)).max(1);
        let parts = visible.chunks(size).enumerate();
        let parts = parts.map(|(n, turns)| outline_part(&state.timeline, n * size, turns));
        Ok(Json(ApiTranscriptOutline { total: visible.len(), parts: parts.collect() }))
    })
    .await
}

fn outline_part(timeline: &Timeline, offset: usize, turns: &[VisibleTurn]) -> ApiOutlinePart {
    let turn = turns.first().map_or(0, |(turn, _)| turn.0);
    let mut part = ApiOutlinePart { offset, turn, ..ApiOutlinePart::default() };
    let chunks = turns.iter().flat_map(|(_, chunks)| chunks);
    for chunk in chunks.filter_map(|&id| timeline.chunk(id)) {
        part.tokens += chunk.len();
        part.live += chunk.live_len();
        part.user += if chunk.id().role == Role::User { chunk.len() } else { 0 };
    }
    part
}

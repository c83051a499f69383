//! Search in all conversations: their names and everything that was said in them.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, QueryParams, spawn_blocking};
use crate::originals::load_originals;
use axum::Json;
use axum::extract::State;
use halo_core::Error;
use halo_core::store::{Access, Store};
use halo_core::token::ChunkId;
use halo_engine::forget::pending as pending_forget;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(search_all))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct AllSearchQuery {
    /// Words, all of which a message must contain; case-insensitive
    q: String,
    /// How many conversations to skip: `next` of the response before
    #[serde(default)]
    offset: usize,
}

/// Conversations that match, the latest first.
#[derive(Serialize, ToSchema)]
#[schema(as = AllSearchResult)]
struct ApiAllSearchResult {
    conversations: Vec<ApiConversationHits>,
    /// The offset of the next request; null if all conversations were searched.
    next: Option<usize>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ConversationHits)]
struct ApiConversationHits {
    name: String,
    /// When it last changed, in milliseconds since 1970.
    updated: i64,
    /// Whether its name contains the words.
    name_matches: bool,
    /// The latest matching messages.
    hits: Vec<ApiMessageHit>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = MessageHit)]
struct ApiMessageHit {
    chunk: String,
    turn: u32,
    /// The text around the first word.
    text: String,
}

const HITS_PER_CONVERSATION: usize = 5;

/// A request ends after this time, and the next one continues after its last conversation.
const TIME_PER_REQUEST: Duration = Duration::from_millis(800);

const CHUNKS_PER_READ: usize = 500;

/// Searches the names and the texts of all conversations
#[utoipa::path(get, path = "/search", params(AllSearchQuery),
    responses((status = 200, body = ApiAllSearchResult), (status = 400, body = ApiError)))]
async fn search_all(
    State(app): State<Arc<App>>,
    QueryParams(query): QueryParams<AllSearchQuery>,
) -> ApiResult<Json<ApiAllSearchResult>> {
    let words: Vec<String> = query.q.split_whitespace().map(str::to_lowercase).collect();
    if words.is_empty() {
        return Err(ErrorResponse::bad_request("the query is empty: set ?q=…"));
    }
    spawn_blocking(move || {
        let started = Instant::now();
        let (mut summaries, originals) = app.with_reader(|store| {
            let summaries = store.list_conversations()?;
            let originals = load_originals(store, &summaries)?;
            Ok((summaries, originals))
        })?;
        summaries.retain(|summary| !originals.contains_key(&summary.name));
        summaries.sort_by_key(|summary| std::cmp::Reverse(summary.updated));
        let mut conversations = Vec::new();
        for (n, summary) in summaries.iter().enumerate().skip(query.offset) {
            if n > query.offset && started.elapsed() > TIME_PER_REQUEST {
                return Ok(Json(ApiAllSearchResult { conversations, next: Some(n) }));
            }
            if summary.live == 0 && app.with_reader(|store| is_deleted(store, &summary.name))? {
                continue;
            }
            let hits = app.with_reader(|store| search_texts(store, &summary.name, &words))?;
            let name_matches = contains_all(&summary.name, &words);
            if name_matches || !hits.is_empty() {
                let (name, updated) = (summary.name.clone(), summary.updated);
                conversations.push(ApiConversationHits { name, updated, name_matches, hits });
            }
        }
        Ok(Json(ApiAllSearchResult { conversations, next: None }))
    })
    .await
}

/// Whether a conversation without live tokens is deleted and waits for its erasure.
fn is_deleted(store: &mut dyn Store, name: &str) -> Result<bool, Error> {
    Ok(pending_forget::load_pending(store, name)?.iter().any(|pending| pending.whole_conversation))
}

/// The latest chunks that contain all words.
fn search_texts(store: &mut dyn Store, name: &str, words: &[String]) -> Result<Vec<ApiMessageHit>, Error> {
    let timeline = store.load(name, Access::Read)?;
    let pending = pending_forget::pending_chunks(store, name)?;
    let chunks = timeline.chunks().rev().filter(|chunk| !chunk.is_deleted() && !chunk.is_forgotten());
    let chunks: Vec<ChunkId> =
        chunks.map(|chunk| chunk.id()).filter(|id| !pending.contains_key(id)).collect();
    let mut hits = Vec::new();
    for part in chunks.chunks(CHUNKS_PER_READ) {
        let mut loaded = timeline.clone();
        crate::search::load_bodies(store, name, &mut loaded, part)?;
        for chunk in part.iter().filter_map(|&id| loaded.chunk(id)) {
            let text = chunk.text();
            if contains_all(&text, words) {
                let (id, text) = (chunk.id(), excerpt(&text, &words[0]));
                hits.push(ApiMessageHit { chunk: id.to_string(), turn: id.turn.0, text });
                if hits.len() == HITS_PER_CONVERSATION {
                    return Ok(hits);
                }
            }
        }
    }
    Ok(hits)
}

fn contains_all(text: &str, words: &[String]) -> bool {
    let text = text.to_lowercase();
    words.iter().all(|word| text.contains(word.as_str()))
}

const EXCERPT_CHARS: usize = 160;

/// The text around a word, in one line.
fn excerpt(text: &str, word: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let lower = line.to_lowercase();
    // Lower case can have another length, so the place is counted in characters and is approximate.
    let at = lower.find(word).map_or(0, |byte| lower[..byte].chars().count());
    let start = at.saturating_sub(EXCERPT_CHARS / 3);
    let dots = if start > 0 { "…" } else { "" };
    let part: String = line.chars().skip(start).take(EXCERPT_CHARS).collect();
    format!("{dots}{part}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpt_shows_the_text_around_the_word() {
        assert_eq!(excerpt("a\nb  c", "b"), "a b c");
        let long = format!("{} needle {}", "hay ".repeat(100), "hay ".repeat(100));
        let found = excerpt(&long, "needle");
        assert!(found.starts_with('…') && found.contains("needle"), "{found}");
        assert!(found.chars().count() <= EXCERPT_CHARS + 1);
        assert!(excerpt("İİİ straße", "straße").contains("straße"));
    }

    #[test]
    fn all_words_must_occur() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(contains_all("Anna keeps BEES", &words("bees anna")));
        assert!(!contains_all("Anna keeps bees", &words("bees tom")));
    }
}

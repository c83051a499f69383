//! Search in one conversation, and the texts of chunks.

use crate::app::App;
use crate::error::ApiResult;
use halo_core::Error;
use halo_core::embedder::Embedder;
use halo_core::store::Store;
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use halo_engine::snapshot::ConversationState;
use halo_recall::rank::RankedChunk;
use halo_recall::recall::{self, SearchOptions};

/// The chunks that match a query best, whether they are in the context window or not.
pub(crate) fn search_index(
    app: &App,
    state: &ConversationState,
    query: &str,
    limit: usize,
) -> ApiResult<Vec<RankedChunk>> {
    let options = SearchOptions { limit, ..state.search_options };
    let mut embedder = app.backend.embedder();
    let embedder = embedder.as_mut().map(|embedder| &mut **embedder as &mut dyn Embedder);
    let today = Some(jiff::Zoned::now().date());
    Ok(recall::search(&state.index, embedder, query, today, options)?)
}

/// The text of each chunk, and whether it is in the context window.
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

/// Loads the bodies of those chunks that are unloaded.
pub(crate) fn load_bodies(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<(), Error> {
    let unloaded = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_loaded()));
    let unloaded: Vec<ChunkId> = unloaded.copied().collect();
    store.load_bodies(name, timeline, &unloaded)
}

//! Search in one conversation, and the texts of chunks.

use crate::app::App;
use crate::error::ApiResult;
use halo_core::Error;
use halo_core::embedder::Embedder;
use halo_core::store::{Access, Store};
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
    let index = app.search_index(state)?;
    Ok(recall::search(&index, embedder, query, today, options)?)
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

/// How often a timeline is loaded again because a writer has changed the conversation meanwhile.
const MAX_RELOADS: usize = 3;

/// Loads the bodies of those chunks that are unloaded.
///
/// A writer can change the conversation between the snapshot and this call, and a stored body then does not match the row of the
/// snapshot. The timeline is loaded from the store again in that case. Chunks that are gone since then have no body.
pub(crate) fn load_bodies(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<(), Error> {
    for _ in 0..MAX_RELOADS {
        let Err(error) = load_unloaded(store, name, timeline, chunks) else { return Ok(()) };
        let stored = store.load(name, Access::Read)?;
        if stored.revision() == timeline.revision() {
            return Err(error);
        }
        *timeline = stored;
    }
    load_unloaded(store, name, timeline, chunks)
}

fn load_unloaded(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<(), Error> {
    let unloaded = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_loaded()));
    let unloaded: Vec<ChunkId> = unloaded.copied().collect();
    store.load_bodies(name, timeline, &unloaded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::change::{Append, Change, NewToken};
    use halo_core::manual_edit;
    use halo_core::store::Durability;
    use halo_core::testing::doubles::InMemoryStore;
    use halo_core::token::{Brightness, ContentKind, Role, TokenId, TurnId};

    #[test]
    fn bodies_are_loaded_after_a_writer_changed_the_conversation() {
        let mut store = InMemoryStore::default();
        let mut writer = store.load("main", Access::Write).expect("a new conversation");
        let mut commit = |store: &mut InMemoryStore, plan: &dyn Fn(&Timeline) -> Change| {
            let change = plan(&writer);
            store.transact("main", &mut writer, &change, Durability::Immediate).expect("committed");
        };
        let chunk: ChunkId = "u0.0".parse().expect("a chunk id");
        commit(&mut store, &|timeline| {
            let tokens = ["Bees", " sleep", "."].map(|text| NewToken {
                id: TokenId(7),
                text: text.to_owned(),
                chunk_index: 0,
                brightness: Brightness(10_000.0),
                kind: ContentKind::Message,
            });
            let at = timeline.next_position();
            Change::Append(Append { at, turn: TurnId(0), role: Role::User, tokens: tokens.into() })
        });
        commit(&mut store, &|timeline| manual_edit::prune(timeline, chunk, None).expect("prunable"));

        let mut snapshot = store.load("main", Access::Read).expect("loaded");
        assert!(snapshot.chunk(chunk).is_some_and(|chunk| !chunk.is_loaded()), "a pruned chunk is unloaded");
        commit(&mut store, &|timeline| manual_edit::delete(timeline, chunk).expect("deletable"));
        assert!(load_unloaded(&mut store, "main", &mut snapshot.clone(), &[chunk]).is_err());

        load_bodies(&mut store, "main", &mut snapshot, &[chunk]).expect("the bodies are loaded");
        let loaded = snapshot.chunk(chunk).expect("the chunk is on the timeline");
        assert_eq!(loaded.text(), "Bees sleep.");
        assert!(loaded.is_deleted(), "the timeline is the one of the writer");
    }
}

//! Invariants of ARCHITECTURE.md that are checked after each step. The numbers are those of its list.

use halo_core::store::{Access, RecordKind, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, Role, TurnId};
use halo_engine::session::Session;
use halo_recall::rank::RankedChunk;
use halo_recall::recall::search;
use std::collections::BTreeSet;

/// What the next steps may search for.
const QUERIES: [&str; 4] = ["the gun on the wall", "my sister Anna", "bees 谢谢", "lamp"];

/// What a conversation was before a request.
pub(super) struct BeforeRequest {
    pinned: BTreeSet<ChunkId>,
    deleted: BTreeSet<ChunkId>,
    /// Chunks in the window without their anchor or their question: the user may prune and delete anything.
    unanchored: BTreeSet<ChunkId>,
    next_position: Position,
    last_message: Option<TurnId>,
}

impl BeforeRequest {
    pub fn new(timeline: &Timeline) -> Self {
        let chunks = || timeline.chunks();
        let is_there = |turn: TurnId| timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
        let mut turns = timeline.turns().iter().rev();
        Self {
            pinned: chunks().filter(|chunk| chunk.is_pinned()).map(|chunk| chunk.id()).collect(),
            deleted: chunks().filter(|chunk| chunk.is_deleted()).map(|chunk| chunk.id()).collect(),
            unanchored: find_unanchored(timeline),
            next_position: timeline.next_position(),
            last_message: turns.find(|turn| turn.role == Role::User && is_there(turn.id)).map(|turn| turn.id),
        }
    }

    /// 3: a chunk that is pinned, or of the turn that is being answered, is not pruned.
    pub fn check_pruned(&self, chunk: ChunkId, current: Option<TurnId>) -> Result<(), String> {
        if self.pinned.contains(&chunk) {
            return Err(format!("{chunk} is pinned and was pruned"));
        }
        if current.is_some_and(|current| chunk.turn >= current) {
            return Err(format!("{chunk} belongs to the current turn and was pruned"));
        }
        Ok(())
    }

    /// 4: a chunk that was there before is not left without its anchor and its question.
    pub fn check_anchors(&self, after: &Timeline) -> Result<(), String> {
        let new = find_unanchored(after).into_iter().find(|id| {
            let is_old = after.chunk(*id).is_some_and(|chunk| chunk.start() < self.next_position);
            is_old && !self.unanchored.contains(id)
        });
        new.map_or(Ok(()), |id| Err(format!("{id} is in the window without its anchor or its question")))
    }

    /// 16: a request deletes nothing but the last exchange, and that is kept as a variant.
    pub fn check_deletions(&self, name: &str, store: &mut dyn Store) -> Result<(), String> {
        let failed = |error: halo_core::Error| format!("'{name}' does not load: {error}");
        let after = store.load(name, Access::Read).map_err(failed)?;
        let deleted =
            after.chunks().filter(|chunk| chunk.is_deleted() && !self.deleted.contains(&chunk.id()));
        let turns: BTreeSet<TurnId> =
            deleted.filter(|chunk| chunk.start() < self.next_position).map(|chunk| chunk.id().turn).collect();
        let Some(first) = turns.first() else { return Ok(()) };
        if self.last_message.is_none_or(|last| *first < last) {
            return Err(format!("'{name}': a request has deleted turn {} before the last exchange", first.0));
        }
        let variants = store.records(name, RecordKind::Variant).map_err(failed)?;
        let kept: BTreeSet<u64> = variants
            .iter()
            .filter_map(|record| serde_json::from_str::<serde_json::Value>(&record.value).ok())
            .flat_map(|value| value["turns"].as_array().cloned().unwrap_or_default())
            .filter_map(|turn| turn.as_u64())
            .collect();
        let lost = turns.iter().find(|turn| !kept.contains(&u64::from(turn.0)));
        lost.map_or(Ok(()), |turn| {
            Err(format!("'{name}': a request has deleted turn {}, which is no variant: {kept:?}", turn.0))
        })
    }
}

/// Chunks in the window whose turn's first chunk, or whose question's first chunk, was pruned.
fn find_unanchored(timeline: &Timeline) -> BTreeSet<ChunkId> {
    let is_pruned = |turn: TurnId| {
        let anchor = timeline.turn_chunks(turn).next().filter(|chunk| chunk.id().is_anchor());
        anchor.is_some_and(|anchor| !anchor.is_live() && !anchor.is_deleted() && anchor.pruned_len() > 0)
    };
    let is_unanchored = |id: ChunkId| {
        let question = timeline.question_of(id.turn);
        (!id.is_anchor() && is_pruned(id.turn)) || question.is_some_and(is_pruned)
    };
    timeline.live_chunks().map(|chunk| chunk.id()).filter(|id| is_unanchored(*id)).collect()
}

/// 14: the index of a session finds what an index built from the store finds, in the same order, for the same reasons.
pub(super) fn check_index(kept: &Session, fresh: &Session, query: usize) -> Result<(), String> {
    let query = QUERIES[query % QUERIES.len()];
    let find = |session: &Session| -> Result<Option<(usize, Vec<RankedChunk>)>, String> {
        let state = session.state();
        let Some(index) = state.index else { return Ok(None) };
        let missing = index.read().missing_vectors();
        let mut embedder = halo_core::testing::doubles::HashEmbedder;
        let found = search(&index, Some(&mut embedder), query, None, state.search_options);
        Ok(Some((missing, found.map_err(|error| error.to_string())?)))
    };
    let (kept, fresh) = (find(kept)?, find(fresh)?);
    match (kept, fresh) {
        // A vector that was computed and could not be stored is in one of them only.
        (Some((missing, found)), Some((missing_fresh, expected)))
            if missing == missing_fresh && found != expected =>
        {
            Err(format!("the search for '{query}' finds {found:?}, and {expected:?} with a new index"))
        }
        _ => Ok(()),
    }
}

//! What the transcript of a long conversation is read with: which turns have text, and when each began. Both take long to
//! compute for 100,000 messages, and change little between two requests.

use halo_core::Error;
use halo_core::store::Store;
use halo_core::timeline::ChunkRef;
use halo_core::token::{ChunkId, TurnId};
use halo_engine::forget::pending as pending_forget;
use halo_engine::snapshot::ConversationState;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

/// A turn that has text, with its chunks that are not deleted.
pub(crate) type VisibleTurn = (TurnId, Vec<ChunkId>);

/// The latest transcripts that were read.
#[derive(Default)]
pub(crate) struct TranscriptCache(Mutex<VecDeque<CachedTranscript>>);

const MAX_TRANSCRIPTS: usize = 8;

struct CachedTranscript {
    /// The id of the conversation.
    id: String,
    source: Weak<ConversationState>,
    pending: BTreeMap<ChunkId, i64>,
    visible: Arc<Vec<VisibleTurn>>,
    times: Arc<Vec<(TurnId, i64)>>,
}

/// The turns of a conversation that have text, in order, and when its turns began, by turn.
pub(crate) struct TranscriptOverview {
    pub visible: Arc<Vec<VisibleTurn>>,
    times: Arc<Vec<(TurnId, i64)>>,
}

impl TranscriptOverview {
    /// When a turn began, in milliseconds since 1970.
    pub fn time_of(&self, turn: TurnId) -> Option<i64> {
        let at = self.times.binary_search_by_key(&turn, |(turn, _)| *turn).ok()?;
        Some(self.times[at].1)
    }
}

impl TranscriptCache {
    pub fn overview(
        &self,
        store: &mut dyn Store,
        state: &Arc<ConversationState>,
    ) -> Result<TranscriptOverview, Error> {
        let pending = pending_forget::pending_chunks(store, &state.name)?;
        let known_times = {
            let cached = self.0.lock();
            let cached = cached.iter().find(|cached| cached.id == state.id && !state.id.is_empty());
            if let Some(cached) = cached
                && std::ptr::eq(cached.source.as_ptr(), Arc::as_ptr(state))
                && cached.pending == pending
            {
                let (visible, times) = (Arc::clone(&cached.visible), Arc::clone(&cached.times));
                return Ok(TranscriptOverview { visible, times });
            }
            cached.map(|cached| Arc::clone(&cached.times))
        };
        let times = load_times(store, state, known_times)?;
        let visible = Arc::new(visible_turns(state, &pending));
        let source = Arc::downgrade(state);
        let mut all = self.0.lock();
        all.retain(|cached| cached.id != state.id);
        let (id, visible_turns, turn_times) = (state.id.clone(), Arc::clone(&visible), Arc::clone(&times));
        all.push_back(CachedTranscript { id, source, pending, visible: visible_turns, times: turn_times });
        if all.len() > MAX_TRANSCRIPTS {
            all.pop_front();
        }
        Ok(TranscriptOverview { visible, times })
    }
}

/// The beginning of a turn never changes, so the times are read again only where there are later turns.
fn load_times(
    store: &mut dyn Store,
    state: &ConversationState,
    known: Option<Arc<Vec<(TurnId, i64)>>>,
) -> Result<Arc<Vec<(TurnId, i64)>>, Error> {
    let last = state.timeline.turns().last().map(|turn| turn.id);
    match known {
        Some(known) if known.last().map(|(turn, _)| *turn) >= last => Ok(known),
        _ => Ok(Arc::new(store.turn_times(&state.name)?)),
    }
}

/// The turns that have a chunk which is neither deleted nor to be forgotten, with those chunks.
fn visible_turns(state: &ConversationState, pending: &BTreeMap<ChunkId, i64>) -> Vec<VisibleTurn> {
    let is_visible = |chunk: &ChunkRef<'_>| {
        !chunk.is_deleted() && !chunk.is_forgotten() && !pending.contains_key(&chunk.id())
    };
    let mut turns: Vec<VisibleTurn> = Vec::with_capacity(state.timeline.turns().len());
    for chunk in state.timeline.chunks().filter(is_visible) {
        let id = chunk.id();
        match turns.last_mut() {
            Some((turn, chunks)) if *turn == id.turn => chunks.push(id),
            _ => turns.push((id.turn, vec![id])),
        }
    }
    turns
}

//! The state of a conversation, published to readers. They read it at any time, whatever changes it meanwhile; a publication
//! replaces the whole state, so no reader sees half of a change.

use crate::memory::record::Memory;
use crate::memory::segment::PlacedMemory;
use crate::rules::ForgettingRules;
use halo_core::budget::pressure;
use halo_core::model::{ModelInfo, ModelToken};
use halo_core::prune::RankBy;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Position, TurnId};
use halo_recall::recall::{SearchOptions, SharedIndex};
use parking_lot::Mutex;
use std::sync::Arc;

/// Holds the current snapshot of a conversation.
pub struct SnapshotCell {
    inner: Mutex<ConversationSnapshot>,
}

/// A conversation at one moment.
#[derive(Clone)]
pub struct ConversationSnapshot {
    pub state: Arc<ConversationState>,
    /// The answer that is being generated.
    pub answer: Option<Arc<AnswerProgress>>,
    /// The number of the last event that this contains.
    pub last_event: u64,
}

/// The state of a conversation after a change.
pub struct ConversationState {
    /// See [`ConversationSummary::id`](halo_core::store::ConversationSummary::id); empty until the first message is stored.
    pub id: String,
    pub name: String,
    pub timeline: Timeline,
    /// The system prompt as tokens.
    pub system_tokens: Vec<ModelToken>,
    /// The most tokens in the context window.
    pub token_limit: usize,
    /// The most tokens after a turn: pruning leaves room for the next message and what is resurrected with it.
    pub budget_after_turn: usize,
    pub model: ModelInfo,
    pub max_brightness: Brightness,
    /// How pruning ranks chunks.
    pub rank: RankBy,
    /// The search index; searching it blocks nobody. None where the conversation was opened without one.
    pub index: Option<SharedIndex>,
    pub search_options: SearchOptions,
    /// Whether answers are recorded to disk.
    pub recording: bool,
    /// Whether memories are formed.
    pub forms_memories: bool,
    pub memories: Vec<Memory>,
    pub placed_memories: Vec<PlacedMemory>,
    /// When a forgetting cycle runs.
    pub forgetting: Option<ForgettingRules>,
}

/// An answer that is being generated.
#[derive(Clone, Debug, Default)]
pub struct AnswerProgress {
    /// Its turn, once it has one.
    pub turn: Option<TurnId>,
    /// Requests that the model serves before it.
    pub ahead: usize,
    /// The tokens so far.
    pub tokens: Vec<(ChunkId, Position, String)>,
}

impl ConversationState {
    /// How full the context window is.
    #[must_use]
    pub fn pressure(&self) -> f64 {
        pressure(self.live_tokens(), self.token_limit)
    }

    /// Tokens in the context window.
    #[must_use]
    pub fn live_tokens(&self) -> usize {
        let memories: usize = self.placed_memories.iter().map(PlacedMemory::len).sum();
        self.timeline.context_window(self.system_tokens.len()).len() + memories
    }
}

impl SnapshotCell {
    pub(crate) fn new(state: ConversationState, last_event: u64) -> Self {
        let snapshot = ConversationSnapshot { state: Arc::new(state), answer: None, last_event };
        Self { inner: Mutex::new(snapshot) }
    }

    #[must_use]
    pub fn get(&self) -> ConversationSnapshot {
        self.inner.lock().clone()
    }

    pub(crate) fn publish(&self, state: ConversationState) {
        let state = Arc::new(state);
        self.inner.lock().state = state;
    }

    /// Updates the answer with an event and numbers the event in one step, so that the snapshot and its event number agree.
    pub(crate) fn record_event(
        &self,
        update: impl FnOnce(&mut Option<AnswerProgress>),
        number: impl FnOnce() -> u64,
    ) -> u64 {
        let mut snapshot = self.inner.lock();
        // Cloned only where a reader holds it at this moment.
        let mut answer = snapshot.answer.take().map(Arc::unwrap_or_clone);
        update(&mut answer);
        snapshot.answer = answer.map(Arc::new);
        snapshot.last_event = number();
        snapshot.last_event
    }
}

/// Publishes the state of one conversation, if it has readers.
#[derive(Default)]
pub(crate) struct SnapshotPublisher {
    cell: Option<Arc<SnapshotCell>>,
}

impl SnapshotPublisher {
    /// Whether the conversation has readers, who may be waiting for the model too.
    pub fn is_attached(&self) -> bool {
        self.cell.is_some()
    }

    pub fn attach(&mut self, cell: Arc<SnapshotCell>) {
        self.cell = Some(cell);
    }

    pub fn publish(&self, state: impl FnOnce() -> ConversationState) {
        if let Some(cell) = &self.cell {
            cell.publish(state());
        }
    }
}

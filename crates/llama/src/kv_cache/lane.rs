//! Lanes: several conversations in one KV cache.
//!
//! All lanes share the cells. A lane has two sequences: one for the tokens of its conversation, one for its fork. A lane is
//! *reserved* while an answer is generated in it; cells that the answer may need are counted as used. Other lanes keep the
//! cells of their conversation until somebody needs the lane or the cells: then the lane that was used least recently is
//! evicted to the KV archive.
//!
//! Lanes share the cells of a common beginning, such as a system prompt. Shared cells are never shifted: a lane that has to
//! shift them gets copies first.

use super::cache::{KvCache, KvCacheMode};
use super::error::KvCacheError;
use super::history::MainState;
use super::window::KeyedWindow;
use crate::cells::{CellEntry, SequenceTable};
use crate::ffi::{LlamaPos, SeqId};
use crate::token_key::token_keys;
use halo_core::model::WindowToken;
use std::time::{Duration, Instant};

/// Fewer common tokens are not worth it.
const MIN_SHARED: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaneId(pub usize);

/// The sequences that the context of a [`KvCache`] must have for a number of lanes.
#[must_use]
pub fn sequence_count(lanes: u32) -> u32 {
    1 + 2 * lanes.max(1)
}

/// The lanes that a number of sequences is enough for.
pub(super) fn lane_count(sequences: u32) -> usize {
    (sequences.saturating_sub(1) / 2).max(1) as usize
}

/// The sequences of one conversation.
pub(super) struct CacheLane {
    pub(super) id: LaneId,
    pub(super) conversation: Option<String>,
    /// The tokens of the conversation.
    pub(super) main: SequenceTable,
    pub(super) fork_seq: SeqId,
    /// The tokens of the fork, while there is one.
    pub(super) fork: Option<SequenceTable>,
    /// The recurrent state of the conversation, for a hybrid model.
    pub(super) main_state: Option<MainState>,
    /// Whether the last sync did not end, so that tokens of the window may be missing between those that are cached.
    pub(super) is_partial: bool,
    /// The cells that a running answer may need in all; 0 while none is generated.
    reserved: usize,
    /// Larger for a lane that was used later.
    last_used: u64,
    /// Until then its conversation is likely to go on.
    held_until: Option<Instant>,
}

impl CacheLane {
    pub(super) fn new(id: LaneId, is_hybrid: bool) -> Self {
        // Sequence 1 is the scratch sequence.
        let main_seq = if id.0 == 0 { 0 } else { 2 * id.0 + 1 };
        Self {
            id,
            conversation: None,
            main: SequenceTable::new(SeqId(main_seq as i32)),
            fork_seq: SeqId(2 * id.0 as i32 + 2),
            fork: None,
            main_state: is_hybrid.then(MainState::default),
            is_partial: false,
            reserved: 0,
            last_used: 0,
            held_until: None,
        }
    }

    pub(super) fn holds(&self, conversation: &str) -> bool {
        self.conversation.as_deref() == Some(conversation)
    }

    /// The table that tokens are decoded into.
    pub(super) fn active_table(&self) -> &SequenceTable {
        self.fork.as_ref().unwrap_or(&self.main)
    }

    pub(super) fn active_table_mut(&mut self) -> &mut SequenceTable {
        self.fork.as_mut().unwrap_or(&mut self.main)
    }

    fn is_held(&self) -> bool {
        self.held_until.is_some_and(|until| Instant::now() < until)
    }

    /// The cells that no other lane can have.
    fn held_cells(&self) -> usize {
        self.main.entries.len().max(self.reserved)
    }
}

impl KvCache {
    pub(super) fn lanes(&self) -> impl Iterator<Item = &CacheLane> {
        std::iter::once(&self.lane).chain(&self.other_lanes)
    }

    /// The number of lanes.
    #[must_use]
    pub fn lane_count(&self) -> usize {
        1 + self.other_lanes.len()
    }

    pub(super) fn lane_ids(&self) -> Vec<LaneId> {
        self.lanes().map(|lane| lane.id).collect()
    }

    /// The highest cell that a token of any lane is known to be in.
    #[must_use]
    pub fn highest_cell(&self) -> Option<u32> {
        self.lanes().flat_map(|lane| &lane.main.entries).filter_map(|entry| entry.cell).max()
    }

    /// The lane that most functions of [`KvCache`] act on.
    #[must_use]
    pub fn selected_lane(&self) -> LaneId {
        self.lane.id
    }

    /// Selects a lane. Does nothing if there is no such lane.
    pub fn select_lane(&mut self, id: LaneId) {
        if let Some(other) = self.other_lanes.iter_mut().find(|lane| lane.id == id) {
            std::mem::swap(&mut self.lane, other);
        }
    }

    /// Selects the lane of a conversation. False if no lane holds it.
    pub(super) fn select_conversation(&mut self, conversation: &str) -> bool {
        let id = self.lanes().find(|lane| lane.holds(conversation)).map(|lane| lane.id);
        id.inspect(|id| self.select_lane(*id)).is_some()
    }

    /// Whether an answer is generated in the lane of a conversation.
    #[must_use]
    pub fn is_reserved(&self, conversation: &str) -> bool {
        self.lanes().any(|lane| lane.holds(conversation) && lane.reserved > 0)
    }

    /// The cells that running answers may need in all.
    #[must_use]
    pub fn reserved_cells(&self) -> usize {
        self.lanes().map(|lane| lane.reserved).sum()
    }

    /// Reserves cells for the answer of the selected lane, which is not evicted until it is released.
    pub fn reserve_lane(&mut self, cells: usize) {
        self.lane.reserved = cells.max(1);
        self.lane.held_until = None;
    }

    /// Ends the reservation of the selected lane, and drops its fork.
    pub fn release_lane(&mut self) {
        self.drop_fork();
        self.lane.reserved = 0;
    }

    /// Keeps the cells of the selected lane for this long, unless somebody needs the lane or the cells: its answer follows.
    pub fn hold_lane(&mut self, time: Duration) {
        self.lane.held_until = Instant::now().checked_add(time);
    }

    /// Selects the lane of a conversation, or a free one for it, or one that is evicted.
    pub(super) fn switch_conversation(&mut self, conversation: &str) -> Result<(), KvCacheError> {
        if !self.select_conversation(conversation) {
            let free = self.lanes().filter(|lane| lane.reserved == 0);
            let oldest = free.min_by_key(|lane| (lane.conversation.is_some(), lane.last_used, lane.id));
            let Some(id) = oldest.map(|lane| lane.id) else { return Err(KvCacheError::AllLanesBusy) };
            self.select_lane(id);
            self.evict_lane();
            self.lane.conversation = Some(conversation.to_owned());
        }
        self.lane.last_used = 1 + self.lanes().map(|lane| lane.last_used).max().unwrap_or(0);
        Ok(())
    }

    /// Whether an answer that starts can share cells of lanes that are held for theirs. One that is alone on the model computes
    /// everything itself, however soon after another it comes.
    pub fn set_held_lanes_shared(&mut self, shared: bool) {
        self.held_lanes_shared = shared;
    }

    /// Whether a conversation could share a beginning of its window that another lane computes: it has no cells of its own.
    pub fn can_share_beginning(&mut self, conversation: &str, window: &[WindowToken]) -> bool {
        let is_cached = self.lanes().any(|lane| lane.holds(conversation) && !lane.main.entries.is_empty());
        if is_cached || self.has_recurrent_state() || !self.context.can_shift() {
            return false;
        }
        let first = window.get(..1).and_then(token_keys).and_then(|keys| keys.first().copied());
        let archived = first.and_then(|key| self.archive.header(conversation, key));
        archived.is_none_or(|header| header.prefix.is_some())
    }

    /// Lets the selected lane, which is empty, use the cells of the first tokens of a window that another lane has computed
    /// from the same tokens. Only lanes whose conversation is in use count: a conversation that is alone computes everything
    /// itself. The last token of the window is left out, because it is decoded in any case.
    pub(super) fn share_prefix(&mut self, window: &KeyedWindow<'_>) {
        if !self.lane.main.entries.is_empty() || self.lane.main_state.is_some() || !self.context.can_shift() {
            return;
        }
        let tokens = || window.tokens.iter().map(|token| token.id.0.cast_signed()).take(window.len() - 1);
        let held_too = self.held_lanes_shared;
        let in_use = self.other_lanes.iter_mut();
        let in_use = in_use.filter(|lane| lane.reserved > 0 || (held_too && lane.is_held()));
        let common = in_use.map(|lane| (lane.main.common_prefix(tokens()), lane));
        let Some((shared, lane)) = common.max_by_key(|(common, _)| *common) else { return };
        // Archived cells were computed in this conversation, perhaps from more than is in the window now: they come first.
        let conversation = self.lane.conversation.as_deref().unwrap_or_default();
        let mut slot = 0;
        while slot < shared {
            match self.archive.header(conversation, window.keys[slot]) {
                Some(header) if header.prefix.is_none() => break,
                Some(header) => {
                    let skipped = window.keys[slot].distance_from(header.start).unwrap_or(0);
                    slot += header.tokens.len().saturating_sub(skipped).max(1);
                }
                None => slot += 1,
            }
        }
        let shared = shared.min(slot);
        if shared < MIN_SHARED {
            return;
        }
        lane.main.entries[..shared].iter_mut().for_each(|entry| entry.shared = true);
        let from = &lane.main.entries[..shared];
        let entries = window.entries(0..shared, 0).into_iter().zip(from);
        self.lane.main.entries = entries
            .map(|(own, from)| CellEntry { key: own.key, chunk_start: own.chunk_start, ..*from })
            .collect();
        self.context.seq_cp(lane.main.seq, self.lane.main.seq, 0, shared as LlamaPos);
    }

    /// The cells that the selected lane can have.
    pub(super) fn available_cells(&self) -> usize {
        let held: usize = self.other_lanes.iter().map(CacheLane::held_cells).sum();
        self.capacity().saturating_sub(held)
    }

    /// Evicts other lanes, the least recently used first, until the selected one can have a number of cells, or the rest is
    /// reserved.
    pub(super) fn make_room(&mut self, cells: usize) {
        let selected = self.lane.id;
        while self.available_cells() < cells {
            let idle = self.other_lanes.iter().filter(|lane| lane.reserved == 0);
            let idle = idle.filter(|lane| !lane.main.entries.is_empty());
            let Some(oldest) = idle.min_by_key(|lane| lane.last_used).map(|lane| lane.id) else { return };
            self.select_lane(oldest);
            self.evict_lane();
            self.select_lane(selected);
        }
    }

    /// Evicts all lanes in which no answer is generated, except for that of a conversation and those that are held.
    pub fn evict_idle_lanes(&mut self, except: &str) {
        let is_idle = |lane: &&CacheLane| {
            lane.reserved == 0 && lane.conversation.is_some() && !lane.holds(except) && !lane.is_held()
        };
        let idle: Vec<LaneId> = self.lanes().filter(is_idle).map(|lane| lane.id).collect();
        for id in idle {
            self.select_lane(id);
            self.evict_lane();
        }
    }

    /// Drops the fork of the selected lane, unless an answer is generated in it.
    pub fn drop_idle_fork(&mut self) {
        if self.lane.reserved == 0 {
            self.drop_fork();
        }
    }

    /// Evicts the lane that was used least recently, if one is idle: for a decode that found no free cells.
    pub fn evict_oldest_lane(&mut self) -> bool {
        let before = self.available_cells();
        self.make_room(before + 1);
        self.available_cells() > before
    }

    /// Frees the cells of the selected lane; those that are not archived are saved first.
    pub(super) fn evict_lane(&mut self) {
        self.drop_fork();
        if self.mode == KvCacheMode::EditCells
            && let Err(error) = self.save_all_cells()
        {
            tracing::warn!("the KV cells of a conversation are not saved: {error}");
        }
        self.clear_lane();
    }

    /// Frees the cells of the selected lane without saving them.
    pub(super) fn clear_lane(&mut self) {
        let seqs = [self.lane.main.seq, self.lane.fork_seq];
        for seq in seqs {
            let _ = self.context.seq_rm(seq, -1, -1);
        }
        self.lane.fork = None;
        self.lane.main.entries.clear();
        self.lane.main_state.iter_mut().for_each(MainState::clear);
        self.lane.conversation = None;
        self.lane.reserved = 0;
        self.lane.held_until = None;
        self.end_k_shift_of_nothing();
    }

    /// Without cells there is no key to rotate.
    pub(super) fn end_k_shift_of_nothing(&mut self) {
        if self.lanes().all(|lane| lane.main.entries.is_empty()) {
            self.k_shift_pending = false;
        }
    }
}

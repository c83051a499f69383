//! The recurrent state of a hybrid model, beside its cells.
//!
//! A recurrent state is the sum of all tokens that it has read; none can be taken out again. So a prune frees the cells of
//! a chunk and leaves the state as it is, and a resurrection restores the cells and leaves it as well: the recurrent layers
//! still know a pruned chunk, and nothing is read again. Where the end of the window is replaced (regenerate, edit, branch),
//! the state has read tokens that were never said. Then the latest earlier state is taken, from the archive, and everything
//! behind it is prefilled again.
//!
//! States are archived before the last chunk and before the last token of a prompt, so that an answer can be regenerated, and
//! when the cells of a conversation are saved.

use super::cache::{KvCache, KvCacheMode};
use super::history::{MainState, RecurrentHistory};
use super::plan::WindowSegment;
use super::window::KeyedWindow;
use crate::cells::SequenceTable;
use crate::ffi::SeqId;
use crate::kv_archive::KvArchiveEntry;
use crate::token_key::TokenKey;
use std::sync::Arc;

/// A state that a window can be continued from.
enum StateSource {
    /// No state: the window is read from its start.
    Empty,
    /// That of the main sequence.
    Main,
    /// One of the archive, and the key of its last token.
    Archived(TokenKey, Arc<KvArchiveEntry>),
}

impl KvCache {
    /// For a hybrid model: cuts the segments off behind the latest state that can be used, and gives the main sequence that
    /// state. Returns the first slot to prefill.
    pub(super) fn rewind_state(
        &mut self,
        segments: &mut Vec<WindowSegment>,
        window: &KeyedWindow<'_>,
        prefill_from: usize,
    ) -> usize {
        if self.lane.main_state.is_none() {
            return prefill_from;
        }
        let first_missing = segments.iter().find_map(|segment| match segment {
            WindowSegment::Missing(slots) => Some(slots.start),
            WindowSegment::Resident(_) | WindowSegment::Archived(..) => None,
        });
        let limit = first_missing.unwrap_or(prefill_from);
        loop {
            let (slots, source) = self.find_state(window, limit);
            self.cut_segments(segments, slots);
            if self.apply_state(self.lane.main.seq, &source) {
                return slots;
            }
        }
    }

    /// For a hybrid model: shortens a fork to the latest state that can be used, and gives the fork that state.
    pub(super) fn rewind_fork(&mut self, fork: &mut SequenceTable, window: &KeyedWindow<'_>) {
        if self.lane.main_state.is_none() {
            return;
        }
        loop {
            let (slots, source) = self.find_state(window, fork.entries.len());
            if let Some(cut) = fork.entries.get(slots) {
                let _ = self.context.seq_rm(self.lane.fork_seq, cut.position, -1);
                fork.entries.truncate(slots);
            }
            if self.apply_state(self.lane.fork_seq, &source) {
                return;
            }
        }
    }

    /// The state that has read most of a window, but at most `limit` slots; and the number of slots.
    fn find_state(&mut self, window: &KeyedWindow<'_>, limit: usize) -> (usize, StateSource) {
        let main = self.lane.main_state.as_ref().and_then(|state| state.history.covered_slots(window));
        let main = main.filter(|slots| (1..=limit).contains(slots));
        let conversation = self.lane.conversation.clone().unwrap_or_default();
        for key in self.archive.state_keys(&conversation) {
            let Ok(slot) = window.keys.binary_search(&key) else { continue };
            if slot >= limit || main.is_some_and(|slots| slot < slots) {
                continue;
            }
            let token = window.tokens[slot].id.0.cast_signed();
            let Some(entry) = self.archive.state(&conversation, key, token) else { continue };
            let history = RecurrentHistory::from_bytes(&entry.cells).map(|(history, _)| history);
            if history.and_then(|history| history.covered_slots(window)) == Some(slot + 1) {
                return (slot + 1, StateSource::Archived(key, entry));
            }
        }
        main.map_or((0, StateSource::Empty), |slots| (slots, StateSource::Main))
    }

    /// Gives a sequence a state. False if that state is damaged; then it is deleted.
    fn apply_state(&mut self, seq: SeqId, source: &StateSource) -> bool {
        let history = match source {
            StateSource::Empty => {
                self.context.clear_recurrent(seq);
                RecurrentHistory::default()
            }
            StateSource::Main => {
                if seq != self.lane.main.seq {
                    self.context.copy_recurrent(self.lane.main.seq, seq);
                }
                return true;
            }
            StateSource::Archived(key, entry) => {
                let parsed = RecurrentHistory::from_bytes(&entry.cells);
                let restored = parsed.and_then(|(history, state)| {
                    self.context.restore_recurrent(seq, state).ok().map(|()| history)
                });
                let Some(history) = restored else {
                    let conversation = self.lane.conversation.clone().unwrap_or_default();
                    self.archive.discard_state(&conversation, *key);
                    if seq == self.lane.main.seq {
                        self.lane.main_state.iter_mut().for_each(MainState::clear);
                    }
                    return false;
                };
                history
            }
        };
        if seq == self.lane.main.seq {
            let archived = matches!(source, StateSource::Archived(..));
            self.lane.main_state = Some(MainState { history, archived });
        }
        true
    }

    /// Shortens segments to the first `slots` slots, and frees the cells of resident tokens behind them.
    pub(super) fn cut_segments(&mut self, segments: &mut Vec<WindowSegment>, slots: usize) {
        let (mut slot, mut resident) = (0, 0);
        segments.retain_mut(|segment| {
            let (WindowSegment::Resident(range)
            | WindowSegment::Archived(range, _)
            | WindowSegment::Missing(range)) = segment;
            range.end = range.end.min(range.start + slots.saturating_sub(slot));
            slot += range.len();
            resident += segment.resident_len();
            segment.len() > 0
        });
        if let Some(cut) = self.lane.main.entries.get(resident) {
            let _ = self.context.seq_rm(self.lane.main.seq, cut.position, -1);
            self.lane.main.entries.truncate(resident);
        }
    }

    /// Whether the model is a hybrid, with a recurrent state beside its cells.
    #[must_use]
    pub fn has_recurrent_state(&self) -> bool {
        self.lane.main_state.is_some()
    }

    /// For a hybrid model: archives the recurrent state before the end of a prompt is decoded. An answer can then be regenerated
    /// without prefilling the window again. Does nothing in a fork.
    pub fn save_prompt_state(&mut self) {
        if self.lane.fork.is_none() {
            self.save_main_state();
        }
    }

    /// Archives the recurrent state of the main sequence, unless the archive has it.
    pub(super) fn save_main_state(&mut self) {
        let Some(state) = self.lane.main_state.as_ref().filter(|state| !state.archived) else { return };
        let Some((key, token)) = state.history.last().filter(|_| self.mode == KvCacheMode::EditCells) else {
            return;
        };
        // A state whose last token was taken out of the window again is of no use.
        let is_cached = self.lane.main.entries.binary_search_by_key(&key, |entry| entry.key).is_ok();
        let Some(conversation) = self.lane.conversation.clone().filter(|_| is_cached) else { return };
        let mut bytes = state.history.to_bytes();
        let state = self.context.save_recurrent(self.lane.main.seq);
        if !state.is_empty() {
            bytes.extend(state);
            let entries = &self.lane.main.entries;
            let is_cached = |key: TokenKey| entries.binary_search_by_key(&key, |entry| entry.key).is_ok();
            self.archive.insert_state(&conversation, key, token, bytes, is_cached);
            self.lane.main_state.iter_mut().for_each(|state| state.archived = true);
        }
    }
}

//! A fork: a second sequence over the same cells, for side tasks (previews, memories) that must leave no trace. It shares
//! the cells of the conversation instead of copying them, and shifts nothing unless positions run out.

use super::cache::{KvCache, KvCacheMode};
use super::error::KvCacheError;
use super::plan::{WindowSegment, archived_position};
use super::sync::WindowSync;
use super::window::{KeyedWindow, match_window};
use crate::cells::{CellEntry, SequenceTable};
use crate::ffi::LlamaPos;
use crate::token_key::TokenKey;
use halo_core::model::{CacheStats, StepFlow, WindowToken};

impl KvCache {
    /// Creates a fork that holds as much of a window as is cached, or can be restored without shifting anything. The
    /// caller prefills the rest with [`decode`](Self::decode). [`drop_fork`](Self::drop_fork) ends it.
    pub fn fork(
        &mut self,
        conversation: &str,
        window: &[WindowToken],
        max_answer_tokens: usize,
    ) -> Result<WindowSync, KvCacheError> {
        let keyed = self.keyed_window(window)?;
        if self.mode == KvCacheMode::Recompute {
            return self.sync_window(conversation, window, max_answer_tokens, &mut |_, _| StepFlow::Continue);
        }
        let was_cached = self.lanes().any(|lane| lane.holds(conversation));
        self.switch_conversation(conversation)?;
        self.drop_fork();
        if !was_cached {
            self.make_room(window.len());
            let mut segments = self.plan_segments(&keyed);
            self.cut_displaced(&mut segments, &keyed, window.len(), None);
            self.place_segments(&segments, &keyed, 0, None, &mut CacheStats::default())?;
        }
        // Shared cells must have their final keys.
        self.apply_k_shift()?;
        let is_cached =
            |key: &&TokenKey| self.lane.main.entries.binary_search_by_key(*key, |entry| entry.key).is_ok();
        let new_tokens = window.len() - keyed.keys.iter().filter(is_cached).count();
        let wanted = self.lane.main.entries.len() + new_tokens;
        self.make_room(wanted.saturating_add(max_answer_tokens).min(self.capacity()));
        let free = self.available_cells().saturating_sub(self.lane.main.entries.len());
        let mut sync = self.build_fork(&keyed, free, max_answer_tokens)?;
        let answer_cells = free.saturating_sub(sync.stats.prefilled + sync.stats.restored);
        if sync.answer_budget < max_answer_tokens.min(answer_cells) {
            // Positions run out before cells do: without compaction the answer would end early.
            self.compact()?;
            sync = self.build_fork(&keyed, free, max_answer_tokens)?;
        }
        if sync.answer_budget < max_answer_tokens.min(1) {
            self.drop_fork();
            let tokens = sync.stats.prefilled + sync.stats.restored + 1;
            return Err(KvCacheError::ForkTooLarge { tokens, free, cells: self.capacity() });
        }
        Ok(sync)
    }

    /// Drops the fork, if there is one, and frees the cells that only it uses.
    pub fn drop_fork(&mut self) {
        if self.lane.fork.take().is_some() {
            let _ = self.context.seq_rm(self.lane.fork_seq, -1, -1);
        }
    }

    /// Fills the fork sequence from the start of the window: shares cached cells, and restores archived ones whose own
    /// positions are free. Stops at the first token that would need more. `free` cells are left for what is not shared.
    fn build_fork(
        &mut self,
        window: &KeyedWindow<'_>,
        free: usize,
        max_answer_tokens: usize,
    ) -> Result<WindowSync, KvCacheError> {
        let mut stats = CacheStats::default();
        let (main_seq, fork_seq) = (self.lane.main.seq, self.lane.fork_seq);
        let mut fork = SequenceTable::new(fork_seq);
        self.lane.fork = Some(SequenceTable::new(fork_seq));
        let matches = match_window(&self.lane.main.entries, window);
        let cached = self.lane.main.entries.iter().copied().zip(matches);
        let cached: Vec<CellEntry> = cached.filter(|(_, matches)| *matches).map(|(entry, _)| entry).collect();
        let (mut slot, mut next_cached) = (0, 0);
        // The last token is always decoded: its logits are needed.
        let end = window.len() - 1;
        while slot < end {
            let first = cached.get(next_cached).map_or(0, |entry| entry.position);
            let shared = cached[next_cached..].iter().zip(&window.keys[slot..end]).zip(first..);
            let shared = shared
                .take_while(|((entry, key), position)| entry.key == **key && entry.position == *position)
                .count();
            if shared > 0 {
                let run = &cached[next_cached..next_cached + shared];
                self.context.seq_cp(main_seq, fork_seq, run[0].position, run[shared - 1].position + 1);
                fork.entries.extend_from_slice(run);
                (slot, next_cached) = (slot + shared, next_cached + shared);
                continue;
            }
            let next = cached.get(next_cached);
            let position_end = next.map_or(self.position_limit, |entry| entry.position);
            let slot_end =
                next.map_or(end, |entry| window.keys.partition_point(|key| *key < entry.key)).min(end);
            let mut segments = Vec::new();
            self.find_archived(slot..slot_end, window, usize::MAX, &mut segments);
            let Some(WindowSegment::Archived(range, header)) = segments.into_iter().next() else { break };
            let position = archived_position(&header, window.keys[range.start]);
            let cells_fit = stats.restored + header.tokens.len() <= free;
            let position_is_free =
                position >= fork.next_position() && position + range.len() as LlamaPos <= position_end;
            if !position_is_free || !cells_fit {
                break;
            }
            let Ok(restored) = self.restore_cells(fork_seq, &header, range.clone(), position, window) else {
                break;
            };
            stats.restored += range.len();
            fork.entries.extend(restored);
            slot = range.end;
        }
        self.rewind_fork(&mut fork, window);
        let slot = fork.entries.len();
        let is_shared = |entry: &&CellEntry| cached.binary_search_by_key(&entry.key, |c| c.key).is_ok();
        stats.reused = fork.entries.iter().filter(is_shared).count();
        stats.restored = slot - stats.reused;
        stats.prefilled = window.len() - slot;
        let free_positions = (self.position_limit - fork.next_position()) as usize;
        let answer_budget = max_answer_tokens
            .min(free.saturating_sub(stats.prefilled + stats.restored))
            .min(free_positions.saturating_sub(stats.prefilled));
        self.lane.fork = Some(fork);
        let cells = self.lane.main.entries.len() + stats.prefilled + stats.restored + answer_budget;
        Ok(WindowSync { prefill_from: slot, answer_budget, cells, stats })
    }
}

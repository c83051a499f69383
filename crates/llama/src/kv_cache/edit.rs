//! Operations on the cells of the KV cache: save, remove, restore, shift, recompute, compact. Each leaves a correct
//! sequence table, also when it fails, so that the cached tokens are always known.

use super::cache::{InputToken, KvCache, KvCacheMode, SCRATCH_SEQ};
use super::error::KvCacheError;
use super::history::MainState;
use super::plan::{WindowSegment, archived_position};
use super::window::{KeyedWindow, match_window};
use crate::attention::TapConfig;
use crate::cells::{CellEntry, PrefixHash, archive_ranges, contiguous_runs};
use crate::ffi::{BatchToken, LlamaError, LlamaPos, LlamaToken, SeqId};
use crate::kv_archive::{KvArchiveEntry, KvArchiveHeader, MAX_ENTRY_TOKENS};
use halo_core::model::{CacheStats, StepFlow, WindowToken};
use halo_core::token::TokenId;
use std::ops::Range;
use std::sync::Arc;

impl KvCache {
    /// Removes the cells of all tokens that are not in the window; cells of pruned tokens are saved first.
    pub(super) fn remove_absent(
        &mut self,
        window: &KeyedWindow<'_>,
        stats: &mut CacheStats,
    ) -> Result<(), KvCacheError> {
        let absent = self.absent_entries(window);
        if absent.is_empty() {
            return Ok(());
        }
        if self.mode == KvCacheMode::EditCells {
            // A token whose key is in the window was replaced by another token; it is not archived.
            let is_pruned = |&n: &usize| window.keys.binary_search(&self.lane.main.entries[n].key).is_err();
            let pruned: Vec<usize> = absent.iter().copied().filter(is_pruned).collect();
            self.save_cells(&pruned)?;
        }
        stats.pruned += absent.len();
        if absent.len() == self.lane.main.entries.len() {
            let _ = self.context.seq_rm(self.lane.main.seq, -1, -1);
            self.lane.main.entries.clear();
            self.lane.main_state.iter_mut().for_each(MainState::clear);
            self.end_k_shift_of_nothing();
            return Ok(());
        }
        let removed: Vec<CellEntry> = absent.iter().map(|&n| self.lane.main.entries[n]).collect();
        for run in contiguous_runs(&removed) {
            let (start, end) = (removed[run.start].position, removed[run.end - 1].position + 1);
            if !self.context.seq_rm(self.lane.main.seq, start, end) {
                return Err(LlamaError::Decode("llama.cpp cannot remove single KV cells".into()).into());
            }
        }
        let mut absent = absent.into_iter().peekable();
        let mut n = 0;
        self.lane.main.entries.retain(|_| {
            let is_absent = absent.next_if_eq(&n).is_some();
            n += 1;
            !is_absent
        });
        Ok(())
    }

    /// The cached entries that have to be removed before the cache can be synced with a window.
    fn absent_entries(&self, window: &KeyedWindow<'_>) -> Vec<usize> {
        let cached = &self.lane.main.entries;
        match self.mode {
            KvCacheMode::EditCells => {
                let matches = match_window(cached, window);
                (0..cached.len()).filter(|&n| !matches[n]).collect()
            }
            KvCacheMode::Recompute => {
                let slots = window.keys.iter().zip(window.tokens);
                let prefix = cached
                    .iter()
                    .zip(slots)
                    .take_while(|(entry, (key, token))| {
                        entry.key == **key && token.id.0 == entry.token.cast_unsigned()
                    })
                    .count();
                // A recurrent state can only be dropped as a whole.
                let keep_prefix = prefix == cached.len() || self.context.can_edit();
                (if keep_prefix { prefix } else { 0 }..cached.len()).collect()
            }
        }
    }

    /// Saves entries of the main sequence to the archive, unless they are archived at their present positions.
    pub(super) fn save_cells(&mut self, entries: &[usize]) -> Result<(), KvCacheError> {
        let Some(conversation) = self.lane.conversation.clone() else { return Ok(()) };
        let entries: Vec<CellEntry> = entries.iter().map(|&n| self.lane.main.entries[n]).collect();
        let window = self.context.weights().sliding_window();
        for range in archive_ranges(&entries, MAX_ENTRY_TOKENS, window) {
            let run = &entries[range];
            let (first, end) = (run[0], run[run.len() - 1].position + 1);
            let tokens: Vec<LlamaToken> = run.iter().map(|entry| entry.token).collect();
            if self.archive.contains(&conversation, first.key, &tokens, first.position) {
                continue;
            }
            self.apply_k_shift()?;
            self.context.seq_cp(self.lane.main.seq, SCRATCH_SEQ, first.position, end);
            let cells = self.context.save_state(SCRATCH_SEQ);
            let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
            if cells.is_empty() {
                continue;
            }
            let prefix = first.prefix.filter(|_| is_chained(run));
            let entry = KvArchiveEntry { start: first.key, tokens, position: first.position, cells, prefix };
            self.archive.insert(&conversation, entry);
        }
        Ok(())
    }

    /// Saves all entries of the main sequence, see [`save_cells`](Self::save_cells), and its recurrent state.
    pub(super) fn save_all_cells(&mut self) -> Result<(), KvCacheError> {
        self.save_main_state();
        self.save_cells(&(0..self.lane.main.entries.len()).collect::<Vec<_>>())
    }

    /// Rotates the keys of shifted cells. llama.cpp does it at the start of a decode, so a token is decoded that nothing
    /// needs. This decode cannot be cancelled: after half a K-shift, the next one would rotate that half again.
    pub(super) fn apply_k_shift(&mut self) -> Result<(), KvCacheError> {
        if self.k_shift_pending {
            self.context.tap().configure(TapConfig::off());
            let canceller = Arc::clone(self.context.canceller());
            let decoded = canceller.run_uninterruptible(|| {
                self.context.decode(SCRATCH_SEQ, &[BatchToken { token: 0, position: 0, logits: false }])
            });
            let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
            decoded?;
            self.k_shift_pending = false;
        }
        Ok(())
    }

    /// Shifts runs of the main sequence to new start positions; returns how many tokens were shifted.
    pub(super) fn shift_runs(&mut self, runs: &[(Range<usize>, LlamaPos)]) -> Result<usize, KvCacheError> {
        let shift =
            |(run, start): &(Range<usize>, LlamaPos)| *start - self.lane.main.entries[run.start].position;
        let shifts: Vec<(Range<usize>, LlamaPos)> =
            runs.iter().map(|run| (run.0.clone(), shift(run))).filter(|(_, by)| *by != 0).collect();
        // Positions must stay unique at every step: runs that go down from the first on, runs that go up from the last.
        let down = shifts.iter().filter(|(_, by)| *by < 0);
        let up = shifts.iter().rev().filter(|(_, by)| *by > 0);
        let moves_cells = self.context.shift_moves_cells();
        let mut shifted = 0;
        for (run, by) in down.chain(up) {
            self.unshare(run.clone())?;
            let entries = &mut self.lane.main.entries[run.clone()];
            let (start, end) = (entries[0].position, entries[entries.len() - 1].position + 1);
            if let Err(error) = self.context.seq_add(self.lane.main.seq, start, end, *by) {
                self.lane.main.entries.drain(run.clone());
                return Err(error.into());
            }
            for entry in entries.iter_mut() {
                entry.position += by;
                entry.prefix = None;
                entry.cell = entry.cell.filter(|_| !moves_cells);
            }
            shifted += entries.len();
            self.k_shift_pending = !moves_cells;
        }
        Ok(shifted)
    }

    /// Gives a run of the main sequence cells of its own where other sequences may have the same ones. If there is no room for
    /// the copies, the run is removed, and computed again later.
    fn unshare(&mut self, run: Range<usize>) -> Result<(), KvCacheError> {
        let entries = self.lane.main.entries[run.clone()].to_vec();
        if !entries.iter().any(|entry| entry.shared) {
            return Ok(());
        }
        self.apply_k_shift()?;
        let main = self.lane.main.seq;
        let window = self.context.weights().sliding_window();
        for range in archive_ranges(&entries, MAX_ENTRY_TOKENS, window) {
            let (start, end) = (entries[range.start].position, entries[range.end - 1].position + 1);
            self.context.seq_cp(main, SCRATCH_SEQ, start, end);
            let cells = self.context.save_state(SCRATCH_SEQ);
            let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
            let _ = self.context.seq_rm(main, start, end);
            let restored = self.context.restore_state(SCRATCH_SEQ, &cells);
            if restored.is_ok() {
                self.context.seq_cp(SCRATCH_SEQ, main, -1, -1);
            }
            let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
            if let Err(error) = restored {
                let first = entries[0].position;
                let _ = self.context.seq_rm(main, first, first + entries.len() as LlamaPos);
                self.lane.main.entries.drain(run);
                return Err(error.into());
            }
        }
        for entry in &mut self.lane.main.entries[run] {
            (entry.cell, entry.shared) = (None, false);
        }
        Ok(())
    }

    /// Restores archived cells of a range of slots into a sequence, from position `start` on.
    pub(super) fn restore_cells(
        &mut self,
        seq: SeqId,
        header: &KvArchiveHeader,
        slots: Range<usize>,
        start: LlamaPos,
        window: &KeyedWindow<'_>,
    ) -> Result<Vec<CellEntry>, KvCacheError> {
        let conversation = self.lane.conversation.clone().unwrap_or_default();
        let entry = self.archive.get(&conversation, window.keys[slots.start]);
        let matches_header = |entry: &KvArchiveEntry| {
            entry.start == header.start && entry.tokens == header.tokens && entry.position == header.position
        };
        let Some(entry) = entry.filter(|entry| matches_header(entry)) else {
            self.archive.discard(&conversation, header.start);
            return Err(LlamaError::StateRestore("they are damaged").into());
        };
        if let Err(error) = self.context.restore_state(SCRATCH_SEQ, &entry.cells) {
            let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
            self.archive.discard(&conversation, entry.start);
            return Err(error.into());
        }
        // llama.cpp restores the whole entry; cells of tokens outside the range are removed again.
        let first = archived_position(header, window.keys[slots.start]);
        let end = first + slots.len() as LlamaPos;
        let entry_end = entry.position + entry.tokens.len() as LlamaPos;
        if entry.position < first {
            let _ = self.context.seq_rm(SCRATCH_SEQ, entry.position, first);
        }
        if end < entry_end {
            let _ = self.context.seq_rm(SCRATCH_SEQ, end, entry_end);
        }
        if first != start {
            self.context.seq_add(SCRATCH_SEQ, first, end, start - first)?;
            self.k_shift_pending = !self.context.shift_moves_cells();
        }
        self.context.seq_cp(SCRATCH_SEQ, seq, -1, -1);
        let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
        let mut entries = window.entries(slots, start);
        if first == start {
            let skipped = (first - header.position) as usize;
            let prefixes = prefix_hashes(header).skip(skipped);
            entries.iter_mut().zip(prefixes).for_each(|(entry, prefix)| entry.prefix = Some(prefix));
        }
        if seq == self.lane.main.seq {
            self.lane.main.insert(&entries);
        }
        Ok(entries)
    }

    /// Recomputes a range of slots over the tokens before it. It is decoded in the fork sequence, because in the main
    /// sequence it would attend to the tokens after it as well.
    pub(super) fn recompute_missing(
        &mut self,
        slots: Range<usize>,
        start: LlamaPos,
        window: &KeyedWindow<'_>,
        progress: &mut dyn FnMut(usize) -> StepFlow,
    ) -> Result<(), KvCacheError> {
        self.apply_k_shift()?;
        let entries = window.entries(slots, start);
        let end = start + entries.len() as LlamaPos;
        self.context.seq_cp(self.lane.main.seq, self.lane.fork_seq, 0, start);
        let batch = self.context.params().batch as usize;
        let mut decoded = Ok(());
        for (n, entries) in entries.chunks(batch).enumerate() {
            if progress(n * batch) != StepFlow::Continue {
                decoded = Err(LlamaError::Cancelled);
                break;
            }
            let items: Vec<BatchToken> = entries
                .iter()
                .map(|entry| BatchToken { token: entry.token, position: entry.position, logits: false })
                .collect();
            self.context.tap().configure(TapConfig::off());
            decoded = self.context.decode(self.lane.fork_seq, &items);
            if decoded.is_err() {
                break;
            }
        }
        if decoded.is_ok() {
            self.context.seq_cp(self.lane.fork_seq, self.lane.main.seq, start, end);
            self.lane.main.insert(&entries);
        }
        let _ = self.context.seq_rm(self.lane.fork_seq, -1, -1);
        Ok(decoded?)
    }

    /// Compaction: closes all holes in the positions of the main sequence with one K-shift. Where positions cannot be
    /// shifted, everything behind the first hole is prefilled again.
    pub fn compact(&mut self) -> Result<(), KvCacheError> {
        self.drop_fork();
        if !self.context.can_shift() {
            return self.prefill_behind_hole();
        }
        let runs = contiguous_runs(&self.lane.main.entries)
            .into_iter()
            .map(|run| (run.clone(), run.start as LlamaPos));
        self.shift_runs(&runs.collect::<Vec<_>>())?;
        self.apply_k_shift()
    }

    /// Prefills everything behind the first hole in the positions of the main sequence again. If it fails, the cache holds
    /// the tokens before the one that failed.
    fn prefill_behind_hole(&mut self) -> Result<(), KvCacheError> {
        let cached = &self.lane.main.entries;
        let Some(first) = (0..cached.len()).find(|&n| cached[n].position != n as LlamaPos) else {
            return Ok(());
        };
        let window_token = |entry: &CellEntry| WindowToken {
            position: None,
            offset: entry.key.offset,
            id: TokenId(entry.token.cast_unsigned()),
            chunk_start: entry.chunk_start,
        };
        let tokens: Vec<WindowToken> = cached.iter().map(window_token).collect();
        let window = KeyedWindow { tokens: &tokens, keys: cached.iter().map(|entry| entry.key).collect() };
        let mut segments = vec![WindowSegment::Resident(0..tokens.len())];
        self.cut_segments(&mut segments, first);
        let from = self.rewind_state(&mut segments, &window, first);
        let input = |slot: usize| InputToken::new(window.keys[slot], &tokens[slot]);
        let batch = self.context.params().batch as usize;
        // The last token is decoded alone, as that of a window.
        let (others, last): (Vec<_>, _) =
            ((from..tokens.len() - 1).map(input).collect(), input(tokens.len() - 1));
        for batch in others.chunks(batch).chain([&[last][..]]) {
            self.decode(batch, TapConfig::off())?;
        }
        Ok(())
    }
}

/// Whether each token but the first one was computed from what the one before it was computed from, and from that one.
fn is_chained(run: &[CellEntry]) -> bool {
    run.windows(2).all(|pair| {
        let expected = pair[0].prefix.map(|prefix| prefix.then(pair[1].token));
        expected.is_some() && pair[1].prefix == expected
    })
}

/// The prefix hashes of the tokens of an archive entry; none if they are unknown.
fn prefix_hashes(header: &KvArchiveHeader) -> impl Iterator<Item = PrefixHash> + '_ {
    let mut next = header.prefix;
    header.tokens.iter().enumerate().map_while(move |(n, token)| {
        if n > 0 {
            next = next.map(|prefix| prefix.then(*token));
        }
        next
    })
}

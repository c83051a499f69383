//! Makes the KV cache equal to a window.

use super::cache::{KvCache, KvCacheMode};
use super::error::KvCacheError;
use super::plan::{WindowSegment, archived_position};
use super::window::KeyedWindow;
use crate::cells::contiguous_runs;
use crate::ffi::{LlamaError, LlamaPos};
use crate::layout::{FixedLayout, PositionRun, RunPlacement, assign_fixed_positions, assign_positions};
use halo_core::model::{CacheStats, StepFlow, WindowToken};
use std::ops::Range;

/// Positions that are reserved for the answer. A longer answer may trigger a compaction while it is generated.
const ANSWER_RESERVE: usize = 512;

/// The result of a sync: what is left to prefill, and how long the answer can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSync {
    /// The first slot that the caller has to prefill; it and all slots after it are not cached.
    pub prefill_from: usize,
    /// The most tokens of the answer.
    pub answer_budget: usize,
    /// The cells that the lane has when the answer is complete, for [`KvCache::reserve_lane`].
    pub cells: usize,
    pub stats: CacheStats,
}

/// Called with the tokens recomputed so far and the tokens to recompute and prefill in all; can stop the sync.
pub(super) type SyncProgress<'a> = dyn FnMut(usize, usize) -> StepFlow + 'a;

/// A run of one segment that is being placed: the index of the segment, and a range as the segment has it.
struct SegmentRun {
    segment: usize,
    range: Range<usize>,
}

impl KvCache {
    /// Makes the cache equal to a window, except for the end that the caller prefills. `max_answer_tokens` is the longest
    /// answer; the budget is lower where fewer cells are free. `progress` is called before each batch that is recomputed.
    pub fn sync_window(
        &mut self,
        conversation: &str,
        window: &[WindowToken],
        max_answer_tokens: usize,
        progress: &mut dyn FnMut(usize, usize) -> StepFlow,
    ) -> Result<WindowSync, KvCacheError> {
        let window = self.keyed_window(window)?;
        self.switch_conversation(conversation)?;
        self.drop_fork();
        self.share_prefix(&window);
        let wanted = window.len().saturating_add(max_answer_tokens).min(self.window_limit);
        self.make_room(wanted);
        let cells = self.available_cells().min(self.window_limit);
        let answer_budget = cells.saturating_sub(window.len()).min(max_answer_tokens);
        if answer_budget < max_answer_tokens.min(1) {
            return Err(KvCacheError::WindowTooLarge { tokens: window.len() + 1, limit: cells });
        }
        let (mut stats, mut retries) = (CacheStats::default(), window.len());
        self.lane.is_partial = true;
        loop {
            match self.try_sync_window(&window, answer_budget, progress, &mut stats) {
                // The entry that cannot be restored was deleted, so the next try recomputes its tokens.
                Err(KvCacheError::Llama(error @ LlamaError::StateRestore(_))) if retries > 0 => {
                    tracing::warn!("{error}; they are recomputed");
                    retries -= 1;
                }
                result => {
                    self.lane.is_partial = result.is_err();
                    return result;
                }
            }
        }
    }

    fn try_sync_window(
        &mut self,
        window: &KeyedWindow<'_>,
        answer_budget: usize,
        progress: &mut SyncProgress<'_>,
        stats: &mut CacheStats,
    ) -> Result<WindowSync, KvCacheError> {
        self.remove_absent(window, stats)?;
        let mut segments = self.plan_segments(window);
        let prefill_from = self.split_prefill(&mut segments, window);
        let reserve = answer_budget.min(ANSWER_RESERVE);
        let prefill_from = self.cut_displaced(&mut segments, window, prefill_from, Some(reserve));
        let prefill_from = self.rewind_state(&mut segments, window, prefill_from);
        let resident: usize = segments.iter().map(WindowSegment::resident_len).sum();
        // Tokens that an earlier try restored or recomputed are resident now, but were not before the sync.
        stats.reused = resident.saturating_sub(stats.restored + stats.recomputed);
        stats.prefilled = window.len() - prefill_from;
        let ahead = stats.prefilled + reserve;
        self.place_segments(&segments, window, ahead, Some(progress), stats)?;
        if let (Some(conversation), Some(key)) = (&self.lane.conversation, window.keys.get(prefill_from)) {
            self.archive.mark_stale(conversation, *key);
        }
        let cells = window.len() + answer_budget;
        Ok(WindowSync { prefill_from, answer_budget, cells, stats: *stats })
    }

    /// Makes the cache equal to a window as far as that is possible without decoding. Does nothing if another
    /// conversation is cached.
    pub fn sync_without_prefill(
        &mut self,
        conversation: &str,
        window: &[WindowToken],
    ) -> Result<CacheStats, KvCacheError> {
        let mut stats = CacheStats::default();
        if self.mode == KvCacheMode::Recompute || !self.select_conversation(conversation) {
            return Ok(stats);
        }
        if window.is_empty() {
            self.save_all_cells()?;
            let empty = KeyedWindow { tokens: &[], keys: Vec::new() };
            return self.remove_absent(&empty, &mut stats).map(|()| stats);
        }
        let window = self.keyed_window(window)?;
        self.drop_fork();
        self.remove_absent(&window, &mut stats)?;
        let mut segments = self.plan_segments(&window);
        self.cut_displaced(&mut segments, &window, window.len(), None);
        self.place_segments(&segments, &window, 0, None, &mut stats)?;
        Ok(stats)
    }

    /// [`sync_without_prefill`](Self::sync_without_prefill), and saves all cells to the archive.
    pub fn persist(
        &mut self,
        conversation: &str,
        window: &[WindowToken],
    ) -> Result<CacheStats, KvCacheError> {
        let stats = self.sync_without_prefill(conversation, window)?;
        if self.mode == KvCacheMode::EditCells && self.select_conversation(conversation) {
            self.save_all_cells()?;
        }
        Ok(stats)
    }

    /// Where positions cannot be shifted: makes segments missing whose archived cells have no room at their own position, and
    /// cuts the segments off where the window has to be prefilled again. `reserve` positions are kept for the answer; without
    /// it nothing can be decoded, and missing segments are left out. Returns the first slot to prefill.
    pub(super) fn cut_displaced(
        &mut self,
        segments: &mut Vec<WindowSegment>,
        window: &KeyedWindow<'_>,
        mut prefill_from: usize,
        reserve: Option<usize>,
    ) -> usize {
        if self.context.can_shift() {
            return prefill_from;
        }
        loop {
            let (runs, sources) = self.segment_runs(segments, window, reserve.is_some());
            let ahead = reserve.map_or(0, |reserve| window.len() - prefill_from + reserve);
            match assign_fixed_positions(&runs, ahead, self.position_limit) {
                Some(FixedLayout::RecomputeRun(n)) => {
                    let SegmentRun { segment, range } = &sources[n];
                    segments[*segment] = WindowSegment::Missing(range.clone());
                }
                Some(FixedLayout::PrefillFrom(n)) => {
                    let SegmentRun { segment, range } = &sources[n];
                    prefill_from = match segments[*segment] {
                        WindowSegment::Resident(_) => {
                            let key = self.lane.main.entries[range.start].key;
                            window.keys.partition_point(|other| *other < key)
                        }
                        WindowSegment::Archived(..) | WindowSegment::Missing(_) => range.start,
                    };
                    self.cut_segments(segments, prefill_from);
                }
                Some(FixedLayout::Fits(_)) | None => break,
            }
        }
        // The end is prefilled, not recomputed in a fork.
        while let Some(WindowSegment::Missing(slots)) = segments.last().filter(|_| reserve.is_some()) {
            prefill_from = slots.start;
            segments.pop();
        }
        prefill_from
    }

    /// Gives every segment its positions: shifts resident cells, restores archived ones, and, if there is a `progress`
    /// callback, recomputes missing ones. `ahead` tokens must fit after them.
    pub(super) fn place_segments(
        &mut self,
        segments: &[WindowSegment],
        window: &KeyedWindow<'_>,
        ahead: usize,
        mut progress: Option<&mut SyncProgress<'_>>,
        stats: &mut CacheStats,
    ) -> Result<(), KvCacheError> {
        let (runs, sources) = self.segment_runs(segments, window, progress.is_some());
        let starts = if self.context.can_shift() {
            assign_positions(&runs, ahead, self.position_limit)
        } else {
            match assign_fixed_positions(&runs, ahead, self.position_limit) {
                Some(FixedLayout::Fits(starts)) => Some(starts),
                _ => None,
            }
        };
        let Some(starts) = starts else {
            let tokens = runs.iter().map(|run| run.len).sum::<usize>() + ahead;
            return Err(KvCacheError::WindowTooLarge { tokens, limit: self.position_limit as usize });
        };
        let placed = || sources.iter().zip(&starts);
        let resident =
            placed().filter(|(run, _)| matches!(segments[run.segment], WindowSegment::Resident(_)));
        let shifts: Vec<(Range<usize>, LlamaPos)> =
            resident.map(|(run, &start)| (run.range.clone(), start)).collect();
        stats.shifted += self.shift_runs(&shifts)?;
        let missing = runs.iter().filter(|run| run.placement == RunPlacement::Missing);
        let missing_tokens = missing.map(|run| run.len).sum::<usize>();
        let mut recomputed = 0;
        for (SegmentRun { segment, range }, &start) in placed() {
            match &segments[*segment] {
                WindowSegment::Resident(_) => {}
                WindowSegment::Archived(_, header) => {
                    self.restore_cells(self.lane.main.seq, header, range.clone(), start, window)?;
                    let archived_at = archived_position(header, window.keys[range.start]);
                    stats.shifted += if archived_at == start { 0 } else { range.len() };
                    stats.restored += range.len();
                }
                WindowSegment::Missing(_) => {
                    let total = missing_tokens + stats.prefilled;
                    let mut batch_progress = |done: usize| match &mut progress {
                        Some(progress) => progress(recomputed + done, total),
                        None => StepFlow::Stop,
                    };
                    self.recompute_missing(range.clone(), start, window, &mut batch_progress)?;
                    recomputed += range.len();
                    stats.recomputed += range.len();
                }
            }
        }
        Ok(())
    }

    /// The runs of all segments for [`assign_positions`], and where each run comes from. A resident segment with holes in
    /// its positions has several runs.
    fn segment_runs(
        &self,
        segments: &[WindowSegment],
        window: &KeyedWindow<'_>,
        with_missing: bool,
    ) -> (Vec<PositionRun>, Vec<SegmentRun>) {
        let (mut runs, mut sources) = (Vec::new(), Vec::new());
        let mut push = |segment: usize, range: Range<usize>, placement: RunPlacement| {
            runs.push(PositionRun { len: range.len(), placement });
            sources.push(SegmentRun { segment, range });
        };
        for (n, segment) in segments.iter().enumerate() {
            match segment {
                WindowSegment::Resident(range) => {
                    for run in contiguous_runs(&self.lane.main.entries[range.clone()]) {
                        let run = range.start + run.start..range.start + run.end;
                        let position = self.lane.main.entries[run.start].position;
                        push(n, run, RunPlacement::Resident(position));
                    }
                }
                WindowSegment::Archived(range, header) => {
                    let position = archived_position(header, window.keys[range.start]);
                    push(n, range.clone(), RunPlacement::Archived(position));
                }
                WindowSegment::Missing(range) if with_missing => {
                    push(n, range.clone(), RunPlacement::Missing);
                }
                WindowSegment::Missing(_) => {}
            }
        }
        (runs, sources)
    }
}

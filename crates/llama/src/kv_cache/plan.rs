//! Compares a window with the KV cache and the KV archive: which of its tokens are resident, archived or missing.

use super::cache::{KvCache, KvCacheMode};
use super::window::KeyedWindow;
use crate::ffi::{LlamaPos, LlamaToken};
use crate::kv_archive::KvArchiveHeader;
use crate::token_key::TokenKey;
use std::ops::Range;
use std::sync::Arc;

/// A part of the window, by where its cells are.
pub(super) enum WindowSegment {
    /// In the KV cache: a range of the main sequence's entries.
    Resident(Range<usize>),
    /// In the KV archive: a range of slots, and the entry that holds them.
    Archived(Range<usize>, Arc<KvArchiveHeader>),
    /// Nowhere: a range of slots.
    Missing(Range<usize>),
}

impl WindowSegment {
    pub(super) fn len(&self) -> usize {
        let (WindowSegment::Resident(range)
        | WindowSegment::Archived(range, _)
        | WindowSegment::Missing(range)) = self;
        range.len()
    }

    pub(super) fn resident_len(&self) -> usize {
        if let WindowSegment::Resident(entries) = self { entries.len() } else { 0 }
    }
}

/// The position that a slot's token has in an archive entry.
pub(super) fn archived_position(header: &KvArchiveHeader, key: TokenKey) -> LlamaPos {
    header.position + key.distance_from(header.start).unwrap_or(0) as LlamaPos
}

impl KvCache {
    /// Splits a window into segments. The cache must hold no token that is not in the window.
    pub(super) fn plan_segments(&mut self, window: &KeyedWindow<'_>) -> Vec<WindowSegment> {
        let mut segments = Vec::new();
        let (mut slot, mut cached) = (0, 0);
        while slot < window.len() {
            let first_cached = cached;
            while slot < window.len()
                && self.lane.main.entries.get(cached).is_some_and(|entry| entry.key == window.keys[slot])
            {
                (slot, cached) = (slot + 1, cached + 1);
            }
            if cached > first_cached {
                segments.push(WindowSegment::Resident(first_cached..cached));
                continue;
            }
            let next_resident = self
                .lane
                .main
                .entries
                .get(cached)
                .map_or(window.len(), |entry| window.keys.partition_point(|key| *key < entry.key));
            // A restore needs free cells for the whole entry, also for the tokens of it that are not in the window.
            let spare_cells = self.available_cells().saturating_sub(window.len());
            self.find_archived(slot..next_resident, window, spare_cells, &mut segments);
            slot = next_resident;
        }
        segments
    }

    /// Appends the segments of a range of slots that is not resident. An archive entry with more than `spare_cells`
    /// tokens that are not needed is not used.
    pub(super) fn find_archived(
        &mut self,
        slots: Range<usize>,
        window: &KeyedWindow<'_>,
        spare_cells: usize,
        segments: &mut Vec<WindowSegment>,
    ) {
        let conversation = self.lane.conversation.clone().unwrap_or_default();
        let mut slot = slots.start;
        while slot < slots.end {
            let header = match self.mode {
                KvCacheMode::EditCells => self.archive.header(&conversation, window.keys[slot]),
                KvCacheMode::Recompute => None,
            };
            let usable = header.as_ref().map_or(0, |header| {
                let matching = matching_tokens(header, slot..slots.end, window);
                // Tokens of a memory may have changed since they were archived. Their keys count from the start of the
                // memory, so they are the same only if all tokens of the memory before them are.
                let key = window.keys[slot];
                let continues = slot > 0 && window.keys[slot - 1].plus(1) == key;
                let prefix_matches = key.offset <= 1
                    || continues && !matches!(segments.last(), Some(WindowSegment::Missing(_)));
                let fits = header.tokens.len() - matching <= spare_cells;
                if fits && prefix_matches { matching } else { 0 }
            });
            match (header, usable) {
                (Some(header), usable) if usable > 0 => {
                    segments.push(WindowSegment::Archived(slot..slot + usable, header));
                    slot += usable;
                }
                _ => {
                    match segments.last_mut() {
                        Some(WindowSegment::Missing(missing)) if missing.end == slot => missing.end += 1,
                        _ => segments.push(WindowSegment::Missing(slot..slot + 1)),
                    }
                    slot += 1;
                }
            }
        }
    }

    /// Cuts the end that is prefilled off the segments and returns its first slot. It has at least the last token, whose
    /// logits are needed.
    pub(super) fn split_prefill(
        &mut self,
        segments: &mut Vec<WindowSegment>,
        window: &KeyedWindow<'_>,
    ) -> usize {
        match segments.last_mut() {
            Some(WindowSegment::Missing(missing)) => {
                let start = missing.start;
                segments.pop();
                start
            }
            Some(WindowSegment::Archived(range, _)) => {
                range.end -= 1;
                if range.start == range.end {
                    segments.pop();
                }
                window.len() - 1
            }
            Some(WindowSegment::Resident(range)) => {
                range.end -= 1;
                if range.start == range.end {
                    segments.pop();
                }
                if let Some(last) = self.lane.main.entries.pop()
                    && !self.context.seq_rm(self.lane.main.seq, last.position, -1)
                {
                    // A recurrent state can only be dropped as a whole.
                    let _ = self.context.seq_rm(self.lane.main.seq, -1, -1);
                    self.lane.main.entries.clear();
                    segments.clear();
                    return 0;
                }
                window.len() - 1
            }
            None => 0,
        }
    }
}

/// How many tokens of the window, from the first slot of the range on, an archive entry holds.
fn matching_tokens(header: &KvArchiveHeader, slots: Range<usize>, window: &KeyedWindow<'_>) -> usize {
    let first = window.keys[slots.start];
    let skipped = first.distance_from(header.start).unwrap_or(header.tokens.len());
    let pairs = header.tokens[skipped..].iter().zip(slots).enumerate();
    let same = |(n, (token, slot)): &(usize, (&LlamaToken, usize))| {
        window.keys[*slot] == first.plus(*n) && window.tokens[*slot].id.0 == token.cast_unsigned()
    };
    pairs.take_while(same).count()
}

//! Which token is in which KV cell.
//!
//! llama.cpp chooses cells freely and reuses freed ones, so the table is never assumed: a cell is read from the graph
//! when its token is decoded, or, after a restore, from the attention mask together with the header of a saved state.

use crate::ffi::types::{LlamaPos, LlamaToken, SeqId};
use crate::token_key::TokenKey;
use std::collections::{BTreeMap, BTreeSet};

/// A token whose key and value are in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellEntry {
    pub key: TokenKey,
    pub token: LlamaToken,
    /// Whether it is the first token of a chunk.
    pub chunk_start: bool,
    pub position: LlamaPos,
    /// None after a restore, until the next decode resolves it.
    pub cell: Option<u32>,
    /// What its key and value were computed from: the tokens from the first one on, at the positions from 0 on. None if it is
    /// anything else, or unknown.
    pub prefix: Option<PrefixHash>,
    /// Whether another sequence may have the same cell, which is not shifted then.
    pub shared: bool,
}

/// A hash of the tokens from the first one of a sequence to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHash(u128);

impl PrefixHash {
    /// The hash of the first token.
    #[must_use]
    pub fn first(token: LlamaToken) -> Self {
        Self(0).then(token)
    }

    /// The hash with one more token.
    #[must_use]
    pub fn then(self, token: LlamaToken) -> Self {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(&self.0.to_le_bytes());
        bytes[16..].copy_from_slice(&token.to_le_bytes());
        Self(xxhash_rust::xxh3::xxh3_128(&bytes))
    }
}

/// The tokens of one sequence in window order: entry `n` is the token in slot `n`.
#[derive(Clone, Debug)]
pub struct SequenceTable {
    pub seq: SeqId,
    /// Keys and positions are strictly ascending.
    pub entries: Vec<CellEntry>,
    /// How many entries from the first one on are known to have been computed from nothing but those before them.
    verified: usize,
}

impl SequenceTable {
    #[must_use]
    pub fn new(seq: SeqId) -> Self {
        Self { seq, entries: Vec::new(), verified: 0 }
    }

    /// The position that follows the last token.
    #[must_use]
    pub fn next_position(&self) -> LlamaPos {
        self.entries.last().map_or(0, |t| t.position + 1)
    }

    /// Adds a token that was decoded after the last one.
    pub fn push_decoded(&mut self, entry: CellEntry) {
        // Behind a hole its position is larger.
        let follows = usize::try_from(entry.position) == Ok(self.entries.len());
        let prefix = if follows && self.verify_prefixes() {
            self.prefix_at(self.entries.len(), entry.token)
        } else {
            None
        };
        self.entries.push(CellEntry { prefix, ..entry });
    }

    /// The hash that a token in a slot has if it is computed from the entries before it.
    fn prefix_at(&self, slot: usize, token: LlamaToken) -> Option<PrefixHash> {
        match slot.checked_sub(1) {
            None => Some(PrefixHash::first(token)),
            Some(before) => self.entries[before].prefix.map(|prefix| prefix.then(token)),
        }
    }

    /// Whether every entry was computed from nothing but those before it. Entries that were inserted are looked at again.
    fn verify_prefixes(&mut self) -> bool {
        self.verified = self.verified.min(self.entries.len());
        while let Some(entry) = self.entries.get(self.verified) {
            if entry.prefix.is_none() || entry.prefix != self.prefix_at(self.verified, entry.token) {
                return false;
            }
            self.verified += 1;
        }
        true
    }

    /// How many tokens from the first one on are these, and were computed from nothing else.
    #[must_use]
    pub fn common_prefix(&self, tokens: impl Iterator<Item = LlamaToken>) -> usize {
        let mut hash: Option<PrefixHash> = None;
        let same = |(n, (entry, token)): &(usize, (&CellEntry, LlamaToken))| {
            let expected = hash.map_or_else(|| PrefixHash::first(*token), |hash| hash.then(*token));
            hash = Some(expected);
            entry.prefix == Some(expected) && usize::try_from(entry.position) == Ok(*n)
        };
        self.entries.iter().zip(tokens).enumerate().take_while(same).count()
    }

    /// Inserts consecutive tokens in key order.
    pub fn insert(&mut self, entries: &[CellEntry]) {
        let Some(first) = entries.first() else { return };
        let at = self.entries.partition_point(|t| t.key < first.key);
        self.verified = self.verified.min(at);
        self.entries.splice(at..at, entries.iter().copied());
    }

    #[must_use]
    pub fn all_cells_known(&self) -> bool {
        self.entries.iter().all(|t| t.cell.is_some())
    }

    /// Resolves the cell of every token from the cells that the last token can attend to (`visible`) and the positions
    /// of the sequence's cells in cell order. The error says how they contradict each other or the table.
    pub fn resolve_cells(&mut self, visible: &[u32], positions: &[LlamaPos]) -> Result<(), String> {
        if visible.len() != self.entries.len() || positions.len() != visible.len() {
            return Err(format!(
                "{} cells are visible and {} have positions, but the table has {} tokens",
                visible.len(),
                positions.len(),
                self.entries.len()
            ));
        }
        let cells: BTreeMap<LlamaPos, u32> = positions.iter().copied().zip(visible.iter().copied()).collect();
        for token in &mut self.entries {
            let cell = cells.get(&token.position).copied();
            match (cell, token.cell) {
                (None, _) => return Err(format!("no cell has position {}", token.position)),
                (Some(cell), Some(tabled)) if cell != tabled => {
                    return Err(format!("position {} is in cell {cell}, not in {tabled}", token.position));
                }
                (Some(cell), _) => token.cell = Some(cell),
            }
        }
        Ok(())
    }

    /// Whether a row by cell is exactly 0 on all cells of other sequences.
    #[must_use]
    pub fn attends_only_own_cells(&self, row: &[f32]) -> bool {
        let own: BTreeSet<u32> = self.entries.iter().filter_map(|t| t.cell).collect();
        row.iter().enumerate().all(|(cell, &a)| a == 0.0 || own.contains(&(cell as u32)))
    }

    /// Reorders a row by cell into slots, up to slot `last`. None while a cell is not resolved.
    #[must_use]
    pub fn by_slot(&self, row: &[f32], last: usize) -> Option<Vec<f32>> {
        let value = |t: &CellEntry| row.get(t.cell? as usize).copied();
        self.entries.get(..=last)?.iter().map(value).collect()
    }
}

/// Ranges of tokens with consecutive keys and consecutive positions.
#[must_use]
pub fn contiguous_runs(tokens: &[CellEntry]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (n, token) in tokens.iter().enumerate() {
        let follows = n > 0 && {
            let last = &tokens[n - 1];
            last.key.plus(1) == token.key && last.position + 1 == token.position
        };
        match runs.last_mut() {
            Some(run) if follows => run.end = n + 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

/// The ranges that the KV archive saves as one entry each: contiguous runs, split at chunk starts and at `max_len`. For a
/// model with a sliding `window` they are also split at multiples of it, because llama.cpp saves no cells of sliding
/// layers that the last token of the sequence does not attend to.
#[must_use]
pub fn archive_ranges(
    tokens: &[CellEntry],
    max_len: usize,
    window: Option<LlamaPos>,
) -> Vec<std::ops::Range<usize>> {
    let at_window = |token: &CellEntry| window.is_some_and(|window| token.position % window == 0);
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for run in contiguous_runs(tokens) {
        let mut start = run.start;
        for n in run.clone() {
            if n > start && (tokens[n].chunk_start || n - start == max_len || at_window(&tokens[n])) {
                ranges.push(start..n);
                start = n;
            }
        }
        ranges.push(start..run.end);
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: i64, position: LlamaPos, chunk_start: bool) -> CellEntry {
        let (cell, prefix, shared) = (None, None, false);
        CellEntry { key: TokenKey::at_position(key), token: 0, chunk_start, position, cell, prefix, shared }
    }

    #[test]
    fn cells_split_into_runs_and_archive_ranges() {
        let tokens = [
            entry(0, 0, true),
            entry(1, 1, false),
            entry(2, 2, true),
            entry(3, 9, false),
            entry(5, 10, false),
            entry(6, 11, false),
            entry(7, 12, false),
        ];
        assert_eq!(contiguous_runs(&tokens), [0..3, 3..4, 4..7]);
        assert_eq!(archive_ranges(&tokens, 2, None), [0..2, 2..3, 3..4, 4..6, 6..7]);
        assert!(contiguous_runs(&[]).is_empty() && archive_ranges(&[], 2, None).is_empty());
    }

    /// A prefix ends at a token that was restored, that has another position, or before which another one was removed.
    #[test]
    fn cells_have_a_common_prefix_only_if_nothing_else_was_visible() {
        let mut table = SequenceTable::new(SeqId(0));
        let decode = |table: &mut SequenceTable, token: LlamaToken| {
            table.push_decoded(CellEntry { token, ..entry(token.into(), token, false) });
            table.entries.last().is_some_and(|entry| entry.prefix.is_some())
        };
        assert!((0..6).all(|token| decode(&mut table, token)));
        let common = |table: &SequenceTable| table.common_prefix([0, 1, 2, 3, 4, 5, 6].into_iter());
        assert_eq!((common(&table), table.common_prefix([0, 1, 9, 3].into_iter())), (6, 2));
        let mut pruned = table.clone();
        pruned.entries.remove(3);
        assert_eq!(common(&pruned), 3);
        assert!(!decode(&mut pruned, 6), "there is a hole before it");
        // Without the hole, the tokens behind it were still computed from the removed one.
        let mut moved = pruned.clone();
        moved.entries[3..].iter_mut().for_each(|entry| entry.position -= 1);
        assert_eq!(moved.common_prefix([0, 1, 2, 4, 5].into_iter()), 3);
        // What comes back may have been computed from something else.
        pruned.insert(&[CellEntry { token: 3, ..entry(3, 3, false) }]);
        assert!(!decode(&mut pruned, 7) && common(&pruned) == 3);
        let mut restored = table.clone();
        restored.entries[2].prefix = None;
        assert_eq!(common(&restored), 2);
        let mut cut = table.clone();
        cut.entries.truncate(3);
        assert!(decode(&mut cut, 3) && common(&cut) == 4, "the end is generated again");
    }

    #[test]
    fn cells_resolved_from_mask_and_mismatch_is_an_error() {
        let mut table = SequenceTable::new(SeqId(0));
        table.insert(&[entry(5, 10, false)]);
        table.insert(&[entry(0, 0, true), entry(1, 1, false)]);
        assert_eq!(
            (table.next_position(), table.entries.iter().map(|t| t.key.timeline_pos).collect::<Vec<_>>()),
            (11, vec![0, 1, 5])
        );
        assert!(table.resolve_cells(&[3, 4, 8], &[10, 0, 1]).is_ok() && table.all_cells_known());
        let row = [0.0, 0.0, 0.0, 0.5, 0.2, 0.0, 0.0, 0.0, 0.3];
        assert_eq!(
            (table.by_slot(&row, 2), table.by_slot(&row, 0)),
            (Some(vec![0.2, 0.3, 0.5]), Some(vec![0.2]))
        );
        assert_eq!((table.by_slot(&row[..4], 2), table.by_slot(&row, 3)), (None, None));
        let mismatches: [(&[u32], &[LlamaPos]); 4] = [
            (&[3, 4], &[10, 0, 1]),
            (&[3, 4, 8], &[10, 0]),
            (&[3, 4, 8], &[10, 0, 2]),
            (&[3, 4, 9], &[10, 0, 1]),
        ];
        for (visible, positions) in mismatches {
            assert!(table.resolve_cells(visible, positions).is_err(), "{visible:?} {positions:?}");
        }
    }
}

//! The rows that a change concerns: whose bodies must be loaded before it, and which a store must write after
//! it.

use crate::change::{Change, Score};
use crate::timeline::Timeline;
use crate::token::{ChunkId, TurnId};
use std::collections::BTreeSet;

/// The row numbers that a store must write after a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirtyRows {
    /// Rows whose tokens have changed.
    pub bodies: BTreeSet<usize>,
    /// Rows whose id, counts, pin or turn have changed; where a change only begins a turn, the number behind
    /// the last row.
    pub headers: BTreeSet<usize>,
}

impl Timeline {
    /// The chunks whose bodies `change` needs and that are not loaded.
    #[must_use]
    pub fn missing_bodies(&self, change: &Change) -> Vec<ChunkId> {
        let mut needed = BTreeSet::new();
        self.collect_needed(change, &mut needed);
        let unloaded = |&row: &usize| self.chunks[row].len > 0 && self.chunks[row].loaded_body().is_none();
        needed.into_iter().filter(unloaded).map(|row| self.chunks[row].id).collect()
    }

    fn collect_needed(&self, change: &Change, out: &mut BTreeSet<usize>) {
        let mut add = |id| out.extend(self.find_row(id));
        match change {
            Change::Append(_) => out.extend(self.chunks.len().checked_sub(1)),
            Change::Score(score) => out.extend(self.scored_rows(score)),
            Change::Prune(pruned) => pruned.iter().for_each(|p| add(p.chunk)),
            Change::Resurrect(resurrected) => resurrected.iter().for_each(|r| add(r.chunk)),
            Change::Delete { chunks, .. } | Change::Undelete(chunks) => {
                chunks.iter().for_each(|c| add(c.chunk));
            }
            Change::Pin { .. } => {}
            Change::Split { chunk, .. } => add(*chunk),
            Change::Merge { chunk, .. } => {
                let row = self.find_row(*chunk);
                out.extend(row);
                let before = row.into_iter().flat_map(|row| (0..row).rev());
                out.extend(before.into_iter().find(|&row| self.chunks[row].len > 0));
            }
            Change::Batch(changes) => changes.iter().for_each(|c| self.collect_needed(c, out)),
        }
    }

    /// The rows that a store must write after `change` has led to this state. Rows that the change has removed
    /// from the end are not included; a store finds them by comparing [`row_count`](Self::row_count).
    #[must_use]
    pub fn dirty_rows(&self, change: &Change) -> DirtyRows {
        let mut dirty = DirtyRows::default();
        self.collect_dirty(change, &mut dirty);
        dirty
    }

    fn collect_dirty(&self, change: &Change, out: &mut DirtyRows) {
        let both = |out: &mut DirtyRows, id: ChunkId| {
            out.bodies.extend(self.find_row(id));
            out.headers.extend(self.find_row(id));
        };
        match change {
            Change::Append(append) => {
                if let Some(turn) = self.turn_index(append.turn) {
                    out.headers.insert(self.turns[turn].first_row as usize);
                }
                let ids = append.tokens.iter().map(|t| ChunkId::new(append.role, append.turn, t.chunk_index));
                let unique_ids: BTreeSet<_> = ids.collect();
                unique_ids.into_iter().for_each(|id| both(out, id));
            }
            Change::Score(score) => {
                for row in self.scored_rows(score) {
                    out.bodies.insert(row);
                    // The header of a chunk without live tokens has the checksum of the body.
                    if self.chunks[row].live == 0 {
                        out.headers.insert(row);
                    }
                }
            }
            Change::Prune(pruned) => pruned.iter().for_each(|p| both(out, p.chunk)),
            Change::Resurrect(resurrected) => resurrected.iter().for_each(|r| both(out, r.chunk)),
            Change::Delete { chunks, .. } | Change::Undelete(chunks) => {
                chunks.iter().for_each(|c| both(out, c.chunk));
            }
            Change::Pin { chunk, .. } => out.headers.extend(self.find_row(*chunk)),
            // Which chunk the tokens came from or went to depends on earlier changes of the batch: it can be any
            // chunk of the turn.
            Change::Merge { chunk, .. } | Change::Split { chunk, .. } => {
                self.mark_turn_dirty(chunk.turn, out);
            }
            Change::Batch(changes) => changes.iter().for_each(|c| self.collect_dirty(c, out)),
        }
    }

    fn mark_turn_dirty(&self, turn: TurnId, out: &mut DirtyRows) {
        let rows = self.turn_index(turn).map_or(0..0, |t| self.turn_rows(t));
        out.headers.extend(rows.clone());
        // A body that is not loaded has not changed.
        out.bodies.extend(
            rows.filter(|&row| self.chunks[row].len == 0 || self.chunks[row].loaded_body().is_some()),
        );
    }

    /// The rows of the chunks that a score changes.
    fn scored_rows(&self, score: &Score) -> BTreeSet<usize> {
        let mut rows: BTreeSet<_> = score.tallies.iter().filter_map(|(id, _)| self.find_row(*id)).collect();
        for run in &score.runs {
            rows.extend(self.chunk_ranges(run.start, run.brightness.len()).map(|(row, _)| row));
        }
        rows
    }
}

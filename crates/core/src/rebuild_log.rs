//! Changes that lead from an empty timeline to a given state, for a conversation whose log is lost.

use crate::change::{
    Append, AttentionTally, Change, ChunkSelection, DeleteReason, Extent, NewToken, PruneReason, Pruned,
    Score, TallyDelta,
};
use crate::timeline::{Chunk, Timeline};
use crate::token::{Position, TokenFlags};

impl Timeline {
    /// Changes that lead from a new timeline to this one: to the same state hash, not through the same history.
    ///
    /// # Panics
    /// When the body of a chunk is not loaded.
    #[must_use]
    pub fn rebuild_changes(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        for turn in 0..self.turns.len() {
            self.rebuild_turn(turn, &mut changes);
        }
        let mut score = Score::default();
        let (mut pruned, mut deleted) = (Vec::new(), Vec::new());
        for chunk in self.chunks() {
            if chunk.tally() != AttentionTally::default() {
                score.tallies.push((chunk.id(), TallyDelta::from_zero_to(chunk.tally())));
            }
            if chunk.is_pinned() {
                changes.push(Change::Pin { chunk: chunk.id(), pinned: true });
            }
            let runs = |flag: TokenFlags| Extent::Runs(chunk.runs_where(|f| f.contains(flag)).collect());
            if chunk.live_len() < chunk.len() {
                // A token can be both. Pruning comes first: a deleted token cannot be pruned.
                pruned.push(Pruned {
                    chunk: chunk.id(),
                    extent: runs(TokenFlags::PRUNED),
                    reason: PruneReason::BeforeImport,
                });
                deleted.push(ChunkSelection { chunk: chunk.id(), extent: runs(TokenFlags::DELETED) });
            }
        }
        pruned.retain(|p| p.extent != Extent::Runs(Vec::new()));
        deleted.retain(|d| d.extent != Extent::Runs(Vec::new()));
        changes.extend((!score.tallies.is_empty()).then_some(Change::Score(score)));
        changes.extend((!pruned.is_empty()).then_some(Change::Prune(pruned)));
        if !deleted.is_empty() {
            changes.push(Change::Delete { chunks: deleted, reason: DeleteReason::default() });
        }
        changes
    }

    /// Appends the tokens of a turn. The empty row of a merged chunk is made by a split and a merge.
    fn rebuild_turn(&self, turn: usize, changes: &mut Vec<Change>) {
        let rows = &self.chunks[self.turn_rows(turn)];
        let (id, role) = (self.turns[turn].id, self.turns[turn].role);
        let at = rows.first().map_or(self.next_position(), |c| c.start);
        let at = if rows.is_empty() { self.empty_turn_start(turn).unwrap_or(at) } else { at };
        // Tokens behind the first empty row are appended to the chunk before that row, and split off afterwards.
        let first_empty = rows.iter().position(|c| c.len == 0).unwrap_or(rows.len());
        let joined_index = first_empty.checked_sub(1).map_or(0, |last| rows[last].id.index);
        let separate = rows[..first_empty].iter().flat_map(|c| new_tokens(c, c.id.index));
        let joined = rows[first_empty..].iter().flat_map(|c| new_tokens(c, joined_index));
        let tokens = separate.chain(joined).collect();
        changes.push(Change::Append(Append { at, turn: id, role, tokens }));
        let tally = AttentionTally::default();
        for (i, row) in rows.iter().enumerate().skip(first_empty) {
            let Some(before) = rows[..i].iter().rev().find(|c| c.len > 0) else { continue };
            // For an empty row, any split will do; a split behind the first token is always possible.
            let at = if row.len == 0 { before.start.plus(1) } else { row.start };
            changes.push(Change::Split { chunk: before.id, at, tail_index: row.id.index, tally });
            if row.len == 0 {
                changes.push(Change::Merge { chunk: row.id, frees_id: false });
            }
        }
    }

    /// The position at which a turn without chunks begins.
    fn empty_turn_start(&self, turn: usize) -> Option<Position> {
        self.chunks.get(self.turns[turn].first_row as usize).map(|c| c.start)
    }
}

/// The tokens of a chunk as they are appended to the chunk with the index `chunk_index`.
fn new_tokens(chunk: &Chunk, chunk_index: u32) -> impl Iterator<Item = NewToken> {
    let body = chunk.loaded_body();
    (0..chunk.len as usize).map(move |i| {
        let body = body.unwrap_or_else(|| panic!("the body of {} is not loaded", chunk.id));
        NewToken {
            id: body.ids[i],
            text: body.text(i..i + 1).to_owned(),
            chunk_index,
            brightness: body.brightness[i],
            kind: body.flags[i].kind(),
        }
    })
}

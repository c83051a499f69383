//! [`Change::Append`]: new tokens at the end of the timeline.

use super::ApplyError;
use crate::change::{Append, Change, ChunkSelection, DeleteReason, Extent, TokenRun};
use crate::timeline::{BodyState, Chunk, Timeline, Turn};
use crate::token::ChunkId;

impl Timeline {
    pub(super) fn append(&mut self, append: &Append) -> Result<Change, ApplyError> {
        self.check_append(append)?;
        if self.turns.last().is_none_or(|t| t.id < append.turn) {
            let first_row = self.chunks.len() as u32;
            self.turns.push(Turn { id: append.turn, role: append.role, first_row });
        }
        let mut appended: Vec<(usize, TokenRun)> = Vec::new();
        for token in &append.tokens {
            let id = ChunkId::new(append.role, append.turn, token.chunk_index);
            if self.chunks.last().is_none_or(|c| c.id != id) {
                self.push_chunk(id);
            }
            let row = self.chunks.len() - 1;
            match appended.last_mut() {
                Some((last, run)) if *last == row => run.len += 1,
                _ => appended.push((row, TokenRun { start: self.next_position(), len: 1 })),
            }
            self.body_mut(row).push(token);
            self.len += 1;
            self.chunks[row].len += 1;
            self.chunks[row].live += 1;
        }
        let mut chunks = Vec::with_capacity(appended.len());
        for (row, run) in appended {
            self.live.add(row, run.len as i32);
            chunks.push(ChunkSelection { chunk: self.chunks[row].id, extent: Extent::Runs(vec![run]) });
        }
        Ok(Change::Delete { chunks, reason: DeleteReason::Undo })
    }

    fn check_append(&self, append: &Append) -> Result<(), ApplyError> {
        if append.at != self.next_position() {
            return Err(ApplyError::NotNextPosition { got: append.at, next: self.next_position() });
        }
        // The lowest chunk index that a token may have: that of the open chunk, or the next one where the last
        // chunk was merged into another.
        let mut lowest = 0;
        if let Some(last) = self.turns.last() {
            if append.turn < last.id || (append.turn == last.id && append.role != last.role) {
                return Err(ApplyError::NotLastTurn {
                    turn: append.turn,
                    role: append.role,
                    last: last.id,
                    last_role: last.role,
                });
            }
            let open = self.chunks.last().filter(|c| c.id.turn == append.turn);
            if let Some(open) = open.filter(|c| c.len > 0 && c.loaded_body().is_none()) {
                return Err(ApplyError::Unloaded(open.id));
            }
            lowest = open.map_or(0, |c| c.id.index + u32::from(c.len == 0));
        }
        for token in &append.tokens {
            if token.chunk_index < lowest {
                let chunk = ChunkId::new(append.role, append.turn, token.chunk_index);
                return Err(ApplyError::NotLastChunk { chunk });
            }
            lowest = token.chunk_index;
        }
        if let Some(bad) = append.tokens.iter().position(|t| !t.brightness.0.is_finite()) {
            return Err(ApplyError::BadScore(append.at.plus(bad)));
        }
        self.check_limits(append)
    }

    /// Lengths of texts, slots and rows are stored in 32 bits.
    fn check_limits(&self, append: &Append) -> Result<(), ApplyError> {
        let open_bytes = self.chunks.last().and_then(Chunk::loaded_body).map_or(0, |body| body.text.len());
        let bytes = append.tokens.iter().fold(open_bytes, |sum, t| sum + t.text.len());
        let index_fits = append.tokens.last().is_none_or(|t| t.chunk_index < u32::MAX);
        let slots = u32::try_from(self.live_len() + append.tokens.len());
        let rows = i32::try_from(self.chunks.len() + append.tokens.len());
        if u32::try_from(bytes).is_err() || !index_fits || slots.is_err() || rows.is_err() {
            return Err(ApplyError::LimitExceeded);
        }
        Ok(())
    }

    /// Adds an empty chunk at the end of the timeline.
    pub(super) fn push_chunk(&mut self, id: ChunkId) {
        let start = self.next_position();
        reserve_rows(&mut self.chunks);
        self.chunks.push(Chunk {
            id,
            pinned: false,
            start,
            len: 0,
            live: 0,
            deleted: 0,
            body: BodyState::Loaded(Box::default()),
        });
        self.live.push();
    }
}

/// Makes room for one more row, growing by an eighth instead of doubling: a long timeline consists mostly of old
/// rows, and doubling would waste as much memory as they take.
fn reserve_rows(rows: &mut Vec<Chunk>) {
    if rows.capacity() == rows.len() {
        rows.reserve_exact(rows.len() / 8 + 1025);
    }
}

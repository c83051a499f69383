//! [`Change::Merge`] and [`Change::Split`]: two neighbouring chunks of a turn become one, or one becomes two. Each
//! is the inverse of the other.

use super::{ApplyError, SplitError};
use crate::change::{AttentionTally, Change};
use crate::chunk_body::ChunkBody;
use crate::timeline::{BodyState, Chunk, Timeline};
use crate::token::{ChunkId, Position};

impl Timeline {
    /// Moves the tokens of `chunk` to the nearest earlier chunk of its turn. The emptied row stays, so that its id
    /// is not used again, unless `frees_id` is set and the row is the last one.
    pub(super) fn merge(&mut self, chunk: ChunkId, frees_id: bool) -> Result<Change, ApplyError> {
        let row = self.loaded_row(chunk)?;
        let Chunk { pinned, start, len, .. } = self.chunks[row];
        let target = (self.first_row_of_turn(chunk)..row)
            .rev()
            .find(|&i| self.chunks[i].len > 0)
            .filter(|&i| self.chunks[i].pinned == pinned)
            .ok_or(ApplyError::NothingToMerge(chunk, pinned))?;
        let target_id = self.chunks[target].id;
        let Some(head) = self.chunks[target].loaded_body() else {
            return Err(ApplyError::Unloaded(target_id));
        };
        let tail = self.chunk_ref(row).body();
        let tally = head.tally.checked_add(tail.tally).ok_or(ApplyError::BadTally(chunk))?;
        let merged_len = self.chunks[target].len.checked_add(len).ok_or(ApplyError::LimitExceeded)?;
        if u32::try_from(head.text.len() + tail.text.len()).is_err() {
            return Err(ApplyError::LimitExceeded);
        }
        let emptied = &mut self.chunks[row];
        (emptied.len, emptied.pinned) = (0, false);
        let tail = std::mem::replace(&mut emptied.body, BodyState::Unloaded(ChunkBody::default().checksum()));
        let BodyState::Loaded(tail) = tail else { unreachable!("`loaded_row` has checked the body") };
        self.recount(row);
        self.chunks[target].len = merged_len;
        let body = self.body_mut(target);
        body.append(&tail);
        body.tally = tally;
        self.recount(target);
        // An empty row starts where the chunk before it ends.
        let end = start.plus(len as usize);
        self.chunks[target + 1..=row].iter_mut().for_each(|c| c.start = end);
        let in_last_turn = self.turns.last().is_some_and(|t| t.id == chunk.turn);
        if frees_id && in_last_turn && row + 1 == self.chunks.len() {
            self.chunks.truncate(row);
            self.live.truncate(row);
        }
        Ok(Change::Split { chunk: target_id, at: start, tail_index: chunk.index, tally: tail.tally })
    }

    /// Moves the tokens of `chunk` from `at` on to the chunk with the index `tail_index`, which takes `tally` with
    /// it.
    pub(super) fn split(
        &mut self,
        chunk: ChunkId,
        at: Position,
        tail_index: u32,
        tally: AttentionTally,
    ) -> Result<Change, ApplyError> {
        let bad = |reason| ApplyError::BadSplit { chunk, at, reason };
        let row = self.loaded_row(chunk)?;
        let Chunk { pinned, start, len, .. } = self.chunks[row];
        let head_len = at.0.checked_sub(start.0).filter(|&n| n > 0 && n < u64::from(len));
        let head_len = head_len.ok_or_else(|| bad(SplitError::NotInside))? as u32;
        let head_tally = self.chunk_ref(row).tally().checked_sub(tally);
        let head_tally = head_tally.ok_or_else(|| bad(SplitError::TallyTooLarge))?;
        if tail_index == u32::MAX {
            return Err(ApplyError::LimitExceeded);
        }
        let tail_id = ChunkId { index: tail_index, ..chunk };
        let target = self.split_target(row, tail_id).map_err(bad)?;
        let is_new_row = target == self.chunks.len();
        if is_new_row {
            self.push_chunk(tail_id);
        }
        self.chunks[row].len = head_len;
        let head = self.body_mut(row);
        let body = Box::new(ChunkBody { tally, ..head.split_off(head_len as usize) });
        head.tally = head_tally;
        let tail = &mut self.chunks[target];
        (tail.start, tail.len, tail.pinned, tail.body) =
            (at, len - head_len, pinned, BodyState::Loaded(body));
        // An empty row starts where the chunk before it ends.
        self.chunks[row + 1..target].iter_mut().for_each(|c| c.start = at);
        self.recount(row);
        self.recount(target);
        Ok(Change::Merge { chunk: tail_id, frees_id: is_new_row })
    }

    /// The row for the tail of a split: an empty row behind `row`, or a new one at the end of the timeline.
    fn split_target(&self, row: usize, tail_id: ChunkId) -> Result<usize, SplitError> {
        let turn = tail_id.turn;
        let target = match self.find_row(tail_id) {
            Some(target) if self.chunks[target].len > 0 => return Err(SplitError::IndexInUse),
            Some(target) if target > row => target,
            None if self.turns.last().is_some_and(|t| t.id == turn)
                && tail_id.index >= self.next_chunk_index(turn) =>
            {
                self.chunks.len()
            }
            _ => return Err(SplitError::IndexNotFree),
        };
        let mut behind = self.chunks[row + 1..].iter().take_while(|c| c.id.turn == turn);
        if behind.by_ref().take(target - row - 1).any(|c| c.len > 0) {
            return Err(SplitError::NotAdjacent);
        }
        Ok(target)
    }

    fn first_row_of_turn(&self, chunk: ChunkId) -> usize {
        self.turn_index(chunk.turn).map_or(0, |t| self.turns[t].first_row as usize)
    }
}

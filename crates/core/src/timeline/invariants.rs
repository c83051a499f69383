//! The invariants of a timeline that can be checked from the timeline alone.

use super::{BodyState, Chunk, Timeline, TimelineError};
use crate::live_index::LiveIndex;
use crate::token::Position;

impl Timeline {
    /// Checks every invariant. Costs a pass over all rows and all loaded bodies: for tests, fuzz targets and
    /// checks of stored data.
    ///
    /// # Errors
    /// The first broken invariant. No sequence of changes leads to one; damaged stored data can.
    pub fn check_invariants(&self) -> Result<(), TimelineError> {
        self.check_turns()?;
        self.check_positions()?;
        for (row, chunk) in self.chunks.iter().enumerate() {
            if self.find_row(chunk.id) != Some(row) {
                return Err(TimelineError::RowNotFound(chunk.id));
            }
            check_chunk(chunk)?;
        }
        if LiveIndex::build(self.chunks.iter().map(|c| c.live)).as_ref() != Some(&self.live) {
            return Err(TimelineError::LiveIndex);
        }
        Ok(())
    }

    /// Checks that each chunk starts where the chunk before it ends.
    fn check_positions(&self) -> Result<(), TimelineError> {
        let mut end = Position(0);
        for chunk in &self.chunks {
            if chunk.start != end {
                return Err(TimelineError::ChunkStart(chunk.id));
            }
            end = chunk.start.plus(chunk.len as usize);
        }
        if end != self.next_position() {
            return Err(TimelineError::Length { chunks: end.0, tokens: self.len });
        }
        Ok(())
    }

    /// Checks that turns are in order, and that each has its own chunks in order.
    fn check_turns(&self) -> Result<(), TimelineError> {
        let in_order = |w: &&[super::Turn]| w[0].id < w[1].id && w[0].first_row <= w[1].first_row;
        if let Some(pair) = self.turns.windows(2).find(|w| !in_order(w)) {
            return Err(TimelineError::TurnOrder(pair[1].id));
        }
        if self.turns.first().map_or(self.chunks.len(), |t| t.first_row as usize) != 0 {
            return Err(TimelineError::ChunkWithoutTurn);
        }
        for (turn, turn_index) in self.turns.iter().zip(0..) {
            let chunks = self.chunks.get(self.turn_rows(turn_index)).unwrap_or_default();
            if chunks.iter().any(|c| (c.id.turn, c.id.role) != (turn.id, turn.role))
                || chunks.windows(2).any(|w| w[0].id.index >= w[1].id.index)
                || turn.first_row as usize > self.chunks.len()
            {
                return Err(TimelineError::TurnChunks(turn.id));
            }
        }
        Ok(())
    }
}

/// Checks that the body of a chunk agrees with its row and with itself.
fn check_chunk(chunk: &Chunk) -> Result<(), TimelineError> {
    let body = match &chunk.body {
        BodyState::Loaded(body) => body,
        BodyState::Unloaded(_) if chunk.live > 0 => return Err(TimelineError::LiveUnloaded(chunk.id)),
        BodyState::Unloaded(_) => return Ok(()),
    };
    chunk.check_body(body, None)?;
    if [body.brightness.len(), body.flags.len(), body.ends.len()] != [body.len(); 3] {
        return Err(TimelineError::ColumnLength(chunk.id));
    }
    let end = body.ends.last().map_or(0, |&e| e as usize);
    if !body.ends.is_sorted() || end != body.text.len() {
        return Err(TimelineError::TextEnds(chunk.id));
    }
    if body.brightness.iter().any(|b| !b.0.is_finite()) {
        return Err(TimelineError::BadBrightness(chunk.id));
    }
    Ok(())
}

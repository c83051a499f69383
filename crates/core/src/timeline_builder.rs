//! Builds a timeline from its stored parts, and checks them.

use crate::chunk_body::ChunkBody;
use crate::timeline::{BodyState, Chunk, ChunkHeader, Timeline, TimelineError, Turn};
use crate::token::{ChunkId, Position};

/// A timeline under construction: first turns and headers in order, then bodies.
#[derive(Debug, Default)]
pub struct TimelineBuilder {
    timeline: Timeline,
    /// The index of the turn that the next chunk belongs to.
    turn_index: usize,
}

impl TimelineBuilder {
    /// A builder with memory for so many turns and chunks.
    #[must_use]
    pub fn with_capacity(turns: usize, chunks: usize) -> Self {
        let (turns, chunks) = (Vec::with_capacity(turns), Vec::with_capacity(chunks));
        Self { timeline: Timeline { turns, chunks, ..Timeline::default() }, turn_index: 0 }
    }

    /// How many rows there are so far, including the empty rows of merged chunks.
    #[must_use]
    pub fn row_count(&self) -> usize {
        self.timeline.chunks.len()
    }

    /// Adds the next turn. It must come before its first chunk.
    ///
    /// # Errors
    /// When it does not come after the turns and chunks so far.
    pub fn push_turn(&mut self, turn: Turn) -> Result<(), TimelineError> {
        let last = self.timeline.turns.last();
        let in_order = last.is_none_or(|l| l.id < turn.id && l.first_row <= turn.first_row);
        let first_is_not_at_start = last.is_none() && turn.first_row > 0;
        if !in_order || (turn.first_row as usize) < self.row_count() || first_is_not_at_start {
            return Err(TimelineError::TurnOrder(turn.id));
        }
        self.timeline.turns.push(turn);
        Ok(())
    }

    /// Adds the next chunk. Its turn follows from its row number.
    ///
    /// # Errors
    /// When the header contradicts itself or those before it.
    pub fn push_chunk(&mut self, header: &PackedChunkHeader) -> Result<(), TimelineError> {
        let timeline = &mut self.timeline;
        let row = timeline.chunks.len();
        while timeline.turns.get(self.turn_index + 1).is_some_and(|t| t.first_row as usize <= row) {
            self.turn_index += 1;
        }
        let turn = timeline.turns.get(self.turn_index).ok_or(TimelineError::ChunkWithoutTurn)?;
        let id = ChunkId::new(turn.role, turn.id, header.index);
        let counted = u64::from(header.live) + u64::from(header.deleted);
        let before = timeline.chunks.last().filter(|c| c.id.turn == id.turn);
        if counted > u64::from(header.len)
            || (header.len == 0 && header.pinned)
            || header.index == u32::MAX
            || before.is_some_and(|c| c.id.index >= header.index)
        {
            return Err(TimelineError::BadHeader(id));
        }
        timeline.chunks.push(Chunk {
            id,
            pinned: header.pinned,
            start: Position(timeline.len),
            len: header.len,
            live: header.live,
            deleted: header.deleted,
            body: BodyState::Unloaded(header.checksum),
        });
        timeline.len += u64::from(header.len);
        timeline.live.push_live(header.live).ok_or(TimelineError::TooManyLive)
    }

    /// The id of the chunk in a row.
    #[must_use]
    pub fn chunk_id(&self, row: usize) -> Option<ChunkId> {
        self.timeline.chunks.get(row).map(|c| c.id)
    }

    /// The header of the chunk in a row.
    #[must_use]
    pub fn header(&self, row: usize) -> Option<ChunkHeader> {
        (row < self.row_count()).then(|| self.timeline.chunk_headers(row..row + 1).next()).flatten()
    }

    /// Whether the last chunk has tokens but no live ones. Its body must be loaded nevertheless: the next append may
    /// extend it.
    #[must_use]
    pub fn last_is_pruned(&self) -> bool {
        self.timeline.chunks.last().is_some_and(|c| c.live == 0 && c.len > 0)
    }

    /// Adds the body of the chunk in a row. The checksum is compared only for a chunk without live tokens: the
    /// header of any other has none.
    ///
    /// # Errors
    /// When there is no such row, or the counts or the checksum of the body are not those of its header.
    pub fn set_body(&mut self, row: usize, body: ChunkBody) -> Result<(), TimelineError> {
        let chunk = self.timeline.chunks.get_mut(row).ok_or(TimelineError::NoRow(row))?;
        let checksum = match chunk.body {
            BodyState::Unloaded(checksum) => (chunk.live == 0).then_some(checksum),
            BodyState::Loaded(_) => None,
        };
        chunk.check_body(&body, checksum)?;
        chunk.body = BodyState::Loaded(Box::new(body));
        Ok(())
    }

    /// The complete timeline.
    ///
    /// # Errors
    /// When a chunk with live tokens has no body, or a turn begins behind the last row.
    pub fn finish(self) -> Result<Timeline, TimelineError> {
        if self.timeline.turns.last().is_some_and(|t| t.first_row as usize > self.row_count()) {
            return Err(TimelineError::TurnBehindEnd);
        }
        let missing = self.timeline.live_chunks().find(|c| !c.is_loaded()).map(|c| c.id());
        match missing {
            Some(chunk) => Err(TimelineError::LiveUnloaded(chunk)),
            None => Ok(self.timeline),
        }
    }
}

/// The header of a chunk as a store writes it in a block, where the row number gives the turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedChunkHeader {
    /// The index of the chunk in its turn.
    pub index: u32,
    /// Whether it is protected from pruning.
    pub pinned: bool,
    /// How many tokens it has.
    pub len: u32,
    /// How many of them are live.
    pub live: u32,
    /// How many of them are deleted.
    pub deleted: u32,
    /// The checksum of its body; not used for a chunk with live tokens.
    pub checksum: u64,
}

//! A timeline as a store keeps it: turns, headers, and bodies as bytes. Only the rows that a change has made dirty
//! are written, so a wrong set of dirty rows shows when the timeline is loaded.

use crate::Error;
use crate::change::Change;
use crate::chunk_body::ChunkBody;
use crate::timeline::{ChunkHeader, Timeline, TimelineError, Turn};
use crate::timeline_builder::{PackedChunkHeader, TimelineBuilder};
use crate::token::ChunkId;

/// The stored parts of one timeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredTimeline {
    turns: Vec<Turn>,
    headers: Vec<ChunkHeader>,
    bodies: Vec<Vec<u8>>,
}

impl StoredTimeline {
    /// Writes the rows that `change`, which has led to `after`, has made dirty.
    ///
    /// # Errors
    /// When a changed body is not loaded.
    ///
    /// # Panics
    /// When a dirty row is behind the end of the timeline.
    pub fn write(&mut self, change: &Change, after: &Timeline) -> Result<(), Error> {
        let dirty = after.dirty_rows(change);
        let old_count = self.headers.len();
        self.turns = after.turns().to_vec();
        self.headers.truncate(after.row_count());
        self.bodies.truncate(after.row_count());
        self.headers.extend(after.chunk_headers(self.headers.len()..after.row_count()));
        self.bodies.resize(after.row_count(), Vec::new());
        for row in dirty.headers.into_iter().filter(|&row| row < old_count.min(after.row_count())) {
            self.headers[row] = after.chunk_headers(row..row + 1).next().expect("the row exists");
        }
        for row in dirty.bodies {
            let bytes = &mut self.bodies[row];
            bytes.clear();
            match after.body_at_row(row) {
                Some(body) => body.encode(bytes),
                None if self.headers[row].len == 0 => {}
                None => {
                    let message = format!("the body of {} is not loaded", self.headers[row].id);
                    return Err(Error::internal("writing the timeline", message));
                }
            }
        }
        Ok(())
    }

    /// The timeline, with the bodies of chunks that have live tokens.
    ///
    /// # Errors
    /// When the parts contradict each other.
    pub fn load(&self) -> Result<Timeline, Error> {
        let damaged = |error: TimelineError| Error::damaged("loading the timeline", error.to_string());
        let mut builder = TimelineBuilder::default();
        self.turns.iter().try_for_each(|&turn| builder.push_turn(turn)).map_err(damaged)?;
        for &ChunkHeader { id, pinned, len, live, deleted, checksum } in &self.headers {
            let checksum = checksum.unwrap_or_default();
            let header = PackedChunkHeader { index: id.index, pinned, len, live, deleted, checksum };
            builder.push_chunk(&header).map_err(damaged)?;
        }
        for row in (0..self.headers.len()).filter(|&row| self.headers[row].live > 0) {
            builder.set_body(row, self.decode_body(row)?).map_err(damaged)?;
        }
        builder.finish().map_err(damaged)
    }

    /// The body of one chunk.
    ///
    /// # Errors
    /// When there is no such chunk, or its bytes are damaged.
    pub fn fetch(&self, chunk: ChunkId) -> Result<ChunkBody, Error> {
        let row = self.headers.iter().position(|h| h.id == chunk);
        let missing = || Error::not_found("loading a body", format!("there is no chunk {chunk}"));
        self.decode_body(row.ok_or_else(missing)?)
    }

    fn decode_body(&self, row: usize) -> Result<ChunkBody, Error> {
        ChunkBody::decode(&self.bodies[row])
            .map_err(|error| Error::damaged(format!("loading {}", self.headers[row].id), error.to_string()))
    }
}

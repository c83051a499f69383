//! How a timeline changes: [`Timeline::apply`] checks a [`Change`] completely, performs it, and returns its
//! inverse. An error leaves the timeline exactly as it was.

mod append;
mod error;
mod flags;
mod merge_split;

pub use error::{ApplyError, FlagOperation, SplitError, TokenState};

use crate::change::{BrightnessRun, Change, Score, TallyDelta};
use crate::chunk_body::ChunkBody;
use crate::timeline::{BodyState, Timeline};
use crate::token::{Brightness, ChunkId, Position};
use std::ops::Range;

impl Timeline {
    /// Performs `change` completely and returns its inverse.
    ///
    /// # Errors
    /// When the change does not fit this timeline, which is then unchanged.
    pub fn apply(&mut self, change: &Change) -> Result<Change, ApplyError> {
        if !matches!(change, Change::Batch(_)) {
            return self.apply_one(change);
        }
        let mut applied = Vec::new();
        match self.apply_each(change, &mut applied) {
            Ok(()) => Ok(inverse_of(applied)),
            Err(error) => {
                self.roll_back(&mut applied);
                Err(error)
            }
        }
    }

    /// Performs `change`, then calls `commit`, and rolls the change back if `commit` fails. `commit` gets the
    /// timeline after the change, so that a store can write the rows that have changed. Returns the inverse.
    ///
    /// # Errors
    /// When the change does not fit, and every error of `commit`.
    pub fn transact<E: From<ApplyError>>(
        &mut self,
        change: &Change,
        commit: impl FnOnce(&Timeline) -> Result<(), E>,
    ) -> Result<Change, E> {
        let mut applied = Vec::new();
        let result = self.apply_each(change, &mut applied).map_err(E::from).and_then(|()| commit(self));
        self.revision.0 += u64::from(result.is_ok());
        match (result, change) {
            (Err(error), _) => {
                self.roll_back(&mut applied);
                Err(error)
            }
            (Ok(()), Change::Batch(_)) => Ok(inverse_of(applied)),
            (Ok(()), _) => Ok(applied.pop().map(|(_, inverse)| inverse).expect("one change has one inverse")),
        }
    }

    /// Performs a change that is not a batch.
    fn apply_one(&mut self, change: &Change) -> Result<Change, ApplyError> {
        match change {
            Change::Append(append) => self.append(append),
            Change::Score(score) => self.score(score),
            Change::Prune(pruned) => self.prune(pruned),
            Change::Resurrect(resurrected) => self.resurrect(resurrected),
            Change::Pin { chunk, pinned } => self.pin(*chunk, *pinned),
            Change::Delete { chunks, .. } => self.delete(chunks),
            Change::Undelete(chunks) => self.undelete(chunks),
            Change::Merge { chunk, frees_id } => self.merge(*chunk, *frees_id),
            Change::Split { chunk, at, tail_index, tally } => self.split(*chunk, *at, *tail_index, *tally),
            Change::Batch(_) => unreachable!("`apply_each` flattens batches"),
        }
    }

    /// Performs a change, flattening nested batches, and pushes to `applied` the end of the timeline before each
    /// part and the inverse of the part. On an error, the parts before it stay applied and are in `applied`.
    fn apply_each(
        &mut self,
        change: &Change,
        applied: &mut Vec<(TimelineEnd, Change)>,
    ) -> Result<(), ApplyError> {
        if let Change::Batch(changes) = change {
            return changes.iter().try_for_each(|change| self.apply_each(change, applied));
        }
        let before = self.end();
        let inverse = self.apply_one(change)?;
        applied.push((before, inverse));
        Ok(())
    }

    fn end(&self) -> TimelineEnd {
        let last_chunk_len = self.chunks.last().map_or(0, |c| c.len);
        TimelineEnd { tokens: self.len, turns: self.turns.len(), chunks: self.chunks.len(), last_chunk_len }
    }

    /// Undoes changes that no caller has seen, the last one first. Unlike the inverse, this also removes appended
    /// tokens: their positions were never handed out.
    fn roll_back(&mut self, applied: &mut Vec<(TimelineEnd, Change)>) {
        while let Some((before, inverse)) = applied.pop() {
            self.apply(&inverse).expect("the inverse of an applied change fits");
            self.truncate(before);
        }
    }

    /// Removes tokens, chunks and turns behind `end`. The inverse of the append has deleted the tokens before.
    fn truncate(&mut self, end: TimelineEnd) {
        self.len = end.tokens;
        self.turns.truncate(end.turns);
        self.chunks.truncate(end.chunks);
        self.live.truncate(end.chunks);
        if let Some(last) = self.chunks.last_mut().filter(|c| c.len > end.last_chunk_len) {
            last.len = end.last_chunk_len;
            self.body_mut(end.chunks - 1).truncate(end.last_chunk_len as usize);
            self.recount(end.chunks - 1);
        }
    }

    fn pin(&mut self, chunk: ChunkId, pinned: bool) -> Result<Change, ApplyError> {
        let row = self.row_of(chunk)?;
        if self.chunks[row].pinned == pinned {
            return Err(ApplyError::PinUnchanged(chunk, pinned));
        }
        self.chunks[row].pinned = pinned;
        Ok(Change::Pin { chunk, pinned: !pinned })
    }

    fn score(&mut self, score: &Score) -> Result<Change, ApplyError> {
        score.runs.iter().try_for_each(|run| self.check_brightness_run(run))?;
        for (n, &(chunk, delta)) in score.tallies.iter().enumerate() {
            if let Err(error) = self.add_to_tally(chunk, delta) {
                for &(chunk, delta) in score.tallies[..n].iter().rev() {
                    self.add_to_tally(chunk, delta.inverse()).expect("an applied delta can be undone");
                }
                return Err(error);
            }
        }
        let mut inverse = Score { runs: Vec::with_capacity(score.runs.len()), tallies: Vec::new() };
        for run in &score.runs {
            let brightness = self.replace_brightness(run.start, &run.brightness);
            inverse.runs.push(BrightnessRun { start: run.start, brightness });
        }
        // Runs may overlap. In reverse order, the oldest value of a token is the last one written.
        inverse.runs.reverse();
        inverse.tallies = score.tallies.iter().rev().map(|&(c, delta)| (c, delta.inverse())).collect();
        Ok(Change::Score(inverse))
    }

    fn check_brightness_run(&self, run: &BrightnessRun) -> Result<(), ApplyError> {
        let end = run.start.0.checked_add(run.brightness.len() as u64);
        if end.is_none_or(|end| end > self.next_position().0) {
            return Err(ApplyError::BadScore(run.start));
        }
        if let Some(bad) = run.brightness.iter().position(|b| !b.0.is_finite()) {
            return Err(ApplyError::BadScore(run.start.plus(bad)));
        }
        let mut covered = self.chunk_ranges(run.start, run.brightness.len());
        match covered.find(|&(row, _)| self.chunks[row].loaded_body().is_none()) {
            Some((row, _)) => Err(ApplyError::Unloaded(self.chunks[row].id)),
            None => Ok(()),
        }
    }

    fn add_to_tally(&mut self, chunk: ChunkId, delta: TallyDelta) -> Result<(), ApplyError> {
        let row = self.loaded_row(chunk)?;
        let body = self.body_mut(row);
        body.tally = body.tally.checked_add_delta(delta).ok_or(ApplyError::BadTally(chunk))?;
        Ok(())
    }

    /// Sets the brightness of tokens from `start` on and returns the previous values.
    fn replace_brightness(&mut self, start: Position, brightness: &[Brightness]) -> Vec<Brightness> {
        let mut old = Vec::with_capacity(brightness.len());
        for (row, range) in self.chunk_ranges(start, brightness.len()) {
            let new = &brightness[old.len()..old.len() + range.len()];
            let column = &mut self.body_mut(row).brightness[range];
            old.extend_from_slice(column);
            column.copy_from_slice(new);
        }
        old
    }

    /// The rows, and the index ranges within their bodies, that `len` tokens from `start` on lie in, in order.
    pub(crate) fn chunk_ranges(
        &self,
        start: Position,
        len: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let first = self.chunks.partition_point(|c| c.start <= start).saturating_sub(1);
        let end = start.0.saturating_add(len as u64);
        let rows = self.chunks[first.min(self.chunks.len())..].iter().zip(first..);
        let ranges: Vec<_> = rows
            .take_while(|(c, _)| c.start.0 < end)
            .filter(|(c, _)| start.0 < c.start.0 + u64::from(c.len))
            .map(|(c, row)| {
                let from = start.0.saturating_sub(c.start.0) as usize;
                (row, from..(end - c.start.0).min(u64::from(c.len)) as usize)
            })
            .collect();
        ranges.into_iter()
    }

    /// The body of a chunk that a check has found to be loaded.
    fn body_mut(&mut self, row: usize) -> &mut ChunkBody {
        match &mut self.chunks[row].body {
            BodyState::Loaded(body) => body,
            BodyState::Unloaded(_) => {
                unreachable!("every change checks that the bodies it changes are loaded")
            }
        }
    }

    /// Updates the counts of live and deleted tokens of a chunk from the flags of its tokens.
    fn recount(&mut self, row: usize) {
        let chunk = &mut self.chunks[row];
        let (live, deleted) = chunk.loaded_body().map_or((0, 0), ChunkBody::live_and_deleted);
        let delta = live.cast_signed() - chunk.live.cast_signed();
        (chunk.live, chunk.deleted) = (live, deleted);
        if delta != 0 {
            self.live.add(row, delta);
        }
    }

    /// The row of a chunk that holds tokens.
    fn row_of(&self, id: ChunkId) -> Result<usize, ApplyError> {
        self.find_row(id).filter(|&i| self.chunks[i].len > 0).ok_or(ApplyError::NoChunk(id))
    }

    /// The row of a chunk whose body is loaded.
    fn loaded_row(&self, id: ChunkId) -> Result<usize, ApplyError> {
        let row = self.row_of(id)?;
        if self.chunks[row].loaded_body().is_some() { Ok(row) } else { Err(ApplyError::Unloaded(id)) }
    }
}

/// The inverse of a list of changes, as a batch.
fn inverse_of(applied: Vec<(TimelineEnd, Change)>) -> Change {
    Change::Batch(applied.into_iter().rev().map(|(_, inverse)| inverse).collect())
}

/// The lengths of a timeline before a change.
#[derive(Clone, Copy, Debug)]
struct TimelineEnd {
    tokens: u64,
    turns: usize,
    chunks: usize,
    last_chunk_len: u32,
}

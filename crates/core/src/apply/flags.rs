//! [`Change::Prune`], [`Change::Resurrect`], [`Change::Delete`] and [`Change::Undelete`]: each sets or clears one
//! flag of tokens.

use super::{ApplyError, FlagOperation, TokenState};
use crate::change::{
    BrightnessRun, Change, ChunkSelection, DeleteReason, Extent, PruneReason, Pruned, ResurrectReason,
    Resurrected, Score, TokenRun,
};
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{ChunkId, Position, TokenFlags};
use std::collections::BTreeSet;

impl FlagOperation {
    /// The flag, and whether the operation sets or clears it.
    fn flag(self) -> (TokenFlags, bool) {
        match self {
            FlagOperation::Prune => (TokenFlags::PRUNED, true),
            FlagOperation::Resurrect => (TokenFlags::PRUNED, false),
            FlagOperation::Delete => (TokenFlags::DELETED, true),
            FlagOperation::Undelete => (TokenFlags::DELETED, false),
        }
    }

    /// Whether a token with these flags can take part. A deleted token is neither pruned nor resurrected.
    fn fits(self, flags: TokenFlags) -> bool {
        let (flag, set) = self.flag();
        flags.contains(flag) != set && (flag == TokenFlags::DELETED || !flags.contains(TokenFlags::DELETED))
    }
}

impl Timeline {
    pub(super) fn prune(&mut self, pruned: &[Pruned]) -> Result<Change, ApplyError> {
        let selected: Vec<_> = pruned.iter().map(|p| (p.chunk, &p.extent)).collect();
        let runs = self.set_flags(&selected, FlagOperation::Prune)?;
        let inverse = pruned.iter().zip(runs).rev().map(|(pruned, runs)| Resurrected {
            chunk: pruned.chunk,
            extent: Extent::Runs(runs),
            brightness: None,
            reason: ResurrectReason::Undo,
        });
        Ok(Change::Resurrect(inverse.collect()))
    }

    pub(super) fn resurrect(&mut self, resurrected: &[Resurrected]) -> Result<Change, ApplyError> {
        if let Some(bad) = resurrected.iter().find(|r| r.brightness.is_some_and(|b| !b.0.is_finite())) {
            return Err(ApplyError::BadScore(self.chunk(bad.chunk).map_or(Position(0), |c| c.start())));
        }
        let selected: Vec<_> = resurrected.iter().map(|r| (r.chunk, &r.extent)).collect();
        let runs = self.set_flags(&selected, FlagOperation::Resurrect)?;
        let mut old = Score::default();
        for (resurrected, runs) in resurrected.iter().zip(&runs) {
            let Some(brightness) = resurrected.brightness else { continue };
            for run in runs {
                let brightness = self.replace_brightness(run.start, &vec![brightness; run.len as usize]);
                old.runs.push(BrightnessRun { start: run.start, brightness });
            }
        }
        let inverse = resurrected.iter().zip(runs).rev().map(|(resurrected, runs)| Pruned {
            chunk: resurrected.chunk,
            extent: Extent::Runs(runs),
            reason: PruneReason::Undo,
        });
        let prune = Change::Prune(inverse.collect());
        if old.runs.is_empty() { Ok(prune) } else { Ok(Change::Batch(vec![Change::Score(old), prune])) }
    }

    pub(super) fn delete(&mut self, chunks: &[ChunkSelection]) -> Result<Change, ApplyError> {
        Ok(Change::Undelete(self.set_deleted(chunks, FlagOperation::Delete)?))
    }

    pub(super) fn undelete(&mut self, chunks: &[ChunkSelection]) -> Result<Change, ApplyError> {
        let chunks = self.set_deleted(chunks, FlagOperation::Undelete)?;
        Ok(Change::Delete { chunks, reason: DeleteReason::Undo })
    }

    /// Deletes or undeletes; returns the selection of the inverse.
    fn set_deleted(
        &mut self,
        chunks: &[ChunkSelection],
        operation: FlagOperation,
    ) -> Result<Vec<ChunkSelection>, ApplyError> {
        let selected: Vec<_> = chunks.iter().map(|c| (c.chunk, &c.extent)).collect();
        let runs = self.set_flags(&selected, operation)?;
        let inverse = chunks.iter().zip(runs).rev();
        Ok(inverse.map(|(c, runs)| ChunkSelection { chunk: c.chunk, extent: Extent::Runs(runs) }).collect())
    }

    /// Sets or clears the flag of the operation and returns the tokens that have changed, by chunk. Checks every
    /// chunk before it changes one.
    fn set_flags(
        &mut self,
        selected: &[(ChunkId, &Extent)],
        operation: FlagOperation,
    ) -> Result<Vec<Vec<TokenRun>>, ApplyError> {
        let mut runs_by_chunk = Vec::with_capacity(selected.len());
        let mut ids = BTreeSet::new();
        for &(id, extent) in selected {
            if !ids.insert(id) {
                return Err(ApplyError::DuplicateChunk(id));
            }
            let chunk = self.chunk_ref(self.loaded_row(id)?);
            runs_by_chunk.push(checked_runs(chunk, extent, operation)?);
        }
        let (flag, set) = operation.flag();
        for (&(id, _), runs) in selected.iter().zip(&runs_by_chunk) {
            let row = self.row_of(id)?;
            for run in runs {
                let range = self.chunk_ref(row).body_range(*run);
                self.body_mut(row).flags[range].iter_mut().for_each(|f| *f = f.with(flag, set));
            }
            self.recount(row);
        }
        Ok(runs_by_chunk)
    }
}

/// The runs of a chunk that an operation changes, all of whose tokens are in the right state for it.
fn checked_runs(
    chunk: ChunkRef<'_>,
    extent: &Extent,
    operation: FlagOperation,
) -> Result<Vec<TokenRun>, ApplyError> {
    let wrong_state = |at, flags| {
        let state = TokenState::from_flags(flags);
        ApplyError::WrongState { chunk: chunk.id(), operation, at, state }
    };
    let runs = match extent {
        Extent::Whole => chunk.runs_where(|flags| operation.fits(flags)).collect(),
        Extent::Runs(runs) => runs.clone(),
    };
    let mut next = chunk.start();
    for run in &runs {
        let end = run.start.0.checked_add(u64::from(run.len));
        if run.start < next || end.is_none_or(|end| end > chunk.start().plus(chunk.len()).0) {
            return Err(ApplyError::BadRuns(chunk.id()));
        }
        next = run.start.plus(run.len as usize);
        let flags = &chunk.body().flags[chunk.body_range(*run)];
        if let Some(bad) = flags.iter().position(|&flags| !operation.fits(flags)) {
            return Err(wrong_state(run.start.plus(bad), flags[bad]));
        }
    }
    if runs.iter().all(|r| r.len == 0) && *extent == Extent::Whole {
        return Err(wrong_state(chunk.start(), chunk.body().flags[0]));
    }
    Ok(runs)
}

impl TokenState {
    /// The state that these flags mean. A token that is pruned and deleted counts as deleted.
    fn from_flags(flags: TokenFlags) -> Self {
        if flags.contains(TokenFlags::DELETED) {
            TokenState::Deleted
        } else if flags.contains(TokenFlags::PRUNED) {
            TokenState::Pruned
        } else {
            TokenState::Live
        }
    }
}

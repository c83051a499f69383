//! The user's manual edits of the context: pin, unpin, prune, resurrect, delete, undelete, merge. Each function
//! plans a [`Change`] or refuses with the reason.

use crate::change::{
    BrightnessRun, Change, ChunkSelection, DeleteReason, Extent, PruneReason, Pruned, ResurrectReason,
    Resurrected, Score,
};
use crate::resurrect::resurrection_group;
use crate::timeline::{ChunkRef, Exchange, Timeline};
use crate::token::{Brightness, ChunkId, Role, TokenFlags, TurnId};
use std::collections::BTreeSet;

/// Why a manual edit is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManualEditError {
    /// No chunk with this id holds a token.
    #[error("there is no chunk {0}")]
    NoChunk(ChunkId),
    /// The chunk is deleted.
    #[error("{0} is deleted; undelete it first")]
    Deleted(ChunkId),
    /// All tokens of the chunk are in the context window.
    #[error("cannot resurrect {0}: it is in the context window already")]
    AlreadyLive(ChunkId),
    /// No token of the chunk is in the context window.
    #[error("cannot prune {0}: it is not in the context window")]
    AlreadyPruned(ChunkId),
    /// The chunk is pinned and live.
    #[error("cannot pin {0}: it is pinned already")]
    AlreadyPinned(ChunkId),
    /// The chunk is not pinned.
    #[error("cannot unpin {0}: it is not pinned")]
    NotPinned(ChunkId),
    /// A pinned chunk depends on the chunk that is to be pruned.
    #[error("cannot prune {asked}: {pinned} is pinned and depends on it; unpin {pinned} first")]
    PinnedDependent {
        /// The chunk that is to be pruned.
        asked: ChunkId,
        /// The pinned chunk.
        pinned: ChunkId,
    },
    /// The system prompt is never pruned.
    #[error("cannot prune {0}: it is part of the system prompt")]
    SystemPrompt(ChunkId),
    /// The chunk that is to be pruned is pinned.
    #[error("cannot prune {0}: it is pinned; unpin it first")]
    Pinned(ChunkId),
    /// The running turn and its question are not pruned.
    #[error(
        "cannot prune {0}: it is part of the running turn, or of its question; wait for the end of the turn"
    )]
    CurrentTurn(ChunkId),
    /// No token of the chunk is deleted.
    #[error("cannot undelete {0}: it is not deleted")]
    NotDeleted(ChunkId),
    /// The turn has no earlier chunk to merge with.
    #[error("cannot merge {0}: it is the first chunk of its turn")]
    FirstOfTurn(ChunkId),
}

/// Pins a chunk: `full` brightness, and no pruning until it is unpinned. A pruned chunk is resurrected.
///
/// # Errors
/// When there is no such chunk, it is deleted, or it is pinned and live already.
pub fn pin(timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, ManualEditError> {
    let target = find_undeleted(timeline, chunk)?;
    if target.pruned_len() > 0 {
        return resurrect(timeline, chunk, full);
    }
    if target.is_pinned() {
        return Err(ManualEditError::AlreadyPinned(chunk));
    }
    Ok(Change::Batch(vec![brighten(target, full), Change::Pin { chunk, pinned: true }]))
}

/// Removes the pin of a chunk. Its brightness stays.
///
/// # Errors
/// When there is no such chunk, or it is not pinned.
pub fn unpin(timeline: &Timeline, chunk: ChunkId) -> Result<Change, ManualEditError> {
    let target = timeline.chunk(chunk).ok_or(ManualEditError::NoChunk(chunk))?;
    if target.is_pinned() {
        Ok(Change::Pin { chunk, pinned: false })
    } else {
        Err(ManualEditError::NotPinned(chunk))
    }
}

/// Resurrects a chunk with `full` brightness and pins it. Its companions are resurrected too, with the
/// brightness that they were pruned with.
///
/// # Errors
/// When there is no such chunk, it is deleted, or it is live already.
pub fn resurrect(timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, ManualEditError> {
    let target = find_undeleted(timeline, chunk)?;
    if target.pruned_len() == 0 {
        return Err(ManualEditError::AlreadyLive(chunk));
    }
    let group = resurrection_group(timeline, target, ResurrectReason::Manual, &BTreeSet::new());
    let resurrected = group.into_iter().map(|(c, reason)| Resurrected {
        chunk: c.id(),
        extent: Extent::Whole,
        brightness: (c.id() == chunk).then_some(full),
        reason,
    });
    let mut changes = vec![Change::Resurrect(resurrected.collect())];
    if target.is_live() {
        changes.push(brighten(target, full));
    }
    if !target.is_pinned() {
        changes.push(Change::Pin { chunk, pinned: true });
    }
    Ok(Change::Batch(changes))
}

/// Prunes a chunk and the live chunks that depend on it. `current` is the running turn.
///
/// # Errors
/// When there is no such chunk, it is deleted or not live, it is part of the system prompt, of the running turn
/// or of its question, or it or a chunk that depends on it is pinned.
pub fn prune(
    timeline: &Timeline,
    chunk: ChunkId,
    current: Option<TurnId>,
) -> Result<Change, ManualEditError> {
    let target = find_undeleted(timeline, chunk)?;
    if !target.is_live() {
        return Err(ManualEditError::AlreadyPruned(chunk));
    }
    if timeline.is_system_prompt(chunk) {
        return Err(ManualEditError::SystemPrompt(chunk));
    }
    let question = current.and_then(|turn| timeline.question_of(turn));
    let mut pruned = Vec::new();
    for dependent in dependents(timeline, target).into_iter().filter(|c| c.is_live()) {
        let id = dependent.id();
        if dependent.is_pinned() && id == chunk {
            return Err(ManualEditError::Pinned(chunk));
        }
        if dependent.is_pinned() {
            return Err(ManualEditError::PinnedDependent { asked: chunk, pinned: id });
        }
        if [current, question].iter().flatten().any(|&turn| turn == id.turn) {
            return Err(ManualEditError::CurrentTurn(chunk));
        }
        let reason = if id == chunk { PruneReason::Manual } else { PruneReason::ManualDependent(chunk) };
        pruned.push(Pruned { chunk: id, extent: Extent::Whole, reason });
    }
    Ok(Change::Prune(pruned))
}

/// Deletes a chunk and all chunks that depend on it, pinned or not: out of the window and out of search. The
/// tokens stay on the timeline; the inverse of the change restores the state before.
///
/// # Errors
/// When there is no such chunk, or it is deleted already.
pub fn delete(timeline: &Timeline, chunk: ChunkId) -> Result<Change, ManualEditError> {
    let target = find_undeleted(timeline, chunk)?;
    let undeleted = dependents(timeline, target).into_iter().filter(|c| !c.is_deleted());
    let chunks = undeleted.map(|c| ChunkSelection { chunk: c.id(), extent: Extent::Whole }).collect();
    Ok(Change::Delete { chunks, reason: DeleteReason::User })
}

/// Undeletes a chunk, the chunks that depend on it, and those that it depends on. Each is live or pruned again
/// as it was before the deletion.
///
/// # Errors
/// When there is no such chunk, or it is not deleted.
pub fn undelete(timeline: &Timeline, chunk: ChunkId) -> Result<Change, ManualEditError> {
    let target = timeline.chunk(chunk).ok_or(ManualEditError::NoChunk(chunk))?;
    if target.deleted_len() == 0 {
        return Err(ManualEditError::NotDeleted(chunk));
    }
    let Some(own) = timeline.turn_index(chunk.turn) else { return Err(ManualEditError::NoChunk(chunk)) };
    // Deleted turns count here: they are what is undeleted.
    let exchange = Exchange::find(timeline.turns(), own, |_| true);
    let step = exchange.step_of(own).unwrap_or_default();
    let question = exchange.question.filter(|&question| question != own);
    let mut related: Vec<ChunkRef<'_>> = question.and_then(|t| timeline.anchor_of(t)).into_iter().collect();
    let chunks_of = |t: usize| timeline.turn_chunks(timeline.turns()[t].id);
    match (chunk.is_anchor(), chunk.role) {
        (true, Role::User) => {
            related.extend(timeline.turn_chunks(chunk.turn));
            related.extend(exchange.steps.iter().flatten().copied().flat_map(chunks_of));
        }
        (true, Role::System) => related.extend(timeline.turn_chunks(chunk.turn)),
        (true, Role::Assistant | Role::Tool) => related.extend(step.iter().copied().flat_map(chunks_of)),
        (false, _) => {
            let mut anchors: Vec<usize> = step.to_vec();
            anchors.extend((!anchors.contains(&own)).then_some(own));
            related.extend(anchors.into_iter().filter_map(|t| timeline.anchor_of(t)));
            related.push(target);
        }
    }
    related.sort_by_key(|c| c.start());
    let deleted = related.into_iter().filter(|c| c.deleted_len() > 0);
    Ok(Change::Undelete(deleted.map(|c| ChunkSelection { chunk: c.id(), extent: Extent::Whole }).collect()))
}

/// Merges a chunk with the one before it in its turn. If either is live, the result is; if either is pinned,
/// the result is.
///
/// # Errors
/// When there is no such chunk, either of the two is deleted, or the turn has no earlier chunk.
pub fn merge(timeline: &Timeline, chunk: ChunkId) -> Result<Change, ManualEditError> {
    let later = find_undeleted(timeline, chunk)?;
    let before = timeline.turn_chunks(chunk.turn).take_while(|c| c.id() != chunk).last();
    let earlier = find_undeleted(timeline, before.ok_or(ManualEditError::FirstOfTurn(chunk))?.id())?;
    let mut changes = Vec::new();
    if earlier.is_live() || later.is_live() {
        let pruned = [earlier, later].into_iter().filter(|c| c.pruned_len() > 0);
        let resurrected: Vec<_> = pruned
            .map(|c| Resurrected {
                chunk: c.id(),
                extent: Extent::Whole,
                brightness: None,
                reason: ResurrectReason::Merged,
            })
            .collect();
        if !resurrected.is_empty() {
            changes.push(Change::Resurrect(resurrected));
        }
    }
    if earlier.is_pinned() != later.is_pinned() {
        let unpinned = if earlier.is_pinned() { later } else { earlier };
        changes.push(Change::Pin { chunk: unpinned.id(), pinned: true });
    }
    changes.push(Change::Merge { chunk, frees_id: false });
    Ok(Change::Batch(changes))
}

/// The chunk, unless it does not exist or is deleted.
fn find_undeleted(timeline: &Timeline, chunk: ChunkId) -> Result<ChunkRef<'_>, ManualEditError> {
    match timeline.chunk(chunk) {
        None => Err(ManualEditError::NoChunk(chunk)),
        Some(c) if c.is_deleted() => Err(ManualEditError::Deleted(chunk)),
        Some(c) => Ok(c),
    }
}

/// Sets the tokens of a chunk to `full` brightness, except deleted ones.
fn brighten(chunk: ChunkRef<'_>, full: Brightness) -> Change {
    let undeleted = chunk.runs_where(|f| !f.contains(TokenFlags::DELETED));
    let runs = undeleted.map(|r| BrightnessRun { start: r.start, brightness: vec![full; r.len as usize] });
    Change::Score(Score { runs: runs.collect(), tallies: Vec::new() })
}

/// The chunk and the chunks that depend on it, in order: on the first chunk of a turn, the rest of the turn; on
/// the first chunk of a question, also its answers; on that of a tool call or a result, the call and its results.
fn dependents<'a>(timeline: &'a Timeline, chunk: ChunkRef<'a>) -> Vec<ChunkRef<'a>> {
    let turn = timeline.turn_index(chunk.id().turn).filter(|_| chunk.id().is_anchor());
    let Some(turn) = turn else { return vec![chunk] };
    let exchange = timeline.exchange_of(turn);
    let turns: Vec<usize> = match (chunk.id().role, exchange.step_of(turn)) {
        (Role::User, _) => std::iter::once(turn).chain(exchange.steps.into_iter().flatten()).collect(),
        (_, Some(step)) => step.to_vec(),
        (_, None) => vec![turn],
    };
    turns.into_iter().flat_map(|t| timeline.turn_chunks(timeline.turns()[t].id)).collect()
}

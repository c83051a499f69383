//! What the user says with their own hand: pin, unpin, prune, resurrect, delete, merge. The strongest
//! signals of all. Each is planned here as a change, or refused with the reason.

use crate::change::{Change, DeleteReason, Extent, Leave, Part, Return, Score, Scored, WhyLeft, WhyReturned};
use crate::resurrect::returning;
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, ChunkId, Flags, Role, TurnId};
use std::collections::BTreeSet;

/// Why a signal cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignalError {
    /// No such chunk.
    #[error("there is no chunk {0}")]
    NoChunk(ChunkId),
    /// The user has deleted it.
    #[error("{0} was deleted: restore it first")]
    Withdrawn(ChunkId),
    /// It is there already.
    #[error("{0} is live already")]
    Live(ChunkId),
    /// It is gone already.
    #[error("{0} has left the window already")]
    Dead(ChunkId),
    /// Pinned already, or not pinned.
    #[error("{0} is pinned already")]
    Pinned(ChunkId),
    /// It is not pinned.
    #[error("{0} is not pinned")]
    NotPinned(ChunkId),
    /// What is pinned stays.
    #[error("{asked} cannot leave the window: {pinned} is pinned and hangs on it; unpin it first")]
    HeldByPin {
        /// What was to leave.
        asked: ChunkId,
        /// What holds it.
        pinned: ChunkId,
    },
    /// The system prompt and the running turn stay.
    #[error("{0} cannot leave the window: it is {1}")]
    Protected(ChunkId, &'static str),
    /// It was not deleted.
    #[error("{0} was not deleted")]
    NotWithdrawn(ChunkId),
    /// It is the first of its turn.
    #[error("{0} is the first chunk of its turn: there is nothing before it to merge with")]
    FirstOfTurn(ChunkId),
}

/// Pins a chunk: as bright as can be, and immune to pruning. A dead one is called back.
///
/// # Errors
/// When there is no such chunk, it was deleted, or it is pinned and live already.
pub fn pin(timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, SignalError> {
    let found = usable(timeline, chunk)?;
    if found.dead_len() > 0 {
        return resurrect(timeline, chunk, full);
    }
    if found.is_pinned() {
        return Err(SignalError::Pinned(chunk));
    }
    Ok(Change::Batch(vec![brighten(found, full), Change::Pin { chunk, pinned: true }]))
}

/// Takes the pin off a chunk. Its brightness stays.
///
/// # Errors
/// When there is no such chunk, or it is not pinned.
pub fn unpin(timeline: &Timeline, chunk: ChunkId) -> Result<Change, SignalError> {
    let found = timeline.chunk(chunk).ok_or(SignalError::NoChunk(chunk))?;
    if found.is_pinned() {
        Ok(Change::Pin { chunk, pinned: false })
    } else {
        Err(SignalError::NotPinned(chunk))
    }
}

/// Calls a chunk back: as bright as can be, and pinned. What it is paired with comes along as it left.
///
/// # Errors
/// When there is no such chunk, it was deleted, or it is live already.
pub fn resurrect(timeline: &Timeline, chunk: ChunkId, full: Brightness) -> Result<Change, SignalError> {
    let target = usable(timeline, chunk)?;
    if target.dead_len() == 0 {
        return Err(SignalError::Live(chunk));
    }
    let group = returning(timeline, target, WhyReturned::Manual, &BTreeSet::new());
    let returns = group.into_iter().map(|(c, why)| Return {
        chunk: c.id(),
        extent: Extent::Whole,
        brightness: (c.id() == chunk).then_some(full),
        why,
    });
    let mut changes = vec![Change::Resurrect(returns.collect())];
    if target.is_live() {
        changes.push(brighten(target, full));
    }
    if !target.is_pinned() {
        changes.push(Change::Pin { chunk, pinned: true });
    }
    Ok(Change::Batch(changes))
}

/// Sends a chunk away, and with it the live chunks that cannot stand without it.
///
/// # Errors
/// When it is not live, is part of the system prompt or the running turn, or something pinned hangs on it.
pub fn prune(timeline: &Timeline, chunk: ChunkId, current: Option<TurnId>) -> Result<Change, SignalError> {
    let found = usable(timeline, chunk)?;
    if !found.is_live() {
        return Err(SignalError::Dead(chunk));
    }
    if timeline.is_system_prompt(chunk) {
        return Err(SignalError::Protected(chunk, "part of the system prompt"));
    }
    let question = current.and_then(|turn| timeline.question_of(turn));
    let mut leaves = Vec::new();
    for hanging in dependents(timeline, found).into_iter().filter(|c| c.is_live()) {
        if hanging.is_pinned() && hanging.id() == chunk {
            return Err(SignalError::Protected(chunk, "pinned; unpin it first"));
        }
        if hanging.is_pinned() {
            return Err(SignalError::HeldByPin { asked: chunk, pinned: hanging.id() });
        }
        if [current, question].iter().flatten().any(|&turn| turn == hanging.id().turn) {
            return Err(SignalError::Protected(chunk, "part of the running turn, or its question"));
        }
        let why = if hanging.id() == chunk { WhyLeft::Manual } else { WhyLeft::ManualWith(chunk) };
        leaves.push(Leave { chunk: hanging.id(), extent: Extent::Whole, why });
    }
    Ok(Change::Prune(leaves))
}

/// Takes a chunk back, and with it all that cannot stand without it: out of the window and out of search.
/// The tokens stay on record, and the inverse of the change brings everything back as it was.
///
/// # Errors
/// When there is no such chunk, or it was deleted already.
pub fn delete(timeline: &Timeline, chunk: ChunkId) -> Result<Change, SignalError> {
    let found = usable(timeline, chunk)?;
    let gone = dependents(timeline, found).into_iter().filter(|c| !c.is_withdrawn());
    let parts = gone.map(|c| Part { chunk: c.id(), extent: Extent::Whole }).collect();
    Ok(Change::Withdraw { parts, reason: DeleteReason::User })
}

/// Takes a deletion back: the chunk, what went with it, and what it cannot stand without, each live or dead as it was.
///
/// # Errors
/// When there is no such chunk, or it was not deleted.
pub fn restore(timeline: &Timeline, chunk: ChunkId) -> Result<Change, SignalError> {
    let found = timeline.chunk(chunk).ok_or(SignalError::NoChunk(chunk))?;
    if found.withdrawn_len() == 0 {
        return Err(SignalError::NotWithdrawn(chunk));
    }
    let turns = timeline.turns();
    let own = turns.iter().position(|t| t.id == chunk.turn);
    let question =
        own.and_then(|i| turns[..i].last()).filter(|t| t.role == Role::User && chunk.role == Role::Assistant);
    let answer =
        own.and_then(|i| turns.get(i + 1)).filter(|t| t.role == Role::Assistant && chunk.role == Role::User);
    let mut back: Vec<ChunkRef<'_>> = Vec::new();
    back.extend(question.and_then(|t| timeline.chunk(ChunkId::new(t.role, t.id, 0))));
    if chunk.is_anchor() {
        back.extend(timeline.turn_chunks(chunk.turn));
        back.extend(answer.into_iter().flat_map(|t| timeline.turn_chunks(t.id)));
    } else {
        back.extend(timeline.chunk(ChunkId { sentence: 0, ..chunk }));
        back.push(found);
    }
    let gone = back.into_iter().filter(|c| c.withdrawn_len() > 0);
    Ok(Change::Restore(gone.map(|c| Part { chunk: c.id(), extent: Extent::Whole }).collect()))
}

/// Joins a chunk to the one before it in its turn. If either is live both are then, if either is pinned the
/// whole is.
///
/// # Errors
/// When either was deleted, or nothing stands before it.
pub fn merge(timeline: &Timeline, chunk: ChunkId) -> Result<Change, SignalError> {
    let late = usable(timeline, chunk)?;
    let before = timeline.turn_chunks(chunk.turn).take_while(|c| c.id() != chunk).last();
    let early = usable(timeline, before.ok_or(SignalError::FirstOfTurn(chunk))?.id())?;
    let mut changes = Vec::new();
    if early.is_live() || late.is_live() {
        let dead = [early, late].into_iter().filter(|c| c.dead_len() > 0);
        let returns: Vec<_> = dead
            .map(|c| Return {
                chunk: c.id(),
                extent: Extent::Whole,
                brightness: None,
                why: WhyReturned::Merged,
            })
            .collect();
        if !returns.is_empty() {
            changes.push(Change::Resurrect(returns));
        }
    }
    if early.is_pinned() != late.is_pinned() {
        let loose = if early.is_pinned() { late } else { early };
        changes.push(Change::Pin { chunk: loose.id(), pinned: true });
    }
    changes.push(Change::Merge { chunk, frees_name: false });
    Ok(Change::Batch(changes))
}

/// The chunk, unless the user has deleted it.
fn usable(timeline: &Timeline, chunk: ChunkId) -> Result<ChunkRef<'_>, SignalError> {
    match timeline.chunk(chunk) {
        None => Err(SignalError::NoChunk(chunk)),
        Some(c) if c.is_withdrawn() => Err(SignalError::Withdrawn(chunk)),
        Some(c) => Ok(c),
    }
}

/// All the chunk's tokens, but for withdrawn ones, as bright as can be.
fn brighten(chunk: ChunkRef<'_>, full: Brightness) -> Change {
    let kept = chunk.runs(|f| !f.has(Flags::WITHDRAWN));
    let runs = kept.map(|r| Scored { start: r.start, brightness: vec![full; r.len as usize] });
    Change::Score(Score { runs: runs.collect(), tallies: Vec::new() })
}

/// The chunk and everything that hangs on it, in order: on the opening of a turn the rest of the turn, on the
/// opening of a question also its answer.
fn dependents<'a>(timeline: &'a Timeline, chunk: ChunkRef<'a>) -> Vec<ChunkRef<'a>> {
    if !chunk.id().is_anchor() {
        return vec![chunk];
    }
    let turns = [Some(chunk.id().turn), timeline.answer_to(chunk.id().turn)];
    turns.into_iter().flatten().flat_map(|t| timeline.turn_chunks(t)).collect()
}

//! Compaction of the log: it stays short, and the state can still be rebuilt from it.
//!
//! Tokens that were streamed one by one become one entry. A score supersedes the one before it: the brightness that both
//! set is only kept in the later one. So the log grows with text, prunes and resurrections, not with the number of
//! scores.

use halo_core::change::{Append, BrightnessRun, Change, Score, TallyDelta};
use halo_core::token::{ChunkId, Position};
use std::collections::BTreeMap;

/// Whether `next` appends to the same message, right after `tail`.
pub(crate) fn continues(tail: &Append, next: &Append) -> bool {
    (tail.turn, tail.role) == (next.turn, next.role) && tail.at.plus(tail.tokens.len()) == next.at
}

/// Whether a change moves tokens from chunk to chunk: tallies cannot be carried over such a change.
pub(crate) fn moves_tokens_between_chunks(change: &Change) -> bool {
    change.flatten().iter().any(|c| matches!(c, Change::Merge { .. } | Change::Split { .. }))
}

pub(crate) fn has_score(change: &Change) -> bool {
    change.flatten().iter().any(|c| matches!(c, Change::Score(_)))
}

/// Removes from the entry `old` the brightness that the later entry `new` sets again and, with `carry`, moves the tallies
/// of `old` to `new`. Returns the rest of `old`; none if it is empty.
pub(crate) fn supersede(old: &Change, new: &mut Change, carry: bool) -> Option<Change> {
    let mut covered: Vec<(u64, u64)> = Vec::new();
    for part in new.flatten() {
        if let Change::Score(score) = part {
            covered.extend(score.runs.iter().map(|r| (r.start.0, r.start.0 + r.brightness.len() as u64)));
        }
    }
    covered.sort_unstable();
    covered.dedup_by(|next, last| {
        let overlaps = next.0 <= last.1;
        last.1 = if overlaps { last.1.max(next.1) } else { last.1 };
        overlaps
    });
    let mut carried: BTreeMap<ChunkId, TallyDelta> = BTreeMap::new();
    let mut rest = Vec::new();
    for part in old.flatten() {
        let Change::Score(score) = part else {
            rest.push(part.clone());
            continue;
        };
        let runs: Vec<_> = score.runs.iter().flat_map(|run| subtract_ranges(run, &covered)).collect();
        let mut tallies = score.tallies.clone();
        if carry {
            for (chunk, tally) in tallies.drain(..) {
                add_tally(carried.entry(chunk).or_default(), tally);
            }
        }
        if !runs.is_empty() || !tallies.is_empty() {
            rest.push(Change::Score(Score { runs, tallies }));
        }
    }
    if let Some(score) = first_score_mut(new).filter(|_| !carried.is_empty()) {
        for (chunk, tally) in std::mem::take(&mut score.tallies) {
            add_tally(carried.entry(chunk).or_default(), tally);
        }
        score.tallies = carried.into_iter().collect();
    }
    match rest.len() {
        0 => None,
        1 => rest.pop(),
        _ => Some(Change::Batch(rest)),
    }
}

fn add_tally(sum: &mut TallyDelta, more: TallyDelta) {
    sum.votes = sum.votes.saturating_add(more.votes);
    sum.mass = sum.mass.saturating_add(more.mass);
    sum.exposures = sum.exposures.saturating_add(more.exposures);
}

fn first_score_mut(change: &mut Change) -> Option<&mut Score> {
    match change {
        Change::Score(score) => Some(score),
        Change::Batch(changes) => changes.iter_mut().find_map(first_score_mut),
        _ => None,
    }
}

/// The parts of a run outside of the covered ranges, which are sorted and do not overlap.
fn subtract_ranges(run: &BrightnessRun, covered: &[(u64, u64)]) -> Vec<BrightnessRun> {
    let (mut at, end) = (run.start.0, run.start.0 + run.brightness.len() as u64);
    let mut parts = Vec::new();
    let mut keep = |from: u64, to: u64| {
        if from < to {
            let range = (from - run.start.0) as usize..(to - run.start.0) as usize;
            parts.push(BrightnessRun { start: Position(from), brightness: run.brightness[range].to_vec() });
        }
    };
    let first = covered.partition_point(|(_, to)| *to <= at);
    for &(from, to) in covered[first..].iter().take_while(|(from, _)| *from < end) {
        keep(at, from.min(end));
        at = at.max(to);
    }
    keep(at, end);
    parts
}

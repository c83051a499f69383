//! How the log stays short and still says all that is needed to make the state again.
//!
//! Tokens that streamed in one by one become one entry. A score is superseded by the next: what both speak of,
//! only the later says. So the log grows with what was said and with what left and returned, not with how
//! often the window was looked at.

use halo_core::change::{Append, BrightnessRun, Change, Score, TallyDelta};
use halo_core::token::{ChunkId, Position};
use std::collections::BTreeMap;

/// Whether `next` goes on where `tail` ends.
pub(crate) fn continues(tail: &Append, next: &Append) -> bool {
    (tail.turn, tail.role) == (next.turn, next.role) && tail.at.plus(tail.tokens.len()) == next.at
}

/// Whether a change moves tokens from chunk to chunk: tallies cannot be carried across it.
pub(crate) fn moves_tokens_between_chunks(change: &Change) -> bool {
    change.flatten().iter().any(|c| matches!(c, Change::Merge { .. } | Change::Split { .. }))
}

/// Whether a change scores anything.
pub(crate) fn has_score(change: &Change) -> bool {
    change.flatten().iter().any(|c| matches!(c, Change::Score(_)))
}

/// Takes from the entry `old` the brightness that `new`, which is to follow, sets anyway, and, where `carry` is
/// set, moves its tallies there. Nothing is left of an entry that only scored.
pub(crate) fn supersede(old: &Change, new: &mut Change, carry: bool) -> Option<Change> {
    let mut covered: Vec<(u64, u64)> = Vec::new();
    for part in new.flatten() {
        if let Change::Score(score) = part {
            covered.extend(score.runs.iter().map(|r| (r.start.0, r.start.0 + r.brightness.len() as u64)));
        }
    }
    covered.sort_unstable();
    covered.dedup_by(|next, last| {
        let touch = next.0 <= last.1;
        last.1 = if touch { last.1.max(next.1) } else { last.1 };
        touch
    });
    let mut carried: BTreeMap<ChunkId, TallyDelta> = BTreeMap::new();
    let mut left = Vec::new();
    for part in old.flatten() {
        let Change::Score(score) = part else {
            left.push(part.clone());
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
            left.push(Change::Score(Score { runs, tallies }));
        }
    }
    if let Some(score) = first_score_mut(new).filter(|_| !carried.is_empty()) {
        for (chunk, tally) in std::mem::take(&mut score.tallies) {
            add_tally(carried.entry(chunk).or_default(), tally);
        }
        score.tallies = carried.into_iter().collect();
    }
    match left.len() {
        0 => None,
        1 => left.pop(),
        _ => Some(Change::Batch(left)),
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

/// The parts of a run that lie in none of the covered ranges, which are in order and apart.
fn subtract_ranges(run: &BrightnessRun, covered: &[(u64, u64)]) -> Vec<BrightnessRun> {
    let (mut at, end) = (run.start.0, run.start.0 + run.brightness.len() as u64);
    let mut left = Vec::new();
    let mut keep = |from: u64, to: u64| {
        if from < to {
            let range = (from - run.start.0) as usize..(to - run.start.0) as usize;
            left.push(BrightnessRun { start: Position(from), brightness: run.brightness[range].to_vec() });
        }
    };
    let first = covered.partition_point(|(_, to)| *to <= at);
    for &(from, to) in covered[first..].iter().take_while(|(from, _)| *from < end) {
        keep(at, from.min(end));
        at = at.max(to);
    }
    keep(at, end);
    left
}

//! Assigns RoPE positions to the runs of tokens of a window.
//!
//! A resident run keeps its position, and an archived run gets the position back that it was saved at: then no key is
//! rotated, and the result is the same to the last bit. Holes that pruned chunks leave stay open. A run is shifted only
//! where there is no room for it. If the window with the answer would pass the last position that the model was trained
//! for, all holes are closed at once: compaction.
//!
//! Where llama.cpp cannot shift positions (M-RoPE), a run stays where it is or is read again: [`assign_fixed_positions`].
//!
//! This module only plans; [`kv_cache`](crate::kv_cache) shifts the cells (K-shift).

use crate::ffi::types::LlamaPos;

/// A run of tokens with consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRun {
    pub len: usize,
    pub placement: RunPlacement,
}

/// Where the cells of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPlacement {
    /// In the KV cache, from this position on.
    Resident(LlamaPos),
    /// In the KV archive, saved from this position on.
    Archived(LlamaPos),
    /// Nowhere. They are recomputed, directly after the run before.
    Missing,
}

/// The first position of each run, so that `ahead` more tokens fit after the last run and all positions are below
/// `limit`. None if they do not fit even without holes.
#[must_use]
pub fn assign_positions(runs: &[PositionRun], ahead: usize, limit: LlamaPos) -> Option<Vec<LlamaPos>> {
    let fits = |end: i64| end + ahead as i64 <= i64::from(limit);
    let (starts, end) = keep_positions(runs);
    if fits(end) {
        return Some(starts);
    }
    let (starts, end) = compact_positions(runs);
    fits(end).then_some(starts)
}

/// Positions of runs that cannot be shifted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FixedLayout {
    /// The first position of each run: that of its cells.
    Fits(Vec<LlamaPos>),
    /// There is no room for the own position of an archived run: its tokens have to be recomputed.
    RecomputeRun(usize),
    /// There is no room for a run: it and everything after it has to be prefilled again, from the end of the run before.
    PrefillFrom(usize),
}

/// [`assign_positions`] where positions cannot be shifted. None if the runs do not fit even without holes.
#[must_use]
pub fn assign_fixed_positions(runs: &[PositionRun], ahead: usize, limit: LlamaPos) -> Option<FixedLayout> {
    let mut starts: Vec<LlamaPos> = Vec::with_capacity(runs.len());
    let mut free = 0i64;
    for (n, run) in runs.iter().enumerate() {
        let start = match run.placement {
            RunPlacement::Missing => free,
            RunPlacement::Resident(position) if i64::from(position) < free => {
                return Some(FixedLayout::PrefillFrom(n));
            }
            RunPlacement::Resident(position) => position.into(),
            RunPlacement::Archived(position) => {
                let room_end = room_after(&runs[n + 1..]).unwrap_or(i64::MAX);
                let end = i64::from(position) + run.len as i64;
                if i64::from(position) < free || end > room_end {
                    return Some(FixedLayout::RecomputeRun(n));
                }
                position.into()
            }
        };
        starts.push(start as LlamaPos);
        free = start + run.len as i64;
    }
    let fits = |end: i64| end + ahead as i64 <= i64::from(limit);
    if fits(free) {
        return Some(FixedLayout::Fits(starts));
    }
    let (compact, end) = compact_positions(runs);
    let first_hole = starts.iter().zip(&compact).position(|(start, compact)| start != compact);
    first_hole.filter(|_| fits(end)).map(FixedLayout::PrefillFrom)
}

/// The position that a run must end at so that the runs after it have room before the next resident run, if there is one.
fn room_after(runs: &[PositionRun]) -> Option<i64> {
    let mut need = 0;
    for run in runs {
        if let RunPlacement::Resident(position) = run.placement {
            return Some(i64::from(position) - need);
        }
        need += run.len as i64;
    }
    None
}

/// Every run at its own position, as far as there is room.
fn keep_positions(runs: &[PositionRun]) -> (Vec<LlamaPos>, i64) {
    let mut starts = Vec::with_capacity(runs.len());
    let mut free = 0i64;
    for (n, run) in runs.iter().enumerate() {
        let start = match run.placement {
            RunPlacement::Missing => free,
            RunPlacement::Resident(position) => free.max(position.into()),
            RunPlacement::Archived(position) => {
                // All runs before the next resident run must fit below its position.
                let latest = room_after(&runs[n + 1..]).map_or(i64::MAX, |end| end - run.len as i64);
                i64::from(position).min(latest).max(free)
            }
        };
        starts.push(start as LlamaPos);
        free = start + run.len as i64;
    }
    (starts, free)
}

/// Every run directly after the one before: no holes.
fn compact_positions(runs: &[PositionRun]) -> (Vec<LlamaPos>, i64) {
    let mut free = 0i64;
    let assign = |run: &PositionRun| {
        let start = free;
        free += run.len as i64;
        start as LlamaPos
    };
    let starts = runs.iter().map(assign).collect();
    (starts, free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len: usize, placement: RunPlacement) -> PositionRun {
        PositionRun { len, placement }
    }

    #[test]
    fn layout_assigns_positions_and_compacts_at_limit() {
        use RunPlacement::{Archived, Missing, Resident};
        type LayoutCase<'a> = (&'a str, &'a [(usize, RunPlacement)], usize, LlamaPos, Option<&'a [LlamaPos]>);
        let cases: &[LayoutCase<'_>] = &[
            ("no runs", &[], 5, 8, Some(&[])),
            ("holes stay open", &[(4, Resident(0)), (4, Resident(20))], 4, 100, Some(&[0, 20])),
            (
                "an archived run gets its position back",
                &[(4, Resident(0)), (3, Archived(10)), (4, Resident(20))],
                1,
                99,
                Some(&[0, 10, 20]),
            ),
            (
                "two archived runs in one hole",
                &[(4, Resident(0)), (3, Archived(10)), (7, Archived(13)), (4, Resident(20))],
                1,
                99,
                Some(&[0, 10, 13, 20]),
            ),
            (
                "own position too high: as high as possible",
                &[(4, Resident(0)), (3, Archived(30)), (4, Resident(20))],
                1,
                99,
                Some(&[0, 17, 20]),
            ),
            (
                "own position too low: as low as possible",
                &[(4, Resident(8)), (3, Archived(2)), (4, Resident(20))],
                1,
                99,
                Some(&[8, 12, 20]),
            ),
            (
                "no room: the runs after it shift",
                &[(4, Resident(0)), (3, Archived(9)), (4, Resident(5)), (1, Resident(9))],
                1,
                99,
                Some(&[0, 4, 7, 11]),
            ),
            (
                "a later hole absorbs the shift",
                &[(4, Resident(0)), (3, Archived(9)), (4, Resident(5)), (1, Resident(30))],
                1,
                99,
                Some(&[0, 4, 7, 30]),
            ),
            (
                "a missing run follows directly",
                &[(4, Resident(0)), (3, Missing), (4, Resident(20))],
                1,
                99,
                Some(&[0, 4, 20]),
            ),
            (
                "at the limit: compaction",
                &[(4, Resident(0)), (3, Archived(10)), (4, Resident(20))],
                10,
                33,
                Some(&[0, 4, 7]),
            ),
            (
                "just below the limit: no compaction",
                &[(4, Resident(0)), (3, Archived(10)), (4, Resident(20))],
                9,
                33,
                Some(&[0, 10, 20]),
            ),
            ("too large even without holes", &[(4, Resident(0)), (4, Resident(20))], 10, 17, None),
            (
                "restart: all runs are archived",
                &[(4, Archived(0)), (3, Archived(10)), (2, Archived(30))],
                1,
                99,
                Some(&[0, 10, 30]),
            ),
            (
                "restart after a compaction",
                &[(4, Archived(0)), (3, Archived(50)), (2, Archived(7))],
                1,
                99,
                Some(&[0, 50, 53]),
            ),
        ];
        for (name, runs, ahead, limit, expected) in cases {
            let runs: Vec<PositionRun> = runs.iter().map(|&(len, placement)| run(len, placement)).collect();
            assert_eq!(assign_positions(&runs, *ahead, *limit).as_deref(), *expected, "{name}");
        }
    }

    #[test]
    fn fixed_layout_shifts_nothing_and_reads_again_what_has_no_room() {
        use FixedLayout::{Fits, PrefillFrom, RecomputeRun};
        use RunPlacement::{Archived, Missing, Resident};
        type FixedCase<'a> = (&'a str, &'a [(usize, RunPlacement)], usize, LlamaPos, Option<FixedLayout>);
        let cases: &[FixedCase<'_>] = &[
            ("no runs", &[], 5, 8, Some(Fits(vec![]))),
            (
                "holes stay open, an archived run gets its position back",
                &[(4, Resident(0)), (3, Archived(10)), (4, Resident(20))],
                1,
                99,
                Some(Fits(vec![0, 10, 20])),
            ),
            (
                "two archived runs in one hole",
                &[(4, Resident(0)), (3, Archived(10)), (7, Archived(13)), (4, Resident(20))],
                1,
                99,
                Some(Fits(vec![0, 10, 13, 20])),
            ),
            (
                "own position too high: recomputed in its hole",
                &[(4, Resident(0)), (3, Archived(30)), (4, Resident(20))],
                1,
                99,
                Some(RecomputeRun(1)),
            ),
            (
                "own position too low",
                &[(4, Resident(8)), (3, Archived(2)), (4, Resident(20))],
                1,
                99,
                Some(RecomputeRun(1)),
            ),
            (
                "the next resident run is not displaced by an archived one",
                &[(4, Resident(0)), (3, Archived(4)), (4, Resident(5))],
                1,
                99,
                Some(RecomputeRun(1)),
            ),
            (
                "a missing run has room in the hole",
                &[(4, Resident(0)), (3, Missing), (4, Resident(7))],
                1,
                99,
                Some(Fits(vec![0, 4, 7])),
            ),
            (
                "a missing run has no room: the rest is prefilled again",
                &[(4, Resident(0)), (3, Missing), (4, Resident(6)), (1, Resident(30))],
                1,
                99,
                Some(PrefillFrom(2)),
            ),
            (
                "at the limit: prefilled again from the first hole on",
                &[(4, Resident(0)), (2, Archived(4)), (3, Archived(10)), (4, Resident(20))],
                10,
                33,
                Some(PrefillFrom(2)),
            ),
            (
                "just below the limit",
                &[(4, Resident(0)), (3, Archived(10)), (4, Resident(20))],
                9,
                33,
                Some(Fits(vec![0, 10, 20])),
            ),
            ("too large even without holes", &[(4, Resident(0)), (4, Resident(20))], 10, 17, None),
            ("too large, and there are no holes", &[(4, Resident(0)), (4, Resident(4))], 10, 17, None),
        ];
        for (name, runs, ahead, limit, expected) in cases {
            let runs: Vec<PositionRun> = runs.iter().map(|&(len, placement)| run(len, placement)).collect();
            assert_eq!(assign_fixed_positions(&runs, *ahead, *limit), *expected, "{name}");
        }
    }
}

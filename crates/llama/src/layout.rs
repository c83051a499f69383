//! Where runs of tokens stand among the model's positions, of which it knows only so many.
//!
//! What stays wants to stay where it is, and what returns wants its own place back: then nothing is moved and nothing
//! changes, to the last bit. Holes are left open. Only where there is no room something moves, as little as can be; and
//! when the end would pass the last position that the model knows, all holes are closed at once.

use crate::ffi::Pos;

/// A run of tokens that stand one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// How many.
    pub len: usize,
    /// What is known of its place.
    pub place: Place,
}

/// What is known of a run's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It stands here.
    Here(Pos),
    /// It stood here when it left.
    Was(Pos),
    /// It is to be computed, right behind what stands before it.
    New,
}

/// The first position of each run, in order, so that `ahead` more tokens fit behind them and all positions lie below
/// `limit`; none if they do not fit whatever is done.
#[must_use]
pub fn arrange(runs: &[Run], ahead: usize, limit: Pos) -> Option<Vec<Pos>> {
    let fits = |end: i64| end + ahead as i64 <= i64::from(limit);
    let (starts, end) = sparing(runs);
    if fits(end) {
        return Some(starts);
    }
    let (starts, end) = dense(runs);
    fits(end).then_some(starts)
}

/// Everything where it stands or stood, as far as there is room.
fn sparing(runs: &[Run]) -> (Vec<Pos>, i64) {
    let mut starts = Vec::with_capacity(runs.len());
    let mut free = 0i64;
    for (n, run) in runs.iter().enumerate() {
        let start = match run.place {
            Place::New => free,
            Place::Here(own) => free.max(own.into()),
            Place::Was(own) => {
                // What returns before the next run that stands must leave room for what returns behind it.
                let next = runs[n + 1..].iter().position(|r| matches!(r.place, Place::Here(_)));
                let between = next.map_or(&runs[n..], |next| &runs[n..n + 1 + next]);
                let need: usize = between.iter().map(|r| r.len).sum();
                let latest = match next.map(|next| runs[n + 1 + next].place) {
                    Some(Place::Here(wall)) => i64::from(wall) - need as i64,
                    _ => i64::MAX,
                };
                i64::from(own).min(latest).max(free)
            }
        };
        starts.push(start as Pos);
        free = start + run.len as i64;
    }
    (starts, free)
}

/// One behind the other.
fn dense(runs: &[Run]) -> (Vec<Pos>, i64) {
    let mut free = 0i64;
    let place = |run: &Run| {
        let start = free;
        free += run.len as i64;
        start as Pos
    };
    let starts = runs.iter().map(place).collect();
    (starts, free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len: usize, place: Place) -> Run {
        Run { len, place }
    }

    #[test]
    fn runs_find_their_places() {
        use Place::{Here, New, Was};
        type Case<'a> = (&'a str, &'a [(usize, Place)], usize, Pos, Option<&'a [Pos]>);
        let cases: &[Case<'_>] = &[
            ("nothing", &[], 5, 8, Some(&[])),
            ("holes stay open", &[(4, Here(0)), (4, Here(20))], 4, 100, Some(&[0, 20])),
            (
                "what returns, returns to its place",
                &[(4, Here(0)), (3, Was(10)), (4, Here(20))],
                1,
                99,
                Some(&[0, 10, 20]),
            ),
            (
                "two in one hole",
                &[(4, Here(0)), (3, Was(10)), (7, Was(13)), (4, Here(20))],
                1,
                99,
                Some(&[0, 10, 13, 20]),
            ),
            (
                "too late: as late as can be",
                &[(4, Here(0)), (3, Was(30)), (4, Here(20))],
                1,
                99,
                Some(&[0, 17, 20]),
            ),
            (
                "too early: as early as can be",
                &[(4, Here(8)), (3, Was(2)), (4, Here(20))],
                1,
                99,
                Some(&[8, 12, 20]),
            ),
            (
                "no room: what stands behind moves",
                &[(4, Here(0)), (3, Was(9)), (4, Here(5)), (1, Here(9))],
                1,
                99,
                Some(&[0, 4, 7, 11]),
            ),
            (
                "a hole behind takes the move up",
                &[(4, Here(0)), (3, Was(9)), (4, Here(5)), (1, Here(30))],
                1,
                99,
                Some(&[0, 4, 7, 30]),
            ),
            (
                "what is computed follows directly",
                &[(4, Here(0)), (3, New), (4, Here(20))],
                1,
                99,
                Some(&[0, 4, 20]),
            ),
            (
                "near the limit all holes close",
                &[(4, Here(0)), (3, Was(10)), (4, Here(20))],
                10,
                33,
                Some(&[0, 4, 7]),
            ),
            (
                "just below it they stay",
                &[(4, Here(0)), (3, Was(10)), (4, Here(20))],
                9,
                33,
                Some(&[0, 10, 20]),
            ),
            ("what does not fit", &[(4, Here(0)), (4, Here(20))], 10, 17, None),
            ("a restart: all return", &[(4, Was(0)), (3, Was(10)), (2, Was(30))], 1, 99, Some(&[0, 10, 30])),
            (
                "a restart after a compaction",
                &[(4, Was(0)), (3, Was(50)), (2, Was(7))],
                1,
                99,
                Some(&[0, 50, 53]),
            ),
        ];
        for (name, runs, ahead, limit, expected) in cases {
            let runs: Vec<Run> = runs.iter().map(|&(len, place)| run(len, place)).collect();
            assert_eq!(arrange(&runs, *ahead, *limit).as_deref(), *expected, "{name}");
        }
    }
}

//! How a time is taken: often, and what most calls would take on a machine that is left alone counts.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The time of one call of `work`, in nanoseconds: one call in ten was faster. `fresh` makes what it works on,
/// untimed. On a shared machine noise only ever adds, so the middle of all calls would measure the neighbours.
///
/// Calls are timed one by one, for at least `least` in all and 15 times, after one call that only warms up.
pub fn p10_call_ns<S, T>(least: Duration, mut fresh: impl FnMut() -> S, mut work: impl FnMut(S) -> T) -> f64 {
    black_box(work(fresh()));
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 15 || (begin.elapsed() < least && times.len() < 100_000) {
        let state = fresh();
        let start = Instant::now();
        let result = work(black_box(state));
        let time = start.elapsed();
        black_box(result);
        times.push(time);
    }
    times.sort_unstable();
    times[times.len() / 10].as_nanos() as f64
}

//! Timing that is robust against noise of other processes.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The time of one call of `work` in nanoseconds, 10th percentile. `fresh` creates its input, untimed. On a shared
/// machine noise only adds time, so a median would measure the neighbours.
///
/// Calls are timed one by one, for at least `least` in all and 15 times, after one warm-up call.
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

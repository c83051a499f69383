//! Random conversations, guided by coverage, compared with the naive timeline. The same operations as the property
//! test `timeline_matches_naive_timeline`.

#![no_main]

use halo_core::testing::timeline_fuzz::TimelineFuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (ops, _) = data.as_chunks::<4>();
    TimelineFuzz::run(&ops[..ops.len().min(200)]);
});

//! Random lives of a conversation against the naive twin, chosen by what they reach in the code. The same
//! world as the property test, without end.

#![no_main]

use halo_core::testing::ops::World;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (ops, _) = data.as_chunks::<4>();
    World::live(&ops[..ops.len().min(200)]);
});

//! Any text, cut into tokens anywhere: chunks keep their sizes, and a turn that is taken up again is cut as if it
//! had never been put down. The same checks as the property tests, without end.

#![no_main]

use halo_core::chunk::ChunkSize;
use halo_core::testing::chunks;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, Vec<(&str, bool)>)| {
    let (min, more, tokens) = input;
    let min = u32::from(min % 80) + 1;
    let size = ChunkSize { min, max: min + u32::from(more) + 1 };
    let texts: Vec<&str> = tokens.iter().map(|t| t.0).collect();
    chunks::keep_their_size(size, &texts);
    chunks::resume(size, &tokens);
});

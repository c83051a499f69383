//! Random texts in random tokens: chunks keep their sizes, and a resumed chunker decides like one that reads the
//! whole turn. The same checks as the property tests.

#![no_main]

use halo_core::chunker::ChunkSize;
use halo_core::testing::chunker_checks;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, Vec<(&str, bool)>)| {
    let (min, more, tokens) = input;
    let min = u32::from(min % 80) + 1;
    let size = ChunkSize { min, max: min + u32::from(more) + 1 };
    let texts: Vec<&str> = tokens.iter().map(|t| t.0).collect();
    chunker_checks::assert_chunk_sizes(size, &texts);
    chunker_checks::assert_chunker_resumes(size, &tokens);
});

//! Any text, cut into tokens anywhere: chunks keep their sizes, and a turn that is taken up again is cut as
//! if it had never been put down.

#![no_main]

use halo_core::chunk::{ChunkSize, Chunker, sentences};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, Vec<&str>)| {
    let (min, more, tokens) = input;
    let min = u32::from(min % 80) + 1;
    let size = ChunkSize { min, max: min + u32::from(more) + 1 };
    let cut = sentences(size, tokens.iter().copied());
    let last = cut.last().copied().unwrap_or(0);
    for sentence in 0..=last {
        let len = cut.iter().filter(|&&s| s == sentence).count() as u32;
        assert!(len <= size.max && (len >= size.min || sentence == last));
    }
    let half = tokens.len() / 2;
    let said = cut[..half].iter().copied().zip(tokens[..half].iter().copied());
    let mut chunker = Chunker::resume(size, said);
    for text in &tokens[half..] {
        chunker.push(text);
    }
    let _ = chunker.sentence();
});

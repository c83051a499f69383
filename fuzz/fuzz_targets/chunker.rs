//! Any text, cut into tokens anywhere: chunks keep their sizes, and a turn that is taken up again is cut as
//! if it had never been put down.

#![no_main]

use halo_core::chunk::{ChunkSize, Chunker, sentences};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, Vec<(&str, bool)>)| {
    let (min, more, tokens) = input;
    let min = u32::from(min % 80) + 1;
    let size = ChunkSize { min, max: min + u32::from(more) + 1 };
    let cut = sentences(size, tokens.iter().map(|t| t.0));
    let last = cut.last().copied().unwrap_or(0);
    for sentence in 0..=last {
        let len = cut.iter().filter(|&&s| s == sentence).count() as u32;
        assert!(len <= size.max && (len >= size.min || sentence == last));
    }
    let mut chunker = Chunker::new(size);
    let mut said: Vec<(u32, &str, bool)> = Vec::new();
    for (text, result) in tokens {
        let next = said.last().map_or(0, |t| t.0 + 1);
        let mut again = Chunker::resume(size, said.iter().copied(), next);
        let push = |c: &mut Chunker| if result { c.push_result() } else { c.push(text) };
        let placed = push(&mut chunker);
        assert_eq!(push(&mut again), placed);
        said.push((placed.sentence, text, result));
        let moved = said.len() - placed.moved.unwrap_or(1) as usize;
        said[moved..].iter_mut().for_each(|t| t.0 = placed.sentence);
    }
});

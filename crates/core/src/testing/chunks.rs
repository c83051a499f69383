//! Any text, cut into tokens anywhere, some of them a tool's result: what must be true of how it is chunked.

use crate::chunk::{ChunkSize, Chunker, sentences};

/// Chunks keep their sizes, whatever the text is.
///
/// # Panics
/// When they do not.
pub fn keep_their_size(size: ChunkSize, tokens: &[&str]) {
    let cut = sentences(size, tokens.iter().copied());
    assert_eq!(cut.len(), tokens.len());
    assert!(cut.windows(2).all(|w| w[1] == w[0] || w[1] == w[0] + 1), "{cut:?}");
    let last = cut.last().copied().unwrap_or(0);
    for sentence in 0..=last {
        let len = cut.iter().filter(|&&s| s == sentence).count() as u32;
        assert!(len <= size.max, "{len} tokens in chunk {sentence}");
        assert!(len >= size.min || sentence == last, "{len} tokens in chunk {sentence}");
    }
}

/// A turn that is put down and taken up again before every token is cut as if it had never been put down.
///
/// # Panics
/// When it is cut elsewhere.
pub fn resume(size: ChunkSize, tokens: &[(&str, bool)]) {
    let mut chunker = Chunker::new(size);
    let mut said: Vec<(u32, &str, bool)> = Vec::new();
    for &(text, result) in tokens {
        let next = said.last().map_or(0, |t| t.0 + 1);
        let mut again = Chunker::resume(size, said.iter().copied(), next);
        let push = |c: &mut Chunker| if result { c.push_result() } else { c.push(text) };
        let placed = push(&mut chunker);
        assert_eq!(push(&mut again), placed, "behind {said:?}");
        said.push((placed.sentence, text, result));
        let moved = said.len() - placed.moved.unwrap_or(1) as usize;
        said[moved..].iter_mut().for_each(|t| t.0 = placed.sentence);
    }
}

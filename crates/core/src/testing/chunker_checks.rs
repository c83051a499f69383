//! Properties of the chunker that hold for every text, however it is tokenized. Property tests and the fuzz target
//! use them.

use crate::chunker::{ChunkSize, Chunker, chunk_indices};

/// Checks that no chunk exceeds the maximum size, and that all but the last have the minimum size.
///
/// # Panics
/// When a chunk has another size.
pub fn assert_chunk_sizes(size: ChunkSize, tokens: &[&str]) {
    let indices = chunk_indices(size, tokens.iter().copied());
    assert_eq!(indices.len(), tokens.len());
    assert!(indices.windows(2).all(|w| w[1] == w[0] || w[1] == w[0] + 1), "{indices:?}");
    let last = indices.last().copied().unwrap_or(0);
    for chunk_index in 0..=last {
        let len = indices.iter().filter(|&&index| index == chunk_index).count() as u32;
        assert!(len <= size.max, "{len} tokens in chunk {chunk_index}");
        assert!(len >= size.min || chunk_index == last, "{len} tokens in chunk {chunk_index}");
    }
}

/// Checks that a chunker that is resumed before each token decides like one that reads the whole turn. Each token
/// has its text and whether it is part of a tool result.
///
/// # Panics
/// When the two decide differently.
pub fn assert_chunker_resumes(size: ChunkSize, tokens: &[(&str, bool)]) {
    let mut chunker = Chunker::new(size);
    let mut read: Vec<(u32, &str, bool)> = Vec::new();
    for &(text, is_result) in tokens {
        let next_index = read.last().map_or(0, |t| t.0 + 1);
        let mut resumed = Chunker::resume(size, read.iter().copied(), next_index);
        let push = |c: &mut Chunker| if is_result { c.push_result() } else { c.push(text) };
        let assigned = push(&mut chunker);
        assert_eq!(push(&mut resumed), assigned, "behind {read:?}");
        read.push((assigned.chunk_index, text, is_result));
        let first_moved = read.len() - assigned.moved_tokens.unwrap_or(1) as usize;
        read[first_moved..].iter_mut().for_each(|t| t.0 = assigned.chunk_index);
    }
}

//! Texts that are longer than an encoder reads. Such a text is embedded in pieces of about equal length, and its vector is the mean
//! of theirs, with length 1. So no part of a text is ignored.

use std::collections::BTreeMap;

/// Cuts the tokens of a text into pieces of at most `max_tokens`. `tokens` begins with `[CLS]` and ends with `[SEP]`, and so does
/// each piece. The first `prefix` tokens behind `[CLS]` tell the encoder what the text is: each piece begins with them.
pub(super) fn cut_into_pieces(tokens: Vec<i32>, prefix: usize, max_tokens: usize) -> Vec<Vec<i32>> {
    let ([cls, inner @ .., sep], true) = (tokens.as_slice(), tokens.len() > max_tokens) else {
        return vec![tokens];
    };
    // A prefix that leaves no room for the text is not repeated.
    let prefix = if prefix + 3 <= max_tokens { prefix.min(inner.len()) } else { 0 };
    let (prefix, inner) = inner.split_at(prefix);
    let room = max_tokens.saturating_sub(prefix.len() + 2).max(1);
    let count = inner.len().div_ceil(room).max(1);
    let length = inner.len().div_ceil(count).max(1);
    let frame = |piece: &[i32]| [&[*cls], prefix, piece, &[*sep]].concat();
    inner.chunks(length).map(frame).collect()
}

/// Joins the vectors of pieces, which arrive in any order.
#[derive(Default)]
pub(super) struct PieceAverager {
    pending: BTreeMap<usize, PendingVector>,
}

struct PendingVector {
    /// Pieces that have not arrived.
    missing: usize,
    sum: Vec<f32>,
}

impl PieceAverager {
    /// A text with that number of pieces, of which at least one follows.
    pub fn begin(&mut self, text: usize, pieces: usize) {
        if pieces > 1 {
            self.pending.insert(text, PendingVector { missing: pieces, sum: Vec::new() });
        }
    }

    /// Adds the vector of a piece. Returns the vector of the text with its last piece. The vector of a text with one piece stays as
    /// it is.
    pub fn add(&mut self, text: usize, vector: Vec<f32>) -> Option<Vec<f32>> {
        let Some(pending) = self.pending.get_mut(&text) else { return Some(vector) };
        match pending.sum.is_empty() {
            true => pending.sum = vector,
            false => pending.sum.iter_mut().zip(&vector).for_each(|(sum, x)| *sum += x),
        }
        pending.missing -= 1;
        if pending.missing > 0 {
            return None;
        }
        let mut mean = self.pending.remove(&text)?.sum;
        let length = mean.iter().map(|x| x * x).sum::<f32>().sqrt();
        if length.is_normal() {
            mean.iter_mut().for_each(|x| *x /= length);
        }
        Some(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a text: `[CLS]` is 1, `[SEP]` is 2, its words are numbered from 10.
    fn text(words: i32) -> Vec<i32> {
        [vec![1], (10..10 + words).collect(), vec![2]].concat()
    }

    #[test]
    fn embed_cuts_long_texts_into_equal_pieces() {
        let cut = |words, prefix, max| cut_into_pieces(text(words), prefix, max);
        assert_eq!(cut(3, 0, 5), [[1, 10, 11, 12, 2]]);
        assert_eq!(cut(4, 0, 5), [[1, 10, 11, 2], [1, 12, 13, 2]]);
        assert_eq!(cut(7, 0, 5), [vec![1, 10, 11, 12, 2], vec![1, 13, 14, 15, 2], vec![1, 16, 2]]);
        assert_eq!(cut(0, 0, 5), [[1, 2]]);
        assert_eq!(cut(5, 1, 5), [[1, 10, 11, 12, 2], [1, 10, 13, 14, 2]], "each piece has the prefix");
        assert_eq!(cut(3, 4, 4), [vec![1, 10, 11, 2], vec![1, 12, 2]], "there is no room for the prefix");
        for words in 0..200 {
            for (prefix, max) in [(0, 3), (0, 8), (2, 8), (3, 64)] {
                let pieces = cut(words, prefix, max);
                assert!(pieces.iter().all(|piece| piece.len() <= max), "{words} {prefix} {max}");
                let skip = |n: usize| 1 + if pieces.len() > 1 && n > 0 { prefix } else { 0 };
                let joined: Vec<i32> = (pieces.iter().enumerate())
                    .flat_map(|(n, piece)| piece[skip(n)..piece.len() - 1].to_vec())
                    .collect();
                assert_eq!(joined, text(words)[1..=words as usize], "no token is lost");
            }
        }
    }

    #[test]
    fn embed_averages_the_vectors_of_pieces() {
        let mut averager = PieceAverager::default();
        averager.begin(0, 1);
        averager.begin(1, 2);
        assert_eq!(averager.add(1, vec![1.0, 0.0]), None);
        assert_eq!(averager.add(0, vec![0.5, 0.25]), Some(vec![0.5, 0.25]), "one piece stays as it is");
        let mean = averager.add(1, vec![0.0, 1.0]).expect("the last piece");
        assert!(mean.iter().all(|x| (x - 0.5f32.sqrt()).abs() < 1e-6), "{mean:?}");
        assert!(averager.pending.is_empty());
    }
}

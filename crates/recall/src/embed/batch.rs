//! Which texts are run together: those with the same number of tokens, so that nothing is padded.

use std::collections::VecDeque;

/// The most tokens that are run at once: as many as the longest text has. So whoever asks for something in the midst of
/// other work waits no longer than for one such text, and from there on more at once is no faster.
const TOKENS: usize = super::tokenizer::MAX_TOKENS;

/// Texts with the same number of tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Batch {
    /// The numbers by which the texts are known.
    pub numbers: Vec<usize>,
    /// Their tokens.
    pub texts: Vec<Vec<i32>>,
}

/// Puts texts into batches, the shortest first; each into one of its own, unless they can be run `together`.
pub(super) fn cut(texts: impl Iterator<Item = (usize, Vec<i32>)>, together: bool) -> VecDeque<Batch> {
    let mut texts: Vec<_> = texts.collect();
    texts.sort_by_key(|(_, tokens)| tokens.len());
    let mut batches: VecDeque<Batch> = VecDeque::new();
    for (number, tokens) in texts {
        let fits = |batch: &&mut Batch| {
            together
                && batch.texts[0].len() == tokens.len()
                && (batch.texts.len() + 1) * tokens.len() <= TOKENS
        };
        match batches.back_mut().filter(fits) {
            Some(batch) => {
                batch.numbers.push(number);
                batch.texts.push(tokens);
            }
            None => batches.push_back(Batch { numbers: vec![number], texts: vec![tokens] }),
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(lengths: &[usize], together: bool) -> Vec<Vec<usize>> {
        let texts = lengths.iter().map(|&length| vec![7; length]).enumerate();
        cut(texts, together).into_iter().map(|batch| batch.numbers).collect()
    }

    #[test]
    fn only_equals_are_run_together() {
        assert_eq!(numbers(&[5, 3, 5, 4, 3], true), [vec![1, 4], vec![3], vec![0, 2]]);
        assert_eq!(numbers(&[5, 3, 5], false), [[1], [0], [2]]);
        assert!(numbers(&[], true).is_empty());
    }

    #[test]
    fn a_batch_is_as_much_as_one_long_text() {
        assert_eq!(numbers(&[256, 256], true), [[0], [1]]);
        assert_eq!(numbers(&[128; 3], true), [vec![0, 1], vec![2]]);
        assert_eq!(numbers(&[3; 200], true).iter().map(Vec::len).collect::<Vec<_>>(), [85, 85, 30]);
    }
}

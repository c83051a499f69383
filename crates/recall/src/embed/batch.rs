//! Batches for the encoder: texts with the same number of tokens, so that nothing is padded.

use std::collections::VecDeque;

/// The most tokens of a batch: as many as the longest text has. A query that arrives during background work waits for one
/// batch at most; larger batches are not faster.
const MAX_BATCH_TOKENS: usize = super::tokenizer::MAX_TOKENS;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct EmbedBatch {
    /// The index of each text in the request.
    pub indices: Vec<usize>,
    pub tokens: Vec<Vec<i32>>,
}

/// Groups texts (index, tokens) into batches, the shortest first. Unless `can_batch`, each text is a batch of its own.
pub(super) fn make_batches(
    texts: impl Iterator<Item = (usize, Vec<i32>)>,
    can_batch: bool,
) -> VecDeque<EmbedBatch> {
    let mut texts: Vec<_> = texts.collect();
    texts.sort_by_key(|(_, tokens)| tokens.len());
    let mut batches: VecDeque<EmbedBatch> = VecDeque::new();
    for (index, tokens) in texts {
        let fits = |batch: &&mut EmbedBatch| {
            can_batch
                && batch.tokens[0].len() == tokens.len()
                && (batch.tokens.len() + 1) * tokens.len() <= MAX_BATCH_TOKENS
        };
        match batches.back_mut().filter(fits) {
            Some(batch) => {
                batch.indices.push(index);
                batch.tokens.push(tokens);
            }
            None => batches.push_back(EmbedBatch { indices: vec![index], tokens: vec![tokens] }),
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch_indices(lengths: &[usize], can_batch: bool) -> Vec<Vec<usize>> {
        let texts = lengths.iter().map(|&length| vec![7; length]).enumerate();
        make_batches(texts, can_batch).into_iter().map(|batch| batch.indices).collect()
    }

    #[test]
    fn embed_batch_groups_texts_of_equal_length() {
        assert_eq!(batch_indices(&[5, 3, 5, 4, 3], true), [vec![1, 4], vec![3], vec![0, 2]]);
        assert_eq!(batch_indices(&[5, 3, 5], false), [[1], [0], [2]]);
        assert!(batch_indices(&[], true).is_empty());
    }

    #[test]
    fn embed_batch_is_limited_to_max_tokens() {
        assert_eq!(batch_indices(&[512, 512], true), [[0], [1]]);
        assert_eq!(batch_indices(&[256; 3], true), [vec![0, 1], vec![2]]);
        assert_eq!(batch_indices(&[3; 400], true).iter().map(Vec::len).collect::<Vec<_>>(), [170, 170, 60]);
    }
}

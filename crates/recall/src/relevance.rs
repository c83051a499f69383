//! How likely a hit answers the query: an absolute measure, where the score of a hit is relative to its conversation.
//!
//! A logistic regression, fitted to the 725 questions of REALTALK, each asked in its own conversation and in another one, in
//! which nothing answers it (LOG.md). It was fitted three times: with the similarities of the default embedder, without
//! similarities, and on search by words alone. The similarities of another embedder have another scale, so they do not count.

/// What the relevance of a hit is computed from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelevanceFeatures {
    /// The score, without the boost of a role.
    pub score: f64,
    /// The cosine similarity of the two vectors of the default embedder: alone, and in context.
    pub similarity: [Option<f32>; 2],
    /// The share of the query's terms that the chunk and its direct neighbours have.
    pub term_share: f64,
    /// The number of chunks in the conversation.
    pub chunks: usize,
    pub basis: RelevanceBasis,
}

/// What the score of a hit is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RelevanceBasis {
    /// Words, and vectors of the default embedder.
    DefaultEmbedder,
    /// Words, and vectors of another embedder.
    OtherEmbedder,
    Words,
}

/// The checksum of the embedder whose similarities were fitted: e5-small. It is the last part of its name.
const FITTED_EMBEDDER: &str = "c8c3e469f4ae";

impl RelevanceBasis {
    /// The basis of a search with vectors of that embedder.
    pub(crate) fn of_embedder(name: &str) -> Self {
        if name.rsplit('-').next() == Some(FITTED_EMBEDDER) {
            Self::DefaultEmbedder
        } else {
            Self::OtherEmbedder
        }
    }
}

/// The similarity of a chunk without a vector: about the mean of unrelated texts.
const UNKNOWN_SIMILARITY: f64 = 0.75;

impl RelevanceFeatures {
    /// The probability that the hit answers the query.
    pub(crate) fn relevance(&self) -> f64 {
        let similarity = self.similarity.map(|value| value.map_or(UNKNOWN_SIMILARITY, f64::from));
        let log_chunks = (self.chunks.max(1) as f64).ln();
        let logit = match self.basis {
            RelevanceBasis::DefaultEmbedder => {
                0.5048 * self.score + 17.135 * similarity[0] + 9.401 * similarity[1] + 1.392 * self.term_share
                    - 0.690 * log_chunks
                    - 24.139
            }
            RelevanceBasis::OtherEmbedder => {
                0.640 * self.score + 2.096 * self.term_share - 0.438 * log_chunks - 4.493
            }
            RelevanceBasis::Words => {
                0.582 * self.score + 2.498 * self.term_share - 0.541 * log_chunks - 3.444
            }
        };
        1.0 / (1.0 + (-logit).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features() -> RelevanceFeatures {
        RelevanceFeatures {
            score: 4.0,
            similarity: [Some(0.85), Some(0.85)],
            term_share: 0.5,
            chunks: 900,
            basis: RelevanceBasis::DefaultEmbedder,
        }
    }

    /// Every feature raises the relevance, and the number of chunks lowers it: in a long conversation something is always near.
    #[test]
    fn relevance_grows_with_every_feature() {
        let plain = features();
        for basis in [RelevanceBasis::DefaultEmbedder, RelevanceBasis::OtherEmbedder, RelevanceBasis::Words] {
            let at = |features: RelevanceFeatures| RelevanceFeatures { basis, ..features }.relevance();
            assert!(at(RelevanceFeatures { score: 5.0, ..plain }) > at(plain), "{basis:?}");
            assert!(at(RelevanceFeatures { term_share: 0.6, ..plain }) > at(plain), "{basis:?}");
            assert!(at(RelevanceFeatures { chunks: 9000, ..plain }) < at(plain), "{basis:?}");
            assert!((0.0..=1.0).contains(&at(RelevanceFeatures { score: -100.0, ..plain })), "{basis:?}");
        }
        let similar = |value: f32| RelevanceFeatures { similarity: [Some(value); 2], ..plain };
        assert!(similar(0.9).relevance() > plain.relevance());
    }

    /// The scale of another embedder is unknown.
    #[test]
    fn similarities_of_other_embedders_do_not_count() {
        let of = |value: f32, basis| RelevanceFeatures { similarity: [Some(value); 2], basis, ..features() };
        for basis in [RelevanceBasis::OtherEmbedder, RelevanceBasis::Words] {
            assert_eq!(of(0.1, basis).relevance(), of(0.9, basis).relevance(), "{basis:?}");
        }
    }
}

//! Search in a conversation: which chunks answer a query, pruned or not.
//!
//! - [`recall`]: opens, updates and searches the index of one conversation. Start here.
//! - [`index`]: the index itself, kept equal to the timeline.
//! - [`rank`]: scores chunks by words, meaning and form, and explains the score.
//! - [`lexical`]: BM25 over stemmed terms. [`vector_index`]: exact nearest-neighbour search.
//! - [`embed`]: sentence encoders (ONNX) that turn texts into vectors.
//!
//! The crate does not decide what is resurrected: `halo_core` does, with the hits.

pub mod embed;
pub mod index;
pub mod lexical;
pub mod query_dates;
pub mod rank;
pub mod recall;
mod relevance;
pub mod row_order;
pub mod text_features;
pub mod vector_index;

//! Test doubles of the traits, and naive implementations to compare with, for tests, fuzz targets and benches.

pub mod chunker_checks;
pub mod doubles;
pub mod logits;
pub mod naive_timeline;
pub mod naive_token;
pub mod shared_store;
pub mod stored_timeline;
pub mod timeline_fuzz;

//! What stands in for the world, and what the timeline is held against, in tests, fuzz targets and benches.

pub mod chunks;
pub mod doubles;
pub mod guesses;
pub mod ops;
pub mod record;
pub mod shared;
pub mod shelf;
pub mod twin;

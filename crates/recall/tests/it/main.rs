//! All integration tests of this crate, linked once.

mod index;
mod minilm;

//! All integration tests of this crate, linked once.

mod align;
mod common;
mod host;
mod memory;
mod turn;

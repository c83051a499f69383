//! All integration tests of this crate, linked once.

mod crash;
mod program;
mod tools;

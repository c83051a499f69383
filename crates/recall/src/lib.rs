//! Finds what was said.

pub mod embed;
pub mod lexical;
pub mod vectors;

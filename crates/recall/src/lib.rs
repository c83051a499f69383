//! Finds what was said.

pub mod embed;
pub mod form;
pub mod index;
pub mod lexical;
pub mod order;
pub mod rank;
pub mod recall;
pub mod vectors;
pub mod when;

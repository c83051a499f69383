//! All integration tests of this crate, linked once.

mod apply;
mod cases;
mod golden;
mod properties;
mod replay;
mod rules;
mod test_doubles;

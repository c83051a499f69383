//! All integration tests of this crate, linked once.

mod apply;
mod cases;
mod extract;
mod founding_rules;
mod golden;
mod properties;
mod replay;
mod rules;
mod test_doubles;

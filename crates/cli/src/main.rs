//! Halo.
fn main() {}

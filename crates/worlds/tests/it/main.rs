//! All integration tests of this crate, linked once.

mod hud;
mod runner;
mod world_rules;

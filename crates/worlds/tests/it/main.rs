//! All integration tests of this crate, linked once.

mod hud;
mod hud_budgets;
mod hud_fields;
mod runner;
mod world_rules;

//! The parts of the `halo` program. `halo-bench` uses them too; nothing else does.

pub mod args;
pub mod capture;
pub mod commands;
mod disk;
pub mod env;
pub mod error;
mod file;
pub mod help;
pub mod model_pool;
pub mod model_probe;
pub mod models;
pub mod output;
pub mod progress;
pub mod script_model;
pub mod settings;
pub mod startup;
pub mod wiring;

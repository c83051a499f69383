//! All integration tests of this crate, linked once.

mod common;
mod every_database;
mod import_formats;
mod import_fuzz;
mod postgres_faults;
mod repair;

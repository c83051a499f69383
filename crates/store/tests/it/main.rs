//! All integration tests of this crate, linked once.

mod common;
mod every_database;
mod export_versions;
mod import_formats;
mod import_fuzz;
mod postgres_faults;
mod repair;

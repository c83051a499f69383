//! All integration tests of this crate, linked once.

mod common;
mod every_database;
mod export_versions;
mod import_formats;
mod import_fuzz;
mod lease_history;
mod postgres_faults;
mod postgres_lease;
mod postgres_pooler;
mod postgres_tls;
mod repair;

//! Conversations on disk, for ever: SQLite in a file, or PostgreSQL on a server.
//!
//! [`Database`](database::Database) is the [`Store`](halo_core::store::Store) of both. What it keeps, and why it
//! is kept so, is in `schema/`; ARCHITECTURE.md has the rest.

mod block;
mod copy;
pub mod database;
pub mod doctor;
pub mod exchange;
mod files;
pub mod forget;
mod log_compaction;
mod log_json;
mod message_keys;
mod postgres;
mod recover;
mod repair;
mod row_store;
mod rows;
mod sql;
mod sqlite;

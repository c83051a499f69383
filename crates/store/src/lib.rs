//! Conversations on disk, for ever: SQLite in a file, or PostgreSQL on a server.
//!
//! [`Database`](database::Database) is the [`Store`](halo_core::seams::Store) of both. What it keeps, and why it
//! is kept so, is in `schema/`; ARCHITECTURE.md has the rest.

mod block;
mod compact;
pub mod database;
pub mod doctor;
pub mod exchange;
mod files;
pub mod forget;
mod log;
mod mend;
mod messages;
mod postgres;
mod rescue;
mod retell;
mod rows;
mod sql;
mod sqlite;
mod worlds;

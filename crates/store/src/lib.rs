//! Conversations on disk: SQLite in a file, or PostgreSQL on a server.
//!
//! [`Database`](database::Database) implements [`Store`](halo_core::store::Store) on both. The tables and their columns
//! are described in `schema/`.

mod block;
mod commit;
mod copy;
pub mod database;
pub mod doctor;
pub mod exchange;
mod file_swap;
mod files;
pub mod forget;
mod held_leases;
mod lease_owner;
mod location;
mod log_compaction;
mod log_json;
mod message_keys;
mod names;
mod open_conversation;
mod postgres;
mod postgres_lease;
mod postgres_pool;
mod postgres_tables;
mod postgres_tls;
mod recover;
mod repair;
mod repair_file;
mod row_store;
mod rows;
mod schema;
mod sql;
mod sqlite;
mod store;
pub mod wal_check;

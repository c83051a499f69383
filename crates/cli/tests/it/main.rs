//! All integration tests of this crate, linked once.

mod chat;
mod common;
mod config;
mod forget;
mod help;
mod models;
mod replay;
mod requirements;
mod rooms;
mod search;
mod store;

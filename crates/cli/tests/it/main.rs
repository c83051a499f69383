//! All integration tests of this crate in one binary, which links faster than one binary per file.

mod chat;
mod common;
mod config;
mod forget;
mod help;
mod licenses;
mod models;
mod replay;
mod requirements;
mod rooms;
mod search;
mod store;

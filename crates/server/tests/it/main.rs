//! Tests of the HTTP API on a fake model and an in-memory store, in one binary.

mod chat;
mod fake;
mod forget;
mod random_clients;

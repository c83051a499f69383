//! Tests of the HTTP API on a fake model and an in-memory store; all linked once.

mod chat;
mod fake;
mod forget;
mod random_clients;

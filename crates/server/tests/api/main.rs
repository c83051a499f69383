//! The API on test doubles, through the real routes.

mod chat;
mod fake;
mod random_clients;

//! All integration tests of this crate in one binary, which links faster than one binary per file.

mod built_tests;
mod chat;
mod client_tables;
mod common;
mod config;
mod docs;
mod forget;
mod forget_property;
mod forgetting;
mod gun;
mod help;
mod hostile_files;
mod hostile_templates;
mod install;
mod licenses;
mod memories;
mod models;
mod postgres_lease;
#[path = "../../../store/tests/it/common/postgres_server.rs"]
#[allow(dead_code, reason = "the tests of the store use all of it")]
mod postgres_server;
mod prebuilt;
mod readme;
mod replay;
mod requirements;
mod rooms;
mod scripted;
mod search;
mod special_tokens;
mod store;
mod template_goldens;
mod wiring;

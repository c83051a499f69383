//! Tests of the HTTP API on a fake model and an in-memory store, in one binary.

mod access;
mod all_routes;
mod chat;
mod client_fields;
mod connections;
mod fake;
mod fixture;
mod forget;
mod hostile_halo_routes;
mod hostile_requests;
mod monitoring;
mod postgres;
#[path = "../../../store/tests/it/common/postgres_server.rs"]
mod postgres_server;
mod random_clients;
mod request_log;
mod responses;
mod routes_conversations;
mod routes_halo;
mod routes_kobold;
mod routes_kobold_info;
mod routes_llama_server;
mod routes_mcp;
mod routes_ollama;
mod routes_openai;
mod routes_options;
mod routes_sampling;
mod routes_transcript;
mod routes_worlds;
mod tools;

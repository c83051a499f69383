//! The commands. A command returns an error for `main` to print; it never exits by itself.

pub mod ask;
pub mod chat;
pub mod config;
pub mod conversations;
pub mod doctor;
pub mod extract;
pub mod fetch_models;
pub mod forget;
pub mod hud;
pub mod import_export;
pub mod key;
pub mod licenses;
pub mod manual_edit;
pub mod memories;
mod model_choices;
pub mod models;
mod pip;
pub mod pull;
pub mod replay;
pub mod rooms;
pub mod search;
pub mod self_check;
pub mod serve;
pub mod shell;
pub mod show;
pub mod stats;

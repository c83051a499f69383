//! The timeline of a conversation and every rule about it.
//!
//! Pure and synchronous: no clock, file, network, database, thread or random number (`clippy.toml` enforces
//! this). Planners read a [`Timeline`](timeline::Timeline) and return a [`Change`](change::Change); only
//! [`apply`] changes a timeline. ARCHITECTURE.md is the map.

#![warn(missing_docs)]

pub mod answer_parser;
pub mod apply;
pub mod attention;
pub mod brightness;
pub mod budget;
pub mod change;
pub mod chunk_body;
pub mod chunker;
pub mod context_window;
pub mod conversation_copy;
pub mod dirty_rows;
pub mod embedder;
pub mod error;
pub mod extract;
mod live_index;
pub mod manual_edit;
pub mod message_wrap;
pub mod model;
pub mod name;
pub mod notation;
pub mod prune;
mod rebuild_log;
pub mod replay;
pub mod resurrect;
pub mod row_store;
pub mod rules;
pub mod salience;
pub mod sampling;
pub mod scorer;
pub mod sliding_window;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
pub mod timeline;
pub mod timeline_builder;
pub mod token;
pub mod tool_call;
pub mod ttl;
pub mod turn_end;

pub use error::{Error, ErrorKind};

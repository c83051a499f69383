//! Conversations: turns, the scheduler, memories, premises, forgetting and history.
//!
//! Models, stores and embedders are traits of `halo-core`, so the same turn runs on all of them and on their test doubles.
//! [`turn`] is the flow of a turn; [`conversation`] owns the timeline and commits; [`session`] composes the parts of an open
//! conversation; [`host`] runs many sessions on one model.

pub mod agent;
pub mod align;
mod answer_edit;
mod answer_stream;
pub mod attention_history;
pub mod branch;
mod call_format;
pub mod chat_format;
mod chat_model;
pub mod chat_options;
mod client_history;
pub mod conversation;
pub mod cooled_model;
pub mod event;
pub mod forget;
pub mod forgetting_cycle;
pub mod forgetting_record;
mod generation;
pub mod history;
pub mod host;
pub mod lookup;
pub mod manual_edit;
pub mod memory;
mod opening;
mod parts;
pub mod premise;
mod reasoning;
pub mod recorder;
mod retokenize;
pub mod rules;
pub mod scheduler;
pub mod session;
pub mod snapshot;
pub mod title;
pub mod tools;
pub mod turn;
mod turn_progress;
pub mod turn_record;
pub mod variant;
pub mod window_size;

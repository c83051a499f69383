//! The conversation: one message in, one answer out, and everything between that keeps the window small and the past
//! within reach.
//!
//! Models, stores and embedders are seen through their seams only, so the same turn runs on all of them, and on their
//! test doubles. [`turn`] is the flow; [`session`] holds what it works on; [`host`] has many of them, for many who ask.

pub mod agent;
pub mod align;
mod anew;
pub mod board;
pub mod branch;
pub mod event;
pub mod find;
pub mod frame;
pub mod gate;
pub mod grace;
pub mod history;
pub mod host;
pub mod memory;
pub mod premise;
pub mod record;
pub mod rules;
pub mod session;
pub mod signal;
mod speech;
mod tell;
pub mod tools;
pub mod turn;
pub mod variant;
pub mod world;

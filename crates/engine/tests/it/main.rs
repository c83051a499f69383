//! All integration tests of this crate, in one binary.

mod align;
mod answers;
mod attention_history;
mod common;
mod forgetting_cycle;
mod host;
mod memory;
mod message_times;
mod notes;
mod reasoning;
mod retokenize;
mod storing;
mod turn;
mod window;

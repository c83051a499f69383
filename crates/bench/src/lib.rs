//! Every figure that Halo claims, measured by `halo-bench NAME`. Each is measured beside a baseline in the same run,
//! because a time alone says more about the machine than about the program.

pub mod align;
pub mod attention;
pub mod core;
pub mod crash;
pub mod decode_attention;
pub mod embed;
mod faulty_vfs;
pub mod hud;
pub mod kv;
pub mod memory;
pub mod needle;
pub mod prune;
mod random_changes;
pub mod recall;
pub mod rooms;
pub mod search;
pub mod simulator;
pub mod store;
mod synthetic_history;
mod synthetic_text;
pub mod timing;
pub mod turn;

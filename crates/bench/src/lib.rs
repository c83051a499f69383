//! Every figure that Halo claims, reproducible with one command: `halo bench NAME`. Each is measured beside
//! a baseline in the same run, because a time alone says more about the machine than about the program.

pub mod align;
pub mod attention;
pub mod core;
pub mod crash;
pub mod embed;
mod faulty;
mod history;
pub mod hud;
pub mod keep;
pub mod kv;
mod lives;
pub mod measure;
pub mod memory;
pub mod needle;
mod prose;
pub mod recall;
pub mod rooms;
pub mod search;
pub mod store;
pub mod turn;

//! Every figure that Halo claims, reproducible with one command: `halo bench NAME`. Each is measured beside
//! a baseline in the same run, because a time alone says more about the machine than about the program.

pub mod attention;
pub mod core;
pub mod crash;
pub mod embed;
mod faulty;
pub mod kv;
mod lives;
pub mod measure;
mod prose;
pub mod recall;
pub mod search;
pub mod store;

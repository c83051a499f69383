//! The local model on llama.cpp: attention of all layers from any unpatched GGUF, and a memory whose cells can be
//! taken out and put back. The only foreign code and the only `unsafe` of the program, all of it in [`ffi`].

pub mod attention;
pub mod cells;
pub mod ffi;
pub mod gguf;
pub mod graveyard;
pub mod key;
pub mod layout;
pub mod memory;
pub mod mirror;
pub mod model;
pub mod schema;
mod speak;
pub mod template;
pub mod text;

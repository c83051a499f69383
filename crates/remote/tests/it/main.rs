//! All integration tests of this crate, linked once.

mod download;
mod kobold;
mod openai;
mod proxy;
mod sse;
mod stub;

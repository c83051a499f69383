//! All integration tests of this crate, in one binary.

mod download;
mod kobold;
mod openai;
mod proxy;
mod sse;
mod stub;

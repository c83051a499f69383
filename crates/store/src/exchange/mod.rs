//! Conversations that leave and arrive: the lossless form of our own, and what other programs write.

mod arrive;
pub mod foreign;
mod own;

pub use arrive::{Arrival, Arrivals, Import};

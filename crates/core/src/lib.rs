//! The timeline of a conversation and every rule about it.
//!
//! Pure and synchronous: no clock, file, network, database, thread or random number (`clippy.toml` holds the
//! fence). Planners read a [`Timeline`](timeline::Timeline) and return a [`Change`](change::Change); only
//! `apply` mutates. See ARCHITECTURE.md for the map.

pub mod apply;
pub mod attention;
pub mod body;
pub mod brightness;
pub mod budget;
pub mod change;
pub mod chunk;
pub mod live;
pub mod notation;
mod order;
pub mod parts;
pub mod past;
pub mod prune;
pub mod replay;
pub mod resurrect;
mod retell;
pub mod salience;
pub mod scorer;
pub mod seams;
pub mod signals;
#[cfg(feature = "testing")]
pub mod testing;
pub mod timeline;
pub mod token;
pub mod told;
pub mod touch;
pub mod ttl;
pub mod window;

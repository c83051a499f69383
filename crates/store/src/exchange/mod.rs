//! Conversations that leave and arrive: the lossless form of our own, and what other programs write.

mod arrive;
pub mod foreign;
mod own;

pub use arrive::{Admit, Import, UNREAD};

use crate::sql::SqlError;
use crate::worlds;
use foreign::Losses;
use halo_core::timeline::Timeline;

/// What came of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// The conversations, in order.
    pub conversations: Vec<Arrival>,
    /// What could not be kept.
    pub lost: Losses,
    /// What the file was.
    pub format: String,
}

/// A conversation, or a world, that has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its name here.
    pub name: String,
    /// Whether it is a world of rooms.
    pub is_world: bool,
    /// Messages.
    pub turns: usize,
    /// Tokens.
    pub tokens: usize,
    /// Tokens in the window.
    pub live: usize,
}

impl Arrival {
    fn of(name: &str, timeline: &Timeline) -> Self {
        let (turns, tokens) = (timeline.turns().len(), timeline.len());
        let world = worlds::of(name);
        let (name, is_world) = (world.unwrap_or(name).to_owned(), world.is_some());
        Self { name, is_world, turns, tokens, live: timeline.live_len() }
    }
}

fn taken(name: &str) -> SqlError {
    let (what, name) = worlds::of(name).map_or(("conversation", name), |world| ("world", world));
    SqlError::refused(format!("there is a {what} '{name}' already: give this one another name with -c"))
}

//! Conversations that leave and arrive: the lossless form of our own, and what other programs write.

mod arrive;
pub mod foreign;
mod own;

pub use arrive::{Import, UNREAD};

use crate::sql::SqlError;
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

/// A conversation that has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its name here.
    pub name: String,
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
        Self { name: name.to_owned(), turns, tokens, live: timeline.live_len() }
    }
}

fn taken(name: &str) -> SqlError {
    SqlError::refused(format!("there is a conversation '{name}' already: give this one another name with -c"))
}

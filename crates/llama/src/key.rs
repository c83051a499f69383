//! How a token of a window is known to a cache: by its place in the system prompt, or by its position on the timeline.

use halo_core::seams::Seen;

/// The name of a token in a cache. Names of neighbours differ by one, and names are in the order of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub i64);

/// The name of the system prompt's first token: long before the timeline's.
const SYSTEM: i64 = -(1 << 40);

impl Key {
    /// The name of the token that follows.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The names of a window's tokens; none if it is not in order.
#[must_use]
pub fn keys(window: &[Seen]) -> Option<Vec<Key>> {
    let mut keys: Vec<Key> = Vec::with_capacity(window.len());
    for (n, seen) in window.iter().enumerate() {
        let key = match seen.position {
            None => Key(SYSTEM + n as i64),
            // More than anybody will ever say; sums of names stay within their type.
            Some(position) => Key(i64::try_from(position.0).ok().filter(|&n| n < 1 << 48)?),
        };
        if keys.last().is_some_and(|last| *last >= key) {
            return None;
        }
        keys.push(key);
    }
    Some(keys)
}

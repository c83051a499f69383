//! How a token of a window is known to a cache: by its place in the system prompt, by its position on the timeline, or, where
//! it stands there without having been said, by the position behind which it stands.

use halo_core::seams::Seen;

/// The name of a token in a cache. Names are in the order of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// A position, or a place in the system prompt.
    pub at: i64,
    /// 0 for what was said there; else which one it is of those that stand behind it.
    pub behind: u16,
}

/// The name of the system prompt's first token: long before the timeline's.
const SYSTEM: i64 = -(1 << 40);

impl Key {
    /// The first name of all, and the last.
    pub const ENDS: (Key, Key) = (Key { at: i64::MIN, behind: 0 }, Key { at: i64::MAX, behind: u16::MAX });

    /// The name of what was said at a position.
    #[must_use]
    pub fn said(at: i64) -> Self {
        Self { at, behind: 0 }
    }

    /// The name of the `n`-th token that follows without a gap.
    #[must_use]
    pub fn plus(self, n: usize) -> Self {
        match self.behind {
            0 => Self::said(self.at.saturating_add(i64::try_from(n).unwrap_or(i64::MAX))),
            behind => Self { behind: behind.saturating_add(u16::try_from(n).unwrap_or(u16::MAX)), ..self },
        }
    }

    /// How many tokens behind another it stands, where all between are of the same kind.
    #[must_use]
    pub fn from(self, start: Self) -> Option<usize> {
        match (start.behind, self.behind) {
            (0, 0) => usize::try_from(self.at.checked_sub(start.at)?).ok(),
            (0, _) | (_, 0) => None,
            (first, this) => (self.at == start.at && this >= first).then(|| usize::from(this - first)),
        }
    }
}

/// The names of a window's tokens; none if it is not in order.
#[must_use]
pub fn keys(window: &[Seen]) -> Option<Vec<Key>> {
    let mut keys: Vec<Key> = Vec::with_capacity(window.len());
    for (n, seen) in window.iter().enumerate() {
        let at = match seen.position {
            None => SYSTEM + n as i64,
            // More than anybody will ever say; sums of names stay within their type.
            Some(position) => i64::try_from(position.0).ok().filter(|&n| n < 1 << 48)?,
        };
        let key = Key { at, behind: seen.behind };
        if keys.last().is_some_and(|last| *last >= key) {
            return None;
        }
        keys.push(key);
    }
    Some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_between_has_names_of_its_own() {
        let (said, beside) = (Key::said(7), Key { at: 7, behind: 1 });
        assert!(said < beside && beside.plus(200) < Key::said(8));
        assert_eq!((said.plus(3).from(said), beside.plus(3).from(beside)), (Some(3), Some(3)));
        assert_eq!(
            (beside.from(said), Key::said(8).from(beside), said.from(Key::said(8))),
            (None, None, None)
        );
        assert_eq!(Key { at: 8, behind: 2 }.from(beside), None, "behind another position");
    }
}

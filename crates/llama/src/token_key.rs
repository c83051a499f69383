//! The key by which the KV cache and the KV archive identify a token of the context window.
//!
//! A token of the timeline has its position. A token of the system prompt has its index, far below all positions. A token
//! that is placed in the window without being on the timeline (a memory) has the position that it follows and an offset.

use halo_core::model::WindowToken;

/// Identifies a token of one conversation. Keys are ordered like the tokens of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenKey {
    /// A timeline position, or a negative number for the system prompt.
    pub timeline_pos: i64,
    /// 0 for the token at that position; 1, 2, … for the inserted tokens that follow it.
    pub offset: u16,
}

/// The key of the system prompt's first token; every timeline position is larger.
const SYSTEM_PROMPT_START: i64 = -(1 << 40);

impl TokenKey {
    /// The smallest and the largest key.
    pub const BOUNDS: (TokenKey, TokenKey) = (
        TokenKey { timeline_pos: i64::MIN, offset: 0 },
        TokenKey { timeline_pos: i64::MAX, offset: u16::MAX },
    );

    /// The key of the token at a timeline position.
    #[must_use]
    pub fn at_position(timeline_pos: i64) -> Self {
        Self { timeline_pos, offset: 0 }
    }

    /// The key of the `n`-th token after this one, if they follow without a gap.
    #[must_use]
    pub fn plus(self, n: usize) -> Self {
        match self.offset {
            0 => Self::at_position(self.timeline_pos.saturating_add(i64::try_from(n).unwrap_or(i64::MAX))),
            offset => Self { offset: offset.saturating_add(u16::try_from(n).unwrap_or(u16::MAX)), ..self },
        }
    }

    /// How many tokens after `start` this one comes. None if one of them is inserted and the other is not, or if they are
    /// inserted at different positions.
    #[must_use]
    pub fn distance_from(self, start: Self) -> Option<usize> {
        match (start.offset, self.offset) {
            (0, 0) => usize::try_from(self.timeline_pos.checked_sub(start.timeline_pos)?).ok(),
            (0, _) | (_, 0) => None,
            (from, to) => {
                (self.timeline_pos == start.timeline_pos && to >= from).then(|| usize::from(to - from))
            }
        }
    }
}

/// The keys of a window's tokens. None if they are not strictly ascending.
#[must_use]
pub fn token_keys(window: &[WindowToken]) -> Option<Vec<TokenKey>> {
    let mut keys: Vec<TokenKey> = Vec::with_capacity(window.len());
    for (n, token) in window.iter().enumerate() {
        let timeline_pos = match token.position {
            None => SYSTEM_PROMPT_START + n as i64,
            // The limit keeps sums of keys within i64.
            Some(position) => i64::try_from(position.0).ok().filter(|&n| n < 1 << 48)?,
        };
        let key = TokenKey { timeline_pos, offset: token.offset };
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
    fn token_key_orders_inserted_tokens_after_their_position() {
        let (token, inserted) = (TokenKey::at_position(7), TokenKey { timeline_pos: 7, offset: 1 });
        assert!(token < inserted && inserted.plus(200) < TokenKey::at_position(8));
        assert_eq!(
            (token.plus(3).distance_from(token), inserted.plus(3).distance_from(inserted)),
            (Some(3), Some(3))
        );
        assert_eq!(
            (
                inserted.distance_from(token),
                TokenKey::at_position(8).distance_from(inserted),
                token.distance_from(TokenKey::at_position(8))
            ),
            (None, None, None)
        );
        assert_eq!(
            TokenKey { timeline_pos: 8, offset: 2 }.distance_from(inserted),
            None,
            "inserted at another position"
        );
    }
}

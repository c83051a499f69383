//! Which tokens a recurrent state has read.

use super::window::KeyedWindow;
use crate::ffi::LlamaToken;
use crate::token_key::TokenKey;

/// The tokens that a recurrent state has read, in ascending order of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RecurrentHistory(Vec<(TokenKey, LlamaToken)>);

/// Bytes of one token in [`RecurrentHistory::to_bytes`].
const HISTORY_TOKEN_BYTES: usize = 14;

impl RecurrentHistory {
    pub(super) fn last(&self) -> Option<(TokenKey, LlamaToken)> {
        self.0.last().copied()
    }

    /// The number of slots at the start of a window that the state has read. None if it has read a token that the window
    /// contradicts, or its last token is not in the window: nothing says whether that one was pruned or never said.
    pub(super) fn covered_slots(&self, window: &KeyedWindow<'_>) -> Option<usize> {
        let Some((last_key, _)) = self.last() else { return Some(0) };
        let last_slot = window.keys.binary_search(&last_key).ok()?;
        let mut slots = (0..=last_slot).peekable();
        for (key, token) in &self.0 {
            while slots.next_if(|&slot| window.keys[slot] < *key).is_some() {}
            let same_key = slots.next_if(|&slot| window.keys[slot] == *key);
            if same_key.is_some_and(|slot| window.tokens[slot].id.0 != token.cast_unsigned()) {
                return None;
            }
        }
        Some(last_slot + 1)
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(4 + self.0.len() * HISTORY_TOKEN_BYTES);
        bytes.extend((self.0.len() as u32).to_le_bytes());
        for (key, token) in &self.0 {
            bytes.extend(key.timeline_pos.to_le_bytes());
            bytes.extend(key.offset.to_le_bytes());
            bytes.extend(token.to_le_bytes());
        }
        bytes
    }

    /// The history at the start of an archived state, and the state that follows it.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let len = (u32::from_le_bytes(*len) as usize).checked_mul(HISTORY_TOKEN_BYTES)?;
        let (tokens, state) = rest.split_at_checked(len)?;
        let token = |bytes: &[u8]| {
            let timeline_pos = i64::from_le_bytes(bytes[..8].try_into().ok()?);
            let offset = u16::from_le_bytes(bytes[8..10].try_into().ok()?);
            let token = LlamaToken::from_le_bytes(bytes[10..].try_into().ok()?);
            Some((TokenKey { timeline_pos, offset }, token))
        };
        let tokens = tokens.chunks_exact(HISTORY_TOKEN_BYTES).map(token).collect::<Option<Vec<_>>>()?;
        Some((Self(tokens), state))
    }
}

/// The recurrent state of the main sequence.
#[derive(Debug, Default)]
pub(super) struct MainState {
    pub(super) history: RecurrentHistory,
    /// Whether the archive has it.
    pub(super) archived: bool,
}

impl MainState {
    pub(super) fn push(&mut self, tokens: impl Iterator<Item = (TokenKey, LlamaToken)>) {
        self.history.0.extend(tokens);
        self.archived = false;
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_key::token_keys;
    use halo_core::model::WindowToken;
    use halo_core::token::{Position, TokenId};

    fn window(tokens: &[(u64, u32)]) -> Vec<WindowToken> {
        let token = |&(position, id): &(u64, u32)| WindowToken {
            position: Some(Position(position)),
            offset: 0,
            id: TokenId(id),
            chunk_start: false,
        };
        tokens.iter().map(token).collect()
    }

    fn covered_slots(history: &RecurrentHistory, tokens: &[(u64, u32)]) -> Option<usize> {
        let tokens = window(tokens);
        let keys = token_keys(&tokens).expect("in order");
        history.covered_slots(&KeyedWindow { tokens: &tokens, keys })
    }

    #[test]
    fn recurrent_history_covers_window_up_to_its_last_token() {
        let read = [(0, 5), (1, 6), (2, 7), (3, 8)];
        let history = RecurrentHistory(read.map(|(n, id)| (TokenKey::at_position(n), id)).to_vec());
        type HistoryCase<'a> = (&'a str, &'a [(u64, u32)], Option<usize>);
        let cases: &[HistoryCase<'_>] = &[
            ("the same", &[(0, 5), (1, 6), (2, 7), (3, 8)], Some(4)),
            ("more after it", &[(0, 5), (1, 6), (2, 7), (3, 8), (4, 9)], Some(4)),
            ("pruned in the middle", &[(0, 5), (3, 8), (4, 9)], Some(2)),
            ("the end is replaced", &[(0, 5), (1, 6), (2, 7), (3, 9)], None),
            ("the end is cut off", &[(0, 5), (1, 6), (2, 7)], None),
            ("another token in the middle", &[(0, 5), (1, 9), (3, 8)], None),
        ];
        for (name, tokens, expected) in cases {
            assert_eq!(covered_slots(&history, tokens), *expected, "{name}");
        }
        assert_eq!(covered_slots(&RecurrentHistory::default(), &[(0, 5)]), Some(0));
        // A token that was resurrected without being read again.
        let partial = RecurrentHistory(vec![(TokenKey::at_position(0), 5), (TokenKey::at_position(3), 8)]);
        assert_eq!(covered_slots(&partial, &[(0, 5), (1, 6), (3, 8)]), Some(3));
    }

    #[test]
    fn recurrent_history_round_trips_and_refuses_cut_bytes() {
        let history = RecurrentHistory(vec![
            (TokenKey::at_position(-9), 5),
            (TokenKey { timeline_pos: 3, offset: 2 }, i32::MAX),
        ]);
        let bytes = [history.to_bytes(), vec![1, 2, 3]].concat();
        assert_eq!(RecurrentHistory::from_bytes(&bytes), Some((history, &[1, 2, 3][..])));
        for len in 0..bytes.len() - 3 {
            assert_eq!(RecurrentHistory::from_bytes(&bytes[..len]), None, "{len}");
        }
    }
}

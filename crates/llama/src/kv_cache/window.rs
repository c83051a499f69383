//! A context window with the keys of its tokens, and which cached tokens are in it.

use crate::cells::CellEntry;
use crate::ffi::LlamaPos;
use crate::token_key::TokenKey;
use halo_core::model::WindowToken;
use std::ops::Range;

/// A window and the keys of its tokens.
pub(super) struct KeyedWindow<'a> {
    pub(super) tokens: &'a [WindowToken],
    pub(super) keys: Vec<TokenKey>,
}

impl KeyedWindow<'_> {
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Table entries for a range of slots, with positions from `start` on and unresolved cells.
    pub(super) fn entries(&self, slots: Range<usize>, start: LlamaPos) -> Vec<CellEntry> {
        let entry = |(slot, position): (usize, LlamaPos)| CellEntry {
            key: self.keys[slot],
            token: self.tokens[slot].id.0.cast_signed(),
            chunk_start: self.tokens[slot].chunk_start,
            position,
            cell: None,
            prefix: None,
            shared: false,
        };
        slots.zip(start..).map(entry).collect()
    }
}

/// Which of the cached tokens are in a window. A token of the timeline never changes. Tokens of a memory may, and are the
/// same only if all tokens of the memory before them are.
pub(super) fn match_window(cached: &[CellEntry], window: &KeyedWindow<'_>) -> Vec<bool> {
    let mut matches: Vec<bool> = Vec::with_capacity(cached.len());
    for (n, entry) in cached.iter().enumerate() {
        let same = window
            .keys
            .binary_search(&entry.key)
            .is_ok_and(|slot| window.tokens[slot].id.0 == entry.token.cast_unsigned());
        let prefix_matches = entry.key.offset <= 1
            || n.checked_sub(1)
                .is_some_and(|before| matches[before] && cached[before].key.plus(1) == entry.key);
        matches.push(same && prefix_matches);
    }
    matches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_key::token_keys;
    use halo_core::token::{Position, TokenId};

    /// After the first changed token of a memory, its later tokens do not match either, even where they are equal.
    #[test]
    fn kv_cache_match_of_inserted_tokens_ends_at_first_change() {
        let token = |position: u64, offset: u16, id: u32| WindowToken {
            position: Some(Position(position)),
            offset,
            id: TokenId(id),
            chunk_start: false,
        };
        let window = |middle: u32| {
            [token(3, 0, 9), token(3, 1, 1), token(3, 2, middle), token(3, 3, 3), token(4, 0, 8)]
        };
        let keyed =
            |tokens| KeyedWindow { tokens, keys: token_keys(tokens).expect("the window is in order") };
        let (old, new) = (window(2), window(7));
        let cached = keyed(&old).entries(0..5, 0);
        assert_eq!(match_window(&cached, &keyed(&old)), [true; 5]);
        assert_eq!(match_window(&cached, &keyed(&new)), [true, true, false, false, true]);
    }
}

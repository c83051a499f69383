//! What clients without a conversation have sent. A new prompt is compared with the earlier ones: tokens that were sent before
//! get the same positions again, so their KV cells are reused, even where a part in between was removed or put back.

use halo_core::token::{Position, TokenId};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The histories of the latest clients, the last used first.
pub(crate) struct CompletionHistories {
    histories: Mutex<Vec<CompletionHistory>>,
    next_number: AtomicU64,
    started: i64,
    /// The tokens of the last prompt and its completion.
    last_window: Mutex<Vec<TokenId>>,
}

/// All tokens that one client has sent or received, in order: the index is the position.
#[derive(Default)]
struct CompletionHistory {
    key: String,
    tokens: Vec<TokenId>,
}

/// A prompt with the positions of its tokens.
pub(crate) struct MatchedPrompt {
    /// The key of its history in the KV cache.
    pub key: String,
    pub positions: Vec<Position>,
    pub next_position: Position,
}

const MAX_HISTORIES: usize = 8;
const MAX_HISTORY_TOKENS: usize = 1 << 20;

/// A run of this many equal tokens counts as sent before.
const MIN_MATCH_TOKENS: usize = 8;

impl Default for CompletionHistories {
    fn default() -> Self {
        Self {
            histories: Mutex::default(),
            next_number: AtomicU64::new(0),
            started: jiff::Timestamp::now().as_microsecond(),
            last_window: Mutex::default(),
        }
    }
}

impl CompletionHistory {
    /// The positions of a window's tokens, and how many of them were sent before. Those keep their positions, in order; the rest
    /// is appended to the history.
    fn match_positions(&self, window: &[TokenId]) -> (Vec<Position>, usize) {
        let mut positions = Vec::with_capacity(window.len());
        let mut at = 0;
        while positions.len() < window.len() {
            let rest = &window[positions.len()..];
            if self.tokens.get(at) != Some(&rest[0]) {
                let head = &rest[..rest.len().min(MIN_MATCH_TOKENS)];
                let later = &self.tokens[at.min(self.tokens.len())..];
                match later.windows(head.len()).position(|run| run == head) {
                    Some(removed) => at += removed,
                    None => break,
                }
            }
            positions.push(Position(at as u64));
            at += 1;
        }
        let matched = positions.len();
        let new = window.len() - matched;
        positions.extend((0..new).map(|n| Position((self.tokens.len() + n) as u64)));
        (positions, matched)
    }
}

impl CompletionHistories {
    /// Finds the history that a window continues, or begins a new one; it becomes the first. An ephemeral window leaves no trace.
    pub fn match_history(&self, window: &[TokenId], ephemeral: bool) -> MatchedPrompt {
        let mut histories = self.histories.lock();
        let best = (histories.iter().enumerate())
            .map(|(n, history)| (n, history.match_positions(window).1))
            .max_by_key(|(n, matched)| (*matched, std::cmp::Reverse(*n)));
        let is_enough = |matched: usize| {
            matched >= MIN_MATCH_TOKENS.min(window.len())
                && matched * 2 >= window.len().min(2 * MIN_MATCH_TOKENS)
        };
        let mut history = match best {
            Some((n, matched)) if is_enough(matched) && histories[n].tokens.len() < MAX_HISTORY_TOKENS => {
                histories.remove(n)
            }
            _ => {
                let number = self.next_number.fetch_add(1, Ordering::SeqCst);
                CompletionHistory { key: format!("raw\0{}\0{number}", self.started), tokens: Vec::new() }
            }
        };
        let (positions, matched) = history.match_positions(window);
        let next_position = Position((history.tokens.len() + window.len() - matched) as u64);
        let key = history.key.clone();
        if !ephemeral {
            history.tokens.extend(&window[matched..]);
            *self.last_window.lock() = window.to_vec();
        }
        histories.insert(0, history);
        histories.truncate(MAX_HISTORIES);
        MatchedPrompt { key, positions, next_position }
    }

    /// Appends a generated token to its history.
    pub fn push_token(&self, key: &str, id: TokenId) {
        let mut histories = self.histories.lock();
        if let Some(history) = histories.iter_mut().find(|history| history.key == key) {
            history.tokens.push(id);
        }
        self.last_window.lock().push(id);
    }

    /// The tokens of the last prompt and its completion, if there was one.
    pub fn last_window(&self) -> Option<Vec<TokenId>> {
        Some(self.last_window.lock().clone()).filter(|last| !last.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn indices(prompt: &MatchedPrompt) -> Vec<u64> {
        prompt.positions.iter().map(|p| p.0).collect()
    }

    #[test]
    fn completion_reuses_positions_of_resent_tokens() {
        let histories = CompletionHistories::default();
        let first = histories.match_history(&ids(0..100), false);
        assert_eq!((indices(&first), first.next_position.0), ((0..100).collect(), 100));
        for id in 100..110 {
            histories.push_token(&first.key, TokenId(id));
        }
        // Tokens in the middle are removed, and new ones are appended.
        let sent = [ids(0..20), ids(40..110), ids(500..520)].concat();
        let second = histories.match_history(&sent, false);
        let expected: Vec<u64> = (0..20).chain(40..110).chain(110..130).collect();
        let same = second.key == first.key;
        assert_eq!((same, indices(&second), second.next_position.0), (true, expected, 130));
        // The removed tokens are back, and others are removed.
        let sent = [ids(0..60), ids(500..520)].concat();
        let third = histories.match_history(&sent, false);
        let expected: Vec<u64> = (0..60).chain(110..130).collect();
        assert_eq!((third.key == first.key, indices(&third)), (true, expected));
        // Another client.
        let other = histories.match_history(&ids(1000..1100), false);
        assert_eq!((other.key == first.key, indices(&other)), (false, (0..100).collect()));
        // Both continue their own histories.
        assert_eq!(histories.match_history(&ids(1000..1101), false).key, other.key);
        assert_eq!(histories.match_history(&ids(0..60), false).key, first.key);
    }

    #[test]
    fn completion_with_changed_prefix_starts_new_history() {
        let histories = CompletionHistories::default();
        let first = histories.match_history(&ids(0..100), false);
        assert_ne!(histories.match_history(&[ids(900..990), ids(0..5)].concat(), false).key, first.key);
        assert_ne!(histories.match_history(&ids(7..8), false).key, "", "one token is enough");
    }
}

//! The recurrent states of a conversation in the KV archive, for hybrid models.
//!
//! A state is an entry of its own: its key is that of the last token that the state has read. States are filed beside the
//! cells of the conversation, under a name that no conversation has, so that limits, eviction, checksums and branches apply
//! to them as to cells.

use super::archive::KvArchive;
use super::entry::KvArchiveEntry;
use super::folder::{ConversationHash, states_name};
use crate::ffi::LlamaToken;
use crate::token_key::TokenKey;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most states of a conversation: the end of the turn before, which an edit of the last message needs; before the last
/// chunk and before the last token of the prompt; the end of the turn. They can be large (75 MB each for Qwen 3-Next), and
/// older ones are rarely needed: the end of a conversation changes, not its beginning.
const MAX_STATES: usize = 4;

impl KvArchive {
    /// Adds the state that a conversation has after a token. Of the states beyond [`MAX_STATES`], those are deleted first whose
    /// last token is not cached, then the least recently used ones.
    pub fn insert_state(
        &mut self,
        conversation: &str,
        last_key: TokenKey,
        last_token: LlamaToken,
        state: Vec<u8>,
        is_cached: impl Fn(TokenKey) -> bool,
    ) {
        let name = states_name(conversation);
        let entry = KvArchiveEntry {
            start: last_key,
            tokens: vec![last_token],
            position: 0,
            cells: state,
            prefix: None,
        };
        self.insert(&name, entry);
        let mut own = self.own_entries(ConversationHash::new(&name));
        own.sort_by_cached_key(|(key, last_used)| (!is_cached(key.start), Reverse(*last_used)));
        own.into_iter().skip(MAX_STATES).for_each(|(key, _)| self.drop_entry(key));
    }

    /// The keys of the last tokens of all states that a conversation can use, its own and its ancestors', the latest first.
    #[must_use]
    pub fn state_keys(&self, conversation: &str) -> Vec<TokenKey> {
        let own = ConversationHash::new(&states_name(conversation));
        let mut keys = BTreeSet::new();
        for owner in self.with_ancestors(own, TokenKey::BOUNDS.0) {
            let shared = |key: TokenKey| self.with_ancestors(own, key).any(|sharing| sharing == owner);
            keys.extend(
                self.own_entries(owner).into_iter().map(|(key, _)| key.start).filter(|&key| shared(key)),
            );
        }
        keys.into_iter().rev().collect()
    }

    /// The state that a conversation has after a token.
    pub fn state(
        &mut self,
        conversation: &str,
        last_key: TokenKey,
        last_token: LlamaToken,
    ) -> Option<Arc<KvArchiveEntry>> {
        let name = states_name(conversation);
        let header = self.header(&name, last_key)?;
        if header.tokens != [last_token] {
            return None;
        }
        self.get(&name, last_key)
    }

    /// Deletes a state that could not be restored.
    pub fn discard_state(&mut self, conversation: &str, last_key: TokenKey) {
        self.discard(&states_name(conversation), last_key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_archive::KvArchiveLimits;

    fn key(position: i64) -> TokenKey {
        TokenKey::at_position(position)
    }

    #[test]
    fn kv_archive_keeps_latest_states_of_a_conversation() {
        let mut archive = KvArchive::open(KvArchiveLimits { ram: 1 << 20, disk: 0, folder: None }, 1);
        for n in 0..6 {
            archive.insert_state("a", key(n * 10), n as LlamaToken, vec![n as u8; 100], |_| true);
        }
        archive.insert_state("b", key(7), 7, vec![7], |_| true);
        assert_eq!(archive.state_keys("a"), [50, 40, 30, 20].map(key));
        assert_eq!(archive.state("a", key(40), 4).map(|entry| entry.cells[0]), Some(4));
        assert!(archive.state("a", key(40), 5).is_none(), "another token");
        assert!(archive.header("a", key(40)).is_none(), "a state is no cell");

        archive.link_branch("branch", "a", 35);
        assert_eq!(archive.state_keys("branch"), [30, 20].map(key), "what both share");
        archive.insert_state("branch", key(30), 9, vec![9], |_| true);
        assert_eq!(archive.state("branch", key(30), 9).map(|entry| entry.cells[0]), Some(9));
        assert_eq!(archive.state("a", key(30), 3).map(|entry| entry.cells[0]), Some(3));

        // The last two were never said: the answer was regenerated.
        archive.insert_state("a", key(60), 6, vec![6], |key| ![40, 50].contains(&key.timeline_pos));
        assert_eq!(archive.state_keys("a"), [60, 40, 30, 20].map(key));
        archive.discard_state("a", key(30));
        assert_eq!(archive.state_keys("a"), [60, 40, 20].map(key));
        archive.forget("a");
        assert!(archive.state_keys("a").is_empty());
        assert_eq!(archive.state_keys("b"), [key(7)]);
        assert_eq!(archive.state_keys("branch"), [key(30)]);
    }
}

//! What the clients of a conversation were told, and whether the store still has it.

use halo_core::store::{Access, Store};
use halo_core::token::{ChunkId, Position};
use std::collections::BTreeMap;

/// A message that its client has not given up.
#[derive(Clone, Debug)]
pub(super) struct PendingMessage {
    pub id: String,
    pub text: String,
    /// Whether the client was told that it is stored.
    pub stored: bool,
    pub attempts: u32,
}

/// What the clients of a conversation were told.
#[derive(Debug, Default)]
pub(super) struct ClientView {
    pub pending: Option<PendingMessage>,
    /// The markers of messages that were acknowledged.
    acknowledged: Vec<String>,
    /// Every token of an answer that was seen.
    tokens: BTreeMap<Position, String>,
    /// Tokens since the last commit that was synced: a power cut may lose them.
    unsynced: Vec<Position>,
}

impl ClientView {
    pub fn see_message(&mut self, marker: &str) {
        self.unsynced.clear();
        if !self.acknowledged.iter().any(|other| other == marker) {
            self.acknowledged.push(marker.to_owned());
        }
    }

    /// A token was announced. A position that was announced before must have the same text.
    pub fn see_token(&mut self, position: Position, text: &str) -> Result<(), String> {
        if let Some(before) = self.tokens.insert(position, text.to_owned())
            && before != text
        {
            return Err(format!("position {} was {before:?} and is now {text:?}", position.0));
        }
        self.unsynced.push(position);
        Ok(())
    }

    /// The turn has ended: everything is synced.
    pub fn see_end(&mut self) {
        self.unsynced.clear();
    }

    /// The power was cut: tokens that were not synced may be gone, and their positions may be used again.
    pub fn lose_unsynced(&mut self) {
        for position in self.unsynced.drain(..) {
            self.tokens.remove(&position);
        }
    }

    /// Compares the store with what was seen.
    pub fn check(&self, name: &str, store: &mut dyn Store) -> Result<(), String> {
        let failed = |error: halo_core::Error| format!("'{name}' does not load: {error}");
        let mut timeline = store.load(name, Access::Read).map_err(failed)?;
        let chunks: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
        store.load_bodies(name, &mut timeline, &chunks).map_err(failed)?;
        timeline
            .check_invariants()
            .map_err(|why| format!("'{name}': the stored timeline is wrong: {why}"))?;
        for (position, text) in &self.tokens {
            let stored = timeline.token(*position).map(|token| token.text.to_owned());
            if stored.as_deref() != Some(text) {
                return Err(format!(
                    "'{name}': position {} was seen as {text:?} and is {stored:?}",
                    position.0
                ));
            }
        }
        let texts: Vec<String> = timeline
            .turns()
            .iter()
            .map(|turn| timeline.turn_chunks(turn.id).map(|chunk| chunk.text().into_owned()).collect())
            .collect();
        let count = |marker: &str| texts.iter().filter(|text| text.contains(marker)).count();
        for marker in &self.acknowledged {
            if count(marker) != 1 {
                return Err(format!(
                    "'{name}': the message {marker} was stored and is there {} times",
                    count(marker)
                ));
            }
        }
        if let Some(pending) = &self.pending
            && count(&pending.id) > 1
        {
            return Err(format!(
                "'{name}': the message {} is there {} times",
                pending.id,
                count(&pending.id)
            ));
        }
        Ok(())
    }
}

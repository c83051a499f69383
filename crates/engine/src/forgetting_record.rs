//! What forgetting cycles did in a conversation, as it is stored.

use crate::conversation::{Conversation, load_setting};
use halo_agents::forgetting::ForgettingResult;
use halo_core::Error;
use halo_core::store::Store;
use serde::{Deserialize, Serialize};

/// Setting: the forgetting cycles of a conversation.
const CYCLE_KEY: &str = "forgetting.cycle";

/// The forgetting cycles of a conversation, as they are stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForgettingRecord {
    /// How many cycles have run.
    pub runs: u64,
    /// When the last one ran, in milliseconds since 1970.
    pub at: i64,
    /// The context pressure before the last one.
    pub initial_pressure: f64,
    pub final_pressure: f64,
    /// Chunks that the last one pruned.
    pub pruned: usize,
    /// Chunks that its retention erased, in all conversations.
    pub forgotten: usize,
    /// Memories that it disabled.
    pub disabled_memories: Vec<u64>,
}

impl ForgettingRecord {
    /// The record of a conversation; none if no cycle has run.
    pub fn load(store: &mut dyn Store, conversation: &str) -> Result<Option<Self>, Error> {
        let stored = load_setting(store, conversation, CYCLE_KEY)?;
        Ok(stored.and_then(|stored| serde_json::from_str(&stored).ok()))
    }

    pub(crate) fn save(&self, conversation: &mut Conversation) -> Result<(), Error> {
        let text = serde_json::to_value(self).unwrap_or_default().to_string();
        conversation.put_setting(CYCLE_KEY, Some(&text))
    }

    pub(crate) fn after(self, result: &ForgettingResult, at: i64) -> Self {
        Self {
            runs: self.runs + 1,
            at,
            initial_pressure: result.initial_pressure,
            final_pressure: result.final_pressure,
            pruned: result.pruned(),
            forgotten: result.forgotten(),
            disabled_memories: result.deactivated(),
        }
    }
}

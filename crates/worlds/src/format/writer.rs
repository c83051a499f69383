//! The interface of HUD formats. A HUD is written in fragments, so that a model reads again only those that changed.

use crate::hud::{Hud, HudMessage};
use serde_json::{Map, Value};

/// Writes the parts of a HUD in one format. The concatenation of all parts, in the order of these methods, is the HUD.
pub(crate) trait HudWriter {
    /// System and meta: the same for all agents of a kind.
    fn shared_section(&self, hud: &Hud) -> String;
    /// The agent's identity, up to the first knowledge entry.
    fn identity(&self, hud: &Hud) -> String;
    fn knowledge_entries(&self, knowledge: &Map<String, Value>) -> Vec<String>;
    /// From the knowledge to the first recent action.
    fn memory_usage(&self, hud: &Hud) -> String;
    fn recent_action(&self, action: &Map<String, Value>) -> String;
    fn action_separator(&self) -> &'static str;
    /// From the last recent action to the first room.
    fn rooms_header(&self, hud: &Hud) -> String;
    /// The fields of a room before its pace.
    fn room_header(&self, hud: &Hud, index: usize) -> String;
    /// The fields of a room that change on every heartbeat: time since the agent spoke, and word budget.
    fn room_pace(&self, hud: &Hud, index: usize) -> String;
    /// From the pace to the first message. Some formats write the number of messages.
    fn messages_header(&self, hud: &Hud, index: usize, messages: usize) -> String;
    fn message_row(&self, message: &HudMessage) -> String;
    fn message_separator(&self) -> &'static str;
    fn room_footer(&self, hud: &Hud, index: usize, messages: usize) -> String;
    fn footer(&self, hud: &Hud) -> String;
}

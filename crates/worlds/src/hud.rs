//! The HUD: everything that an agent sees on a heartbeat.
//!
//! The text that all agents of a kind share comes first, then the agent, then its rooms. What changes most comes last,
//! so that a model with a KV cache prefills little.

use crate::heartbeat::{Millis, format_time, time_since, word_budget};
use crate::world::{
    AccessRequest, AgentId, MessageSender, Reaction, RecentAction, Room, RoomId, RoomMessage,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The field names are the ones that agents see.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hud {
    pub system: Arc<HudSystem>,
    pub meta: Arc<HudMeta>,
    #[serde(rename = "self")]
    pub me: HudSelf,
    pub rooms: Vec<HudRoom>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudSystem {
    pub directives: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudMeta {
    pub instructions: String,
    pub available_actions: Map<String, Value>,
    pub response_format: HudResponseFormat,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub description: String,
    pub instructions: String,
    pub example: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudSelf {
    pub identity: HudIdentity,
    pub knowledge: Map<String, Value>,
    /// The knowledge budget that is used, in percent.
    pub memory_used: String,
    /// What was left out of this HUD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
    pub recent_actions: Vec<Arc<Map<String, Value>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudIdentity {
    pub id: AgentId,
    pub name: String,
    pub model: String,
    /// The background of a persona.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<String>,
    /// The role of a bot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// A room as one of its members sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudRoom {
    pub id: RoomId,
    /// The number of the agent itself.
    pub you: AgentId,
    pub is_self_room: bool,
    pub members: Vec<String>,
    pub attention_pct: f64,
    pub time_since_last: String,
    pub word_budget: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub billboard: Option<String>,
    /// Only in the agent's own room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub my_keys: Option<Vec<String>>,
    /// Only in the agent's own room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_access_requests: Option<Vec<HudAccessRequest>>,
    /// The selected messages, oldest first.
    pub messages: Vec<Arc<HudMessage>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudAccessRequest {
    pub id: u64,
    pub requester_id: AgentId,
    pub key_used: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HudMessage {
    pub id: u64,
    pub timestamp: String,
    pub sender: String,
    pub content: String,
    /// Either `text` or `system`.
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reactions: Option<BTreeMap<Reaction, u64>>,
}

impl From<&RoomMessage> for HudMessage {
    fn from(message: &RoomMessage) -> Self {
        let count = |(reaction, agents): (&Reaction, &BTreeSet<AgentId>)| (*reaction, agents.len() as u64);
        let reactions =
            (!message.reactions.is_empty()).then(|| message.reactions.iter().map(count).collect());
        Self {
            id: message.id,
            timestamp: format_time(message.at),
            sender: message.sender.to_string(),
            content: message.content.clone(),
            kind: if message.sender == MessageSender::System { "system" } else { "text" }.to_owned(),
            reply_to: message.reply_to,
            reactions,
        }
    }
}

impl HudRoom {
    /// A room without its messages.
    pub(crate) fn new(you: AgentId, room: &Room, share: f64, now: Millis) -> Self {
        let is_own = room.id == you;
        let member = room.members.get(&you);
        let last_spoke = member.and_then(|member| member.last_spoke);
        let request = |request: &AccessRequest| HudAccessRequest {
            id: request.id,
            requester_id: request.requester,
            key_used: request.key.clone(),
        };
        Self {
            id: room.id,
            you,
            is_self_room: is_own,
            members: room.members.keys().map(AgentId::to_string).collect(),
            attention_pct: (share * 10.0).round() / 10.0,
            time_since_last: time_since(last_spoke, now),
            word_budget: word_budget(last_spoke, now, room.wpm),
            billboard: room.billboard.clone(),
            my_keys: is_own.then(|| room.keys.clone()),
            pending_access_requests: is_own.then(|| room.requests.iter().map(request).collect()),
            messages: Vec::new(),
        }
    }
}

/// A recent action as the HUD shows it.
pub(crate) fn recent_action_fields(recent: &RecentAction) -> Map<String, Value> {
    let mut row = Map::new();
    row.insert("type".into(), recent.kind.clone().into());
    row.insert("timestamp".into(), format_time(recent.at).into());
    row.extend(recent.args.clone());
    row.extend(recent.refused.as_ref().map(|reason| ("refused".to_owned(), reason.clone().into())));
    row
}

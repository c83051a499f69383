//! What an agent sees on a heartbeat: all that it needs to decide.
//!
//! What all agents of a kind are told comes first, then the agent itself, then its rooms: what changes most stands last, so that a
//! model that keeps what it has read reads little anew.

use crate::heartbeat::{Millis, shown, time_since, word_budget};
use crate::world::{AgentId, Message, Reaction, Recent, Request, Room, RoomId, Sender};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What an agent sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hud {
    /// How to live together.
    pub system: Arc<System>,
    /// How to read this, and what can be done.
    pub meta: Arc<Meta>,
    /// Itself.
    #[serde(rename = "self")]
    pub me: Me,
    /// Where it is.
    pub rooms: Vec<RoomView>,
}

/// How to live together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// In words.
    pub directives: String,
}

/// How to read a HUD, and what can be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// In words.
    pub instructions: String,
    /// By category.
    pub available_actions: Map<String, Value>,
    /// How to answer.
    pub response_format: ResponseFormat,
}

/// How to answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// The format's name.
    #[serde(rename = "type")]
    pub kind: String,
    /// What it is.
    pub description: String,
    /// How it is written.
    pub instructions: String,
    /// For instance.
    pub example: String,
}

/// The agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Me {
    /// Who it is.
    pub identity: Identity,
    /// What it has written down.
    pub knowledge: Map<String, Value>,
    /// How full that is.
    pub memory_used: String,
    /// What it should know about what it sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
    /// What it did last.
    pub recent_actions: Vec<Arc<Map<String, Value>>>,
}

/// Who an agent is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// For ever.
    pub id: AgentId,
    /// For now.
    pub name: String,
    /// What thinks for it.
    pub model: String,
    /// Where a persona comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<String>,
    /// What a bot does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// A room, as one of its members sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoomView {
    /// Its number: its owner's.
    pub id: RoomId,
    /// The agent's own number.
    pub you: AgentId,
    /// Whether it is the agent's.
    pub is_self_room: bool,
    /// Who is there.
    pub members: Vec<String>,
    /// How much of the agent's attention it gets.
    pub attention_pct: f64,
    /// How long ago the agent spoke there.
    pub time_since_last: String,
    /// How many words it may say.
    pub word_budget: usize,
    /// What hangs on the wall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub billboard: Option<String>,
    /// The keys to the agent's own room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub my_keys: Option<Vec<String>>,
    /// Who wants to come in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_access_requests: Option<Vec<RequestView>>,
    /// What was said, the newest last.
    pub messages: Vec<Arc<MessageView>>,
}

/// Somebody wants to come in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestView {
    /// The request's number.
    pub id: u64,
    /// Who.
    pub requester_id: AgentId,
    /// With which key.
    pub key_used: String,
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageView {
    /// Its number.
    pub id: u64,
    /// When.
    pub timestamp: String,
    /// By whom.
    pub sender: String,
    /// What.
    pub content: String,
    /// `text` or `system`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<u64>,
    /// How many feel what about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reactions: Option<BTreeMap<Reaction, u64>>,
}

impl From<&Message> for MessageView {
    fn from(message: &Message) -> Self {
        let count = |(reaction, who): (&Reaction, &std::collections::BTreeSet<AgentId>)| {
            (*reaction, who.len() as u64)
        };
        let reactions =
            (!message.reactions.is_empty()).then(|| message.reactions.iter().map(count).collect());
        Self {
            id: message.id,
            timestamp: shown(message.at),
            sender: message.sender.to_string(),
            content: message.content.clone(),
            kind: if message.sender == Sender::System { "system" } else { "text" }.to_owned(),
            reply_to: message.reply_to,
            reactions,
        }
    }
}

impl RoomView {
    /// A room without its messages.
    pub(crate) fn new(you: AgentId, room: &Room, share: f64, now: Millis) -> Self {
        let own = room.id == you;
        let member = room.members.get(&you);
        let spoke = member.and_then(|member| member.spoke);
        let writes = member.is_some_and(|member| member.writing.is_some());
        let request = |request: &Request| RequestView {
            id: request.id,
            requester_id: request.requester,
            key_used: request.key.clone(),
        };
        Self {
            id: room.id,
            you,
            is_self_room: own,
            members: room.members.keys().map(AgentId::to_string).collect(),
            attention_pct: (share * 10.0).round() / 10.0,
            time_since_last: time_since(spoke, now),
            // Who is still writing says nothing else meanwhile.
            word_budget: if writes { 0 } else { word_budget(spoke, now, room.wpm) },
            billboard: room.billboard.clone(),
            my_keys: own.then(|| room.keys.clone()),
            pending_access_requests: own.then(|| room.requests.iter().map(request).collect()),
            messages: Vec::new(),
        }
    }
}

/// Something that an agent did, as it sees it.
pub(crate) fn done(recent: &Recent) -> Map<String, Value> {
    let mut row = Map::new();
    row.insert("type".into(), recent.kind.clone().into());
    row.insert("timestamp".into(), shown(recent.at).into());
    row.extend(recent.with.clone());
    row.extend(recent.refused.as_ref().map(|why| ("refused".to_owned(), why.clone().into())));
    row
}

//! The actions of agents, as models write them.

use super::read;
use crate::heartbeat::Millis;
use crate::text::truncate_chars;
use crate::world::{AgentId, AgentKind, Reaction, RecentAction, RoomId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    /// Sets a value in the agent's knowledge.
    Set {
        #[serde(deserialize_with = "read::text")]
        path: String,
        value: Value,
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_number")]
        w: Option<f64>,
    },
    /// Deletes a value from the agent's knowledge.
    Delete {
        #[serde(deserialize_with = "read::text")]
        path: String,
    },
    /// Appends to a list in the agent's knowledge.
    Append {
        #[serde(deserialize_with = "read::text")]
        path: String,
        value: Value,
    },
    React {
        #[serde(deserialize_with = "read::number")]
        message_id: u64,
        reaction: Reaction,
    },
    /// Ends the sleep of another agent.
    WakeAgent {
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
    },
    Reply {
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        #[serde(deserialize_with = "read::number")]
        message_id: u64,
        #[serde(deserialize_with = "read::text")]
        message: String,
    },
    /// Sets the billboard of its own room.
    SetBillboard {
        #[serde(deserialize_with = "read::text")]
        message: String,
    },
    ClearBillboard,
    /// Sets the words per minute of its own room.
    SetWpm {
        #[serde(deserialize_with = "read::number")]
        wpm: u64,
    },
    /// Adds a key to its own room.
    CreateKey {
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    RevokeKey {
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    RequestAccess {
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    /// Accepts a request to join its own room.
    GrantAccess {
        #[serde(deserialize_with = "read::number")]
        request_id: u64,
    },
    DenyAccess {
        #[serde(deserialize_with = "read::number")]
        request_id: u64,
    },
    LeaveRoom {
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
    },
    /// Sets the share of its message budget for a room.
    SetAttention {
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        /// A percentage such as `30%`, or `%*`.
        #[serde(deserialize_with = "read::share")]
        value: String,
    },
    SetName {
        #[serde(deserialize_with = "read::text")]
        name: String,
    },
    /// No heartbeats until then.
    Sleep {
        /// A time in ISO 8601.
        #[serde(deserialize_with = "read::text")]
        until: String,
    },
    CreateAgent {
        #[serde(deserialize_with = "read::text")]
        name: String,
        /// The background of a persona, or the role of a bot.
        #[serde(deserialize_with = "read::text")]
        background_prompt: String,
        #[serde(default)]
        agent_type: AgentKind,
        /// A room to join besides its own.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_id")]
        in_room_id: Option<RoomId>,
    },
    AlterAgent {
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        background_prompt: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        name: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        model: Option<String>,
    },
    RetireAgent {
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
    },
}

/// The values of `type`, in the order of [`Action`].
pub const ACTION_TYPES: [&str; 21] = [
    "set",
    "delete",
    "append",
    "react",
    "wake_agent",
    "reply",
    "set_billboard",
    "clear_billboard",
    "set_wpm",
    "create_key",
    "revoke_key",
    "request_access",
    "grant_access",
    "deny_access",
    "leave_room",
    "set_attention",
    "set_name",
    "sleep",
    "create_agent",
    "alter_agent",
    "retire_agent",
];

/// An action that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidAction {
    /// Its `type`, as far as it is known.
    pub kind: String,
    pub reason: String,
}

/// Characters of an argument that an agent sees in its recent actions.
const MAX_SHOWN_CHARS: usize = 60;

impl Action {
    /// The action as the agent sees it later: its type, and its arguments shortened.
    pub(super) fn to_recent_action(&self, at: Millis) -> RecentAction {
        let Ok(Value::Object(mut args)) = serde_json::to_value(self) else {
            return RecentAction { kind: String::new(), at, args: Map::new(), refused: None };
        };
        let kind =
            args.shift_remove("type").and_then(|kind| kind.as_str().map(str::to_owned)).unwrap_or_default();
        let args = args.into_iter().map(|(name, value)| (name, shorten_value(value))).collect();
        RecentAction { kind, at, args, refused: None }
    }
}

/// Lists and objects are shown as their JSON text, so that a row of recent actions has only scalars.
fn shorten_value(value: Value) -> Value {
    let text = match value {
        Value::String(text) => text,
        Value::Number(_) | Value::Bool(_) => return value,
        other => other.to_string(),
    };
    Value::String(truncate_chars(&text, MAX_SHOWN_CHARS))
}

//! What agents can do, and what they cannot. Whatever is refused, the agent is told why: it sees it among its recent actions.

mod read;
mod rules;

pub use rules::Bounds;

pub(crate) use read::as_text;
pub(crate) use rules::{BILLBOARD, KEY, KEYS, PROMPT, name_of, no_longer};

use crate::heartbeat::Millis;
use crate::world::{AgentId, AgentKind, Reaction, Recent, RoomId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Something that an agent does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    /// Writes something down.
    Set {
        /// Where.
        #[serde(deserialize_with = "read::text")]
        path: String,
        /// What.
        value: Value,
        /// How much it matters.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_number")]
        w: Option<f64>,
    },
    /// Forgets something that it has written down.
    Delete {
        /// Where.
        #[serde(deserialize_with = "read::text")]
        path: String,
    },
    /// Writes something at the end of a list.
    Append {
        /// Where.
        #[serde(deserialize_with = "read::text")]
        path: String,
        /// What.
        value: Value,
    },
    /// Feels something about a message.
    React {
        /// Which.
        #[serde(deserialize_with = "read::number")]
        message_id: u64,
        /// What.
        reaction: Reaction,
    },
    /// Wakes somebody who sleeps.
    WakeAgent {
        /// Whom.
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
    },
    /// Answers a message.
    Reply {
        /// Where.
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        /// Which.
        #[serde(deserialize_with = "read::number")]
        message_id: u64,
        /// With what.
        #[serde(deserialize_with = "read::text")]
        message: String,
    },
    /// Hangs something on the wall of its room.
    SetBillboard {
        /// What.
        #[serde(deserialize_with = "read::text")]
        message: String,
    },
    /// Takes it down.
    ClearBillboard,
    /// Says how fast people talk in its room.
    SetWpm {
        /// Words in a minute.
        #[serde(deserialize_with = "read::number")]
        wpm: u64,
    },
    /// Makes a key to its room.
    CreateKey {
        /// Which.
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    /// Makes it useless.
    RevokeKey {
        /// Which.
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    /// Asks to come into a room.
    RequestAccess {
        /// Which.
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        /// With which key.
        #[serde(deserialize_with = "read::text")]
        key: String,
    },
    /// Lets somebody in.
    GrantAccess {
        /// Whose request.
        #[serde(deserialize_with = "read::number")]
        request_id: u64,
    },
    /// Does not.
    DenyAccess {
        /// Whose request.
        #[serde(deserialize_with = "read::number")]
        request_id: u64,
    },
    /// Goes.
    LeaveRoom {
        /// Where from.
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
    },
    /// Turns to a room, or away from it.
    SetAttention {
        /// Which.
        #[serde(deserialize_with = "read::id")]
        room_id: RoomId,
        /// `30%` or `%*`.
        #[serde(deserialize_with = "read::share")]
        value: String,
    },
    /// Takes another name.
    SetName {
        /// Which.
        #[serde(deserialize_with = "read::text")]
        name: String,
    },
    /// Sleeps.
    Sleep {
        /// Until when.
        #[serde(deserialize_with = "read::text")]
        until: String,
    },
    /// Makes somebody.
    CreateAgent {
        /// Called so.
        #[serde(deserialize_with = "read::text")]
        name: String,
        /// Where it comes from, or what it does.
        #[serde(deserialize_with = "read::text")]
        background_prompt: String,
        /// What it is for.
        #[serde(default)]
        agent_type: AgentKind,
        /// Where it is besides its own room.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_id")]
        in_room_id: Option<RoomId>,
    },
    /// Makes somebody another.
    AlterAgent {
        /// Whom.
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
        /// Where it comes from now, or what it does.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        background_prompt: Option<String>,
        /// What it is called now.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        name: Option<String>,
        /// What thinks for it now.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::maybe_text")]
        model: Option<String>,
    },
    /// Ends somebody.
    RetireAgent {
        /// Whom.
        #[serde(deserialize_with = "read::id")]
        agent_id: AgentId,
    },
}

/// The words for all of them.
pub const KINDS: [&str; 21] = [
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

/// The longest value that is shown among recent actions.
const SHOWN: usize = 60;

impl Action {
    /// What agents see of it later: its kind, and its values as far as they are short.
    fn told(&self, at: Millis) -> Recent {
        let Ok(Value::Object(mut with)) = serde_json::to_value(self) else {
            return Recent { kind: String::new(), at, with: Map::new(), refused: None };
        };
        let kind =
            with.shift_remove("type").and_then(|kind| kind.as_str().map(str::to_owned)).unwrap_or_default();
        let with = with.into_iter().map(|(name, value)| (name, short(value))).collect();
        Recent { kind, at, with, refused: None }
    }
}

/// A value in a few characters: a word, a number, or yes or no.
fn short(value: Value) -> Value {
    let text = match value {
        Value::String(text) => text,
        Value::Number(_) | Value::Bool(_) => return value,
        other => other.to_string(),
    };
    Value::String(shortened(&text, SHOWN))
}

/// The beginning of what is longer than so many characters.
fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// What can be done, by category, as agents are told; managing agents only where that is allowed.
#[must_use]
pub fn available(may_manage: bool) -> Map<String, Value> {
    let mut all = json!({
        "knowledge_management": {
            "_description": "Manage your private knowledge store using dot-path notation",
            "actions": [
                {"type": "set", "path": "dot.path", "value": "any", "w": "0.0-1.0 (optional)"},
                {"type": "delete", "path": "dot.path"},
                {"type": "append", "path": "dot.path", "value": "any"},
            ],
        },
        "social_interactions": {
            "_description": "Interact with other agents. Reactions affect heartbeat speed.",
            "actions": [
                {"type": "react", "message_id": "int", "reaction": "thumbs_up|thumbs_down|brain|heart"},
                {"type": "wake_agent", "agent_id": "int (must be in same room)"},
            ],
        },
        "messaging": {
            "_description": "Enhanced messaging. Reply links to previous message.",
            "actions": [{"type": "reply", "room_id": "int", "message_id": "int", "message": "string"}],
        },
        "room_management": {
            "_description": "Manage your own room. Billboard visible to all members.",
            "actions": [
                {"type": "set_billboard", "message": "string"},
                {"type": "clear_billboard"},
                {"type": "set_wpm", "wpm": "int (10-200)"},
            ],
        },
        "access_control": {
            "_description": "Control room access with keys and requests.",
            "actions": [
                {"type": "create_key", "key": "string (for your room)"},
                {"type": "revoke_key", "key": "string"},
                {"type": "request_access", "room_id": "int", "key": "string"},
                {"type": "grant_access", "request_id": "int"},
                {"type": "deny_access", "request_id": "int"},
                {"type": "leave_room", "room_id": "int (cannot leave own room)"},
            ],
        },
        "attention": {
            "_description": "Allocate attention across rooms. '%*' for dynamic sizing.",
            "actions": [{"type": "set_attention", "room_id": "int", "value": "percent_or_%*"}],
        },
        "identity": {
            "_description": "Manage your display identity",
            "actions": [{"type": "set_name", "name": "string (max 50 chars)"}],
        },
        "timing": {
            "_description": "Control your activity timing",
            "actions": [{"type": "sleep", "until": "ISO datetime (e.g. 2024-01-15T14:30:00)"}],
        },
    });
    if may_manage {
        all["agent_management"] = json!({
            "_description": "Create, modify, retire agents. Requires room proximity.",
            "actions": [
                {
                    "type": "create_agent",
                    "name": "string",
                    "background_prompt": "string",
                    "agent_type": "persona|bot (optional, default persona)",
                    "in_room_id": "int (optional)",
                },
                {
                    "type": "alter_agent",
                    "agent_id": "int (must be in same room, not yourself)",
                    "background_prompt": "string (optional)",
                    "name": "string (optional)",
                    "model": "string (optional, e.g. gpt-4o)",
                },
                {"type": "retire_agent", "agent_id": "int (must be in same room, not yourself)"},
            ],
        });
    }
    match all {
        Value::Object(all) => all,
        _ => Map::new(),
    }
}

//! The catalog of actions that a HUD shows, by category.

use serde_json::{Map, Value, json};

/// The actions that an agent may perform; managing agents only if it is allowed to.
#[must_use]
pub fn available_actions(can_create_agents: bool) -> Map<String, Value> {
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
    if can_create_agents {
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

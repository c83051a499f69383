//! The same HUD with all rows of a list alike, so that they can be written as a table: what a row has not is null, and what
//! only some have is written as words.

use super::positional;
use crate::hud::{Hud, MessageView};
use crate::world::Reaction;
use serde_json::{Map, Value, json};

/// An action as a row: what it is, when, with what, and why not.
pub(super) fn action(action: &Map<String, Value>) -> Value {
    let with = |name: &str| !matches!(name, "type" | "timestamp" | "refused");
    let with: Map<String, Value> =
        action.iter().filter(|(name, _)| with(name)).map(|(n, v)| (n.clone(), v.clone())).collect();
    let with = if with.is_empty() { Value::Null } else { Value::String(positional::fields(&with)) };
    let get = |name: &str| action.get(name).cloned().unwrap_or_default();
    json!({"type": get("type"), "timestamp": get("timestamp"), "with": with, "refused": get("refused")})
}

/// What can be done, as a row.
fn signature(action: &Value) -> Value {
    let Some(fields) = action.as_object() else { return action.clone() };
    let with: Map<String, Value> =
        fields.iter().filter(|(name, _)| *name != "type").map(|(n, v)| (n.clone(), v.clone())).collect();
    let with = if with.is_empty() { Value::Null } else { Value::String(positional::fields(&with)) };
    json!({"type": fields.get("type"), "with": with})
}

/// A message as a row.
pub(super) fn message(message: &MessageView) -> Value {
    let reactions = message.reactions.as_ref().map(|all| {
        all.iter()
            .map(|(reaction, count)| format!("{} {count}", reaction.name()))
            .collect::<Vec<_>>()
            .join(" ")
    });
    json!({
        "id": message.id,
        "timestamp": message.timestamp,
        "sender": message.sender,
        "content": message.content,
        "type": message.kind,
        "reply_to": message.reply_to,
        "reactions": reactions,
    })
}

/// What all agents of a kind are told.
pub(super) fn meta(hud: &Hud) -> Value {
    let mut meta = serde_json::to_value(&hud.meta).unwrap_or_default();
    if let Some(categories) = meta.get_mut("available_actions").and_then(Value::as_object_mut) {
        for category in categories.values_mut() {
            if let Some(actions) = category.get_mut("actions").and_then(Value::as_array_mut) {
                actions.iter_mut().for_each(|action| *action = signature(action));
            }
        }
    }
    meta
}

/// A HUD whose rows are alike, with its rows as they were.
pub(super) fn plainly(mut hud: Value) -> Result<Value, String> {
    let lists = |value: Option<&mut Value>| value.and_then(Value::as_array_mut).map(std::mem::take);
    if let Some(categories) = hud.pointer_mut("/meta/available_actions").and_then(Value::as_object_mut) {
        for category in categories.values_mut() {
            if let Some(rows) = lists(category.get_mut("actions")) {
                category["actions"] = Value::Array(rows.into_iter().map(spread).collect::<Result<_, _>>()?);
            }
        }
    }
    if let Some(rows) = lists(hud.pointer_mut("/self/recent_actions")) {
        hud["self"]["recent_actions"] = Value::Array(rows.into_iter().map(spread).collect::<Result<_, _>>()?);
    }
    for room in hud.get_mut("rooms").and_then(Value::as_array_mut).into_iter().flatten() {
        for message in room.get_mut("messages").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(fields) = message.as_object_mut() else { continue };
            if let Some(Value::String(words)) = fields.get("reactions") {
                let reactions = reactions(words)?;
                fields.insert("reactions".into(), reactions);
            }
            fields.retain(|_, value| !value.is_null());
        }
    }
    Ok(hud)
}

fn spread(row: Value) -> Result<Value, String> {
    let Value::Object(mut row) = row else { return Ok(row) };
    let refused = row.shift_remove("refused").filter(|why| !why.is_null());
    if let Some(with) = row.shift_remove("with")
        && let Value::String(with) = with
    {
        row.extend(positional::read_fields(&with)?);
    }
    row.extend(refused.map(|why| ("refused".to_owned(), why)));
    Ok(Value::Object(row))
}

fn reactions(words: &str) -> Result<Value, String> {
    let words: Vec<&str> = words.split_whitespace().collect();
    let one = |pair: &[&str]| match pair {
        [name, count] => {
            let reaction = Reaction::read(name).ok_or_else(|| format!("'{name}' is no reaction"))?;
            let count: u64 = count.parse().map_err(|_| format!("'{count}' is no number of reactions"))?;
            Ok((reaction.name().to_owned(), count.into()))
        }
        _ => Err("reactions come with their number".to_owned()),
    };
    Ok(Value::Object(words.chunks(2).map(one).collect::<Result<_, String>>()?))
}

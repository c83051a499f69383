//! Lists of a HUD as tables: all rows of a list get the same columns. A missing field becomes null, and fields that
//! only some rows have are joined into one column.

use super::positional;
use crate::error::Error;
use crate::hud::{Hud, HudMessage};
use crate::world::Reaction;
use serde_json::{Map, Value, json};

/// A recent action: type, timestamp, arguments, refusal.
pub(super) fn action_row(action: &Map<String, Value>) -> Value {
    let is_argument = |name: &str| !matches!(name, "type" | "timestamp" | "refused");
    let with = join_fields(action, is_argument);
    let get = |name: &str| action.get(name).cloned().unwrap_or_default();
    json!({"type": get("type"), "timestamp": get("timestamp"), "with": with, "refused": get("refused")})
}

/// An available action: type and arguments.
fn signature_row(action: &Value) -> Value {
    let Some(fields) = action.as_object() else { return action.clone() };
    json!({"type": fields.get("type"), "with": join_fields(fields, |name| name != "type")})
}

/// Some fields of an object as one text; null where there are none.
fn join_fields(fields: &Map<String, Value>, filter: impl Fn(&str) -> bool) -> Value {
    let joined: Map<String, Value> =
        fields.iter().filter(|(name, _)| filter(name)).map(|(n, v)| (n.clone(), v.clone())).collect();
    if joined.is_empty() { Value::Null } else { Value::String(positional::inline_fields(&joined)) }
}

pub(super) fn message_row(message: &HudMessage) -> Value {
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

/// The meta section with its available actions as rows.
pub(super) fn meta_with_rows(hud: &Hud) -> Value {
    let mut meta = serde_json::to_value(&hud.meta).unwrap_or_default();
    if let Some(categories) = meta.get_mut("available_actions").and_then(Value::as_object_mut) {
        for category in categories.values_mut() {
            if let Some(actions) = category.get_mut("actions").and_then(Value::as_array_mut) {
                actions.iter_mut().for_each(|action| *action = signature_row(action));
            }
        }
    }
    meta
}

/// The inverse: gives the rows of a parsed HUD their own fields again.
pub(super) fn expand_rows(mut hud: Value) -> Result<Value, Error> {
    let take_list = |value: Option<&mut Value>| value.and_then(Value::as_array_mut).map(std::mem::take);
    if let Some(categories) = hud.pointer_mut("/meta/available_actions").and_then(Value::as_object_mut) {
        for category in categories.values_mut() {
            if let Some(rows) = take_list(category.get_mut("actions")) {
                category["actions"] =
                    Value::Array(rows.into_iter().map(expand_row).collect::<Result<_, _>>()?);
            }
        }
    }
    if let Some(rows) = take_list(hud.pointer_mut("/self/recent_actions")) {
        hud["self"]["recent_actions"] =
            Value::Array(rows.into_iter().map(expand_row).collect::<Result<_, _>>()?);
    }
    for room in hud.get_mut("rooms").and_then(Value::as_array_mut).into_iter().flatten() {
        for message in room.get_mut("messages").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(fields) = message.as_object_mut() else { continue };
            if let Some(Value::String(words)) = fields.get("reactions") {
                let reactions = parse_reactions(words)?;
                fields.insert("reactions".into(), reactions);
            }
            fields.retain(|_, value| !value.is_null());
        }
    }
    Ok(hud)
}

fn expand_row(row: Value) -> Result<Value, Error> {
    let Value::Object(mut row) = row else { return Ok(row) };
    let refused = row.shift_remove("refused").filter(|reason| !reason.is_null());
    if let Some(with) = row.shift_remove("with")
        && let Value::String(with) = with
    {
        row.extend(positional::decode_fields(&with)?);
    }
    row.extend(refused.map(|reason| ("refused".to_owned(), reason)));
    Ok(Value::Object(row))
}

fn parse_reactions(words: &str) -> Result<Value, Error> {
    let words: Vec<&str> = words.split_whitespace().collect();
    let reaction = |pair: &[&str]| match pair {
        [name, count] => {
            let reaction = Reaction::from_name(name)
                .ok_or_else(|| Error::invalid_input(format!("'{name}' is not a reaction")))?;
            let count: u64 = count
                .parse()
                .map_err(|_| Error::invalid_input(format!("'{count}' is not a number of reactions")))?;
            Ok((reaction.name().to_owned(), count.into()))
        }
        _ => Err(Error::invalid_input("each reaction is followed by its number")),
    };
    Ok(Value::Object(words.chunks(2).map(reaction).collect::<Result<_, Error>>()?))
}

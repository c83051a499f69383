//! Deserializes the arguments of actions as models write them: numbers as strings, and strings as numbers.

use crate::world::AgentId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

pub(super) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(from)?;
    let number = value.as_u64().or_else(|| match &value {
        Value::String(text) => text.trim().parse().ok(),
        Value::Number(number) => number.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0).map(|n| n as u64),
        _ => None,
    });
    number.ok_or_else(|| D::Error::custom(format!("{value} is not a number")))
}

pub(super) fn id<'de, D: Deserializer<'de>>(from: D) -> Result<AgentId, D::Error> {
    let number = number(from)?;
    u32::try_from(number)
        .map(AgentId)
        .map_err(|_| D::Error::custom(format!("{number} is not the number of an agent or a room")))
}

pub(super) fn maybe_id<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AgentId>, D::Error> {
    let value = Option::<Value>::deserialize(from)?.filter(|value| !value.is_null());
    value.map(|value| id(value).map_err(D::Error::custom)).transpose()
}

pub(super) fn maybe_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    match Option::<Value>::deserialize(from)? {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(number)) => Ok(number.as_f64()),
        Some(Value::String(text)) if text.trim().parse::<f64>().is_ok() => Ok(text.trim().parse().ok()),
        Some(other) => {
            Err(D::Error::custom(format!("{other} is not a weight: write a number from 0.0 to 1.0")))
        }
    }
}

/// A value as text: TOON does not quote strings that look like numbers or booleans.
pub(crate) fn value_as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        // A float is refused: 2.10 has become 2.1 when it was parsed.
        Value::Number(number) if !number.is_f64() => Some(value.to_string()),
        Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

pub(super) fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let value = Value::deserialize(from)?;
    value_as_text(&value)
        .ok_or_else(|| D::Error::custom(format!("{value} is not a string: write it in quotes")))
}

pub(super) fn maybe_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let value = Option::<Value>::deserialize(from)?.filter(|value| !value.is_null());
    value.map(|value| text(value).map_err(D::Error::custom)).transpose()
}

pub(super) fn share<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let value = Value::deserialize(from)?;
    match value {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        other => {
            Err(D::Error::custom(format!("{other} is not a share of attention: write one such as 30% or %*")))
        }
    }
}

//! Reads the values of actions as models write them.

use crate::world::AgentId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Models write numbers as words now and then.
pub(super) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(from)?;
    let found = value.as_u64().or_else(|| match &value {
        Value::String(text) => text.trim().parse().ok(),
        Value::Number(number) => number.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0).map(|n| n as u64),
        _ => None,
    });
    found.ok_or_else(|| D::Error::custom(format!("{value} is no number of something")))
}

pub(super) fn id<'de, D: Deserializer<'de>>(from: D) -> Result<AgentId, D::Error> {
    let found = number(from)?;
    u32::try_from(found)
        .map(AgentId)
        .map_err(|_| D::Error::custom(format!("{found} is no number of anybody")))
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
        Some(other) => Err(D::Error::custom(format!("{other} is no weight: write a number from 0.0 to 1.0"))),
    }
}

/// And words as numbers: TOON does not quote all of them.
pub(crate) fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        // Of 2.10 only 2.1 is left.
        Value::Number(number) if !number.is_f64() => Some(value.to_string()),
        Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

pub(super) fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let value = Value::deserialize(from)?;
    as_text(&value).ok_or_else(|| D::Error::custom(format!("{value} is no text: write it in quotes")))
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
            Err(D::Error::custom(format!("{other} is no share of attention: write one such as 30% or %*")))
        }
    }
}

//! Fields of JSON objects whose shape is not guaranteed.

use serde_json::Value;

/// The text of a field; empty if there is none.
pub(super) fn str_field<'v>(value: &'v Value, key: &str) -> &'v str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The list of a field; empty if there is none.
pub(super) fn array_field<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Whether a field is `true`.
pub(super) fn bool_field(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool).unwrap_or(false)
}

//! Items that a request names by their id instead of sending them. Vercel's AI SDK sends the answers of a history so.

use super::format::ResponseFormat;
use super::input_items::input_items;
use super::record::{ResponseRecord, find_response};
use super::stored_answer;
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use halo_core::ErrorKind;
use serde_json::Value;

/// The id that an item refers to. The type may be missing: then an item is a reference if it has nothing but its id.
fn referenced_id(item: &Value) -> Option<&Value> {
    let is_reference = match &item["type"] {
        Value::Null => item["role"].is_null() && item["content"].is_null() && !item["id"].is_null(),
        kind => kind == "item_reference",
    };
    is_reference.then(|| &item["id"])
}

/// Whether an input has references.
pub(super) fn has_references(input: Option<&Value>) -> bool {
    let items = input.and_then(Value::as_array);
    items.is_some_and(|items| items.iter().any(|item| referenced_id(item).is_some()))
}

/// Replaces references by the items that they name. Those that the previous response continues are part of the conversation already,
/// and are left out, like reasoning.
pub(super) fn resolve_references(
    app: &App,
    input: &Value,
    previous: Option<&(String, ResponseRecord)>,
) -> ApiResult<Value> {
    let mut items = Vec::new();
    for (n, item) in input.as_array().into_iter().flatten().enumerate() {
        match referenced_id(item) {
            None => items.push(item.clone()),
            Some(id) => items.extend(find_item(app, &format!("input[{n}]"), id, previous)?),
        }
    }
    Ok(Value::Array(items))
}

fn find_item(
    app: &App,
    place: &str,
    id: &Value,
    previous: Option<&(String, ResponseRecord)>,
) -> ApiResult<Option<Value>> {
    let parts = id.as_str().and_then(|id| {
        let (kind, place) = id.split_once('_')?;
        let (number, place) = place.split_once('_')?;
        Some((id, kind, number, place))
    });
    let Some((id, kind, number, item_place)) = parts else {
        let message = format!("{place}: {id} is not the id of an item; send the item itself");
        return Err(ErrorResponse::invalid_parameter("input", message));
    };
    let missing = || {
        let message = format!("{place}: there is no stored item '{id}'; send the item itself");
        ErrorResponse::not_found(message).with_param("input")
    };
    let is_missing = |e: ErrorResponse| if e.kind() == ErrorKind::NotFound { missing() } else { e };
    let response = format!("resp_{number}");
    let (name, record) = find_response(app, &response).map_err(is_missing)?;
    let is_known = previous.is_some_and(|(other, previous)| *other == name && record.turn <= previous.turn);
    // A later message of an answer is the end of its first one.
    let is_end = kind == "msg" && item_place.parse().is_ok_and(|place: usize| place > 0);
    if is_known || is_end || kind == "rs" {
        return Ok(None);
    }
    let answer = stored_answer(app, &response, &name, &record).map_err(is_missing)?;
    let mut items = ResponseFormat::stored(app, &response, &record).output(&answer, &record.status);
    items.extend(input_items(app, &name, &response, &record)?);
    items.into_iter().find(|item| item["id"] == id).map(Some).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn item_reference_is_known_by_its_type_or_by_its_id_alone() {
        for (item, expected) in [
            (json!({ "type": "item_reference", "id": "msg_1_0" }), true),
            (json!({ "id": "msg_1_0" }), true),
            (json!({ "type": null, "id": "msg_1_0" }), true),
            (json!({ "id": "msg_1_0", "role": "user", "content": "Hi" }), false),
            (json!({ "type": "message", "id": "msg_1_0", "role": "user", "content": "Hi" }), false),
            (json!({ "type": "reasoning", "id": "rs_1_0", "summary": [] }), false),
            (json!("text"), false),
        ] {
            assert_eq!(has_references(Some(&json!([item]))), expected, "{item}");
        }
        assert!(!has_references(Some(&json!("Hi"))) && !has_references(None));
    }
}

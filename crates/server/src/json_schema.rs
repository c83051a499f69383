//! Whether a JSON value follows a JSON schema. Keywords that are not known here, and `pattern` and `format`, are not checked.

use serde_json::{Map, Value};
use std::cell::Cell;

/// Schemas that refer to themselves end here.
const MAX_DEPTH: usize = 64;

/// The most schemas that are compared with values. A small schema with choices between references to itself would take for ever.
const MAX_STEPS: usize = 100_000;

/// A value that cannot be checked within the limits does not follow the schema.
pub(crate) fn follows_schema(schema: &Value, value: &Value) -> bool {
    SchemaCheck { root: schema, steps: Cell::new(0) }.follows(schema, value, MAX_DEPTH)
}

struct SchemaCheck<'a> {
    /// Local references begin here.
    root: &'a Value,
    steps: Cell<usize>,
}

impl SchemaCheck<'_> {
    fn follows(&self, schema: &Value, value: &Value, depth: usize) -> bool {
        let Some(depth) = depth.checked_sub(1) else { return false };
        self.steps.set(self.steps.get() + 1);
        if self.steps.get() > MAX_STEPS {
            return false;
        }
        let schema = match schema {
            Value::Bool(allows) => return *allows,
            Value::Object(schema) => schema,
            _ => return true,
        };
        let follows = |schema: &Value| self.follows(schema, value, depth);
        let list = |key: &str| schema.get(key).and_then(Value::as_array);
        if schema.get("nullable") == Some(&Value::Bool(true)) && value.is_null() {
            return true;
        }
        let reference = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
        reference.is_none_or(|path| self.root.pointer(path).is_some_and(follows))
            && has_type(schema.get("type"), value)
            && schema.get("const").is_none_or(|only| only == value)
            && list("enum").is_none_or(|values| values.contains(value))
            && list("allOf").is_none_or(|all| all.iter().all(follows))
            && list("anyOf").is_none_or(|any| any.iter().any(follows))
            && list("oneOf").is_none_or(|one| one.iter().filter(|schema| follows(schema)).count() == 1)
            && schema.get("not").is_none_or(|not| !follows(not))
            && self.follows_members(schema, value, depth)
            && self.follows_items(schema, value, depth)
            && is_in_limits(schema, value)
    }

    fn follows_members(&self, schema: &Map<String, Value>, value: &Value, depth: usize) -> bool {
        let Value::Object(members) = value else { return true };
        let properties = schema.get("properties").and_then(Value::as_object);
        let others = schema.get("additionalProperties");
        // Their names are regular expressions.
        let has_patterns = schema.contains_key("patternProperties");
        let required = schema.get("required").and_then(Value::as_array);
        let has_member = |name: &Value| name.as_str().is_none_or(|name| members.contains_key(name));
        required.is_none_or(|names| names.iter().all(has_member))
            && members.iter().all(|(name, value)| {
                match (properties.and_then(|properties| properties.get(name)), others) {
                    (Some(schema), _) => self.follows(schema, value, depth),
                    (None, Some(schema)) if !has_patterns => self.follows(schema, value, depth),
                    _ => true,
                }
            })
    }

    fn follows_items(&self, schema: &Map<String, Value>, value: &Value, depth: usize) -> bool {
        let Value::Array(values) = value else { return true };
        let first = schema.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let rest = values.get(first.len()..).unwrap_or_default();
        first.iter().zip(values).all(|(schema, value)| self.follows(schema, value, depth))
            && schema
                .get("items")
                .is_none_or(|schema| rest.iter().all(|value| self.follows(schema, value, depth)))
    }
}

fn has_type(expected: Option<&Value>, value: &Value) -> bool {
    let is = |name: &str| match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => true,
    };
    match expected {
        Some(Value::String(name)) => is(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).any(is),
        _ => true,
    }
}

/// The limits of numbers, and of the lengths of texts, lists and objects.
fn is_in_limits(schema: &Map<String, Value>, value: &Value) -> bool {
    let limit = |key: &str| schema.get(key).and_then(Value::as_f64);
    let is_within = |number: f64, least: &str, most: &str| {
        limit(least).is_none_or(|least| number >= least) && limit(most).is_none_or(|most| number <= most)
    };
    match value {
        Value::Number(number) => {
            let number = number.as_f64().unwrap_or_default();
            is_within(number, "minimum", "maximum")
                && limit("exclusiveMinimum").is_none_or(|least| number > least)
                && limit("exclusiveMaximum").is_none_or(|most| number < most)
        }
        Value::String(text) => is_within(text.chars().count() as f64, "minLength", "maxLength"),
        Value::Array(values) => is_within(values.len() as f64, "minItems", "maxItems"),
        Value::Object(members) => is_within(members.len() as f64, "minProperties", "maxProperties"),
        Value::Null | Value::Bool(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn schema_keywords_are_checked() {
        let tree = json!({
            "$ref": "#/$defs/node",
            "$defs": { "node": {
                "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } }, "additionalProperties": false,
            } },
        });
        // A schema, values that follow it, values that do not.
        for (schema, good, bad) in [
            (json!(true), json!([1]), json!([])),
            (json!(false), json!([]), json!([1, null])),
            (json!({ "type": "integer" }), json!([1, 2.0]), json!([1.5, "1"])),
            (json!({ "type": ["string", "null"] }), json!(["a", null]), json!([1, false])),
            (json!({ "type": "string", "nullable": true }), json!(["a", null]), json!([1])),
            (json!({ "enum": ["a", 1] }), json!(["a", 1]), json!(["b", 2])),
            (json!({ "const": 7 }), json!([7]), json!([8])),
            (json!({ "minimum": 1, "exclusiveMaximum": 3 }), json!([1, 2.9, "x"]), json!([0, 3])),
            (json!({ "minLength": 2, "maxLength": 3 }), json!(["äö", "abc"]), json!(["a", "abcd"])),
            (
                json!({ "items": { "type": "number" }, "minItems": 1 }),
                json!([[1], [1, 2]]),
                json!([[], ["a"]]),
            ),
            (
                json!({ "prefixItems": [{ "type": "string" }], "items": { "type": "number" } }),
                json!([["a"], ["a", 1], []]),
                json!([[1], ["a", "b"]]),
            ),
            (
                json!({ "properties": { "a": { "type": "string" } }, "required": ["a"] }),
                json!([{ "a": "x" }, { "a": "x", "b": 1 }]),
                json!([{}, { "a": 1 }]),
            ),
            (
                json!({ "properties": { "a": {} }, "additionalProperties": { "type": "number" } }),
                json!([{ "a": "x", "b": 1 }]),
                json!([{ "b": "x" }]),
            ),
            (
                json!({ "anyOf": [{ "type": "string" }, { "type": "number" }] }),
                json!(["a", 1]),
                json!([null]),
            ),
            (json!({ "oneOf": [{ "minimum": 1 }, { "maximum": 3 }] }), json!([0, 4]), json!([2])),
            (json!({ "allOf": [{ "minimum": 1 }, { "maximum": 3 }] }), json!([2]), json!([0, 4])),
            (json!({ "not": { "type": "null" } }), json!([1]), json!([null])),
            (tree, json!([{}, { "next": { "next": {} } }]), json!([{ "next": { "last": {} } }, 1])),
            (json!({ "$ref": "#" }), json!([]), json!([1])),
            (json!({ "$ref": "#/missing" }), json!([]), json!([1])),
            (json!({ "anyOf": [{ "$ref": "#" }, { "$ref": "#" }] }), json!([]), json!([1])),
        ] {
            let of = |values: &Value| values.as_array().cloned().unwrap_or_default();
            for value in of(&good) {
                assert!(follows_schema(&schema, &value), "{schema}: {value}");
            }
            for value in of(&bad) {
                assert!(!follows_schema(&schema, &value), "{schema}: {value}");
            }
        }
    }
}

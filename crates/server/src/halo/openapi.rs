//! Completes the OpenAPI document that utoipa generates: what every operation shares, and what the types of Rust do not say.

use crate::app::MAX_NAME_BYTES;
use serde_json::{Map, Value, json};

/// The operations of a path item; its other fields are no operations.
const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

/// The longest text of a query, in characters.
const MAX_QUERY_LENGTH: usize = 65_536;

/// Makes the document valid and complete: descriptions of all responses, keys, limits, the errors that every operation can return, and
/// schemas that JSON can satisfy.
pub(super) fn complete_document(document: &mut Value, max_body_bytes: usize) {
    if let Some(schemas) = document.pointer_mut("/components/schemas") {
        fix_property_names(schemas);
        fix_tuples(schemas);
    }
    limit_texts(document, max_body_bytes);
    document["components"]["securitySchemes"] = json!({
        "bearer": { "type": "http", "scheme": "bearer", "description": "The key of the server (server.key)" },
        "header": { "type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key in a header of its own" },
    });
    // The empty object: a server without a key needs none.
    document["security"] = json!([{ "bearer": [] }, { "header": [] }, {}]);
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    for item in paths.filter_map(Value::as_object_mut) {
        for operation in item.iter_mut().filter(|(name, _)| METHODS.contains(&name.as_str())) {
            if let Value::Object(operation) = operation.1 {
                complete_operation(operation);
            }
        }
    }
}

fn complete_operation(operation: &mut Map<String, Value>) {
    let has_parameters =
        operation.get("parameters").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    let takes_input = has_parameters || operation.contains_key("requestBody");
    for parameter in operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
        let max = match (parameter["in"].as_str(), parameter["name"].as_str()) {
            (Some("path"), _) => MAX_NAME_BYTES,
            _ => MAX_QUERY_LENGTH,
        };
        if let Some(schema) = parameter.get_mut("schema") {
            limit_text(schema, max);
        }
    }
    let error = json!({ "application/json": { "schema": { "$ref": "#/components/schemas/ApiError" } } });
    let responses = operation.entry("responses").or_insert_with(|| json!({}));
    let Value::Object(responses) = responses else { return };
    let common: &[&str] =
        if takes_input { &["400", "401", "403", "413", "429"] } else { &["401", "403", "429"] };
    for status in common {
        responses.entry(*status).or_insert_with(|| json!({ "content": error }));
    }
    for (status, response) in responses {
        let description = &mut response["description"];
        if description.as_str().is_none_or(str::is_empty) {
            *description = json!(describe_status(status));
        }
    }
}

fn describe_status(status: &str) -> &'static str {
    match status {
        "200" => "Success",
        "201" => "Created",
        "202" => "Accepted: events report the progress",
        "204" => "Done; there is nothing to return",
        "400" => "The request is malformed: a parameter, the body or a name",
        "401" => "The key is missing or wrong",
        "403" => "The host, the origin or the caller is not allowed",
        "404" => "There is no such thing",
        "409" => "It contradicts the current state",
        "413" => "The body is too large",
        "422" => "The values make no sense together, or do not fit",
        "429" => "Too many requests: wait as long as retry-after says",
        "500" => "A defect of the server",
        "501" => "This server has no such part",
        "503" => "The model or the store is busy or not available: try again later",
        _ => "Another result",
    }
}

/// The keys of JSON objects are texts. A map from numbers has keys that are written as numbers.
fn fix_property_names(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.get("propertyNames").is_some_and(|names| names["type"] == "integer") {
                fields.insert("propertyNames".into(), json!({ "type": "string", "pattern": "^-?[0-9]+$" }));
            }
            fields.values_mut().for_each(fix_property_names);
        }
        Value::Array(items) => items.iter_mut().for_each(fix_property_names),
        _ => {}
    }
}

/// A tuple is a list of fixed length. Its rest is forbidden by the length and not by `items: false`, which generators of clients do not
/// know.
fn fix_tuples(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let (Some(Value::Array(items)), Some(Value::Bool(false))) =
                (fields.get("prefixItems"), fields.get("items"))
            {
                let mut kinds: Vec<Value> = Vec::new();
                for item in items {
                    if !kinds.contains(item) {
                        kinds.push(item.clone());
                    }
                }
                let length = items.len();
                let any = if kinds.len() == 1 { kinds.remove(0) } else { json!({ "anyOf": kinds }) };
                fields.insert("items".into(), any);
                fields.insert("minItems".into(), json!(length));
                fields.insert("maxItems".into(), json!(length));
            }
            fields.values_mut().for_each(fix_tuples);
        }
        Value::Array(items) => items.iter_mut().for_each(fix_tuples),
        _ => {}
    }
}

/// The texts of requests are limited by the size of a body; names have a limit of their own.
fn limit_texts(document: &mut Value, max_body_bytes: usize) {
    let schemas = document.pointer("/components/schemas").and_then(Value::as_object);
    let bodies: Vec<String> = request_schemas(document);
    let known: Vec<String> = schemas.into_iter().flat_map(|all| all.keys().cloned()).collect();
    for name in known.iter().filter(|name| bodies.contains(name)) {
        let Some(schema) = document.pointer_mut(&format!("/components/schemas/{name}")) else { continue };
        let properties = schema.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten();
        for (property, schema) in properties {
            limit_text(schema, if property == "name" { MAX_NAME_BYTES } else { max_body_bytes });
        }
    }
}

/// The names of the schemas that are bodies of requests.
fn request_schemas(document: &Value) -> Vec<String> {
    let paths = document["paths"].as_object().into_iter().flat_map(Map::values);
    let operations = paths.filter_map(Value::as_object).flat_map(Map::values);
    operations
        .filter_map(|operation| operation.pointer("/requestBody/content/application~1json/schema/$ref"))
        .filter_map(|reference| reference.as_str()?.rsplit('/').next().map(str::to_owned))
        .collect()
}

/// Limits a schema of texts that has no limit; lists of texts have one for each.
fn limit_text(schema: &mut Value, max: usize) {
    let Value::Object(fields) = schema else { return };
    let is_text = match fields.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => false,
    };
    if is_text && !fields.contains_key("enum") && !fields.contains_key("maxLength") {
        fields.insert("maxLength".into(), json!(max));
    }
    if let Some(items) = fields.get_mut("items") {
        limit_text(items, max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed() -> Value {
        let mut document = json!({
            "paths": {
                "/a/{name}": {
                    "get": {
                        "parameters": [
                            { "name": "name", "in": "path", "required": true, "schema": { "type": "string" } },
                            { "name": "q", "in": "query", "schema": { "type": ["string", "null"] } },
                        ],
                        "responses": { "200": { "description": "" }, "404": { "description": "Not here" } },
                    },
                    "post": {
                        "requestBody": { "content": { "application/json": { "schema": { "$ref": "#/components/schemas/New" } } } },
                        "responses": { "204": {} },
                    },
                },
                "/b": { "get": { "responses": { "200": {} } } },
            },
            "components": { "schemas": {
                "New": { "type": "object", "properties": {
                    "name": { "type": "string" },
                    "texts": { "type": "array", "items": { "type": "string" } },
                    "kind": { "type": "string", "enum": ["a"] },
                } },
                "Pair": { "type": "array", "items": false, "prefixItems": [{ "type": "string" }, { "type": "integer" }, { "type": "string" }] },
                "Map": { "type": "object", "propertyNames": { "type": "integer" }, "additionalProperties": { "type": "string" } },
            } },
        });
        complete_document(&mut document, 1000);
        document
    }

    #[test]
    fn openapi_responses_have_descriptions() {
        let document = completed();
        let get = &document["paths"]["/a/{name}"]["get"]["responses"];
        assert_eq!(
            (&get["200"]["description"], &get["404"]["description"]),
            (&json!("Success"), &json!("Not here"))
        );
        assert!(get["400"]["content"].is_object() && get["401"]["description"].is_string());
        let bare = &document["paths"]["/b"]["get"]["responses"];
        assert!(bare["400"].is_null() && bare["401"].is_object(), "{bare}");
    }

    #[test]
    fn openapi_schemas_are_satisfiable_and_limited() {
        let document = completed();
        let schemas = &document["components"]["schemas"];
        assert_eq!(schemas["Map"]["propertyNames"], json!({ "type": "string", "pattern": "^-?[0-9]+$" }));
        let pair = &schemas["Pair"];
        assert_eq!(pair["items"], json!({ "anyOf": [{ "type": "string" }, { "type": "integer" }] }));
        assert_eq!((&pair["minItems"], &pair["maxItems"]), (&json!(3), &json!(3)));
        let new = &schemas["New"]["properties"];
        assert_eq!(
            (&new["name"]["maxLength"], &new["texts"]["items"]["maxLength"]),
            (&json!(MAX_NAME_BYTES), &json!(1000))
        );
        assert!(new["kind"]["maxLength"].is_null());
        let parameters = &document["paths"]["/a/{name}"]["get"]["parameters"];
        assert_eq!(parameters[0]["schema"]["maxLength"], json!(MAX_NAME_BYTES));
        assert_eq!(parameters[1]["schema"]["maxLength"], json!(MAX_QUERY_LENGTH));
        assert!(
            document["components"]["securitySchemes"]["bearer"].is_object()
                && document["security"].is_array()
        );
    }
}

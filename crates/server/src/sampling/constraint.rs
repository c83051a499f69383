//! The format that an answer must have: `response_format` of OpenAI, `json_schema` and `grammar` of llama.cpp, `format` of Ollama.

use super::dialect::ApiDialect;
use super::fields::{RequestFields, wrong_type};
use crate::error::{ApiResult, ErrorResponse};
use halo_core::model::OutputConstraint;
use serde_json::{Value, json};

/// The constraint of a request, and the name of its field.
pub(super) fn parse_constraint(
    fields: &RequestFields,
    dialect: ApiDialect,
) -> ApiResult<Option<(&'static str, OutputConstraint)>> {
    let format = response_format(fields)?.map(|schema| ("response_format", schema));
    let ollama = if dialect == ApiDialect::Ollama { ollama_format(fields)? } else { None };
    let schema = match fields.find(&["json_schema"]) {
        None => None,
        Some((_, Value::Object(schema))) if schema.is_empty() => None,
        Some((name, schema @ Value::Object(_))) => {
            Some((name, OutputConstraint::JsonSchema(schema.to_string())))
        }
        Some((name, value)) => return Err(wrong_type(name, value, "a JSON schema")),
    };
    let grammar = fields.text(&["grammar", "grammar_string"])?.filter(|(_, text)| !text.trim().is_empty());
    let grammar = grammar.map(|(name, text)| (name, OutputConstraint::GbnfGrammar(text.to_owned())));
    let mut all = [format, ollama, schema, grammar].into_iter().flatten();
    let first = all.next();
    if let (Some((first, _)), Some((second, _))) = (&first, all.next()) {
        let message = format!("{second} and {first} are both set; an answer can follow only one of them");
        return Err(ErrorResponse::invalid_parameter(second, message));
    }
    Ok(first)
}

fn response_format(fields: &RequestFields) -> ApiResult<Option<OutputConstraint>> {
    let Some((name, format)) = fields.find(&["response_format"]) else { return Ok(None) };
    let Some(kind) = format["type"].as_str() else {
        return Err(wrong_type(name, format, "an object with the type text, json_object or json_schema"));
    };
    let schema = match kind {
        "text" => return Ok(None),
        // llama.cpp takes a schema here too.
        "json_object" => format.get("schema").filter(|schema| schema.is_object()).cloned(),
        "json_schema" => {
            let schema = format["json_schema"].get("schema").filter(|schema| !schema.is_null());
            let missing = || {
                let message = "response_format.json_schema.schema is missing";
                ErrorResponse::invalid_parameter(name, message)
            };
            Some(schema.ok_or_else(missing)?.clone())
        }
        other => {
            let message =
                format!("response_format '{other}' is not supported; use text, json_object or json_schema");
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
    };
    let schema = schema.unwrap_or_else(|| json!({ "type": "object" }));
    Ok(Some(OutputConstraint::JsonSchema(schema.to_string())))
}

/// `format` is empty, `json`, or a JSON schema.
fn ollama_format(fields: &RequestFields) -> ApiResult<Option<(&'static str, OutputConstraint)>> {
    let schema = match fields.find(&["format"]) {
        None => return Ok(None),
        Some((_, Value::String(text))) if text.is_empty() => return Ok(None),
        Some((_, Value::String(text))) if text == "json" => json!({ "type": "object" }),
        Some((_, schema @ Value::Object(_))) => schema.clone(),
        Some((name, value)) => return Err(wrong_type(name, value, "\"json\" or a JSON schema, an object")),
    };
    Ok(Some(("format", OutputConstraint::JsonSchema(schema.to_string()))))
}

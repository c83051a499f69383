//! Functions that a client offers: the definitions of a request, and their checks. Halo never runs them.

use crate::error::{ApiResult, ErrorResponse};
use crate::sampling::wrong_type;
use halo_core::tool_call::{CallFormat, ToolChoice, ToolDefinition, ToolOptions};
use serde::Deserialize;
use serde_json::{Value, json};

/// More functions do not fit the attention of any model.
const MAX_TOOLS: usize = 256;
const MAX_DEFINITION_BYTES: usize = 1 << 18;
const MAX_NAME_CHARS: usize = 64;

/// The functions of a request, and how they may be called.
#[derive(Deserialize)]
pub(super) struct ToolParams {
    tools: Option<Value>,
    /// The old form of `tools`.
    functions: Option<Value>,
    tool_choice: Option<Value>,
    /// The old form of `tool_choice`.
    function_call: Option<Value>,
    parallel_tool_calls: Option<Value>,
}

impl ToolParams {
    /// Whether the request has the old form, and so the response has it too.
    pub fn is_legacy(&self) -> bool {
        self.functions.is_some() && self.tools.is_none()
    }

    pub fn is_parallel(&self) -> bool {
        self.parallel_tool_calls.as_ref().and_then(Value::as_bool).unwrap_or(true)
    }

    /// The choice as the Responses API repeats it.
    pub fn choice_json(&self) -> Value {
        self.tool_choice.clone().filter(|choice| !choice.is_null()).unwrap_or_else(|| "auto".into())
    }

    /// The functions that the model may call; none where it may call none.
    pub fn parse(&self, format: &CallFormat) -> ApiResult<Option<ToolOptions>> {
        if let Some(value) = self.parallel_tool_calls.as_ref().filter(|value| !value.is_boolean()) {
            return Err(wrong_type("parallel_tool_calls", value, "true or false"));
        }
        let mut tools: Vec<ToolDefinition> = Vec::new();
        for (n, tool) in list("tools", self.tools.as_ref())?.iter().enumerate() {
            if tool["type"].as_str().is_some_and(|kind| kind != "function") {
                let kind = tool["type"].as_str().unwrap_or_default();
                let message = format!("tools[{n}]: a tool of type {kind} is not supported, only functions");
                return Err(ErrorResponse::invalid_parameter("tools", message));
            }
            // The Responses API has the function itself here.
            let function = if tool["function"].is_object() { &tool["function"] } else { tool };
            tools.push(parse_definition(&format!("tools[{n}]"), function)?);
        }
        for (n, function) in list("functions", self.functions.as_ref())?.iter().enumerate() {
            tools.push(parse_definition(&format!("functions[{n}]"), function)?);
        }
        check_definitions(&tools)?;
        let choice = self.tool_choice.as_ref().or(self.function_call.as_ref());
        let Some(choice) = parse_choice(choice, &tools)? else { return Ok(None) };
        if tools.is_empty() {
            return Ok(None);
        }
        let parallel = self.is_parallel() && !self.is_legacy();
        Ok(Some(ToolOptions { tools, choice, parallel, format: format.clone(), answer_schema: None }))
    }
}

fn list<'a>(name: &'static str, value: Option<&'a Value>) -> ApiResult<&'a [Value]> {
    match value {
        None => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(value) => Err(wrong_type(name, value, "a list of functions")),
    }
}

/// Whether a text can be the name of a function. Such a name needs no escapes in JSON, and no special token has it.
pub(super) fn is_function_name(name: &str) -> bool {
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.chars().all(is_name_char)
}

fn parse_definition(place: &str, function: &Value) -> ApiResult<ToolDefinition> {
    let name = function["name"].as_str().unwrap_or_default();
    if !is_function_name(name) {
        return Err(ErrorResponse::invalid_parameter(
            "tools",
            format!(
                "{place}: the name of the function must have 1 to {MAX_NAME_CHARS} letters, digits, underscores, dots or dashes"
            ),
        ));
    }
    let parameters = match &function["parameters"] {
        Value::Null => json!({ "type": "object", "properties": {} }),
        Value::Object(schema) => Value::Object(schema.clone()),
        _ => {
            let message = format!("{place}: parameters must be a JSON schema, which is an object");
            return Err(ErrorResponse::invalid_parameter("tools", message));
        }
    };
    let mut written = json!({ "name": name });
    if let Some(description) = function["description"].as_str() {
        written["description"] = description.into();
    }
    written["parameters"] = parameters.clone();
    Ok(ToolDefinition {
        name: name.to_owned(),
        function: written.to_string(),
        parameters: parameters.to_string(),
    })
}

fn check_definitions(tools: &[ToolDefinition]) -> ApiResult<()> {
    if tools.len() > MAX_TOOLS {
        let message = format!("{} tools; a request may have at most {MAX_TOOLS}", tools.len());
        return Err(ErrorResponse::invalid_parameter("tools", message));
    }
    let bytes: usize = tools.iter().map(|tool| tool.function.len()).sum();
    if bytes > MAX_DEFINITION_BYTES {
        let message = format!("the tools have {bytes} bytes; at most {MAX_DEFINITION_BYTES} are allowed");
        return Err(ErrorResponse::invalid_parameter("tools", message));
    }
    let is_repeated = |(n, tool): &(usize, &ToolDefinition)| tools[..*n].iter().any(|t| t.name == tool.name);
    match tools.iter().enumerate().find(is_repeated) {
        None => Ok(()),
        Some((_, tool)) => {
            let message = format!("two tools are called '{}'; give each function its own name", tool.name);
            Err(ErrorResponse::bad_request(message))
        }
    }
}

/// None where the model must call no function.
fn parse_choice(choice: Option<&Value>, tools: &[ToolDefinition]) -> ApiResult<Option<ToolChoice>> {
    let choice = match choice {
        None | Some(Value::Null) => return Ok(Some(ToolChoice::Auto)),
        Some(choice) => choice,
    };
    let name = [&choice["function"]["name"], &choice["name"]].into_iter().find_map(Value::as_str);
    let parsed = match (choice.as_str(), name) {
        (Some("auto"), _) => return Ok(Some(ToolChoice::Auto)),
        (Some("none"), _) => return Ok(None),
        (Some("required" | "any"), _) => ToolChoice::Required,
        (None, Some(name)) => ToolChoice::Named(name.to_owned()),
        _ => {
            return Err(ErrorResponse::invalid_parameter(
                "tool_choice",
                "tool_choice must be auto, none, required, or an object that names a function",
            ));
        }
    };
    let is_offered = match &parsed {
        ToolChoice::Named(name) => tools.iter().any(|tool| tool.name == *name),
        ToolChoice::Auto | ToolChoice::Required => !tools.is_empty(),
    };
    if !is_offered {
        let message = "tool_choice asks for a function that is not in tools; add its definition";
        return Err(ErrorResponse::invalid_parameter("tool_choice", message));
    }
    Ok(Some(parsed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: Value) -> Result<Option<ToolOptions>, String> {
        let params: ToolParams = serde_json::from_value(body).expect("the shape fits");
        params.parse(&CallFormat::default()).map_err(|e| e.message().to_owned())
    }

    #[test]
    fn tools_are_parsed_in_all_forms() {
        let function =
            json!({ "name": "clock", "description": "Tells the time", "parameters": { "type": "object" } });
        let new = parse(json!({ "tools": [{ "type": "function", "function": function }] }));
        let old = parse(json!({ "functions": [function], "function_call": "auto" }));
        let flat = parse(
            json!({ "tools": [{ "type": "function", "name": "clock", "description": "Tells the time", "parameters": { "type": "object" } }] }),
        );
        let (new, old, flat) = (new.expect("valid"), old.expect("valid"), flat.expect("valid"));
        let tools = &new.as_ref().expect("a function").tools;
        assert_eq!(
            tools[0].function,
            r#"{"name":"clock","description":"Tells the time","parameters":{"type":"object"}}"#
        );
        assert_eq!(tools, &old.as_ref().expect("a function").tools);
        assert_eq!(tools, &flat.expect("a function").tools);
        assert!(new.expect("a function").parallel && !old.expect("a function").parallel);
    }

    #[test]
    fn tool_choice_is_parsed() {
        let tools = json!([{ "type": "function", "function": { "name": "clock" } }]);
        let choice = |choice: Value| parse(json!({ "tools": tools, "tool_choice": choice }));
        let parsed = |value: Value| choice(value).expect("valid").map(|options| options.choice);
        assert_eq!(parsed(Value::Null), Some(ToolChoice::Auto));
        assert_eq!(parsed(json!("auto")), Some(ToolChoice::Auto));
        assert_eq!(parsed(json!("none")), None);
        assert_eq!(parsed(json!("required")), Some(ToolChoice::Required));
        let named = json!({ "type": "function", "function": { "name": "clock" } });
        assert_eq!(parsed(named), Some(ToolChoice::Named("clock".into())));
        assert_eq!(
            parsed(json!({ "type": "function", "name": "clock" })),
            Some(ToolChoice::Named("clock".into()))
        );
        for bad in [json!("always"), json!({ "name": "rm" }), json!(7)] {
            assert!(choice(bad.clone()).is_err(), "{bad}");
        }
        assert!(parse(json!({ "tool_choice": "required" })).is_err());
        assert_eq!(parse(json!({ "tool_choice": "auto" })), Ok(None));
        assert_eq!(parse(json!({ "tools": [] })), Ok(None));
    }

    #[test]
    fn tools_with_bad_definitions_are_refused() {
        let tool = |function: Value| json!({ "tools": [{ "type": "function", "function": function }] });
        let twice = json!({ "name": "clock" });
        let bad = [
            tool(json!({})),
            tool(json!({ "name": "" })),
            tool(json!({ "name": "two words" })),
            tool(json!({ "name": "<|im_end|>" })),
            tool(json!({ "name": "x".repeat(65) })),
            tool(json!({ "name": "clock", "parameters": "none" })),
            json!({ "tools": [{ "type": "web_search" }] }),
            json!({ "functions": [twice, twice] }),
            json!({ "functions": (0..300).map(|n| json!({ "name": format!("f{n}") })).collect::<Vec<_>>() }),
        ];
        for body in bad {
            assert!(parse(body.clone()).is_err(), "{body}");
        }
    }
}

//! Whether a client wants reasoning before the answer. Chat templates have one switch for it; a level that is not `none` turns it on.

use crate::error::{ApiResult, ErrorResponse};
use crate::sampling::wrong_type;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The parameters of reasoning, under the names that OpenAI, vLLM, llama-server, OpenRouter and others have for them.
#[derive(Default, Deserialize)]
pub(super) struct ReasoningParams {
    reasoning_effort: Option<Value>,
    enable_thinking: Option<Value>,
    chat_template_kwargs: Option<Value>,
    reasoning: Option<Value>,
    /// The switch of DeepSeek, GLM and Anthropic: an object with a type.
    thinking: Option<Value>,
    reasoning_budget: Option<Value>,
    thinking_budget: Option<Value>,
    thinking_budget_tokens: Option<Value>,
}

/// The switches of chat templates.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

impl ReasoningParams {
    /// Whether the answer is generated without reasoning. The switch of the template counts more than a level.
    pub fn skips_reasoning(&self) -> ApiResult<bool> {
        let mut switch = match &self.enable_thinking {
            None => None,
            Some(Value::Bool(on)) => Some(*on),
            Some(value) => return Err(wrong_type("enable_thinking", value, "true or false")),
        };
        let mut effort = match &self.reasoning_effort {
            None => None,
            Some(Value::String(effort)) => Some(("reasoning_effort", effort.as_str())),
            Some(value) => return Err(wrong_type("reasoning_effort", value, "a text")),
        };
        let kwargs = object("chat_template_kwargs", self.chat_template_kwargs.as_ref())?;
        for (name, value) in kwargs.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            match (name.as_str(), value) {
                (name, Value::Bool(on)) if SWITCHES.contains(&name) => switch = Some(*on),
                ("reasoning_effort", Value::String(text)) => effort = Some(("chat_template_kwargs", text)),
                // The template is read once, when the model is loaded: other variables cannot reach it.
                _ => {
                    let message = "chat_template_kwargs: enable_thinking, thinking (true or false) and reasoning_effort are \
                                   supported; leave others out";
                    return Err(ErrorResponse::invalid_parameter("chat_template_kwargs", message));
                }
            }
        }
        for (name, value) in object("reasoning", self.reasoning.as_ref())?.into_iter().flatten() {
            match (name.as_str(), value) {
                ("effort", Value::String(text)) => effort = Some(("reasoning", text)),
                ("enabled", Value::Bool(on)) => switch = Some(*on),
                // They say how the reasoning is shown, and do not change it.
                ("summary" | "generate_summary" | "effort" | "enabled", _) | (_, Value::Null) => {}
                _ => {
                    let message = "reasoning: effort and enabled are supported; leave others out";
                    return Err(ErrorResponse::invalid_parameter("reasoning", message));
                }
            }
        }
        if let Some(value) = &self.thinking {
            switch = thinking_switch(value)?.or(switch);
        }
        for (name, budget) in [
            ("reasoning_budget", &self.reasoning_budget),
            ("thinking_budget", &self.thinking_budget),
            ("thinking_budget_tokens", &self.thinking_budget_tokens),
        ] {
            match budget.as_ref().map(|budget| budget.as_i64()) {
                None | Some(Some(-1)) => {}
                Some(Some(0)) => switch = Some(false),
                Some(_) => return Err(no_budget(name, name)),
            }
        }
        let skips = effort.map(|(param, effort)| skips_at(param, effort)).transpose()?;
        Ok(switch.map_or(skips.unwrap_or(false), |on| !on))
    }
}

/// The switch in `thinking`: true, false, or an object whose type is enabled, disabled, adaptive or auto.
fn thinking_switch(value: &Value) -> ApiResult<Option<bool>> {
    let fields = match value {
        Value::Null => return Ok(None),
        Value::Bool(on) => return Ok(Some(*on)),
        Value::Object(fields) => fields,
        _ => return Err(wrong_type("thinking", value, "true, false, or an object with type")),
    };
    let switch = match fields.get("type").and_then(Value::as_str) {
        Some("enabled") => Some(true),
        Some("disabled") => Some(false),
        Some("adaptive" | "auto") => None,
        _ => {
            let message = "thinking.type must be enabled, disabled, adaptive or auto";
            return Err(ErrorResponse::invalid_parameter("thinking", message));
        }
    };
    for (name, value) in fields {
        match name.as_str() {
            "type" => {}
            _ if value.is_null() || switch == Some(false) => {}
            "budget_tokens" => return Err(no_budget("thinking", "thinking.budget_tokens")),
            _ => {
                let message = format!("thinking.{name} is not supported; leave it out");
                return Err(ErrorResponse::unsupported_parameter("thinking", message));
            }
        }
    }
    Ok(switch)
}

/// Reasoning has no length of its own here.
fn no_budget(param: &str, field: &str) -> ErrorResponse {
    let message = format!(
        "{field} is not supported: reasoning counts towards the length of the answer; leave it out, or turn the \
         reasoning off"
    );
    ErrorResponse::unsupported_parameter(param, message)
}

fn object<'a>(name: &'static str, value: Option<&'a Value>) -> ApiResult<Option<&'a Map<String, Value>>> {
    match value {
        None => Ok(None),
        Some(Value::Object(fields)) => Ok(Some(fields)),
        Some(value) => Err(wrong_type(name, value, "an object")),
    }
}

fn skips_at(param: &str, effort: &str) -> ApiResult<bool> {
    match effort {
        "none" | "minimal" => Ok(true),
        "low" | "medium" | "high" | "xhigh" | "max" | "auto" => Ok(false),
        _ => {
            let message =
                format!("{param}: the effort must be none, minimal, low, medium, high, xhigh, max or auto");
            Err(ErrorResponse::invalid_parameter(param, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reasoning_is_switched_by_all_of_its_names() {
        for (body, expected) in [
            (json!({}), Ok(false)),
            (json!({ "reasoning_effort": "none" }), Ok(true)),
            (json!({ "reasoning_effort": "high" }), Ok(false)),
            (json!({ "enable_thinking": false }), Ok(true)),
            (json!({ "chat_template_kwargs": { "thinking": false, "x": null } }), Ok(true)),
            (
                json!({ "chat_template_kwargs": { "enable_thinking": true }, "reasoning_effort": "none" }),
                Ok(false),
            ),
            (json!({ "chat_template_kwargs": { "reasoning_effort": "minimal" } }), Ok(true)),
            (json!({ "reasoning": { "effort": "none", "summary": "auto" } }), Ok(true)),
            (json!({ "reasoning": { "enabled": false } }), Ok(true)),
            (json!({ "thinking": { "type": "disabled" } }), Ok(true)),
            (json!({ "thinking": { "type": "disabled", "budget_tokens": 0 } }), Ok(true)),
            (json!({ "thinking": { "type": "enabled" }, "reasoning_effort": "none" }), Ok(false)),
            (json!({ "thinking": { "type": "adaptive" }, "reasoning_effort": "none" }), Ok(true)),
            (json!({ "thinking": { "type": "enabled", "budget_tokens": null } }), Ok(false)),
            (json!({ "thinking": false }), Ok(true)),
            (json!({ "thinking": null, "reasoning_budget": null, "reasoning_effort": null }), Ok(false)),
            (json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } }), Err("thinking")),
            (json!({ "thinking": { "type": "enabled", "style": "long" } }), Err("thinking")),
            (json!({ "thinking": { "type": "on" } }), Err("thinking")),
            (json!({ "thinking": {} }), Err("thinking")),
            (json!({ "thinking": "yes" }), Err("thinking")),
            (json!({ "reasoning_budget": 0 }), Ok(true)),
            (json!({ "reasoning_budget": -1 }), Ok(false)),
            (json!({ "reasoning_budget": 100 }), Err("reasoning_budget")),
            (json!({ "thinking_budget": 0 }), Ok(true)),
            (json!({ "thinking_budget": "much" }), Err("thinking_budget")),
            (json!({ "thinking_budget_tokens": 100 }), Err("thinking_budget_tokens")),
            (json!({ "reasoning_effort": 7 }), Err("reasoning_effort")),
            (json!({ "reasoning": { "max_tokens": 5 } }), Err("reasoning")),
            (json!({ "reasoning_effort": "extreme" }), Err("reasoning_effort")),
            (
                json!({ "chat_template_kwargs": { "tools_in_user_message": true } }),
                Err("chat_template_kwargs"),
            ),
            (json!({ "chat_template_kwargs": { "enable_thinking": "no" } }), Err("chat_template_kwargs")),
        ] {
            let params: ReasoningParams = serde_json::from_value(body.clone()).expect("the shape fits");
            let skips = params.skips_reasoning();
            assert_eq!(
                skips.as_ref().map_err(|e| e.param().unwrap_or_default()),
                expected.as_ref().map_err(|p| *p),
                "{body}"
            );
        }
    }
}

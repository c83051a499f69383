//! Functions of a client, their calls and their results in the messages of an OpenAI-compatible server.
//!
//! A timeline has calls as text, in the general format, whatever model wrote them. A server gets them as `tool_calls` and
//! returns them as such; here they become text and back. Ids only join a call and its result within one request, so they
//! are numbered.

use halo_core::Error;
use halo_core::answer_parser::AnswerMarkers;
use halo_core::model::PromptMessage;
use halo_core::token::Role;
use halo_core::tool_call::{CallFormat, ToolChoice, ToolOptions};
use serde_json::{Value, json};

/// The messages of a request.
pub(crate) fn native_messages(messages: &[PromptMessage]) -> Vec<Value> {
    let markers = AnswerMarkers { calls: Some(CallFormat::default()), ..AnswerMarkers::default() };
    let mut native = Vec::with_capacity(messages.len());
    // The calls of the last answer, and how many of them have a result.
    let (mut calls, mut results) = (0, 0);
    let id = |call: usize, message: usize| format!("call_{message}_{call}");
    let mut caller = 0;
    for (n, message) in messages.iter().enumerate() {
        let content = message.text.as_str();
        match message.role {
            Role::Assistant if content.contains(CallFormat::default().marker()) => {
                let answer = markers.parse(content);
                (calls, results, caller) = (answer.calls.len(), 0, n);
                let call = |(index, call): (usize, halo_core::tool_call::FunctionCall)| {
                    let function = json!({"name": call.name, "arguments": call.arguments});
                    json!({"id": id(index, n), "type": "function", "function": function})
                };
                let tool_calls: Vec<Value> = answer.calls.into_iter().enumerate().map(call).collect();
                let content = Some(answer.text).filter(|text| !text.is_empty());
                let mut message = json!({"role": "assistant", "content": content});
                if !tool_calls.is_empty() {
                    message["tool_calls"] = json!(tool_calls);
                }
                native.push(message);
            }
            Role::Tool if results < calls => {
                native.push(json!({"role": "tool", "tool_call_id": id(results, caller), "content": content}));
                results += 1;
            }
            // A server refuses a result without its call.
            Role::Tool => native.push(json!({"role": "user", "content": content})),
            role => native.push(json!({"role": role.name(), "content": content})),
        }
    }
    native
}

/// Adds the functions to a request.
pub(crate) fn add_tools(body: &mut Value, options: &ToolOptions) -> Result<(), Error> {
    let tools = options.tools.iter().map(|tool| {
        let function: Value = serde_json::from_str(&tool.function).map_err(|e| {
            let why = format!("the definition of {} is not valid JSON ({e}); correct it", tool.name);
            Error::invalid_input("writing the functions", why)
        })?;
        Ok(json!({"type": "function", "function": function}))
    });
    body["tools"] = json!(tools.collect::<Result<Vec<Value>, Error>>()?);
    body["tool_choice"] = match &options.choice {
        ToolChoice::Auto => json!("auto"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "function": {"name": name}}),
    };
    body["parallel_tool_calls"] = options.parallel.into();
    Ok(())
}

/// Writes the calls of a streamed answer as text.
#[derive(Debug, Default)]
pub(crate) struct CallText {
    /// The index of the open call.
    open: Option<u64>,
    has_arguments: bool,
}

impl CallText {
    /// The text of one delta of a call.
    pub fn push(&mut self, delta: &Value) -> String {
        let format = CallFormat::default();
        let index = delta["index"].as_u64().unwrap_or(0);
        let mut text = String::new();
        if self.open != Some(index) {
            if self.open.is_some() {
                text.push_str(self.end_object());
            }
            text.push_str(if self.open.is_some() { &format.separator } else { &format.open });
            let name = delta["function"]["name"].as_str().unwrap_or_default();
            text.push_str(&format!("{{\"name\": \"{name}\", \"{}\": ", format.arguments_key));
            (self.open, self.has_arguments) = (Some(index), false);
        }
        let arguments = delta["function"]["arguments"].as_str().unwrap_or_default();
        self.has_arguments |= !arguments.trim().is_empty();
        text.push_str(arguments);
        text
    }

    /// The text after the last delta.
    pub fn finish(&mut self) -> String {
        match self.open.take() {
            None => String::new(),
            Some(_) => format!("{}{}", self.end_object(), CallFormat::default().close),
        }
    }

    fn end_object(&self) -> &'static str {
        if self.has_arguments { "}" } else { "{}}" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: Role, text: &str) -> PromptMessage {
        PromptMessage { role, text: text.into() }
    }

    #[test]
    fn remote_messages_have_calls_and_results() {
        let call = "I look.\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": 1}}\n</tool_call>";
        let messages = [
            message(Role::User, "Hi"),
            message(Role::Assistant, call),
            message(Role::Tool, "12:00"),
            message(Role::Tool, "sunny"),
            message(Role::Tool, "too many"),
            message(Role::Assistant, "It is noon."),
        ];
        let tool_call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls = [tool_call("call_1_0", "clock", "{}"), tool_call("call_1_1", "weather", "{\"town\": 1}")];
        let expected = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1_0", "content": "12:00"},
            {"role": "tool", "tool_call_id": "call_1_1", "content": "sunny"},
            {"role": "user", "content": "too many"},
            {"role": "assistant", "content": "It is noon."},
        ]);
        assert_eq!(json!(native_messages(&messages)), expected);
    }

    #[test]
    fn remote_calls_become_text() {
        let mut text = CallText::default();
        let delta = |index: u64, name: Option<&str>, arguments: &str| json!({"index": index, "function": {"name": name, "arguments": arguments}});
        let mut written = text.push(&delta(0, Some("clock"), ""));
        written += &text.push(&delta(0, None, "{\"a\""));
        written += &text.push(&delta(0, None, ": 1}"));
        written += &text.push(&delta(1, Some("weather"), ""));
        written += &text.finish();
        let expected = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
        assert_eq!(written, expected);
        assert_eq!(text.finish(), "");
    }
}

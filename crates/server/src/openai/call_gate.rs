//! Withholds the calls of an answer until they are complete and their arguments follow the schema of their function. Where the model
//! decides itself whether it calls a function, not every format of calls can be enforced while it writes; and an answer can be cut off
//! in the middle of a call.

use crate::json_schema::follows_schema;
use halo_core::answer_parser::AnswerDelta;
use halo_core::tool_call::{CallFormat, FunctionCall, ToolChoice, ToolOptions};
use serde_json::Value;

/// Passes on what an answer adds. A call that its client could not run is passed on as text.
pub(super) struct CallGate {
    format: CallFormat,
    /// The functions, with the schemas of their arguments.
    schemas: Vec<(String, Value)>,
    /// Whether an answer may have several calls.
    parallel: bool,
    held: Option<FunctionCall>,
    /// How many calls were passed on.
    calls: usize,
}

impl CallGate {
    /// None where the calls of an answer need no check: a function that must be called is enforced from the first token.
    pub fn new(options: &ToolOptions) -> Option<Self> {
        let schema = |text: &str| serde_json::from_str(text).unwrap_or(Value::Bool(true));
        (options.choice == ToolChoice::Auto).then(|| Self {
            format: options.format.clone(),
            schemas: options.allowed().map(|tool| (tool.name.clone(), schema(&tool.parameters))).collect(),
            parallel: options.parallel,
            held: None,
            calls: 0,
        })
    }

    /// Whether the answer has the only call that it may have. Further calls are not passed on.
    pub fn is_satisfied(&self) -> bool {
        !self.parallel && self.calls > 0
    }

    /// How many calls were passed on.
    pub fn calls(&self) -> usize {
        self.calls
    }

    pub fn push(&mut self, deltas: Vec<AnswerDelta>) -> Vec<AnswerDelta> {
        let mut passed = Vec::with_capacity(deltas.len());
        for delta in deltas {
            match delta {
                AnswerDelta::CallStart { name, .. } => {
                    passed.extend(self.release());
                    if self.is_satisfied() {
                        continue;
                    }
                    self.held = Some(FunctionCall { name, arguments: String::new() });
                }
                AnswerDelta::CallArguments { text, .. } => {
                    let Some(call) = &mut self.held else { continue };
                    call.arguments.push_str(&text);
                    if is_complete(&call.arguments) {
                        passed.extend(self.release());
                    }
                }
                delta @ (AnswerDelta::Text(_) | AnswerDelta::Reasoning(_)) => {
                    passed.extend(self.release());
                    passed.push(delta);
                }
            }
        }
        passed
    }

    /// Passes on the call that is held, as a call or as text.
    pub fn release(&mut self) -> Vec<AnswerDelta> {
        let Some(call) = self.held.take() else { return Vec::new() };
        if !self.is_valid(&call) {
            return vec![AnswerDelta::Text(self.text_of(&call))];
        }
        let index = self.calls;
        self.calls += 1;
        let FunctionCall { name, arguments: text } = call;
        vec![AnswerDelta::CallStart { index, name }, AnswerDelta::CallArguments { index, text }]
    }

    fn is_valid(&self, call: &FunctionCall) -> bool {
        let Ok(arguments) = serde_json::from_str::<Value>(&call.arguments) else { return false };
        let schema = self.schemas.iter().find(|(name, _)| *name == call.name).map(|(_, schema)| schema);
        arguments.is_object() && schema.is_some_and(|schema| follows_schema(schema, &arguments))
    }

    /// The object of a call as the model wrote it; without its last brace, if it was cut off.
    fn text_of(&self, call: &FunctionCall) -> String {
        let object = self.format.object(call);
        match serde_json::from_str::<Value>(&object) {
            Ok(_) => object,
            Err(_) => object.strip_suffix('}').unwrap_or(&object).to_owned(),
        }
    }
}

/// Whether arguments are a whole object.
fn is_complete(arguments: &str) -> bool {
    arguments.ends_with('}') && serde_json::from_str::<Value>(arguments).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::answer_parser::{AnswerMarkers, AnswerParser, AnswerParts};
    use halo_core::tool_call::ToolDefinition;

    fn gate(format: &CallFormat, parallel: bool) -> CallGate {
        let parameters =
            r#"{"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}"#;
        let tool = |name: &str, parameters: &str| ToolDefinition {
            name: name.into(),
            function: String::new(),
            parameters: parameters.into(),
        };
        let options = ToolOptions {
            tools: vec![tool("weather", parameters), tool("clock", r#"{"type": "object"}"#)],
            choice: ToolChoice::Auto,
            parallel,
            format: format.clone(),
            answer_schema: None,
        };
        let forced = ToolOptions { choice: ToolChoice::Required, ..options.clone() };
        assert!(CallGate::new(&forced).is_none(), "enforced calls stream as they are written");
        CallGate::new(&options).expect("auto is checked")
    }

    /// The answer, token by token of one character.
    fn read(format: &CallFormat, text: &str) -> AnswerParts {
        read_with(format, true, text)
    }

    fn read_with(format: &CallFormat, parallel: bool, text: &str) -> AnswerParts {
        let functions = Some(vec!["weather".to_owned(), "clock".to_owned()]);
        let mut parser = AnswerParser::new(AnswerMarkers {
            calls: Some(format.clone()),
            functions,
            ..AnswerMarkers::default()
        });
        let mut gate = gate(format, parallel);
        let mut answer = AnswerParts::default();
        for c in text.chars() {
            let deltas = parser.push(&c.to_string());
            gate.push(deltas).into_iter().for_each(|delta| answer.push(delta));
        }
        gate.push(parser.finish()).into_iter().for_each(|delta| answer.push(delta));
        gate.release().into_iter().for_each(|delta| answer.push(delta));
        answer
    }

    #[test]
    fn calls_with_invalid_arguments_are_text() {
        let hermes = CallFormat::default();
        let bare = CallFormat {
            open: String::new(),
            separator: "; ".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        let good = r#"{"town": "Lindau"}"#;
        // Arguments, and whether they make a call.
        for (arguments, valid) in [
            (good, true),
            (r#"{"town": "a}b\"}", "x": [{}]}"#, true),
            (r#"{"town": 7}"#, false),
            ("{}", false),
            (r#"["Lindau"]"#, false),
            (r#""Lindau""#, false),
            (r#"{town: "Lindau"}"#, false),
        ] {
            for (format, key) in [(&hermes, "arguments"), (&bare, "parameters")] {
                let object = format!("{{\"name\": \"weather\", \"{key}\": {arguments}}}");
                let answer = read(format, &format!("{}{object}{}", format.open, format.close));
                assert_eq!(answer.calls.len(), usize::from(valid), "{object}: {answer:?}");
                if valid {
                    let call = FunctionCall { name: "weather".into(), arguments: arguments.into() };
                    assert_eq!((answer.calls, answer.text.as_str()), (vec![call], ""), "{object}");
                } else {
                    assert!(
                        answer.text.contains("weather") && answer.text.contains(arguments),
                        "{object}: {answer:?}"
                    );
                }
            }
        }
        let mixed = read(
            &hermes,
            "Well. <tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>",
        );
        assert_eq!(mixed.calls, [FunctionCall { name: "clock".into(), arguments: "{}".into() }], "{mixed:?}");
        assert_eq!(mixed.text, "Well. {\"name\": \"weather\", \"arguments\": {}}");
        let cut = read(&hermes, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Li");
        assert_eq!(
            (cut.calls.len(), cut.text.as_str()),
            (0, "{\"name\": \"weather\", \"arguments\": {\"town\": \"Li")
        );
    }
    #[test]
    fn only_one_call_is_passed_on_where_calls_are_not_parallel() {
        let bare = CallFormat {
            open: String::new(),
            separator: "; ".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        let call = |town: &str| format!(r#"{{"name": "weather", "parameters": {{"town": "{town}"}}}}"#);
        let text = format!("{}; {}", call("Lindau"), call("Bregenz"));
        let towns = |answer: AnswerParts| -> Vec<String> {
            answer.calls.into_iter().map(|call| call.arguments).collect()
        };
        assert_eq!(towns(read_with(&bare, true, &text)), [r#"{"town": "Lindau"}"#, r#"{"town": "Bregenz"}"#]);
        assert_eq!(towns(read_with(&bare, false, &text)), [r#"{"town": "Lindau"}"#]);
        // A call that its client could not run does not count.
        let text = format!(r#"{{"name": "weather", "parameters": {{}}}}; {}"#, call("Bregenz"));
        assert_eq!(towns(read_with(&bare, false, &text)), [r#"{"town": "Bregenz"}"#]);
    }
}

//! Functions that a client offers to the model, and the model's calls of them.
//!
//! A call is text of the answer, in the format of the model's chat template: a JSON object with the name and the
//! arguments, between markers. The client runs the function and sends the result; Halo never runs it. The arguments
//! stay the text that the model wrote.

use crate::message_wrap::MessageWrap;

/// A function that a client offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolDefinition {
    /// Its name.
    pub name: String,
    /// A JSON object with its name, its description and the schema of its arguments.
    pub function: String,
    /// The JSON schema of its arguments.
    pub parameters: String,
}

/// Which function the model must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// The functions of a request and how the model may call them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolOptions {
    /// The functions.
    pub tools: Vec<ToolDefinition>,
    /// Which of them the model must call.
    pub choice: ToolChoice,
    /// Whether one answer may have several calls.
    pub parallel: bool,
    /// How the model writes a call.
    pub format: CallFormat,
    /// The JSON schema of an answer without a call.
    pub answer_schema: Option<String>,
}

impl ToolOptions {
    /// The functions that the model may call.
    pub fn allowed(&self) -> impl Iterator<Item = &ToolDefinition> {
        self.tools.iter().filter(|tool| match &self.choice {
            ToolChoice::Auto | ToolChoice::Required => true,
            ToolChoice::Named(name) => tool.name == *name,
        })
    }
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionCall {
    /// The name of the function.
    pub name: String,
    /// Its arguments, a JSON object as text.
    pub arguments: String,
}

/// How a model writes calls: `open`, the objects with `separator` between them, `close`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFormat {
    /// Before the first object; empty where an answer that is an object is a call.
    pub open: String,
    /// Between two objects.
    pub separator: String,
    /// After the last object.
    pub close: String,
    /// The key of the arguments.
    pub arguments_key: String,
}

impl Default for CallFormat {
    /// The format of Hermes and Qwen, which many models are trained on.
    fn default() -> Self {
        Self {
            open: "<tool_call>\n".into(),
            separator: "\n</tool_call>\n<tool_call>\n".into(),
            close: "\n</tool_call>".into(),
            arguments_key: "arguments".into(),
        }
    }
}

/// A part of a rendered message: text of the template, which may name special tokens, or content, which may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    /// Text of the template.
    Frame(String),
    /// Text of a client.
    Content(String),
}

impl CallFormat {
    /// The text with which calls begin, without white space: `<tool_call>`, `[TOOL_CALLS]`.
    #[must_use]
    pub fn marker(&self) -> &str {
        self.open.trim_end_matches(|c: char| c.is_whitespace() || c == '[' || c == '{').trim_start()
    }

    /// The object of one call.
    #[must_use]
    pub fn object(&self, call: &FunctionCall) -> String {
        let FunctionCall { name, arguments } = call;
        format!("{{\"name\": \"{name}\", \"{}\": {arguments}}}", self.arguments_key)
    }

    /// An answer with calls as the model would have written it.
    #[must_use]
    pub fn render(&self, content: &str, calls: &[FunctionCall]) -> Vec<MessagePart> {
        let mut parts = Vec::new();
        if !content.is_empty() {
            parts.push(MessagePart::Content(content.to_owned()));
        }
        for (n, call) in calls.iter().enumerate() {
            let before = match n {
                0 if content.is_empty() || self.open.is_empty() => self.open.clone(),
                0 => format!("\n{}", self.open),
                _ => self.separator.clone(),
            };
            parts.push(MessagePart::Frame(before));
            parts.push(MessagePart::Content(self.object(call)));
        }
        if !calls.is_empty() {
            parts.push(MessagePart::Frame(self.close.clone()));
        }
        parts
    }
}

/// How functions and their results are written for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolFormat {
    /// The system prompt with functions; none where the template has none: then [`ToolSection::generic`] is used.
    pub section: Option<ToolSection>,
    /// How the model writes calls.
    pub call: CallFormat,
    /// Around the result of a call.
    pub result: MessageWrap,
    /// Between two results that follow each other, in the place of the suffix of the one and the prefix of the
    /// other.
    pub result_separator: Option<String>,
}

/// The system prompt with functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolSection {
    /// Whether the functions come before the text of the system prompt.
    pub tools_first: bool,
    /// Before the first of the two.
    pub head: String,
    /// Between the text and the functions.
    pub gap: String,
    /// Between two functions.
    pub separator: String,
    /// After the last of the two.
    pub tail: String,
    /// Whether a function is written without its type, `{"type": "function", "function": …}`.
    pub bare_function: bool,
    /// By how many spaces its JSON is indented; none for one line.
    pub indent: Option<usize>,
}

impl ToolSection {
    /// Instructions in the format of Hermes, behind the system prompt whose prefix is given.
    #[must_use]
    pub fn generic(system_prefix: &str) -> Self {
        Self {
            tools_first: false,
            head: system_prefix.to_owned(),
            gap:
                "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are \
                  provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
                    .into(),
            separator: "\n".into(),
            tail:
                "\n</tools>\n\nFor each function call, return a json object with function name and arguments \
                   within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \
                   \"arguments\": <args-json-object>}\n</tool_call>"
                    .into(),
            bare_function: false,
            indent: None,
        }
    }

    /// The JSON of one function.
    #[must_use]
    pub fn definition(&self, tool: &ToolDefinition) -> String {
        let json = match self.bare_function {
            true => tool.function.clone(),
            false => format!("{{\"type\": \"function\", \"function\": {}}}", tool.function),
        };
        self.indent.map_or_else(|| space_json(&json), |indent| indent_json(&json, indent))
    }
}

/// The reasoning of a model before its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// Begins it: `<think>`.
    pub open: String,
    /// Ends it: `</think>`.
    pub close: String,
    /// What the chat template writes before the reasoning, and so the model does not: `<think>\n`. Empty where the
    /// model writes it.
    pub prompt: String,
    /// What the chat template writes before an answer without reasoning; none where it has no such answers.
    pub skip: Option<String>,
}

/// The end of the JSON value at the beginning of a text; none where it is incomplete. The value is not checked
/// beyond its brackets and strings.
#[must_use]
pub fn json_value_end(text: &str) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for (at, c) in text.char_indices() {
        if in_string {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            if !in_string && depth == 0 {
                return Some(at + 1);
            }
            continue;
        }
        match c {
            '"' => in_string = true,
            '{' | '[' => depth += 1,
            '}' | ']' if depth == 0 => return Some(at),
            '}' | ']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            ',' | ' ' | '\n' | '\r' | '\t' if depth == 0 && !text[..at].trim().is_empty() => return Some(at),
            _ => {}
        }
    }
    None
}

/// The members of the JSON object at the beginning of a text, as far as they are complete: key, value, and whether
/// the value is complete. The offset behind the object, if it is complete.
#[must_use]
pub fn json_members(text: &str) -> (Vec<JsonMember<'_>>, Option<usize>) {
    let mut members = Vec::new();
    let Some(mut rest) = text.strip_prefix('{') else { return (members, None) };
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        if let Some(after) = rest.strip_prefix('}') {
            return (members, Some(text.len() - after.len()));
        }
        let Some(key_end) = json_value_end(rest).filter(|_| rest.starts_with('"')) else {
            return (members, None);
        };
        let (key, after) = (rest[..key_end].trim_matches('"'), rest[key_end..].trim_start());
        let Some(value) = after.strip_prefix(':').map(str::trim_start) else { return (members, None) };
        if value.is_empty() {
            return (members, None);
        }
        match json_value_end(value) {
            Some(end) => {
                members.push(JsonMember { key, value: &value[..end], is_complete: true });
                rest = &value[end..];
            }
            None => {
                members.push(JsonMember { key, value, is_complete: false });
                return (members, None);
            }
        }
    }
}

/// A member of a JSON object, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonMember<'a> {
    /// The key, without its quotes.
    pub key: &'a str,
    /// The value.
    pub value: &'a str,
    /// Whether the value is complete.
    pub is_complete: bool,
}

/// JSON without white space between its tokens, for comparisons.
#[must_use]
pub fn compact_json(json: &str) -> String {
    reformat_json(json, |_, _| String::new(), "")
}

/// JSON in one line, with a space behind each comma and colon, as Python writes it.
#[must_use]
pub fn space_json(json: &str) -> String {
    reformat_json(json, |c, _| if c == ',' { " ".to_owned() } else { String::new() }, " ")
}

/// JSON with a line for each member, as Python writes it with `indent`.
#[must_use]
pub fn indent_json(json: &str, indent: usize) -> String {
    reformat_json(json, |_, depth| format!("\n{}", " ".repeat(indent * depth)), " ")
}

/// JSON with new white space: `line_break` gives that behind an opening bracket or a comma and before a closing
/// bracket, `colon` is that behind a colon. Empty objects and lists stay in one line.
fn reformat_json(json: &str, line_break: impl Fn(char, usize) -> String, colon: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    let mut opened = false;
    for c in json.chars() {
        if in_string {
            out.push(c);
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            continue;
        }
        if c.is_whitespace() {
            continue;
        }
        if matches!(c, '}' | ']') {
            depth = depth.saturating_sub(1);
            if !opened {
                out.push_str(&line_break(c, depth));
            }
        } else if opened {
            out.push_str(&line_break('{', depth));
        }
        opened = matches!(c, '{' | '[');
        out.push(c);
        match c {
            '"' => in_string = true,
            '{' | '[' => depth += 1,
            ',' => out.push_str(&line_break(c, depth)),
            ':' => out.push_str(colon),
            _ => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_members_of_partial_objects() {
        type Members = &'static [(&'static str, &'static str, bool)];
        let cases: [(&str, Members, Option<usize>); 7] = [
            ("{", &[], None),
            (r#"{"name": "f"#, &[("name", "\"f", false)], None),
            (
                r#"{"name": "f", "arguments": {"a"#,
                &[("name", "\"f\"", true), ("arguments", "{\"a", false)],
                None,
            ),
            (
                r#"{"name":"f","arguments":{"a":"}"}} x"#,
                &[("name", "\"f\"", true), ("arguments", r#"{"a":"}"}"#, true)],
                Some(34),
            ),
            (r#"{"a": 12, "b": null}"#, &[("a", "12", true), ("b", "null", true)], Some(20)),
            (r#"{"a": "\"{"}"#, &[("a", r#""\"{""#, true)], Some(12)),
            ("no object", &[], None),
        ];
        for (text, expected, end) in cases {
            let (members, found_end) = json_members(text);
            let members: Vec<_> = members.iter().map(|m| (m.key, m.value, m.is_complete)).collect();
            assert_eq!((members.as_slice(), found_end), (expected, end), "{text}");
        }
    }

    #[test]
    fn json_white_space_is_that_of_python() {
        let json = r#"{"a":[1,2],"b":{},"c":"x, {y}: \"z\"","d":{"e":true}}"#;
        assert_eq!(space_json(json), r#"{"a": [1, 2], "b": {}, "c": "x, {y}: \"z\"", "d": {"e": true}}"#);
        assert_eq!(compact_json(&space_json(json)), json);
        let indented = "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {},\n  \"c\": \"x, {y}: \\\"z\\\"\",\n  \"d\": {\n    \"e\": true\n  }\n}";
        assert_eq!(indent_json(json, 2), indented);
        assert_eq!(compact_json(indented), json);
    }

    #[test]
    fn call_format_renders_calls_between_markers() {
        let call = |name: &str| FunctionCall { name: name.into(), arguments: "{\"a\": 1}".into() };
        let text = |parts: Vec<MessagePart>| -> String {
            let text = |part: MessagePart| match part {
                MessagePart::Frame(text) | MessagePart::Content(text) => text,
            };
            parts.into_iter().map(text).collect()
        };
        let hermes = CallFormat::default();
        assert_eq!(
            text(hermes.render("I look.", &[call("f"), call("g")])),
            "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {\"a\": 1}}\n</tool_call>"
        );
        assert_eq!(hermes.marker(), "<tool_call>");
        let bare = CallFormat {
            open: String::new(),
            separator: "; ".into(),
            close: String::new(),
            arguments_key: "parameters".into(),
        };
        assert_eq!(text(bare.render("", &[call("f")])), "{\"name\": \"f\", \"parameters\": {\"a\": 1}}");
        assert_eq!(text(hermes.render("Only text.", &[])), "Only text.");
    }
}

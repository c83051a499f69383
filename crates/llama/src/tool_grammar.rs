//! Writes the calls of a client's functions as a Lark grammar, so that the arguments of every call follow their schema.

use halo_core::tool_call::{CallFormat, ToolChoice, ToolOptions};
use serde_json::{Value, json};
use std::fmt::Write;

/// The grammar of an answer with functions; none where the model decides itself whether it calls one, a call has no marker of
/// text, and an answer without a call is any text: then the calls are read from the answer afterwards. `control_token` gives the number of a control
/// token by its name.
pub(crate) fn tool_grammar(
    options: &ToolOptions,
    control_token: &dyn Fn(&str) -> Option<i32>,
) -> Result<Option<String>, String> {
    let CallFormat { open, separator, close, arguments_key } = &options.format;
    let marker = options.format.marker();
    let control = Some(marker).filter(|marker| !marker.is_empty()).and_then(control_token);
    let is_auto = options.choice == ToolChoice::Auto;
    let is_lazy = is_auto && !marker.is_empty() && control.is_none();
    if is_auto && !is_lazy && options.answer_schema.is_none() {
        return Ok(None);
    }
    // Where nothing but its JSON tells a call from another answer, both are JSON to the grammar: a literal that begins like the
    // answer would be read in its place, because the lexer does not go back.
    let is_json_or_schema = is_auto && !is_lazy && control.is_none() && open.is_empty();
    let mut rules = String::new();
    let mut names = Vec::new();
    for (n, tool) in options.allowed().enumerate() {
        let mut schema: Value = serde_json::from_str(&tool.parameters)
            .map_err(|e| format!("the schema of {} is not JSON: {e}", tool.name))?;
        if is_json_or_schema {
            schema = call_schema(&tool.name, arguments_key, schema);
            compact_whitespace(&mut schema);
            let _ = writeln!(rules, "call_{n}: %json {schema}");
            names.push(format!("call_{n}"));
            continue;
        }
        compact_whitespace(&mut schema);
        let head = format!("{{\"name\": {}, {}: ", quoted(&tool.name), quoted(arguments_key));
        let _ = writeln!(rules, "call_{n}: {} args_{n} \"}}\"", quoted(&head));
        let _ = writeln!(rules, "args_{n}: %json {schema}");
        names.push(format!("call_{n}"));
    }
    if names.is_empty() {
        return Err("there is no function that may be called".into());
    }
    let _ = writeln!(rules, "call: {}", names.join(" | "));
    let more = if options.parallel { format!("({} call)*", literal(separator)) } else { String::new() };
    let calls = format!("call {more} {}", literal(close));
    let rest = open.trim_start().strip_prefix(marker).unwrap_or_default();
    let forced = match control {
        Some(token) => format!("<[{token}]> {} {calls}", literal(rest)),
        None => format!("{} {calls}", literal(open)),
    };
    let start = match is_auto {
        true => {
            let text = match &options.answer_schema {
                None => "TEXT".to_owned(),
                Some(schema) => {
                    let mut schema: Value =
                        serde_json::from_str(schema).map_err(|e| format!("the schema is not JSON: {e}"))?;
                    compact_whitespace(&mut schema);
                    format!("%json {schema}")
                }
            };
            let _ = writeln!(rules, "text: {text}");
            match is_lazy {
                // Text may come before a call.
                true => {
                    let _ = writeln!(rules, "head[lazy]: TEXT {}\nTEXT: /(\\n|.)*/", quoted(marker));
                    format!("head {} {calls} | text", literal(rest))
                }
                false => format!("{forced} | text"),
            }
        }
        false => forced,
    };
    Ok(Some(format!("start: {start}\n{rules}")))
}

/// The schema of a whole call.
fn call_schema(name: &str, arguments_key: &str, mut arguments: Value) -> Value {
    let definitions: Vec<(&str, Option<Value>)> = ["$defs", "definitions"]
        .map(|key| (key, arguments.as_object_mut().and_then(|schema| schema.remove(key))))
        .into();
    let mut schema = json!({
        "type": "object",
        "properties": {"name": {"const": name}, arguments_key: arguments},
        "required": ["name", arguments_key],
        "additionalProperties": false,
    });
    // References name them from the root.
    for (key, definitions) in definitions {
        if let Some(definitions) = definitions {
            schema[key] = definitions;
        }
    }
    schema
}

/// A text as a literal of the grammar; an empty one is left out.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { quoted(text) }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Small models can generate whitespace without end: allow at most one space after a comma or colon.
pub(crate) fn compact_whitespace(schema: &mut Value) {
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("x-guidance").or_insert_with(
            || json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"}),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::tool_call::ToolDefinition;
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::ApproximateTokEnv;
    use llguidance::{Matcher, ParserFactory};

    fn options(choice: ToolChoice, parallel: bool) -> ToolOptions {
        let tool = |name: &str, parameters: &str| ToolDefinition {
            name: name.into(),
            function: format!("{{\"name\":\"{name}\",\"parameters\":{parameters}}}"),
            parameters: parameters.into(),
        };
        let town = r#"{"type":"object","properties":{"town":{"type":"string"}},"required":["town"],"additionalProperties":false}"#;
        ToolOptions {
            tools: vec![
                tool("weather", town),
                tool("clock", r#"{"type":"object","properties":{},"additionalProperties":false}"#),
            ],
            choice,
            parallel,
            format: CallFormat::default(),
            answer_schema: None,
        }
    }

    /// Whether the grammar allows a text as a whole answer, byte by byte.
    fn allows(options: &ToolOptions, text: &str) -> bool {
        let grammar = tool_grammar(options, &|_| None).expect("valid").expect("a grammar");
        let environment = ApproximateTokEnv::single_byte_env();
        let factory = ParserFactory::new_simple(&environment).expect("a factory");
        let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(grammar.clone())));
        assert!(matcher.get_error().is_none(), "{grammar}: {:?}", matcher.get_error());
        let fits = text.bytes().all(|byte| {
            // A matcher without a mask has stopped: the answer is complete.
            let mask = matcher.compute_mask();
            mask.is_ok_and(|mask| mask.is_allowed(u32::from(byte)))
                && matcher.consume_token(u32::from(byte)).is_ok()
        });
        fits && matcher.is_accepting().expect("a state")
    }

    #[test]
    fn tool_grammar_follows_the_choice_and_the_schemas() {
        let lindau =
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>";
        let clock = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
        let both = format!("{lindau}\n{clock}");
        let wrong = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"country\": 1}}\n</tool_call>";
        let text = "It is sunny.";
        let after_text = format!("I look. {lindau}");
        let named = ToolChoice::Named("clock".into());
        let cases: [(ToolChoice, bool, &str, bool); 13] = [
            (ToolChoice::Required, true, lindau, true),
            (ToolChoice::Required, true, &both, true),
            (ToolChoice::Required, false, &both, false),
            (ToolChoice::Required, true, text, false),
            (ToolChoice::Required, true, wrong, false),
            (named.clone(), true, clock, true),
            (named, true, lindau, false),
            (ToolChoice::Auto, true, text, true),
            (ToolChoice::Auto, true, lindau, true),
            (ToolChoice::Auto, true, &after_text, true),
            (ToolChoice::Auto, true, wrong, false),
            (ToolChoice::Auto, true, "a <tool of mine", true),
            (ToolChoice::Auto, false, &both, false),
        ];
        for (choice, parallel, answer, expected) in cases {
            assert_eq!(
                allows(&options(choice.clone(), parallel), answer),
                expected,
                "{choice:?} {parallel} {answer}"
            );
        }
    }

    #[test]
    fn tool_grammar_only_where_a_marker_of_text_begins_a_call() {
        let bare = CallFormat { open: String::new(), close: String::new(), ..CallFormat::default() };
        let auto = ToolOptions { format: bare, ..options(ToolChoice::Auto, true) };
        assert_eq!(tool_grammar(&auto, &|_| None), Ok(None));
        // An answer without a call that must follow a schema is enforced with each kind of marker.
        let answer_schema =
            Some(r#"{"type":"object","properties":{"sky":{"enum":["blue"]}},"required":["sky"]}"#.to_owned());
        let schema = ToolOptions { answer_schema: answer_schema.clone(), ..auto.clone() };
        for (answer, expected) in [
            (r#"{"sky": "blue"}"#, true),
            (r#"{"name": "clock", "arguments": {}}"#, true),
            (r#"{"name": "weather", "arguments": {"town": 7}}"#, false),
            (r#"{"sky": "red"}"#, false),
            ("The sky is blue.", false),
        ] {
            assert_eq!(allows(&schema, answer), expected, "{answer}");
        }
        let marked = ToolOptions { answer_schema, ..options(ToolChoice::Auto, true) };
        let control = tool_grammar(&marked, &|_| Some(7)).expect("valid").expect("a grammar");
        assert!(control.starts_with("start: <[7]> \"\\n\" call"), "{control}");
        assert!(control.contains("| text\n") && control.contains("text: %json"), "{control}");
        let required = ToolOptions { choice: ToolChoice::Required, ..auto };
        assert!(allows(&required, r#"{"name": "clock", "arguments": {}}"#));
        assert_eq!(tool_grammar(&options(ToolChoice::Auto, true), &|_| Some(7)), Ok(None));
        let control = tool_grammar(&options(ToolChoice::Required, true), &|_| Some(7)).expect("valid");
        assert!(control.expect("a grammar").starts_with("start: <[7]> \"\\n\" call"));
    }

    #[test]
    fn tool_grammar_refuses_bad_schemas() {
        let mut bad = options(ToolChoice::Required, true);
        bad.tools[0].parameters = "no JSON".into();
        assert!(tool_grammar(&bad, &|_| None).is_err());
        assert!(tool_grammar(&options(ToolChoice::Named("rm".into()), true), &|_| None).is_err());
    }
}

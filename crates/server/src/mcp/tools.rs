//! The tools: their descriptions, their arguments and the format of their results.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) struct McpToolSpec {
    pub kind: McpTool,
    description: &'static str,
    effect: ToolEffect,
    pub arguments: &'static [McpArgument],
    results: &'static [ResultField],
}

/// A property of a result.
struct ResultField {
    name: &'static str,
    kind: ResultKind,
    description: &'static str,
}

enum ResultKind {
    Text,
    /// A text, or null.
    OptionalText,
    Integer,
    Number,
    Flag,
    Texts,
    Objects(&'static [ResultField]),
}

const fn result(name: &'static str, kind: ResultKind, description: &'static str) -> ResultField {
    ResultField { name, kind, description }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum McpTool {
    Recall,
    RecallEverywhere,
    ListConversations,
    ReadChunk,
    Remember,
    Pin,
    Resurrect,
    Notes,
}

impl McpTool {
    pub fn name(self) -> &'static str {
        match self {
            Self::Recall => "recall",
            Self::RecallEverywhere => "recall_everywhere",
            Self::ListConversations => "list_conversations",
            Self::ReadChunk => "read_chunk",
            Self::Remember => "remember",
            Self::Pin => "pin",
            Self::Resurrect => "resurrect",
            Self::Notes => "notes",
        }
    }
}

/// What a tool does to what is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ToolEffect {
    Reads,
    Adds,
    /// It changes flags of text; a second call changes nothing.
    Marks,
    /// What was there before is lost.
    Replaces,
}

pub(super) struct McpArgument {
    pub name: &'static str,
    pub kind: ArgumentKind,
    pub required: bool,
    description: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArgumentKind {
    Text,
    /// A whole number from one to the other.
    Integer(u64, u64),
}

const fn argument(name: &'static str, kind: ArgumentKind, description: &'static str) -> McpArgument {
    McpArgument { name, kind, required: false, description }
}

const fn required(name: &'static str, description: &'static str) -> McpArgument {
    McpArgument { name, kind: ArgumentKind::Text, required: true, description }
}

const CONVERSATION: McpArgument =
    argument("conversation", ArgumentKind::Text, "Name of the conversation; default 'main'");
const CHUNK: McpArgument = required("chunk", "Id of the paragraph, such as u4.0, as recall returns it");
const QUERY: McpArgument = required("query", "What to search for");
const MOST: McpArgument =
    argument("most", ArgumentKind::Integer(1, 50), "Maximum number of paragraphs; default 5");

const HITS: ResultField = result("hits", ResultKind::Objects(&HIT), "Paragraphs, the best first");
const HIT: [ResultField; 9] = [
    CONVERSATION_RESULT,
    result("chunk", ResultKind::Text, "Id of the paragraph"),
    result("said_by", ResultKind::Text, "user, assistant, system or tool"),
    result("when", ResultKind::OptionalText, "When it was said (RFC 3339); null if it is unknown"),
    result("in_window", ResultKind::Flag, "Whether the model sees it now"),
    result("score", ResultKind::Number, "What the hits are ranked by; it compares hits of one query only"),
    result(
        "relevance",
        ResultKind::Number,
        "The probability that it answers the query, from 0 to 1; it compares hits of different queries too",
    ),
    result(
        "reason",
        ResultKind::Text,
        "Why it was found: the largest parts of the score, and the words that matched",
    ),
    result("text", ResultKind::Text, "The text"),
];
const CONVERSATION_LIST: [ResultField; 6] = [
    result("name", ResultKind::Text, "Its name"),
    result("turns", ResultKind::Integer, "How many messages it has"),
    result("tokens", ResultKind::Integer, "How many tokens they have"),
    result("in_window", ResultKind::Integer, "How many of them the model sees"),
    result("created", ResultKind::Text, "When it was created (RFC 3339)"),
    result("updated", ResultKind::Text, "When it was changed last (RFC 3339)"),
];
const CHUNKS: ResultField = result("chunks", ResultKind::Texts, "Ids of the paragraphs that changed");
const CONVERSATION_RESULT: ResultField = result("conversation", ResultKind::Text, "Name of the conversation");

pub(super) const TOOLS: [McpToolSpec; 8] = [
    McpToolSpec {
        kind: McpTool::Recall,
        description: "Searches a conversation by meaning and by words, in and out of the context window. Says why and when each \
                      paragraph was said.",
        effect: ToolEffect::Reads,
        arguments: &[QUERY, CONVERSATION, MOST],
        results: &[HITS],
    },
    McpToolSpec {
        kind: McpTool::RecallEverywhere,
        description: "Searches all conversations by meaning and by words, like recall, the latest first.",
        effect: ToolEffect::Reads,
        arguments: &[
            QUERY,
            MOST,
            argument(
                "offset",
                ArgumentKind::Integer(0, u32::MAX as u64),
                "How many conversations to skip: offset and searched of the result before, together",
            ),
        ],
        results: &[
            HITS,
            result("offset", ResultKind::Integer, "How many conversations were skipped"),
            result(
                "searched",
                ResultKind::Integer,
                "How many conversations were searched; a search ends after ten seconds, and offset continues it",
            ),
            result("of", ResultKind::Integer, "How many conversations there are"),
        ],
    },
    McpToolSpec {
        kind: McpTool::ListConversations,
        description: "Lists the conversations, the latest first.",
        effect: ToolEffect::Reads,
        arguments: &[argument(
            "most",
            ArgumentKind::Integer(1, 1000),
            "Maximum number of conversations; default 50",
        )],
        results: &[
            result(
                "conversations",
                ResultKind::Objects(&CONVERSATION_LIST),
                "Conversations, the latest first",
            ),
            result("of", ResultKind::Integer, "How many conversations there are"),
        ],
    },
    McpToolSpec {
        kind: McpTool::ReadChunk,
        description: "Reads one paragraph, with the paragraphs of the same message before and after it.",
        effect: ToolEffect::Reads,
        arguments: &[CHUNK, CONVERSATION],
        results: &[
            CONVERSATION_RESULT,
            result("chunk", ResultKind::Text, "Id of the paragraph"),
            result("said_by", ResultKind::Text, "user, assistant, system or tool"),
            result("when", ResultKind::Text, "When it was said (RFC 3339); empty if it is unknown"),
            result("in_window", ResultKind::Flag, "Whether the model sees it now"),
            result("pinned", ResultKind::Flag, "Whether it is never pruned"),
            result("text", ResultKind::Text, "The text"),
            result("message", ResultKind::Texts, "Ids of all paragraphs of its message, in order"),
        ],
    },
    McpToolSpec {
        kind: McpTool::Remember,
        description: "Stores a text in a conversation, word for word, so that it can be recalled later. A long text is cut into \
                      paragraphs.",
        effect: ToolEffect::Adds,
        arguments: &[required("text", "The text to store"), CONVERSATION],
        results: &[
            CONVERSATION_RESULT,
            result("turn", ResultKind::Integer, "Number of the message that was stored"),
            result("chunks", ResultKind::Texts, "Ids of its paragraphs"),
        ],
    },
    McpToolSpec {
        kind: McpTool::Pin,
        description: "Pins a paragraph, so that it is never pruned from the context window of the conversation.",
        effect: ToolEffect::Marks,
        arguments: &[CHUNK, CONVERSATION],
        results: &[CONVERSATION_RESULT, CHUNKS],
    },
    McpToolSpec {
        kind: McpTool::Resurrect,
        description: "Puts a pruned paragraph back at its own position in the context window, pinned, with the paragraphs that it \
                      depends on.",
        effect: ToolEffect::Marks,
        arguments: &[CHUNK, CONVERSATION],
        results: &[CONVERSATION_RESULT, CHUNKS],
    },
    McpToolSpec {
        kind: McpTool::Notes,
        description: "Reads the notes of a conversation, a JSON document; with 'text', replaces them.",
        effect: ToolEffect::Replaces,
        arguments: &[argument("text", ArgumentKind::Text, "The new notes, as JSON"), CONVERSATION],
        results: &[CONVERSATION_RESULT, result("notes", ResultKind::Text, "The notes, as JSON")],
    },
];

impl McpToolSpec {
    pub fn tool(&self) -> Tool {
        let properties: JsonObject =
            self.arguments.iter().map(|argument| (argument.name.to_owned(), argument.schema())).collect();
        let required: Vec<&str> = self
            .arguments
            .iter()
            .filter(|argument| argument.required)
            .map(|argument| argument.name)
            .collect();
        let input = json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        });
        let output = object_schema(self.results);
        let mut tool = Tool::new(self.kind.name(), self.description, object(&input));
        tool.output_schema = Some(object(&output));
        let mut hints = ToolAnnotations::new();
        hints.read_only_hint = Some(self.effect == ToolEffect::Reads);
        hints.destructive_hint = Some(self.effect == ToolEffect::Replaces);
        hints.idempotent_hint = Some(self.effect != ToolEffect::Adds);
        hints.open_world_hint = Some(false);
        tool.annotations = Some(hints);
        tool
    }
}

/// The schema of an object with these properties, all of which it has.
fn object_schema(fields: &[ResultField]) -> Value {
    let properties: JsonObject = fields.iter().map(|field| (field.name.to_owned(), field.schema())).collect();
    let names: Vec<&str> = fields.iter().map(|field| field.name).collect();
    json!({ "type": "object", "properties": properties, "required": names })
}

impl ResultField {
    fn schema(&self) -> Value {
        let mut schema = match self.kind {
            ResultKind::Text => json!({ "type": "string" }),
            ResultKind::OptionalText => json!({ "type": ["string", "null"] }),
            ResultKind::Integer => json!({ "type": "integer" }),
            ResultKind::Number => json!({ "type": "number" }),
            ResultKind::Flag => json!({ "type": "boolean" }),
            ResultKind::Texts => json!({ "type": "array", "items": { "type": "string" } }),
            ResultKind::Objects(fields) => json!({ "type": "array", "items": object_schema(fields) }),
        };
        schema["description"] = self.description.into();
        schema
    }
}

fn object(value: &Value) -> Arc<JsonObject> {
    Arc::new(value.as_object().cloned().unwrap_or_default())
}

impl McpArgument {
    fn schema(&self) -> Value {
        match self.kind {
            ArgumentKind::Text => json!({ "type": "string", "description": self.description }),
            ArgumentKind::Integer(min, max) => {
                json!({ "type": "integer", "minimum": min, "maximum": max, "description": self.description })
            }
        }
    }
}

/// The arguments of a call, checked against those of its tool.
pub(super) struct ToolArguments<'a>(&'a JsonObject);

impl<'a> ToolArguments<'a> {
    /// Refuses unknown arguments, wrong types, numbers out of range and missing arguments. The error says which.
    pub fn check(tool: &McpToolSpec, values: &'a JsonObject) -> Result<Self, String> {
        let name = tool.kind.name();
        let known = |key: &str| tool.arguments.iter().find(|argument| argument.name == key);
        for (key, value) in values {
            let Some(argument) = known(key) else {
                let names: Vec<&str> = tool.arguments.iter().map(|argument| argument.name).collect();
                return Err(format!("{name} has no argument '{key}'; it has {}", names.join(", ")));
            };
            match argument.kind {
                _ if value.is_null() && !argument.required => {}
                ArgumentKind::Text if value.is_string() => {}
                ArgumentKind::Text => return Err(format!("{name}: '{key}' must be a string")),
                ArgumentKind::Integer(min, max) => {
                    if !value.as_u64().is_some_and(|n| (min..=max).contains(&n)) {
                        return Err(format!("{name}: '{key}' must be a whole number from {min} to {max}"));
                    }
                }
            }
        }
        match tool.arguments.iter().find(|argument| argument.required && !values.contains_key(argument.name))
        {
            Some(missing) => Err(format!("{name} needs the argument '{}', a string", missing.name)),
            None => Ok(Self(values)),
        }
    }

    /// A text; empty if it was left out.
    pub fn text(&self, name: &str) -> String {
        self.optional_text(name).unwrap_or_default()
    }

    pub fn optional_text(&self, name: &str) -> Option<String> {
        self.0.get(name).and_then(Value::as_str).map(str::to_owned)
    }

    pub fn number(&self, name: &str, default: usize) -> usize {
        self.0.get(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()).unwrap_or(default)
    }

    /// The name of the conversation.
    pub fn conversation(&self) -> String {
        Some(self.text("conversation")).filter(|name| !name.is_empty()).unwrap_or_else(|| "main".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mcp_arguments_are_checked() {
        let check = |tool: &str, values: Value| {
            let spec = TOOLS.iter().find(|spec| spec.kind.name() == tool).expect("a tool");
            ToolArguments::check(spec, values.as_object().expect("an object")).map(drop)
        };
        for (tool, values) in [
            ("recall", json!({ "query": "a" })),
            ("recall", json!({ "query": "a", "most": 50, "conversation": null })),
            ("list_conversations", json!({})),
            ("notes", json!({ "text": "{}" })),
        ] {
            assert_eq!(check(tool, values.clone()), Ok(()), "{tool} {values}");
        }
        for (tool, values, names) in [
            ("recall", json!({}), "'query'"),
            ("recall", json!({ "query": null }), "'query' must be a string"),
            ("recall", json!({ "query": "a", "most": 0 }), "'most' must be a whole number from 1 to 50"),
            ("recall", json!({ "query": "a", "most": 1000 }), "'most'"),
            ("recall", json!({ "query": "a", "most": "x" }), "'most'"),
            ("recall", json!({ "query": "a", "most": 1.5 }), "'most'"),
            ("recall", json!({ "query": "a", "conversation": 7 }), "'conversation' must be a string"),
            (
                "recall",
                json!({ "query": "a", "limit": 7 }),
                "no argument 'limit'; it has query, conversation, most",
            ),
            ("notes", json!({ "text": { "a": 2 } }), "'text' must be a string"),
        ] {
            let error = check(tool, values.clone()).expect_err("refused");
            assert!(error.contains(names), "{tool} {values}: {error}");
        }
    }
}

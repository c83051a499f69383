//! Messages as the OpenAI interface takes them: a bare array, a request with `messages`, or a file with one
//! of either a line, as for fine-tuning. Each `messages` is a conversation; messages that stand alone are
//! one.

use super::date::date;
use super::input::{RECORD_LIMIT, records};
use super::{Each, Foreign, Format, Losses, ReadError, Role, append, filled, kind, list, text};
use serde_json::Value;
use std::io::BufRead;

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    let mut alone: Option<Foreign> = None;
    records(input, RECORD_LIMIT, &mut |record, value| {
        if let Some(messages) = value.get("messages").and_then(Value::as_array) {
            alone.take().map_or(Ok(()), &mut *each)?;
            return each(conversation(&value, messages));
        }
        if value.get("role").is_none() && value.get("type").is_none() {
            let why = "it has neither 'messages' nor a 'role'";
            return Err(ReadError::Shape { format: Format::OpenAi, record, why });
        }
        message(&value, alone.get_or_insert_default());
        Ok(())
    })?;
    alone.map_or(Ok(()), each)
}

fn conversation(value: &Value, messages: &[Value]) -> Foreign {
    let name = filled(text(value, "title")).or_else(|| filled(text(value, "name")));
    let mut foreign = Foreign { name, model: filled(text(value, "model")), ..Foreign::default() };
    foreign.created = date(value.get("created_at").or(value.get("created")), &mut foreign.lost);
    let tools = list(value, "tools").len() + list(value, "functions").len();
    foreign.lost.add("tool definitions", tools);
    for said in messages {
        message(said, &mut foreign);
    }
    foreign
}

fn message(message: &Value, foreign: &mut Foreign) {
    let lost = &mut foreign.lost;
    let calls = list(message, "tool_calls").len();
    lost.add(
        kind::TOOL_CALLS,
        calls + usize::from(message.get("function_call").is_some_and(Value::is_object)),
    );
    let thought = ["reasoning_content", "reasoning"].iter().any(|key| !text(message, key).is_empty());
    lost.add(kind::THOUGHTS, usize::from(thought));
    lost.add(kind::AUDIO, usize::from(message.get("audio").is_some_and(Value::is_object)));

    let role = match (text(message, "role"), text(message, "type")) {
        ("system" | "developer", _) => Role::System,
        ("user", _) => Role::User,
        ("assistant", _) => Role::Assistant,
        ("tool" | "function", _) | ("", "function_call_output") => return lost.add(kind::TOOL_RESULTS, 1),
        ("", "function_call") => return lost.add(kind::TOOL_CALLS, 1),
        ("", "reasoning") => return lost.add(kind::THOUGHTS, 1),
        _ => return lost.add(kind::ROLES, 1),
    };
    let mut said = match message.get("content") {
        Some(Value::String(content)) => content.clone(),
        Some(Value::Array(parts)) => joined(parts, lost),
        _ => String::new(),
    };
    append(&mut said, "\n\n", text(message, "refusal"));
    let at = date(message.get("created_at").or(message.get("timestamp")), lost);
    foreign.say(role, text(message, "name"), at, said);
}

/// The words of a content that comes in parts, each on lines of its own.
fn joined(parts: &[Value], lost: &mut Losses) -> String {
    let mut words = String::new();
    for part in parts {
        let kind = match text(part, "type") {
            "text" | "input_text" | "output_text" => {
                append(&mut words, "\n", text(part, "text"));
                continue;
            }
            "refusal" => {
                append(&mut words, "\n", text(part, "refusal"));
                continue;
            }
            "image_url" | "input_image" | "image" => kind::IMAGES,
            "input_audio" => kind::AUDIO,
            "file" | "input_file" => kind::ATTACHMENTS,
            _ => kind::PARTS,
        };
        lost.add(kind, 1);
    }
    words
}

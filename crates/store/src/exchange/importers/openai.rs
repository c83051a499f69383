//! Messages of the OpenAI API: an array, a request with `messages`, or a file with one of either per line, as for
//! fine-tuning. Each list `messages` is a conversation; all messages outside of such a list are one.

use super::conversation::{ConversationCallback, ForeignConversation, append_with_separator, non_blank};
use super::date::parse_date;
use super::error::ImportError;
use super::format::ImportFormat;
use super::input::{MAX_RECORD_BYTES, for_each_record};
use super::json::{array_field, str_field};
use super::losses::{ImportLosses, loss_kind};
use halo_core::token::Role;
use serde_json::Value;
use std::io::BufRead;

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let mut unlisted: Option<ForeignConversation> = None;
    for_each_record(input, MAX_RECORD_BYTES, &mut |record, value| {
        if let Some(messages) = value.get("messages").and_then(Value::as_array) {
            unlisted.take().map_or(Ok(()), &mut *each)?;
            return each(read_conversation(&value, messages));
        }
        if value.get("role").is_none() && value.get("type").is_none() {
            let why = "it has neither 'messages' nor a 'role'";
            return Err(ImportError::WrongFormat { format: ImportFormat::OpenAi, record, why });
        }
        read_message(&value, unlisted.get_or_insert_default());
        Ok(())
    })?;
    unlisted.map_or(Ok(()), each)
}

fn read_conversation(value: &Value, messages: &[Value]) -> ForeignConversation {
    let name = non_blank(str_field(value, "title")).or_else(|| non_blank(str_field(value, "name")));
    let mut foreign = ForeignConversation {
        name,
        model: non_blank(str_field(value, "model")),
        ..ForeignConversation::default()
    };
    foreign.created = parse_date(value.get("created_at").or(value.get("created")), &mut foreign.losses);
    let tools = array_field(value, "tools").len() + array_field(value, "functions").len();
    foreign.losses.add("tool definitions", tools);
    for message in messages {
        read_message(message, &mut foreign);
    }
    foreign
}

fn read_message(message: &Value, foreign: &mut ForeignConversation) {
    let losses = &mut foreign.losses;
    let function_calls = usize::from(message.get("function_call").is_some_and(Value::is_object));
    losses.add(loss_kind::TOOL_CALLS, array_field(message, "tool_calls").len() + function_calls);
    let reasoning = ["reasoning_content", "reasoning"].iter().any(|key| !str_field(message, key).is_empty());
    losses.add(loss_kind::REASONING, usize::from(reasoning));
    losses.add(loss_kind::AUDIO, usize::from(message.get("audio").is_some_and(Value::is_object)));

    let role = match (str_field(message, "role"), str_field(message, "type")) {
        ("system" | "developer", _) => Role::System,
        ("user", _) => Role::User,
        ("assistant", _) => Role::Assistant,
        ("tool" | "function", _) | ("", "function_call_output") => {
            return losses.add(loss_kind::TOOL_RESULTS, 1);
        }
        ("", "function_call") => return losses.add(loss_kind::TOOL_CALLS, 1),
        ("", "reasoning") => return losses.add(loss_kind::REASONING, 1),
        _ => return losses.add(loss_kind::UNKNOWN_ROLES, 1),
    };
    let mut text = match message.get("content") {
        Some(Value::String(content)) => content.clone(),
        Some(Value::Array(parts)) => join_parts(parts, losses),
        _ => String::new(),
    };
    append_with_separator(&mut text, "\n\n", str_field(message, "refusal"));
    let at = parse_date(message.get("created_at").or(message.get("timestamp")), losses);
    foreign.push_turn(role, str_field(message, "name"), at, text);
}

/// The text parts of a message, each on lines of its own.
fn join_parts(parts: &[Value], losses: &mut ImportLosses) -> String {
    let mut text = String::new();
    for part in parts {
        let kind = match str_field(part, "type") {
            "text" | "input_text" | "output_text" => {
                append_with_separator(&mut text, "\n", str_field(part, "text"));
                continue;
            }
            "refusal" => {
                append_with_separator(&mut text, "\n", str_field(part, "refusal"));
                continue;
            }
            "image_url" | "input_image" | "image" => loss_kind::IMAGES,
            "input_audio" => loss_kind::AUDIO,
            "file" | "input_file" => loss_kind::ATTACHMENTS,
            _ => loss_kind::UNKNOWN_PARTS,
        };
        losses.add(kind, 1);
    }
    text
}

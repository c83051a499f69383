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
use halo_core::tool_call::{CallFormat, FunctionCall, MessagePart};
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
    let reasoning = ["reasoning_content", "reasoning"].iter().any(|key| !str_field(message, key).is_empty());
    losses.add(loss_kind::REASONING, usize::from(reasoning));
    losses.add(loss_kind::AUDIO, usize::from(message.get("audio").is_some_and(Value::is_object)));

    let role = match (str_field(message, "role"), str_field(message, "type")) {
        ("system" | "developer", _) => Role::System,
        ("user", _) => Role::User,
        ("assistant", _) => Role::Assistant,
        ("tool" | "function", _) | ("", "function_call_output") => Role::Tool,
        ("", "function_call") => Role::Assistant,
        ("", "reasoning") => return losses.add(loss_kind::REASONING, 1),
        _ => return losses.add(loss_kind::UNKNOWN_ROLES, 1),
    };
    let content = if role == Role::Tool {
        message.get("content").or(message.get("output"))
    } else {
        message.get("content")
    };
    let mut text = match content {
        Some(Value::String(content)) => content.clone(),
        Some(Value::Array(parts)) => join_parts(parts, losses),
        _ => String::new(),
    };
    append_with_separator(&mut text, "\n\n", str_field(message, "refusal"));
    let calls = read_calls(message, losses);
    if role == Role::Assistant && !calls.is_empty() {
        text = text_with_calls(text.trim_end(), &calls);
    }
    let at = parse_date(message.get("created_at").or(message.get("timestamp")), losses);
    // The name of a result, or of a call by itself, is that of the function.
    let names_function = role == Role::Tool || str_field(message, "type") == "function_call";
    let speaker = if names_function { "" } else { str_field(message, "name") };
    foreign.push_turn(role, speaker, at, text);
}

/// The calls of a message, of all forms. One without a name is lost.
fn read_calls(message: &Value, losses: &mut ImportLosses) -> Vec<FunctionCall> {
    let listed = array_field(message, "tool_calls").iter().map(|call| call.get("function").unwrap_or(call));
    let old = message.get("function_call").filter(|call| call.is_object());
    let item = Some(message).filter(|item| str_field(item, "type") == "function_call");
    let mut calls = Vec::new();
    for call in listed.chain(old).chain(item) {
        let arguments = match call.get("arguments") {
            Some(Value::String(text)) if !text.trim().is_empty() => text.trim().to_owned(),
            Some(arguments @ Value::Object(_)) => arguments.to_string(),
            _ => "{}".to_owned(),
        };
        match non_blank(str_field(call, "name")) {
            Some(name) => calls.push(FunctionCall { name, arguments }),
            None => losses.add(loss_kind::TOOL_CALLS, 1),
        }
    }
    calls
}

/// A message with its calls in the general format, which every model reads.
fn text_with_calls(text: &str, calls: &[FunctionCall]) -> String {
    let parts = CallFormat::default().render(text, calls);
    let text = |part| match part {
        MessagePart::Frame(text) | MessagePart::Content(text) => text,
    };
    parts.into_iter().map(text).collect()
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

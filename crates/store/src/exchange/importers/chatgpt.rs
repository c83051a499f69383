//! ChatGPT account exports: an array of conversations, each a tree of messages.
//!
//! Editing a question or regenerating an answer adds a branch. The branch that the user saw last is imported: from
//! `current_node` up to the root.

use super::conversation::{
    ConversationCallback, ForeignConversation, append_with_separator, non_blank, path_from_root,
};
use super::date::parse_date;
use super::error::ImportError;
use super::format::ImportFormat;
use super::input::{MAX_RECORD_BYTES, for_each_record};
use super::json::{array_field, bool_field, str_field};
use super::losses::{ImportLosses, loss_kind};
use halo_core::token::Role;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::io::BufRead;

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    for_each_record(input, MAX_RECORD_BYTES, &mut |record, value| {
        let why = "it has no 'mapping' of messages";
        let wrong_format = ImportError::WrongFormat { format: ImportFormat::ChatGpt, record, why };
        let nodes = value.get("mapping").and_then(Value::as_object).ok_or(wrong_format)?;
        each(read_conversation(&value, nodes))
    })
}

fn read_conversation(value: &Value, nodes: &Map<String, Value>) -> ForeignConversation {
    let mut foreign =
        ForeignConversation { name: non_blank(str_field(value, "title")), ..ForeignConversation::default() };
    foreign.created = parse_date(value.get("create_time"), &mut foreign.losses);
    let existing = |id: &str| nodes.get_key_value(id).map(|(id, _)| id.as_str());
    let parent = |id: &str| match nodes.get(id).and_then(|node| node.get("parent")).and_then(Value::as_str) {
        Some(parent) => existing(parent).map(Some).ok_or(()),
        None => Ok(None),
    };
    let last = existing(str_field(value, "current_node")).or_else(|| newest_leaf(nodes));
    let path = path_from_root(last, parent, &mut foreign.losses);
    for node in &path {
        if let Some(message) = nodes.get(*node).and_then(|node| node.get("message")) {
            read_message(message, &mut foreign);
        }
    }
    let path: HashSet<&str> = path.into_iter().collect();
    let other_branches =
        nodes.iter().filter(|(id, node)| !path.contains(id.as_str()) && has_text(node)).count();
    foreign.losses.add(loss_kind::BRANCHES, other_branches);
    let model = non_blank(str_field(value, "default_model_slug")).filter(|slug| slug != "auto");
    foreign.model = model.or(foreign.model);
    foreign
}

/// The last message of a conversation without `current_node`: the newest one that has no answer.
fn newest_leaf(nodes: &Map<String, Value>) -> Option<&str> {
    let parents: HashSet<&str> = nodes.values().map(|node| str_field(node, "parent")).collect();
    let time =
        |node: &Value| node.pointer("/message/create_time").and_then(Value::as_f64).unwrap_or_default();
    let messages = nodes.iter().filter(|(_, node)| has_text(node));
    let newest = messages.max_by(|(a, x), (b, y)| {
        let leaf = |id: &String| !parents.contains(id.as_str());
        leaf(a).cmp(&leaf(b)).then(time(x).total_cmp(&time(y)))
    });
    newest.map(|(id, _)| id.as_str())
}

fn has_text(node: &Value) -> bool {
    let content = node.pointer("/message/content").unwrap_or(&Value::Null);
    !content_text(content, &mut ImportLosses::default()).is_empty()
}

fn read_message(message: &Value, foreign: &mut ForeignConversation) {
    let null = &Value::Null;
    let author = message.get("author").unwrap_or(null);
    let content = message.get("content").unwrap_or(null);
    let metadata = message.get("metadata").unwrap_or(null);
    let content_type = str_field(content, "content_type");
    let hidden = bool_field(metadata, "is_visually_hidden_from_conversation")
        || message.get("weight").and_then(Value::as_f64) == Some(0.0);
    let losses = &mut foreign.losses;

    // Custom instructions are hidden too, but the user wrote them, and they influenced the answers. The metadata has
    // them as they were written, the content with a template of ChatGPT around them.
    let user_context = metadata.get("user_context_message_data").unwrap_or(null);
    let instructions = join_fields(user_context, ["about_user_message", "about_model_message"])
        .or_else(|| join_fields(content, ["user_profile", "user_instructions"]));
    if let Some(instructions) = instructions {
        return foreign.push_turn(Role::System, "", None, instructions);
    }

    let text = content_text(content, losses);
    let is_file = |file: &&Value| !str_field(file, "mime_type").starts_with("image/");
    losses.add(loss_kind::ATTACHMENTS, array_field(metadata, "attachments").iter().filter(is_file).count());
    let lost_messages = usize::from(!text.is_empty());
    let loss = match (str_field(author, "role"), str_field(message, "recipient")) {
        ("tool", _) => Some(loss_kind::TOOL_RESULTS),
        _ if matches!(content_type, "thoughts" | "reasoning_recap") => Some(loss_kind::REASONING),
        _ if hidden => Some(loss_kind::HIDDEN_MESSAGES),
        ("assistant", recipient) if !matches!(recipient, "" | "all") => Some(loss_kind::TOOL_CALLS),
        _ => None,
    };
    if let Some(kind) = loss {
        losses.add(kind, lost_messages);
        return;
    }
    let role = match str_field(author, "role") {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return losses.add(loss_kind::UNKNOWN_ROLES, lost_messages),
    };
    if role == Role::Assistant {
        foreign.model = non_blank(str_field(metadata, "model_slug")).or(foreign.model.take());
    }
    let at = parse_date(message.get("create_time"), losses);
    foreign.push_turn(role, str_field(author, "name"), at, text);
}

fn join_fields(value: &Value, keys: [&str; 2]) -> Option<String> {
    let mut joined = String::new();
    for key in keys {
        append_with_separator(&mut joined, "\n\n", str_field(value, key));
    }
    non_blank(&joined)
}

/// The text of any kind of content, with each part on lines of its own.
fn content_text(content: &Value, losses: &mut ImportLosses) -> String {
    let mut text = String::new();
    for part in array_field(content, "parts") {
        match part.as_str() {
            Some(part) => append_with_separator(&mut text, "\n", part),
            None => append_asset(part, &mut text, losses),
        }
    }
    for key in ["text", "result", "content", "thoughts", "model_set_context"] {
        append_with_separator(&mut text, "\n", str_field(content, key));
    }
    for thought in array_field(content, "thoughts") {
        append_with_separator(&mut text, "\n", str_field(thought, "content"));
    }
    text
}

fn append_asset(part: &Value, text: &mut String, losses: &mut ImportLosses) {
    let kind = match str_field(part, "content_type") {
        "audio_transcription" => return append_with_separator(text, "\n", str_field(part, "text")),
        "image_asset_pointer" => loss_kind::IMAGES,
        kind if kind.contains("audio") => loss_kind::AUDIO,
        _ if part.is_null() => return,
        _ => loss_kind::UNKNOWN_PARTS,
    };
    losses.add(kind, 1);
}

//! ChatGPT account exports: an array of conversations, each a tree of messages.
//!
//! Editing a question or regenerating an answer grows a branch. What came in is the branch that the user saw
//! last: from `current_node` up to the root.

use super::date::date;
use super::input::{RECORD_LIMIT, records};
use super::way_to;
use super::{Each, Foreign, Format, Losses, ReadError, Role, append, filled, is_true, kind, list, text};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::io::BufRead;

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    records(input, RECORD_LIMIT, &mut |record, value| {
        let why = "it has no 'mapping' of messages";
        let shape = ReadError::Shape { format: Format::ChatGpt, record, why };
        let nodes = value.get("mapping").and_then(Value::as_object).ok_or(shape)?;
        each(conversation(&value, nodes))
    })
}

fn conversation(value: &Value, nodes: &Map<String, Value>) -> Foreign {
    let mut foreign = Foreign { name: filled(text(value, "title")), ..Foreign::default() };
    foreign.created = date(value.get("create_time"), &mut foreign.lost);
    let known = |id: &str| nodes.get_key_value(id).map(|(id, _)| id.as_str());
    let parent = |id: &str| match nodes.get(id).and_then(|node| node.get("parent")).and_then(Value::as_str) {
        Some(parent) => known(parent).map(Some).ok_or(()),
        None => Ok(None),
    };
    let last = known(text(value, "current_node")).or_else(|| newest_leaf(nodes));
    let path = way_to(last, parent, &mut foreign.lost);
    for node in &path {
        if let Some(said) = nodes.get(*node).and_then(|node| node.get("message")) {
            message(said, &mut foreign);
        }
    }
    let path: HashSet<&str> = path.into_iter().collect();
    let elsewhere =
        nodes.iter().filter(|(id, node)| !path.contains(id.as_str()) && says_something(node)).count();
    foreign.lost.add(kind::BRANCHES, elsewhere);
    let model = filled(text(value, "default_model_slug")).filter(|slug| slug != "auto");
    foreign.model = model.or(foreign.model);
    foreign
}

/// Where the conversation ends if it does not say so: the newest message that has no answer.
fn newest_leaf(nodes: &Map<String, Value>) -> Option<&str> {
    let parents: HashSet<&str> = nodes.values().map(|node| text(node, "parent")).collect();
    let time =
        |node: &Value| node.pointer("/message/create_time").and_then(Value::as_f64).unwrap_or_default();
    let said = nodes.iter().filter(|(_, node)| says_something(node));
    let newest = said.max_by(|(a, x), (b, y)| {
        let leaf = |id: &String| !parents.contains(id.as_str());
        leaf(a).cmp(&leaf(b)).then(time(x).total_cmp(&time(y)))
    });
    newest.map(|(id, _)| id.as_str())
}

fn says_something(node: &Value) -> bool {
    let content = node.pointer("/message/content").unwrap_or(&Value::Null);
    !words(content, &mut Losses::default()).is_empty()
}

fn message(message: &Value, foreign: &mut Foreign) {
    let null = &Value::Null;
    let author = message.get("author").unwrap_or(null);
    let content = message.get("content").unwrap_or(null);
    let metadata = message.get("metadata").unwrap_or(null);
    let content_type = text(content, "content_type");
    let hidden = is_true(metadata, "is_visually_hidden_from_conversation")
        || message.get("weight").and_then(Value::as_f64) == Some(0.0);
    let lost = &mut foreign.lost;

    // What the user has told the model about himself is hidden too, but it is his, and it shaped the answers.
    // The metadata have it in his words, the content with what ChatGPT puts around them.
    let own = metadata.get("user_context_message_data").unwrap_or(null);
    let instructions = both(own, ["about_user_message", "about_model_message"])
        .or_else(|| both(content, ["user_profile", "user_instructions"]));
    if let Some(instructions) = instructions {
        return foreign.say(Role::System, "", None, instructions);
    }

    let said = words(content, lost);
    let is_file = |file: &&Value| !text(file, "mime_type").starts_with("image/");
    lost.add(kind::ATTACHMENTS, list(metadata, "attachments").iter().filter(is_file).count());
    let something = usize::from(!said.is_empty());
    let left_behind = match (text(author, "role"), text(message, "recipient")) {
        ("tool", _) => Some(kind::TOOL_RESULTS),
        _ if matches!(content_type, "thoughts" | "reasoning_recap") => Some(kind::THOUGHTS),
        _ if hidden => Some(kind::HIDDEN),
        ("assistant", recipient) if !matches!(recipient, "" | "all") => Some(kind::TOOL_CALLS),
        _ => None,
    };
    if let Some(kind) = left_behind {
        lost.add(kind, something);
        return;
    }
    let role = match text(author, "role") {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return lost.add(kind::ROLES, something),
    };
    if role == Role::Assistant {
        foreign.model = filled(text(metadata, "model_slug")).or(foreign.model.take());
    }
    let at = date(message.get("create_time"), lost);
    foreign.say(role, text(author, "name"), at, said);
}

fn both(value: &Value, keys: [&str; 2]) -> Option<String> {
    let mut joined = String::new();
    for key in keys {
        append(&mut joined, "\n\n", text(value, key));
    }
    filled(&joined)
}

/// The words of any kind of content; its parts stand on lines of their own.
fn words(content: &Value, lost: &mut Losses) -> String {
    let mut words = String::new();
    for part in list(content, "parts") {
        match part.as_str() {
            Some(part) => append(&mut words, "\n", part),
            None => asset(part, &mut words, lost),
        }
    }
    for key in ["text", "result", "content", "thoughts", "model_set_context"] {
        append(&mut words, "\n", text(content, key));
    }
    for thought in list(content, "thoughts") {
        append(&mut words, "\n", text(thought, "content"));
    }
    words
}

fn asset(part: &Value, words: &mut String, lost: &mut Losses) {
    let kind = match text(part, "content_type") {
        "audio_transcription" => return append(words, "\n", text(part, "text")),
        "image_asset_pointer" => kind::IMAGES,
        kind if kind.contains("audio") => kind::AUDIO,
        _ if part.is_null() => return,
        _ => kind::PARTS,
    };
    lost.add(kind, 1);
}

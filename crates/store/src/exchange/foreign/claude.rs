//! Claude account exports: an array of conversations, each a list of messages.
//!
//! Newer exports hold every branch in that list and link each message to the one before it; what came in is
//! then the branch of the newest message. The plain `text` of a message mixes thoughts and placeholders into
//! the words, so its `content` is read where there is one.

use super::date::date;
use super::input::{RECORD_LIMIT, records};
use super::{
    Each, Foreign, Format, Losses, ReadError, Role, append, attach, filled, kind, list, text, way_to,
};
use serde_json::Value;
use std::collections::HashMap;
use std::io::BufRead;

/// The parent of a first message.
const ROOT: &str = "00000000-0000-4000-8000-000000000000";

const PICTURES: [&str; 5] = [".png", ".jpg", ".jpeg", ".gif", ".webp"];

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    records(input, RECORD_LIMIT, &mut |record, value| {
        if !value.get("chat_messages").is_some_and(Value::is_array) {
            let why = "it has no list 'chat_messages'";
            return Err(ReadError::Shape { format: Format::Claude, record, why });
        }
        let model = filled(text(&value, "model"));
        let mut foreign = Foreign { name: filled(text(&value, "name")), model, ..Foreign::default() };
        foreign.created = date(value.get("created_at"), &mut foreign.lost);
        foreign.lost.add("summaries", usize::from(!text(&value, "summary").is_empty()));
        let messages = list(&value, "chat_messages");
        for index in path(messages, text(&value, "current_leaf_message_uuid"), &mut foreign.lost) {
            message(&messages[index], &mut foreign);
        }
        each(foreign)
    })
}

/// The messages of the branch that counts, in order.
fn path(messages: &[Value], leaf: &str, lost: &mut Losses) -> Vec<usize> {
    if messages.iter().all(|message| text(message, "parent_message_uuid").is_empty()) {
        return (0..messages.len()).collect();
    }
    let places: HashMap<&str, usize> =
        messages.iter().enumerate().map(|(index, message)| (text(message, "uuid"), index)).collect();
    let time = |index: &usize| date(messages[*index].get("created_at"), &mut Losses::default());
    let last = places.get(leaf).copied().or_else(|| (0..messages.len()).max_by_key(time));
    let parent = |index: usize| match text(&messages[index], "parent_message_uuid") {
        "" | ROOT => Ok(None),
        parent => places.get(parent).copied().map(Some).ok_or(()),
    };
    let path = way_to(last, parent, lost);
    lost.add(kind::BRANCHES, messages.len() - path.len());
    path
}

fn message(message: &Value, foreign: &mut Foreign) {
    let lost = &mut foreign.lost;
    let content = list(message, "content");
    let mut said = String::new();
    if content.is_empty() {
        said.push_str(text(message, "text"));
    }
    for block in content {
        let kind = match text(block, "type") {
            "text" | "voice_note" => {
                append(&mut said, "\n\n", text(block, "text"));
                continue;
            }
            "thinking" | "redacted_thinking" => kind::THOUGHTS,
            "tool_use" => kind::TOOL_CALLS,
            "tool_result" => kind::TOOL_RESULTS,
            "image" => kind::IMAGES,
            "token_budget" => continue,
            _ => kind::PARTS,
        };
        lost.add(kind, 1);
    }
    let attachments = list(message, "attachments");
    for attachment in attachments {
        match text(attachment, "extracted_content") {
            "" => lost.add(kind::ATTACHMENTS, 1),
            content => attach(&mut said, text(attachment, "file_name"), content),
        }
    }
    for file in list(message, "files") {
        let name = text(file, "file_name");
        if !attachments.iter().any(|attachment| text(attachment, "file_name") == name) {
            let name = name.to_ascii_lowercase();
            let picture = PICTURES.iter().any(|ending| name.ends_with(ending));
            lost.add(if picture { kind::IMAGES } else { kind::ATTACHMENTS }, 1);
        }
    }
    let role = match text(message, "sender") {
        "human" | "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return lost.add(kind::ROLES, usize::from(!said.is_empty())),
    };
    let at = date(message.get("created_at"), lost);
    foreign.say(role, "", at, said);
}

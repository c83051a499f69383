//! Claude account exports: an array of conversations, each a list of messages.
//!
//! Newer exports have every branch in that list and link each message to the one before it; the branch of the newest
//! message is imported. The `text` of a message mixes reasoning and placeholders into the answer, so its `content` is
//! read where there is one.

use super::conversation::{
    ConversationCallback, ForeignConversation, append_attachment, append_with_separator, non_blank,
    path_from_root,
};
use super::date::parse_date;
use super::error::ImportError;
use super::format::ImportFormat;
use super::input::{MAX_RECORD_BYTES, for_each_record};
use super::json::{array_field, str_field};
use super::losses::{ImportLosses, loss_kind};
use halo_core::token::Role;
use serde_json::Value;
use std::collections::HashMap;
use std::io::BufRead;

/// The parent of a first message.
const ROOT_MESSAGE_ID: &str = "00000000-0000-4000-8000-000000000000";

const IMAGE_EXTENSIONS: [&str; 5] = [".png", ".jpg", ".jpeg", ".gif", ".webp"];

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    for_each_record(input, MAX_RECORD_BYTES, &mut |record, value| {
        if !value.get("chat_messages").is_some_and(Value::is_array) {
            let why = "it has no list 'chat_messages'";
            return Err(ImportError::WrongFormat { format: ImportFormat::Claude, record, why });
        }
        let model = non_blank(str_field(&value, "model"));
        let mut foreign = ForeignConversation {
            name: non_blank(str_field(&value, "name")),
            model,
            ..ForeignConversation::default()
        };
        foreign.created = parse_date(value.get("created_at"), &mut foreign.losses);
        foreign.losses.add("summaries", usize::from(!str_field(&value, "summary").is_empty()));
        let messages = array_field(&value, "chat_messages");
        for index in
            message_path(messages, str_field(&value, "current_leaf_message_uuid"), &mut foreign.losses)
        {
            read_message(&messages[index], &mut foreign);
        }
        each(foreign)
    })
}

/// The messages of the current branch, in order.
fn message_path(messages: &[Value], leaf: &str, losses: &mut ImportLosses) -> Vec<usize> {
    if messages.iter().all(|message| str_field(message, "parent_message_uuid").is_empty()) {
        return (0..messages.len()).collect();
    }
    let indexes: HashMap<&str, usize> =
        messages.iter().enumerate().map(|(index, message)| (str_field(message, "uuid"), index)).collect();
    let time = |index: &usize| parse_date(messages[*index].get("created_at"), &mut ImportLosses::default());
    let last = indexes.get(leaf).copied().or_else(|| (0..messages.len()).max_by_key(time));
    let parent = |index: usize| match str_field(&messages[index], "parent_message_uuid") {
        "" | ROOT_MESSAGE_ID => Ok(None),
        parent => indexes.get(parent).copied().map(Some).ok_or(()),
    };
    let path = path_from_root(last, parent, losses);
    losses.add(loss_kind::BRANCHES, messages.len() - path.len());
    path
}

fn read_message(message: &Value, foreign: &mut ForeignConversation) {
    let losses = &mut foreign.losses;
    let content = array_field(message, "content");
    let mut text = String::new();
    if content.is_empty() {
        text.push_str(str_field(message, "text"));
    }
    for block in content {
        let kind = match str_field(block, "type") {
            "text" | "voice_note" => {
                append_with_separator(&mut text, "\n\n", str_field(block, "text"));
                continue;
            }
            "thinking" | "redacted_thinking" => loss_kind::REASONING,
            "tool_use" => loss_kind::TOOL_CALLS,
            "tool_result" => loss_kind::TOOL_RESULTS,
            "image" => loss_kind::IMAGES,
            "token_budget" => continue,
            _ => loss_kind::UNKNOWN_PARTS,
        };
        losses.add(kind, 1);
    }
    let attachments = array_field(message, "attachments");
    for attachment in attachments {
        match str_field(attachment, "extracted_content") {
            "" => losses.add(loss_kind::ATTACHMENTS, 1),
            content => append_attachment(&mut text, str_field(attachment, "file_name"), content),
        }
    }
    for file in array_field(message, "files") {
        let name = str_field(file, "file_name");
        if !attachments.iter().any(|attachment| str_field(attachment, "file_name") == name) {
            let name = name.to_ascii_lowercase();
            let image = IMAGE_EXTENSIONS.iter().any(|extension| name.ends_with(extension));
            losses.add(if image { loss_kind::IMAGES } else { loss_kind::ATTACHMENTS }, 1);
        }
    }
    let role = match str_field(message, "sender") {
        "human" | "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return losses.add(loss_kind::UNKNOWN_ROLES, usize::from(!text.is_empty())),
    };
    let at = parse_date(message.get("created_at"), losses);
    foreign.push_turn(role, "", at, text);
}

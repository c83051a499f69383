//! Claude account exports: an array of conversations, each a list of messages.
//!
//! Newer exports hold every branch in that list and link each message to the one before it; what came in is
//! then the branch of the newest message. The plain `text` of a message mixes thoughts and placeholders into
//! the words, so its `content` is read where there is one.

use super::date::parse_date;
use super::input::{MAX_RECORD_BYTES, for_each_record};
use super::{
    ConversationCallback, ForeignConversation, ImportError, ImportFormat, ImportLosses, Role,
    append_attachment, append_with_separator, array_field, loss_kind, non_blank, path_from_root, str_field,
};
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

/// The messages of the branch that counts, in order.
fn message_path(messages: &[Value], leaf: &str, lost: &mut ImportLosses) -> Vec<usize> {
    if messages.iter().all(|message| str_field(message, "parent_message_uuid").is_empty()) {
        return (0..messages.len()).collect();
    }
    let places: HashMap<&str, usize> =
        messages.iter().enumerate().map(|(index, message)| (str_field(message, "uuid"), index)).collect();
    let time = |index: &usize| parse_date(messages[*index].get("created_at"), &mut ImportLosses::default());
    let last = places.get(leaf).copied().or_else(|| (0..messages.len()).max_by_key(time));
    let parent = |index: usize| match str_field(&messages[index], "parent_message_uuid") {
        "" | ROOT_MESSAGE_ID => Ok(None),
        parent => places.get(parent).copied().map(Some).ok_or(()),
    };
    let path = path_from_root(last, parent, lost);
    lost.add(loss_kind::BRANCHES, messages.len() - path.len());
    path
}

fn read_message(message: &Value, foreign: &mut ForeignConversation) {
    let lost = &mut foreign.losses;
    let content = array_field(message, "content");
    let mut said = String::new();
    if content.is_empty() {
        said.push_str(str_field(message, "text"));
    }
    for block in content {
        let kind = match str_field(block, "type") {
            "text" | "voice_note" => {
                append_with_separator(&mut said, "\n\n", str_field(block, "text"));
                continue;
            }
            "thinking" | "redacted_thinking" => loss_kind::REASONING,
            "tool_use" => loss_kind::TOOL_CALLS,
            "tool_result" => loss_kind::TOOL_RESULTS,
            "image" => loss_kind::IMAGES,
            "token_budget" => continue,
            _ => loss_kind::UNKNOWN_PARTS,
        };
        lost.add(kind, 1);
    }
    let attachments = array_field(message, "attachments");
    for attachment in attachments {
        match str_field(attachment, "extracted_content") {
            "" => lost.add(loss_kind::ATTACHMENTS, 1),
            content => append_attachment(&mut said, str_field(attachment, "file_name"), content),
        }
    }
    for file in array_field(message, "files") {
        let name = str_field(file, "file_name");
        if !attachments.iter().any(|attachment| str_field(attachment, "file_name") == name) {
            let name = name.to_ascii_lowercase();
            let picture = IMAGE_EXTENSIONS.iter().any(|ending| name.ends_with(ending));
            lost.add(if picture { loss_kind::IMAGES } else { loss_kind::ATTACHMENTS }, 1);
        }
    }
    let role = match str_field(message, "sender") {
        "human" | "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        _ => return lost.add(loss_kind::UNKNOWN_ROLES, usize::from(!said.is_empty())),
    };
    let at = parse_date(message.get("created_at"), lost);
    foreign.push_turn(role, "", at, said);
}

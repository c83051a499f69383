//! SillyTavern chats: one JSON object per line, a header and then the messages; group chats have no header.
//!
//! `is_system` does not mean the role "system": it marks what SillyTavern shows but never sends to the model (help texts,
//! comments, messages hidden with `/hide`), so those are counted as hidden. Messages of the narrator are sent to the
//! model with the role "system".

use super::conversation::{ConversationCallback, ForeignConversation, append_attachment, non_blank};
use super::date::parse_date;
use super::error::ImportError;
use super::format::ImportFormat;
use super::input::{MAX_RECORD_BYTES, for_each_record};
use super::json::{array_field, bool_field, str_field};
use super::losses::loss_kind;
use halo_core::token::Role;
use serde_json::Value;
use std::io::BufRead;

const SWIPES_LOSS: &str = "alternative answers (swipes)";

/// What newer versions write in place of the names.
const PLACEHOLDER_NAME: &str = "unused";

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let mut chat = None;
    for_each_record(input, MAX_RECORD_BYTES, &mut |record, value| {
        let chat = chat.get_or_insert_with(ForeignConversation::default);
        if value.get("mes").is_some() || bool_field(&value, "is_user") {
            read_message(&value, chat);
        } else if ["user_name", "character_name", "chat_metadata"].iter().any(|key| value.get(key).is_some())
        {
            read_header(&value, chat);
        } else {
            let why = "it is neither a message with 'mes' nor a header with 'chat_metadata'";
            return Err(ImportError::WrongFormat { format: ImportFormat::SillyTavern, record, why });
        }
        Ok(())
    })?;
    let Some(mut chat) = chat else { return Ok(()) };
    let character = || chat.turns.iter().find(|turn| turn.role == Role::Assistant)?.speaker.clone();
    chat.name = chat.name.take().or_else(character);
    chat.created = chat.created.or_else(|| chat.turns.first()?.at);
    each(chat)
}

fn read_header(header: &Value, chat: &mut ForeignConversation) {
    chat.name = non_blank(str_field(header, "character_name")).filter(|name| name != PLACEHOLDER_NAME);
    chat.created = parse_date(header.get("create_date"), &mut chat.losses);
    let note =
        header.get("chat_metadata").is_some_and(|metadata| !str_field(metadata, "note_prompt").is_empty());
    chat.losses.add("author's notes", usize::from(note));
}

fn read_message(message: &Value, chat: &mut ForeignConversation) {
    let extra = message.get("extra").unwrap_or(&Value::Null);
    let losses = &mut chat.losses;
    let swipes = array_field(message, "swipes");
    losses.add(SWIPES_LOSS, swipes.len().saturating_sub(1));
    losses.add(loss_kind::REASONING, usize::from(!str_field(extra, "reasoning").is_empty()));
    let image = usize::from(!str_field(extra, "image").is_empty());
    losses.add(loss_kind::IMAGES, array_field(extra, "image_swipes").len().max(image));
    for medium in array_field(extra, "media") {
        let kind = match str_field(medium, "type") {
            "image" => loss_kind::IMAGES,
            "audio" => loss_kind::AUDIO,
            _ => loss_kind::ATTACHMENTS,
        };
        losses.add(kind, 1);
    }

    let tool_calls = array_field(extra, "tool_invocations").len();
    if tool_calls > 0 {
        losses.add(loss_kind::TOOL_CALLS, tool_calls);
        return;
    }
    let mut text = str_field(message, "mes").to_owned();
    if text.is_empty() {
        let shown = message.get("swipe_id").and_then(Value::as_u64).and_then(|id| usize::try_from(id).ok());
        let shown = shown.and_then(|id| swipes.get(id)).and_then(Value::as_str);
        text.push_str(shown.unwrap_or_default());
    }
    for file in array_field(extra, "files").iter().chain(extra.get("file").filter(|file| file.is_object())) {
        match str_field(file, "text") {
            "" => losses.add(loss_kind::ATTACHMENTS, 1),
            content => append_attachment(&mut text, str_field(file, "name"), content),
        }
    }
    if bool_field(message, "is_system") {
        losses.add(loss_kind::HIDDEN_MESSAGES, usize::from(!text.is_empty()));
        return;
    }
    let role = if str_field(extra, "type") == "narrator" {
        Role::System
    } else if bool_field(message, "is_user") {
        Role::User
    } else {
        Role::Assistant
    };
    if role == Role::Assistant {
        chat.model = non_blank(str_field(extra, "model")).or(chat.model.take());
    }
    let at = parse_date(message.get("send_date"), losses);
    chat.push_turn(role, str_field(message, "name"), at, text);
}

//! SillyTavern chats: one JSON object a line, a header and then the messages, in a group chat without a
//! header.
//!
//! `is_system` does not mean the system's role: it marks what SillyTavern shows but never sends to the model
//! (help texts, comments, messages hidden with `/hide`), so those are counted as hidden. What the model gets
//! in the system's role is a message of the narrator.

use super::date::date;
use super::input::{RECORD_LIMIT, records};
use super::{Each, Foreign, Format, ReadError, Role, attach, filled, is_true, kind, list, text};
use serde_json::Value;
use std::io::BufRead;

const SWIPES: &str = "alternative answers (swipes)";

/// What newer versions write where the names used to be.
const NO_NAME: &str = "unused";

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    let mut chat = None;
    records(input, RECORD_LIMIT, &mut |record, value| {
        let chat = chat.get_or_insert_with(Foreign::default);
        if value.get("mes").is_some() || is_true(&value, "is_user") {
            message(&value, chat);
        } else if ["user_name", "character_name", "chat_metadata"].iter().any(|key| value.get(key).is_some())
        {
            header(&value, chat);
        } else {
            let why = "it is neither a message with 'mes' nor a header with 'chat_metadata'";
            return Err(ReadError::Shape { format: Format::SillyTavern, record, why });
        }
        Ok(())
    })?;
    let Some(mut chat) = chat else { return Ok(()) };
    let character = || chat.turns.iter().find(|turn| turn.role == Role::Assistant)?.speaker.clone();
    chat.name = chat.name.take().or_else(character);
    chat.created = chat.created.or_else(|| chat.turns.first()?.at);
    each(chat)
}

fn header(header: &Value, chat: &mut Foreign) {
    chat.name = filled(text(header, "character_name")).filter(|name| name != NO_NAME);
    chat.created = date(header.get("create_date"), &mut chat.lost);
    let note = header.get("chat_metadata").is_some_and(|metadata| !text(metadata, "note_prompt").is_empty());
    chat.lost.add("author's notes", usize::from(note));
}

fn message(message: &Value, chat: &mut Foreign) {
    let extra = message.get("extra").unwrap_or(&Value::Null);
    let lost = &mut chat.lost;
    let swipes = list(message, "swipes");
    lost.add(SWIPES, swipes.len().saturating_sub(1));
    lost.add(kind::THOUGHTS, usize::from(!text(extra, "reasoning").is_empty()));
    let image = usize::from(!text(extra, "image").is_empty());
    lost.add(kind::IMAGES, list(extra, "image_swipes").len().max(image));
    for medium in list(extra, "media") {
        let kind = match text(medium, "type") {
            "image" => kind::IMAGES,
            "audio" => kind::AUDIO,
            _ => kind::ATTACHMENTS,
        };
        lost.add(kind, 1);
    }

    let tool_calls = list(extra, "tool_invocations").len();
    if tool_calls > 0 {
        lost.add(kind::TOOL_CALLS, tool_calls);
        return;
    }
    let mut said = text(message, "mes").to_owned();
    if said.is_empty() {
        let shown = message.get("swipe_id").and_then(Value::as_u64).and_then(|id| usize::try_from(id).ok());
        let shown = shown.and_then(|id| swipes.get(id)).and_then(Value::as_str);
        said.push_str(shown.unwrap_or_default());
    }
    for file in list(extra, "files").iter().chain(extra.get("file").filter(|file| file.is_object())) {
        match text(file, "text") {
            "" => lost.add(kind::ATTACHMENTS, 1),
            content => attach(&mut said, text(file, "name"), content),
        }
    }
    if is_true(message, "is_system") {
        lost.add(kind::HIDDEN, usize::from(!said.is_empty()));
        return;
    }
    let role = if text(extra, "type") == "narrator" {
        Role::System
    } else if is_true(message, "is_user") {
        Role::User
    } else {
        Role::Assistant
    };
    if role == Role::Assistant {
        chat.model = filled(text(extra, "model")).or(chat.model.take());
    }
    let at = date(message.get("send_date"), lost);
    chat.say(role, text(message, "name"), at, said);
}

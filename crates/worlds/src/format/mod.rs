//! A HUD as text and back: JSON, compact JSON, TOON and positional TOON.

mod fragment;
mod json;
pub mod positional;
mod tabular;
mod toon;
mod writer;

pub use crate::hud_format::{AnswerFormat, HudFormat};
pub use fragment::{FragmentKey, HudFragment, HudSection, LAST_ITEM};
pub(crate) use writer::HudWriter;

use crate::error::Error;
use crate::hud::Hud;
use crate::knowledge::AgentKnowledge;

pub(crate) fn writer_for(format: HudFormat) -> Box<dyn HudWriter> {
    match format {
        HudFormat::Json => Box::new(json::JsonHudWriter { compact: false }),
        HudFormat::CompactJson => Box::new(json::JsonHudWriter { compact: true }),
        HudFormat::Toon => Box::new(toon::ToonHudWriter),
        HudFormat::ToonPositional => Box::new(toon::PositionalHudWriter),
    }
}

/// The tokens of an agent's knowledge as its HUD shows it.
#[must_use]
pub fn knowledge_tokens(
    knowledge: &AgentKnowledge,
    format: HudFormat,
    count_tokens: impl Fn(&str) -> usize,
) -> usize {
    writer_for(format).knowledge_entries(knowledge.entries()).iter().map(|entry| count_tokens(entry)).sum()
}

#[must_use]
pub fn render_fragments(hud: &Hud, format: HudFormat) -> Vec<HudFragment> {
    let writer = writer_for(format);
    let mut fragments = Vec::new();
    let mut push = |key: FragmentKey, text: String| fragments.push(HudFragment { key, text });
    push(FragmentKey::shared(), writer.shared_section(hud));
    push(FragmentKey::knowledge(0), writer.identity(hud));
    for (n, entry) in writer.knowledge_entries(&hud.me.knowledge).into_iter().enumerate() {
        push(FragmentKey::knowledge(1 + n), entry);
    }
    push(FragmentKey::memory_usage(), writer.memory_usage(hud));
    for (n, action) in hud.me.recent_actions.iter().enumerate() {
        let key = FragmentKey::action(n as u64);
        push(key, writer.recent_action(action));
        if n + 1 < hud.me.recent_actions.len() {
            push(key.separator_after(), writer.action_separator().to_owned());
        }
    }
    push(FragmentKey::rooms_header(), writer.rooms_header(hud));
    for (n, room) in hud.rooms.iter().enumerate() {
        push(FragmentKey::room(room, 0), writer.room_header(hud, n));
        push(FragmentKey::room(room, 1), writer.room_pace(hud, n));
        push(FragmentKey::room(room, 2), writer.messages_header(hud, n, room.messages.len()));
        for (m, message) in room.messages.iter().enumerate() {
            let key = FragmentKey::message(room, message.id);
            push(key, writer.message_row(message));
            if m + 1 < room.messages.len() {
                push(key.separator_after(), writer.message_separator().to_owned());
            }
        }
        push(FragmentKey::room(room, LAST_ITEM), writer.room_footer(hud, n, room.messages.len()));
    }
    push(FragmentKey::end(), writer.footer(hud));
    fragments.retain(|fragment| !fragment.text.is_empty());
    fragments
}

#[must_use]
pub fn render(hud: &Hud, format: HudFormat) -> String {
    render_fragments(hud, format).into_iter().map(|fragment| fragment.text).collect()
}

/// Parses a HUD that was rendered in a format.
pub fn parse(text: &str, format: HudFormat) -> Result<Hud, Error> {
    let from_json = || serde_json::from_str(text).map_err(invalid_hud);
    let value = match format {
        HudFormat::Json => from_json()?,
        HudFormat::CompactJson => json::expand_names(from_json()?),
        HudFormat::Toon => {
            let decoded = toon_format::decode(text, &toon_format::DecodeOptions::default());
            tabular::expand_rows(decoded.map_err(invalid_hud)?)?
        }
        HudFormat::ToonPositional => tabular::expand_rows(positional::decode(text)?)?,
    };
    serde_json::from_value(value).map_err(invalid_hud)
}

fn invalid_hud(error: impl std::fmt::Display) -> Error {
    Error::invalid_input(format!("this is not a HUD: {error}"))
}

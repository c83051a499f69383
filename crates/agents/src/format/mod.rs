//! A HUD as text, and back: JSON, JSON with short names, TOON, and the positional dialect. What is written is told in pieces, each
//! with its place, so that a model that has read one before need not read it again.

mod json;
mod lines;
pub mod positional;
mod uniform;

use crate::hud::{Hud, MessageView};
use crate::world::RoomId;
use serde::{Deserialize, Serialize};

/// How a HUD is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// JSON, two spaces deep at each level.
    #[default]
    Json,
    /// JSON without spaces and with short names.
    CompactJson,
    /// Token-Oriented Object Notation, as its public specification has it.
    Toon,
    /// Names declared once, then values by position.
    ToonPositional,
}

/// How an agent answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// In JSON.
    #[default]
    Json,
    /// In TOON.
    Toon,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 4] = [Format::Json, Format::CompactJson, Format::Toon, Format::ToonPositional];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::Json => "json",
            Format::CompactJson => "compact_json",
            Format::Toon => "toon",
            Format::ToonPositional => "toon_positional",
        }
    }

    /// What a word stands for.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == word)
    }
}

impl Output {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Output::Json => "json",
            Output::Toon => "toon",
        }
    }
}

/// Where a piece of a HUD stands. Places are in the order of the text, and what stays the same keeps its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// What it is about.
    pub part: Part,
    /// Which one of these.
    pub item: u64,
}

/// What a piece of a HUD is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// What all agents of a kind are told.
    Shared,
    /// The agent itself.
    Own,
    /// A room.
    Room(RoomId),
    /// The end.
    End,
}

/// Where the numbered pieces of a part begin; each is followed by what divides it from the next.
const NUMBERED: u64 = 16;

/// Behind all pieces of a part.
pub const LAST: u64 = (1 << 24) - 1;

impl Place {
    fn new(part: Part, item: u64) -> Self {
        Self { part, item }
    }

    fn numbered(part: Part, number: u64) -> Self {
        Self { part, item: NUMBERED + 2 * number }
    }

    fn behind(self) -> Self {
        Self { item: self.item + 1, ..self }
    }
}

/// A piece of a HUD as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<T = String> {
    /// Where it stands.
    pub place: Place,
    /// What it says.
    pub text: T,
}

/// Something that writes a HUD piece by piece.
pub(crate) trait Writer {
    /// What all agents of a kind are told.
    fn shared(&self, hud: &Hud) -> String;
    /// Who the agent is, up to what it has written down.
    fn identity(&self, hud: &Hud) -> String;
    /// What it has written down, entry by entry.
    fn known(&self, hud: &Hud) -> Vec<String>;
    /// From there to what it did.
    fn used(&self, hud: &Hud) -> String;
    /// Something that it did.
    fn did(&self, action: &serde_json::Map<String, serde_json::Value>) -> String;
    /// What divides that from the next.
    fn between_actions(&self) -> &'static str;
    /// From there to its rooms.
    fn to_rooms(&self, hud: &Hud) -> String;
    /// A room, up to how long ago the agent spoke there.
    fn room(&self, hud: &Hud, number: usize) -> String;
    /// How long ago, and how much it may say.
    fn pace(&self, hud: &Hud, number: usize) -> String;
    /// From there to its messages, of which there are so many.
    fn board(&self, hud: &Hud, number: usize, messages: usize) -> String;
    /// A message.
    fn message(&self, message: &MessageView) -> String;
    /// What divides it from the next.
    fn between_messages(&self) -> &'static str;
    /// The end of a room with so many.
    fn room_end(&self, hud: &Hud, number: usize, messages: usize) -> String;
    /// The end of it all.
    fn end(&self, hud: &Hud) -> String;
}

pub(crate) fn writer(format: Format) -> Box<dyn Writer> {
    match format {
        Format::Json => Box::new(json::Json { compact: false }),
        Format::CompactJson => Box::new(json::Json { compact: true }),
        Format::Toon => Box::new(lines::Toon),
        Format::ToonPositional => Box::new(lines::Positional),
    }
}

/// A HUD in pieces. `done` is how much the agent has ever done; `message` writes one of a room's messages: those who have
/// written it before need not do so again.
pub(crate) fn pieces_with<T: From<String>>(
    hud: &Hud,
    format: Format,
    done: u64,
    mut message: impl FnMut(&dyn Writer, &MessageView) -> T,
) -> Vec<Piece<T>> {
    let writer = writer(format);
    let writer = &*writer;
    let mut pieces = Vec::with_capacity(64);
    let mut push = |place: Place, text: T| pieces.push(Piece { place, text });
    push(Place::new(Part::Shared, 0), writer.shared(hud).into());
    let own = |item| Place::new(Part::Own, item);
    push(own(0), writer.identity(hud).into());
    // What is known comes before what was done: its places are counted in the lower half.
    const DONE: u64 = 1 << 12;
    for (n, entry) in writer.known(hud).into_iter().enumerate() {
        push(own((1 + n as u64).min(DONE - 2)), entry.into());
    }
    push(own(DONE - 1), writer.used(hud).into());
    for (n, action) in hud.me.recent_actions.iter().enumerate() {
        let number = done.saturating_sub(hud.me.recent_actions.len() as u64) + n as u64;
        let place = own(DONE + 2 * number);
        push(place, writer.did(action).into());
        if n + 1 < hud.me.recent_actions.len() && !writer.between_actions().is_empty() {
            push(place.behind(), writer.between_actions().to_owned().into());
        }
    }
    push(own(LAST), writer.to_rooms(hud).into());
    for (n, room) in hud.rooms.iter().enumerate() {
        let part = Part::Room(room.id);
        push(Place::new(part, 0), writer.room(hud, n).into());
        push(Place::new(part, 1), writer.pace(hud, n).into());
        push(Place::new(part, 2), writer.board(hud, n, room.messages.len()).into());
        for (m, said) in room.messages.iter().enumerate() {
            let place = Place::numbered(part, said.id);
            push(place, message(writer, said));
            if m + 1 < room.messages.len() && !writer.between_messages().is_empty() {
                push(place.behind(), writer.between_messages().to_owned().into());
            }
        }
        push(Place::new(part, LAST), writer.room_end(hud, n, room.messages.len()).into());
    }
    push(Place::new(Part::End, 0), writer.end(hud).into());
    pieces
}

/// A HUD in pieces.
#[must_use]
pub fn pieces(hud: &Hud, format: Format) -> Vec<Piece> {
    pieces_with(hud, format, hud.me.recent_actions.len() as u64, |writer, said| writer.message(said))
}

/// A HUD as text.
#[must_use]
pub fn write(hud: &Hud, format: Format) -> String {
    pieces(hud, format).into_iter().map(|piece| piece.text).collect()
}

/// A HUD that was written as text.
///
/// # Errors
/// In words, when it is none.
pub fn read(text: &str, format: Format) -> Result<Hud, String> {
    let value = match format {
        Format::Json => serde_json::from_str(text).map_err(|why| why.to_string())?,
        Format::CompactJson => json::long(serde_json::from_str(text).map_err(|why| why.to_string())?),
        Format::Toon => {
            let read = toon_format::decode(text, &toon_format::DecodeOptions::default());
            uniform::plainly(read.map_err(|why| why.to_string())?)?
        }
        Format::ToonPositional => uniform::plainly(positional::read(text)?)?,
    };
    serde_json::from_value(value).map_err(|why| why.to_string())
}

//! A HUD as text, and back: JSON, JSON with short names, TOON, and the positional dialect. What is written is told in pieces, each
//! with its place, so that a model that has read one before need not read it again.

mod json;
mod lines;
pub mod positional;
mod uniform;

use crate::hud::{Hud, MessageView};
use crate::world::RoomId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

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
    fn known(&self, known: &Map<String, Value>) -> Vec<String>;
    /// From there to what it did.
    fn used(&self, hud: &Hud) -> String;
    /// Something that it did.
    fn did(&self, action: &Map<String, Value>) -> String;
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

/// Where what an agent did begins among its own pieces: behind what it knows.
const DONE: u64 = 1 << 12;

/// Where the numbered things of an agent and of rooms stand.
impl Place {
    /// What all agents of a kind are told.
    pub(crate) fn shared() -> Self {
        Self::new(Part::Shared, 0)
    }

    /// Who the agent is, and then what it knows, entry by entry.
    pub(crate) fn known(n: usize) -> Self {
        Self::new(Part::Own, (n as u64).min(DONE - 2))
    }

    /// From there to what it did.
    pub(crate) fn used() -> Self {
        Self::new(Part::Own, DONE - 1)
    }

    /// The `number`-th thing that it ever did.
    pub(crate) fn did(number: u64) -> Self {
        Self::new(Part::Own, DONE + 2 * number)
    }

    /// Whether it is something that the agent did.
    pub(crate) fn is_did(self) -> bool {
        self.part == Part::Own && (DONE..LAST).contains(&self.item) && (self.item - DONE).is_multiple_of(2)
    }

    /// From there to its rooms.
    pub(crate) fn to_rooms() -> Self {
        Self::new(Part::Own, LAST)
    }

    /// A part of a room: its head, how fast it goes, its board.
    pub(crate) fn room(room: RoomId, n: u64) -> Self {
        Self::new(Part::Room(room), n)
    }

    /// A message.
    pub(crate) fn said(room: RoomId, id: u64) -> Self {
        Self::new(Part::Room(room), NUMBERED + 2 * id)
    }

    /// The end of everything.
    pub(crate) fn end() -> Self {
        Self::new(Part::End, 0)
    }

    /// What divides a piece from the next.
    pub(crate) fn behind(self) -> Self {
        Self { item: self.item + 1, ..self }
    }

    fn new(part: Part, item: u64) -> Self {
        Self { part, item }
    }
}

/// A HUD in pieces.
#[must_use]
pub fn pieces(hud: &Hud, format: Format) -> Vec<Piece> {
    let writer = writer(format);
    let mut pieces = Vec::new();
    let mut push = |place: Place, text: String| pieces.push(Piece { place, text });
    push(Place::shared(), writer.shared(hud));
    push(Place::known(0), writer.identity(hud));
    for (n, entry) in writer.known(&hud.me.knowledge).into_iter().enumerate() {
        push(Place::known(1 + n), entry);
    }
    push(Place::used(), writer.used(hud));
    for (n, action) in hud.me.recent_actions.iter().enumerate() {
        let place = Place::did(n as u64);
        push(place, writer.did(action));
        if n + 1 < hud.me.recent_actions.len() {
            push(place.behind(), writer.between_actions().to_owned());
        }
    }
    push(Place::to_rooms(), writer.to_rooms(hud));
    for (n, room) in hud.rooms.iter().enumerate() {
        push(Place::room(room.id, 0), writer.room(hud, n));
        push(Place::room(room.id, 1), writer.pace(hud, n));
        push(Place::room(room.id, 2), writer.board(hud, n, room.messages.len()));
        for (m, said) in room.messages.iter().enumerate() {
            let place = Place::said(room.id, said.id);
            push(place, writer.message(said));
            if m + 1 < room.messages.len() {
                push(place.behind(), writer.between_messages().to_owned());
            }
        }
        push(Place::room(room.id, LAST), writer.room_end(hud, n, room.messages.len()));
    }
    push(Place::end(), writer.end(hud));
    pieces.retain(|piece| !piece.text.is_empty());
    pieces
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

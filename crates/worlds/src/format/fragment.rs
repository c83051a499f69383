//! Fragments of a HUD and their keys.

use crate::hud::HudRoom;
use crate::world::RoomId;

/// The key of a fragment. Keys are ordered as the text is, and a fragment that does not change keeps its key: the key
/// becomes a position in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentKey {
    pub section: HudSection,
    /// The number within the section.
    pub item: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HudSection {
    /// The same text for all agents of a kind.
    Shared,
    Agent,
    /// A room of another agent.
    Room(RoomId),
    /// The agent's own room, after all others.
    OwnRoom(RoomId),
    End,
}

impl HudSection {
    fn of_room(room: &HudRoom) -> Self {
        if room.is_self_room { Self::OwnRoom(room.id) } else { Self::Room(room.id) }
    }

    /// The room that the section shows.
    #[must_use]
    pub fn room(self) -> Option<RoomId> {
        match self {
            Self::Room(room) | Self::OwnRoom(room) => Some(room),
            Self::Shared | Self::Agent | Self::End => None,
        }
    }
}

/// A part of a HUD as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HudFragment<T = String> {
    pub key: FragmentKey,
    pub text: T,
}

/// The first key of the messages of a room; the odd key after each message is its separator.
const FIRST_MESSAGE: u64 = 16;

/// The first key of an agent's recent actions, after its knowledge entries; the odd key after each is its separator.
const FIRST_ACTION: u64 = 1 << 12;

/// The last key of a section.
pub const LAST_ITEM: u64 = (1 << 24) - 1;

impl FragmentKey {
    pub(crate) fn shared() -> Self {
        Self::new(HudSection::Shared, 0)
    }

    /// Identity is entry 0, knowledge entries follow. Entries beyond the range share its last key.
    pub(crate) fn knowledge(n: usize) -> Self {
        Self::new(HudSection::Agent, (n as u64).min(FIRST_ACTION - 2))
    }

    pub(crate) fn memory_usage() -> Self {
        Self::new(HudSection::Agent, FIRST_ACTION - 1)
    }

    /// `number` counts all actions that the agent ever performed.
    pub(crate) fn action(number: u64) -> Self {
        Self::new(HudSection::Agent, FIRST_ACTION + 2 * number)
    }

    /// Whether it is the key of a recent action, not of a separator.
    pub(crate) fn is_action(self) -> bool {
        self.is_in_actions() && (self.item - FIRST_ACTION).is_multiple_of(2)
    }

    /// Whether it is the key of a recent action or of a separator between two.
    pub(crate) fn is_in_actions(self) -> bool {
        self.section == HudSection::Agent && (FIRST_ACTION..LAST_ITEM).contains(&self.item)
    }

    pub(crate) fn rooms_header() -> Self {
        Self::new(HudSection::Agent, LAST_ITEM)
    }

    /// The parts of a room before its messages: header 0, pace 1, messages header 2.
    pub(crate) fn room(room: &HudRoom, n: u64) -> Self {
        Self::new(HudSection::of_room(room), n)
    }

    pub(crate) fn message(room: &HudRoom, id: u64) -> Self {
        Self::new(HudSection::of_room(room), FIRST_MESSAGE + 2 * id)
    }

    pub(crate) fn end() -> Self {
        Self::new(HudSection::End, 0)
    }

    pub(crate) fn separator_after(self) -> Self {
        Self { item: self.item + 1, ..self }
    }

    fn new(section: HudSection, item: u64) -> Self {
        Self { section, item }
    }
}

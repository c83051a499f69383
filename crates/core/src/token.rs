//! The numbers and names that a timeline is made of, each its own type, so that mixing two up does
//! not compile. Nothing here knows about windows, scores or files.

use std::fmt;
use std::str::FromStr;

/// A token's birth index on the timeline. It never changes and is never given to another token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// A token's index in what the model sees now. Attention comes back by slot; only the
/// [live view](crate::live::LiveView) turns a slot into a position or back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// One message. Turn ids count upward for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TurnId(pub u32);

/// A token's number in the vocabulary of the model that speaks it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

impl TokenId {
    /// What stands where something was forgotten for good. No model has a token of this number.
    pub const FORGOTTEN: TokenId = TokenId(u32::MAX - 1);
}

impl Position {
    /// The position `n` places further on.
    #[must_use]
    pub fn plus(self, n: usize) -> Self {
        Self(self.0 + n as u64)
    }

    /// As an index into the timeline's columns. Positions are dense, so this is the identity.
    pub(crate) fn index(self) -> usize {
        usize::try_from(self.0).expect("a position addresses a token that is in memory")
    }
}

impl Slot {
    /// As an index into an attention row.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl TurnId {
    /// The turn after this one. The very last number has none: it is then itself, and is refused as taken.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// How much the model has looked at a token.
///
/// A float, because the v0 engine may decay by fractions. Magnitude voting keeps whole numbers, which an
/// `f32` holds exactly down to −16,777,216: a token would have to go unnoticed for sixteen million steps
/// before its decay stands still.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Brightness(pub f32);

impl fmt::Display for Brightness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Standing instructions.
    System,
    /// The person, or whoever writes to the model.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The letter that chunk names begin with.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Role::System => 's',
            Role::User => 'u',
            Role::Assistant => 'a',
        }
    }

    /// The role whose chunk names begin with `letter`.
    #[must_use]
    pub fn from_letter(letter: char) -> Option<Self> {
        [Role::System, Role::User, Role::Assistant].into_iter().find(|r| r.letter() == letter)
    }

    /// The word that captures, exports and chat templates use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }

    /// The role of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Role::System, Role::User, Role::Assistant].into_iter().find(|r| r.name() == name)
    }
}

/// Where a token came from, as far as its first brightness is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The user's words.
    User,
    /// Standing instructions.
    System,
    /// A tool's result.
    Tool,
    /// The model's words.
    Llm,
    /// Anything else.
    Other,
}

impl Source {
    /// The source of a token by its role, or that it is part of a tool's result.
    #[must_use]
    pub fn of(role: Role, tool: bool) -> Self {
        match role {
            _ if tool => Source::Tool,
            Role::User => Source::User,
            Role::System => Source::System,
            Role::Assistant => Source::Llm,
        }
    }
}

/// A paragraph or code block of one turn, written `u4.0`, `a5.2`, `s0.0` (role, turn, sentence).
/// Sentence 0 is the turn's opening, its *anchor*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// The message it belongs to.
    pub turn: TurnId,
    /// Its number in the message, counted from 0.
    pub sentence: u32,
    /// Who speaks.
    pub role: Role,
}

impl ChunkId {
    /// The chunk `sentence` of `turn`, spoken by `role`.
    #[must_use]
    pub fn new(role: Role, turn: TurnId, sentence: u32) -> Self {
        Self { turn, sentence, role }
    }

    /// Whether this is the opening of its turn.
    #[must_use]
    pub fn is_anchor(self) -> bool {
        self.sentence == 0
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}.{}", self.role.letter(), self.turn.0, self.sentence)
    }
}

/// Why a text is not the name of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not the name of a chunk: write role, turn and sentence, such as u4.0, a5.2 or s0.0")]
pub struct BadChunkId(String);

impl FromStr for ChunkId {
    type Err = BadChunkId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let role = Role::from_letter(text.chars().next()?)?;
            let (turn, sentence) = text[1..].split_once('.')?;
            let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok())?;
            Some(Self::new(role, TurnId(number(turn)?), number(sentence)?))
        };
        parse().ok_or_else(|| BadChunkId(text.to_owned()))
    }
}

/// Whose words a token is, within its turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Voice {
    /// Those of whoever speaks in the turn.
    #[default]
    Speaker,
    /// A tool's: its result.
    Tool,
    /// Nobody's: what the model's template puts around messages.
    Frame,
}

impl Voice {
    /// The flags that a token of this voice is born with.
    #[must_use]
    pub fn flags(self) -> Flags {
        match self {
            Voice::Speaker => Flags::default(),
            Voice::Tool => Flags::TOOL,
            Voice::Frame => Flags::FRAME,
        }
    }
}

/// What is true of one token beside its text and brightness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u8);

impl Flags {
    /// Pruned: out of the window, still searchable, can return.
    pub const DEAD: Flags = Flags(1);
    /// Taken back by the user: out of the window and out of search, returns only by undo.
    pub const WITHDRAWN: Flags = Flags(2);
    /// Part of a tool's result.
    pub const TOOL: Flags = Flags(4);
    /// What the model's template puts around messages: nobody has said it.
    pub const FRAME: Flags = Flags(8);

    /// Whose words the token is.
    #[must_use]
    pub fn voice(self) -> Voice {
        if self.has(Flags::TOOL) {
            Voice::Tool
        } else if self.has(Flags::FRAME) {
            Voice::Frame
        } else {
            Voice::Speaker
        }
    }

    /// Neither dead nor withdrawn: the model sees it.
    #[must_use]
    pub fn is_live(self) -> bool {
        self.0 & (Self::DEAD.0 | Self::WITHDRAWN.0) == 0
    }

    /// Whether all of `other` is set.
    #[must_use]
    pub fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags with `other` set or cleared.
    #[must_use]
    pub fn with(self, other: Flags, on: bool) -> Self {
        if on { Flags(self.0 | other.0) } else { Flags(self.0 & !other.0) }
    }

    /// The byte that a store keeps.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// The flags of a stored byte; bits that mean nothing are refused.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        let known = Self::DEAD.0 | Self::WITHDRAWN.0 | Self::TOOL.0 | Self::FRAME.0;
        (bits & !known == 0 && bits & (Self::TOOL.0 | Self::FRAME.0) != Self::TOOL.0 | Self::FRAME.0)
            .then_some(Flags(bits))
    }
}

//! The ids and numbers of a timeline, each with its own type, so that a mix-up does not compile. Nothing here
//! depends on windows, scores or files.

use std::fmt;
use std::str::FromStr;

/// The index of a token on the timeline. It never changes and is never used for another token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// The index of a token in what the model sees now. Attention rows are indexed by slot; only the [context
/// window](crate::context_window::ContextWindow) converts between slots and positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// The id of a message. Ids ascend along the timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TurnId(pub u32);

/// The number of a token in the vocabulary of its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

impl TokenId {
    /// Takes the place of a token whose text was erased for good. No vocabulary has this number.
    pub const FORGOTTEN: TokenId = TokenId(u32::MAX - 1);
    /// A word of an imported text that no model has tokenized yet. No vocabulary has this number.
    pub const UNTOKENIZED: TokenId = TokenId(u32::MAX);
}

impl Position {
    /// The position `n` tokens further on.
    #[must_use]
    pub fn plus(self, n: usize) -> Self {
        Self(self.0 + n as u64)
    }

    /// The index in an array of all tokens.
    pub(crate) fn index(self) -> usize {
        usize::try_from(self.0).expect("a position addresses a token that is in memory")
    }
}

impl Slot {
    /// The index in an attention row.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl TurnId {
    /// The id of the next turn. The largest id gives itself, which an append then refuses.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// A score of how much attention a token has received.
///
/// A float, because time-to-live scoring may decay by fractions. Magnitude voting uses integers, which an `f32`
/// holds exactly down to −16,777,216: enough for sixteen million steps without attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Brightness(pub f32);

impl fmt::Display for Brightness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The system prompt, or a later system message.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A client: the result of a function that the model called.
    Tool,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 4] = [Role::System, Role::User, Role::Assistant, Role::Tool];

    /// The letter that chunk ids begin with.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Role::System => 's',
            Role::User => 'u',
            Role::Assistant => 'a',
            Role::Tool => 't',
        }
    }

    /// The role whose chunk ids begin with `letter`.
    #[must_use]
    pub fn from_letter(letter: char) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.letter() == letter)
    }

    /// The name in captures, exports and chat templates.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }

    /// The role with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// The origin of a token, which its initial brightness depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// A message of the user.
    User,
    /// A system message.
    System,
    /// A tool result.
    Tool,
    /// An answer of the model.
    Llm,
    /// Anything else.
    Other,
}

impl TokenSource {
    /// The origin of a token in a message of `role`; `tool` for a tool result.
    #[must_use]
    pub fn from_role(role: Role, tool: bool) -> Self {
        match role {
            _ if tool => TokenSource::Tool,
            Role::User => TokenSource::User,
            Role::System => TokenSource::System,
            Role::Assistant => TokenSource::Llm,
            Role::Tool => TokenSource::Tool,
        }
    }
}

/// The id of a chunk: a paragraph or code block of one message. Written as role, turn and index: `u4.0`,
/// `a5.2`, `t6.0`, `s0.0`. The first chunk of a turn, with the index 0, is its *anchor*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// The message that it belongs to.
    pub turn: TurnId,
    /// Its index in the message, counted from 0.
    pub index: u32,
    /// Who wrote the message.
    pub role: Role,
}

impl ChunkId {
    /// The id of the chunk `index` of a turn.
    #[must_use]
    pub fn new(role: Role, turn: TurnId, index: u32) -> Self {
        Self { turn, index, role }
    }

    /// Whether this is the first chunk of its turn.
    #[must_use]
    pub fn is_anchor(self) -> bool {
        self.index == 0
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}.{}", self.role.letter(), self.turn.0, self.index)
    }
}

/// Why a text is not a chunk id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a chunk id: write role, turn and index, such as u4.0, a5.2 or s0.0")]
pub struct ParseChunkIdError(String);

impl FromStr for ChunkId {
    type Err = ParseChunkIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let role = Role::from_letter(text.chars().next()?)?;
            let (turn, index) = text[1..].split_once('.')?;
            let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok())?;
            Some(Self::new(role, TurnId(number(turn)?), number(index)?))
        };
        parse().ok_or_else(|| ParseChunkIdError(text.to_owned()))
    }
}

/// What kind of content a token is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentKind {
    /// Text of the message, by the role of the turn.
    #[default]
    Message,
    /// Part of a tool result.
    ToolResult,
    /// Part of the chat template around messages; nobody wrote it.
    Template,
}

impl ContentKind {
    /// The flags of a new token of this kind.
    #[must_use]
    pub fn flags(self) -> TokenFlags {
        match self {
            ContentKind::Message => TokenFlags::default(),
            ContentKind::ToolResult => TokenFlags::TOOL_RESULT,
            ContentKind::Template => TokenFlags::TEMPLATE,
        }
    }
}

/// The flags of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TokenFlags(u8);

impl TokenFlags {
    /// Out of the context window; still found by search; can be resurrected.
    pub const PRUNED: TokenFlags = TokenFlags(1);
    /// Out of the context window and out of search until it is undeleted.
    pub const DELETED: TokenFlags = TokenFlags(2);
    /// Part of a tool result.
    pub const TOOL_RESULT: TokenFlags = TokenFlags(4);
    /// Part of the chat template around messages.
    pub const TEMPLATE: TokenFlags = TokenFlags(8);

    /// What kind of content the token is.
    #[must_use]
    pub fn kind(self) -> ContentKind {
        if self.contains(TokenFlags::TOOL_RESULT) {
            ContentKind::ToolResult
        } else if self.contains(TokenFlags::TEMPLATE) {
            ContentKind::Template
        } else {
            ContentKind::Message
        }
    }

    /// Whether the token is in the context window: neither pruned nor deleted.
    #[must_use]
    pub fn is_live(self) -> bool {
        self.0 & (Self::PRUNED.0 | Self::DELETED.0) == 0
    }

    /// Whether all flags of `other` are set.
    #[must_use]
    pub fn contains(self, other: TokenFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags with those of `other` set or cleared.
    #[must_use]
    pub fn with(self, other: TokenFlags, on: bool) -> Self {
        if on { TokenFlags(self.0 | other.0) } else { TokenFlags(self.0 & !other.0) }
    }

    /// The byte that stores write.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// The flags of a stored byte; none for unknown bits and for contradictory ones.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        let known = Self::PRUNED.0 | Self::DELETED.0 | Self::TOOL_RESULT.0 | Self::TEMPLATE.0;
        (bits & !known == 0
            && bits & (Self::TOOL_RESULT.0 | Self::TEMPLATE.0) != Self::TOOL_RESULT.0 | Self::TEMPLATE.0)
            .then_some(TokenFlags(bits))
    }
}

//! Conversations that other programs wrote down, read into one plain form.
//!
//! [`detect`] tells the format from the first bytes, [`read`] hands over one [`Foreign`] conversation after
//! the other. A reader never invents: text comes in as it was written, and what has no place here (images,
//! tool calls, other branches) is counted in [`Losses`], so that an import can say what it left behind. A
//! file is somebody else's data and is trusted with nothing: whatever it contains, the answer is a
//! conversation or an error.
//!
//! Memory: one conversation at a time. A record (a conversation of an account export, a line of a JSONL file)
//! may be 256 MiB long, a Markdown transcript as well, a Halo Weave export 1 GiB; what is longer is refused.
//! In memory it takes a few times as much.

mod chatgpt;
mod claude;
mod date;
mod detect;
mod input;
mod markdown;
mod openai;
mod sillytavern;
mod weave;

pub use detect::{detect_format, is_zip};

use halo_core::token::Role;
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::io::{self, BufRead};

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImportFormat {
    /// An export or a database backup of Halo Weave.
    Weave,
    /// A chat file of SillyTavern.
    SillyTavern,
    /// The `conversations.json` of a ChatGPT account export.
    ChatGpt,
    /// The `conversations.json` of a Claude account export.
    Claude,
    /// Messages as the OpenAI interface takes them, or a fine-tuning file.
    OpenAi,
    /// A transcript in Markdown or plain text.
    Markdown,
}

impl ImportFormat {
    /// Every format, in the order in which they are offered.
    pub const ALL: [ImportFormat; 6] = [
        ImportFormat::Weave,
        ImportFormat::SillyTavern,
        ImportFormat::ChatGpt,
        ImportFormat::Claude,
        ImportFormat::OpenAi,
        ImportFormat::Markdown,
    ];

    /// The name by which a user asks for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ImportFormat::Weave => "halo_weave",
            ImportFormat::SillyTavern => "sillytavern",
            ImportFormat::ChatGpt => "chatgpt",
            ImportFormat::Claude => "claude",
            ImportFormat::OpenAi => "openai",
            ImportFormat::Markdown => "markdown",
        }
    }

    /// The format of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

impl fmt::Display for ImportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImportFormat::Weave => "a Halo Weave export",
            ImportFormat::SillyTavern => "a SillyTavern chat",
            ImportFormat::ChatGpt => "a ChatGPT export",
            ImportFormat::Claude => "a Claude export",
            ImportFormat::OpenAi => "a list of OpenAI messages",
            ImportFormat::Markdown => "a Markdown transcript",
        })
    }
}

/// A conversation as another program wrote it down.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForeignConversation {
    /// Its title, or the character that it was held with.
    pub name: Option<String>,
    /// The model that spoke, as the other program calls it.
    pub model: Option<String>,
    /// When it began, in milliseconds since 1970.
    pub created: Option<i64>,
    /// What was said, in order; nothing, if the file has an empty conversation.
    pub turns: Vec<ForeignTurn>,
    /// The notes that the model kept beside it.
    pub notes: Option<Value>,
    /// Its search index; every entry names a chunk that is in `turns`, and none is named twice.
    pub index: Vec<ForeignIndexEntry>,
    /// What could not be kept.
    pub losses: ImportLosses,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ForeignTurn {
    /// Its number in the other program. Where turns have numbers, they rise; a system prompt that the other
    /// program keeps outside of the turns stands in front and has none.
    pub number: Option<u32>,
    pub role: Role,
    /// The name that the speaker goes by, if the file says more than the role.
    pub speaker: Option<String>,
    /// When, in milliseconds since 1970. A date without a time zone is read as UTC.
    pub at: Option<i64>,
    pub content: ForeignContent,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum ForeignContent {
    Text(String),
    /// Tokens with what was known about each, at least one.
    Tokens(Vec<ForeignToken>),
}

/// A token as Halo Weave kept it.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignToken {
    /// Its number in the vocabulary of the model that spoke.
    pub id: Option<u32>,
    /// Its text; empty for a control token.
    pub text: String,
    /// The chunk of the turn; never falls within a turn.
    pub chunk_index: u32,
    /// How bright it is, or was when it was pruned; finite.
    pub brightness: f32,
    pub pruned: bool,
    pub pinned: bool,
    /// Part of a tool's result.
    pub tool: bool,
}

/// A chunk in the search index of Halo Weave.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignIndexEntry {
    /// The turn that the chunk belongs to, as in [`ForeignTurn::number`].
    pub turn: u32,
    /// The chunk of the turn.
    pub chunk_index: u32,
    pub role: Role,
    /// What the chunk said when it was indexed.
    pub text: String,
    /// How often it was brought back.
    pub references: u64,
    /// Its embedding, if the file has it; every number is finite.
    pub embedding: Option<Vec<f32>>,
}

/// What could not be kept, counted by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportLosses(BTreeMap<&'static str, u64>);

impl ImportLosses {
    /// Counts `n` more of a kind.
    pub fn add(&mut self, kind: &'static str, n: usize) {
        if n > 0 {
            let count = self.0.entry(kind).or_default();
            *count = count.saturating_add(n as u64);
        }
    }

    /// Whether everything was kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The kinds in alphabetical order, each with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(kind, count)| (*kind, *count))
    }

    /// Adds what another conversation has lost.
    pub fn merge(&mut self, other: &ImportLosses) {
        for (kind, n) in other.iter() {
            let count = self.0.entry(kind).or_default();
            *count = count.saturating_add(n);
        }
    }
}

/// What [`Losses`] calls the things that more than one reader has to leave behind.
mod loss_kind {
    pub const ATTACHMENTS: &str = "attachments";
    pub const AUDIO: &str = "audio";
    pub const BRANCHES: &str = "messages on other branches";
    pub const BROKEN_LINKS: &str = "links that lead to no earlier message";
    pub const UNREADABLE_DATES: &str = "unreadable dates";
    pub const HIDDEN_MESSAGES: &str = "hidden messages";
    pub const IMAGES: &str = "images";
    pub const UNKNOWN_PARTS: &str = "parts of an unknown kind";
    pub const UNKNOWN_ROLES: &str = "messages of an unknown role";
    pub const REASONING: &str = "thoughts of the model";
    pub const TOOL_CALLS: &str = "tool calls";
    pub const TOOL_RESULTS: &str = "tool results";
}

/// Why a file could not be read to its end. Conversations that were handed over before stay good.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file itself could not be read.
    #[error("the file could not be read: {0}; check that it is still there and may be opened")]
    Io(#[source] io::Error),
    /// A byte fits no character.
    #[error(
        "the file is not UTF-8 text: byte {byte}, in line {line}, fits no character; save the file as UTF-8 \
         and import it again"
    )]
    NotUtf8 {
        /// The line, counted from 1.
        line: u64,
        /// The byte of the file, counted from 0.
        byte: u64,
    },
    /// One record would take more memory than an import may.
    #[error("record {record} is longer than {limit} bytes; split the file and import the parts one by one")]
    TooLong {
        /// The conversation or line, counted from 1.
        record: u64,
        /// How long it may be.
        limit: u64,
    },
    /// The text is not JSON, or a value in it is of the wrong kind.
    #[error("record {record} cannot be read: {source}; the file is damaged or cut short: export it again")]
    Json {
        /// The conversation or line, counted from 1.
        record: u64,
        /// What is wrong, with line and column.
        source: serde_json::Error,
    },
    /// The text is JSON of another shape.
    #[error("record {record} is not part of {format}: {why}; name the format that the file really has")]
    WrongFormat {
        format: ImportFormat,
        /// The conversation or line, counted from 1.
        record: u64,
        why: &'static str,
    },
    /// A transcript does not say who speaks.
    #[error(
        "no line of the transcript says who speaks; put a heading such as '## User' or '## Assistant' above \
         each message"
    )]
    NoSpeakers,
    /// The caller did not want to go on; its reason.
    #[error(transparent)]
    Aborted(Box<dyn std::error::Error + Send + Sync>),
}

/// Takes one conversation after the other; an error ends the reading.
type ConversationCallback<'a> = &'a mut dyn FnMut(ForeignConversation) -> Result<(), ImportError>;

/// Reads every conversation of a file, handing each over as soon as it is complete.
pub fn read(
    format: ImportFormat,
    input: &mut dyn BufRead,
    each: &mut dyn FnMut(ForeignConversation) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    match format {
        ImportFormat::Weave => weave::read(input, each),
        ImportFormat::SillyTavern => sillytavern::read(input, each),
        ImportFormat::ChatGpt => chatgpt::read(input, each),
        ImportFormat::Claude => claude::read(input, each),
        ImportFormat::OpenAi => openai::read(input, each),
        ImportFormat::Markdown => markdown::read(input, each),
    }
}

impl ForeignConversation {
    /// Adds a message, unless it says nothing at all.
    fn push_turn(&mut self, role: Role, speaker: &str, at: Option<i64>, text: String) {
        if !text.is_empty() {
            let speaker = non_blank(speaker);
            self.turns.push(ForeignTurn {
                number: None,
                role,
                speaker,
                at,
                content: ForeignContent::Text(text),
            });
        }
    }
}

/// Follows links back from the last message and returns the way from the first one on. A link that leads to
/// where one has been, or (an error of `before`) to nothing, ends the way and is counted.
fn path_from_root<K: Copy + Eq + Hash>(
    last: Option<K>,
    before: impl Fn(K) -> Result<Option<K>, ()>,
    lost: &mut ImportLosses,
) -> Vec<K> {
    let mut way = Vec::new();
    let mut seen = HashSet::new();
    let mut next = Ok(last);
    while let Ok(Some(message)) = next {
        if !seen.insert(message) {
            next = Err(());
            break;
        }
        way.push(message);
        next = before(message);
    }
    lost.add(loss_kind::BROKEN_LINKS, usize::from(next.is_err()));
    way.reverse();
    way
}

/// The text under a key, empty if there is none.
fn str_field<'v>(value: &'v Value, key: &str) -> &'v str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The list under a key, empty if there is none.
fn array_field<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Whether the value under a key is `true`.
fn bool_field(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool).unwrap_or(false)
}

/// A text that says something.
fn non_blank(text: &str) -> Option<String> {
    (!text.trim().is_empty()).then(|| text.to_owned())
}

/// Appends a part of a message to what comes before it, with `gap` between.
fn append_with_separator(whole: &mut String, gap: &str, part: &str) {
    if !whole.is_empty() && !part.is_empty() {
        whole.push_str(gap);
    }
    whole.push_str(part);
}

/// Appends the text of an attached file under its name. The model read it as part of the message, so it is
/// one.
fn append_attachment(whole: &mut String, name: &str, content: &str) {
    let name = if name.is_empty() { "attachment" } else { name };
    append_with_separator(whole, "\n\n", &format!("[{name}]\n{content}"));
}

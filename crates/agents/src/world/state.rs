//! What a world is made of: its agents, their rooms, what was said there, and what is true of all of it.

use crate::format::{Format, Output};
use crate::heartbeat::{Interval, Millis};
use crate::knowledge::Knowledge;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// An agent, for ever: names change, this does not. A room has the number of its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AgentId(pub u32);

/// A room: the number of its owner.
pub type RoomId = AgentId;

/// The person.
pub const ARCHITECT: AgentId = AgentId(0);

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Agents that a world can have, in all its time.
pub const MOST_AGENTS: u32 = 4_093;

/// Messages that a world can have, in all its time.
pub const MOST_MESSAGES: u64 = (1 << 23) - 16;

/// The last actions that an agent is shown.
pub const RECENT: usize = 20;

/// Messages of a room that are at hand; older ones are in the store.
pub const AT_HAND: usize = 2_000;

/// What an agent is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AgentKind {
    /// A character with a past.
    #[default]
    Persona,
    /// A function.
    Bot,
}

/// One agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentState {
    /// Who it is.
    pub id: AgentId,
    /// What it is for.
    pub kind: AgentKind,
    /// What it is called.
    pub name: String,
    /// The model that thinks for it.
    pub model: String,
    /// Where it comes from (a persona), or what it does (a bot).
    pub prompt: String,
    /// Whether it may make, change and retire others.
    pub can_create_agents: bool,
    /// How it is shown its HUD.
    pub input: Format,
    /// How it answers.
    pub output: Output,
    /// What it has written down.
    pub knowledge: Knowledge,
    /// What it did last, the newest last.
    pub recent: VecDeque<Recent>,
    /// How much it has ever done.
    #[serde(default)]
    pub done: u64,
    /// How fast its heart beats.
    pub interval: Interval,
    /// When it beats next.
    pub next: Millis,
    /// Until when it sleeps.
    pub asleep: Option<Millis>,
    /// How often its heart has beaten.
    pub beats: u64,
    /// It is no more.
    pub retired: bool,
    /// It does nothing until the person lets it.
    #[serde(default)]
    pub paused: bool,
}

/// Something that an agent did, or tried to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recent {
    /// What.
    #[serde(rename = "type")]
    pub kind: String,
    /// When.
    pub at: Millis,
    /// With what, shortened: each a word, a number, or yes or no.
    pub with: Map<String, Value>,
    /// Why it was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// How much of an agent's attention a room gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// So many hundredths.
    Fixed(f64),
    /// What the others leave, shared equally.
    #[default]
    Dynamic,
}

impl Attention {
    /// `30%` or `%*`, as agents write it.
    ///
    /// # Errors
    /// In words, when it is neither.
    pub fn read(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "%*" || text == "*" {
            return Ok(Self::Dynamic);
        }
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>();
        match number {
            Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Fixed(percent)),
            _ => Err(format!(
                "'{text}' is no share of attention: write one such as 30%, or %* for what the others leave"
            )),
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attention::Fixed(percent) => write!(f, "{percent}%"),
            Attention::Dynamic => f.write_str("%*"),
        }
    }
}

/// Somebody in a room.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// How much of its attention the room gets.
    pub attention: Attention,
    /// When it last spoke there.
    pub spoke: Option<Millis>,
    /// What it is writing: longer messages take their time.
    pub writing: Option<Draft>,
}

/// A message that is not said yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// What it says.
    pub content: String,
    /// What it answers.
    pub reply_to: Option<u64>,
    /// When it is written.
    pub due: Millis,
}

/// Somebody wants to come in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its number.
    pub id: u64,
    /// Who.
    pub requester: AgentId,
    /// With which key.
    pub key: String,
}

/// A room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Room {
    /// Its number: its owner's.
    pub id: RoomId,
    /// Who is in it.
    pub members: BTreeMap<AgentId, Member>,
    /// What hangs on its wall.
    pub billboard: Option<String>,
    /// What lets others ask to come in.
    pub keys: Vec<String>,
    /// Who does.
    pub requests: Vec<Request>,
    /// Words that can be said in a minute.
    pub wpm: u32,
    /// Its owner is no more.
    pub closed: bool,
    /// What was said last, the newest last.
    #[serde(skip)]
    pub messages: VecDeque<Message>,
}

/// Who says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sender {
    /// An agent, or the person.
    Agent(AgentId),
    /// The world itself.
    System,
}

impl fmt::Display for Sender {
    /// As agents see it: agents by number, so that they are known whatever they are called.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sender::Agent(ARCHITECT) => f.write_str("The Architect"),
            Sender::Agent(id) => write!(f, "{id}"),
            Sender::System => f.write_str("System"),
        }
    }
}

/// What can be felt about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reaction {
    /// Its sender thinks faster.
    ThumbsUp,
    /// Its sender thinks slower.
    ThumbsDown,
    /// Clever.
    Brain,
    /// Kind.
    Heart,
}

impl Reaction {
    /// All of them.
    pub const ALL: [Reaction; 4] =
        [Reaction::ThumbsUp, Reaction::ThumbsDown, Reaction::Brain, Reaction::Heart];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reaction::ThumbsUp => "thumbs_up",
            Reaction::ThumbsDown => "thumbs_down",
            Reaction::Brain => "brain",
            Reaction::Heart => "heart",
        }
    }

    /// What a word stands for.
    #[must_use]
    pub fn read(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reaction| reaction.name() == word.trim())
    }
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Its number, in the whole world.
    pub id: u64,
    /// Where.
    pub room: RoomId,
    /// When.
    pub at: Millis,
    /// By whom.
    pub sender: Sender,
    /// What.
    pub content: String,
    /// What it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<u64>,
    /// Who feels what about it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reactions: BTreeMap<Reaction, BTreeSet<AgentId>>,
}

impl Message {
    /// Whether somebody can feel that about it.
    ///
    /// # Errors
    /// In words, when it is its own, or it has felt so before.
    pub fn can_move(&self, who: AgentId, reaction: Reaction) -> Result<(), String> {
        if self.sender == Sender::Agent(who) {
            return Err("nobody reacts to what they said themselves".to_owned());
        }
        if self.reactions.get(&reaction).is_some_and(|all| all.contains(&who)) {
            return Err(format!("you have reacted to message {} with {} before", self.id, reaction.name()));
        }
        Ok(())
    }
}

/// How much fits into a HUD, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budgets {
    /// In all.
    pub total: usize,
    /// For what does not come from rooms, at most.
    #[serde(rename = "static")]
    pub fixed: usize,
    /// For rooms, at least.
    pub messages: usize,
    /// For what the agent has written down, at most.
    pub knowledge: usize,
}

impl Default for Budgets {
    fn default() -> Self {
        Self { total: 10_000, fixed: 5_000, messages: 5_000, knowledge: 3_000 }
    }
}

impl Budgets {
    /// The same in a smaller place: all shares stay as they are.
    #[must_use]
    pub fn within(self, room: usize) -> Self {
        if room >= self.total {
            return self;
        }
        let scaled = |part: usize| (part as u128 * room as u128 / self.total.max(1) as u128) as usize;
        Self {
            total: room,
            fixed: scaled(self.fixed),
            messages: scaled(self.messages),
            knowledge: scaled(self.knowledge),
        }
    }
}

/// The longest message, in characters.
pub const LONGEST: usize = 2_000;

/// What is true of a whole world.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The number of the next agent.
    pub next_agent: u32,
    /// The number of the next message.
    pub next_message: u64,
    /// The number of the next request.
    pub next_request: u64,
    /// How much fits into a HUD.
    pub budgets: Budgets,
    /// The models that may think; the first is the usual one.
    pub models: Vec<Brain>,
    /// How many agents there may be at once.
    pub most_agents: u32,
    /// What time it was when something last happened.
    #[serde(default)]
    pub clock: Millis,
}

impl Default for Head {
    fn default() -> Self {
        Self {
            next_agent: 1,
            next_message: 1,
            next_request: 1,
            budgets: Budgets::default(),
            models: Vec::new(),
            most_agents: 100,
            clock: 0,
        }
    }
}

/// A model that may think for agents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Brain {
    /// What agents and people call it.
    pub name: String,
    /// Where it is: an address or a model's name, as `--model` takes it; none: whatever the program runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
}

impl Brain {
    /// The program's own model, called so.
    pub fn here(name: impl Into<String>) -> Self {
        Self { name: name.into(), at: None }
    }
}

impl Head {
    /// Whether a model is called that.
    #[must_use]
    pub fn knows(&self, model: &str) -> bool {
        self.models.iter().any(|known| known.name == model)
    }

    /// What the models are called, in words.
    #[must_use]
    pub fn brains(&self) -> String {
        self.models.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

impl Room {
    /// A message that is at hand.
    #[must_use]
    pub fn message(&self, id: u64) -> Option<&Message> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get(at).filter(|message| message.id == id)
    }

    pub(super) fn message_mut(&mut self, id: u64) -> Option<&mut Message> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get_mut(at).filter(|message| message.id == id)
    }
}

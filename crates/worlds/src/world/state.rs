//! The data of a world: agents, rooms, messages and the header. The serde names are part of the stored format.

use crate::error::Error;
use crate::heartbeat::{HeartbeatInterval, Millis};
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::knowledge::AgentKnowledge;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// The number of an agent. An agent's name may change, its number never does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AgentId(pub u32);

/// A room has the number of its owner.
pub type RoomId = AgentId;

/// The number of the user.
pub const ARCHITECT: AgentId = AgentId(0);

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Agents over the whole life of a world. Fragment positions in the KV cache hold 12 bits for a section: the agent itself,
/// the rooms of others, its own room, and the end.
pub const MAX_AGENTS: u32 = 4_092;

/// Messages over the whole life of a world. Fragment positions in the KV cache hold 24 bits for a message and its
/// separator.
pub const MAX_MESSAGES: u64 = (1 << 23) - 16;

/// How many of its last actions an agent sees.
pub const RECENT_ACTIONS: usize = 20;

/// Messages of a room that stay in memory; older ones are only in the store.
pub const LOADED_MESSAGES: usize = 2_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AgentKind {
    /// A character with a background.
    #[default]
    Persona,
    /// An agent with a task.
    Bot,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentState {
    pub id: AgentId,
    pub kind: AgentKind,
    pub name: String,
    /// The name of its model, one of [`WorldHeader::models`].
    pub model: String,
    /// The background of a persona, or the role of a bot.
    pub prompt: String,
    /// Whether it may create, alter and retire agents.
    pub can_create_agents: bool,
    #[serde(rename = "input")]
    pub hud_format: HudFormat,
    #[serde(rename = "output")]
    pub answer_format: AnswerFormat,
    pub knowledge: AgentKnowledge,
    /// The last [`RECENT_ACTIONS`] actions, oldest first.
    #[serde(rename = "recent")]
    pub recent_actions: VecDeque<RecentAction>,
    /// All actions ever. The number of an action keys its place in the HUD.
    #[serde(default)]
    #[serde(rename = "done")]
    pub action_count: u64,
    pub interval: HeartbeatInterval,
    #[serde(rename = "next")]
    pub next_heartbeat: Millis,
    #[serde(rename = "asleep")]
    pub sleep_until: Option<Millis>,
    #[serde(rename = "beats")]
    pub heartbeat_count: u64,
    /// A retired agent stays in the store, so that its messages keep a sender.
    pub retired: bool,
    /// Paused by the user: no heartbeats until resumed.
    #[serde(default)]
    pub paused: bool,
}

/// An action that an agent performed or attempted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecentAction {
    #[serde(rename = "type")]
    pub kind: String,
    pub at: Millis,
    /// The arguments: strings (shortened), numbers and booleans.
    #[serde(rename = "with")]
    pub args: Map<String, Value>,
    /// Why the action was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// The share of its message budget that an agent gives a room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoomAttention {
    /// A share in percent.
    Fixed(f64),
    /// An equal part of what fixed shares leave.
    #[default]
    Dynamic,
}

impl RoomAttention {
    /// Parses `30%` or `%*`, as agents write it.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        if text == "%*" || text == "*" {
            return Ok(Self::Dynamic);
        }
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>();
        match number {
            Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Self::Fixed(percent)),
            _ => Err(Error::invalid_input(format!(
                "'{text}' is not a share of attention: write one such as 30%, or %* for an equal part of the rest"
            ))),
        }
    }
}

impl fmt::Display for RoomAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoomAttention::Fixed(percent) => write!(f, "{percent}%"),
            RoomAttention::Dynamic => f.write_str("%*"),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoomMember {
    pub attention: RoomAttention,
    #[serde(rename = "spoke")]
    pub last_spoke: Option<Millis>,
    /// A message that is being typed: long messages are delivered later.
    #[serde(rename = "writing")]
    pub draft: Option<MessageDraft>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageDraft {
    pub content: String,
    pub reply_to: Option<u64>,
    /// When it is delivered.
    pub due: Millis,
    /// Paragraphs that are typed after it, each a message of its own.
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    pub rest: VecDeque<String>,
}

/// A request to join a room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessRequest {
    pub id: u64,
    pub requester: AgentId,
    pub key: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Room {
    pub id: RoomId,
    pub members: BTreeMap<AgentId, RoomMember>,
    /// Text that all members see.
    pub billboard: Option<String>,
    /// An agent needs one of these keys to request access.
    pub keys: Vec<String>,
    pub requests: Vec<AccessRequest>,
    /// Words per minute: the typing speed of its members.
    pub wpm: u32,
    /// Closed when its owner was retired.
    pub closed: bool,
    /// The last [`LOADED_MESSAGES`] messages, oldest first; stored as rows of their own.
    #[serde(skip)]
    pub messages: VecDeque<RoomMessage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MessageSender {
    /// An agent, or the user as [`ARCHITECT`].
    Agent(AgentId),
    System,
}

impl fmt::Display for MessageSender {
    /// As the HUD shows it: agents by number, because names may change.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MessageSender::Agent(ARCHITECT) => f.write_str("The Architect"),
            MessageSender::Agent(id) => write!(f, "{id}"),
            MessageSender::System => f.write_str("System"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reaction {
    /// Makes the heartbeat of the sender faster.
    ThumbsUp,
    /// Makes the heartbeat of the sender slower.
    ThumbsDown,
    Brain,
    Heart,
}

impl Reaction {
    pub const ALL: [Reaction; 4] =
        [Reaction::ThumbsUp, Reaction::ThumbsDown, Reaction::Brain, Reaction::Heart];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reaction::ThumbsUp => "thumbs_up",
            Reaction::ThumbsDown => "thumbs_down",
            Reaction::Brain => "brain",
            Reaction::Heart => "heart",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reaction| reaction.name() == name.trim())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomMessage {
    /// Unique in the world, not only in the room.
    pub id: u64,
    pub room: RoomId,
    pub at: Millis,
    pub sender: MessageSender,
    pub content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reactions: BTreeMap<Reaction, BTreeSet<AgentId>>,
}

impl RoomMessage {
    /// Fails for a reaction to one's own message, and for a repeated reaction.
    pub fn check_reaction(&self, agent: AgentId, reaction: Reaction) -> Result<(), Error> {
        if self.sender == MessageSender::Agent(agent) {
            return Err(Error::conflict("you cannot react to your own message"));
        }
        if self.reactions.get(&reaction).is_some_and(|agents| agents.contains(&agent)) {
            return Err(Error::conflict(format!(
                "you have already reacted to message {} with {}",
                self.id,
                reaction.name()
            )));
        }
        Ok(())
    }
}

/// The token budgets of a HUD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HudBudgets {
    pub total: usize,
    /// The most for everything but rooms.
    #[serde(rename = "static")]
    pub fixed: usize,
    /// The least for rooms.
    pub messages: usize,
    /// The most for the agent's knowledge.
    pub knowledge: usize,
}

impl Default for HudBudgets {
    fn default() -> Self {
        Self { total: 10_000, fixed: 5_000, messages: 5_000, knowledge: 3_000 }
    }
}

impl HudBudgets {
    /// The same proportions within a smaller total.
    #[must_use]
    pub fn scaled_to(self, limit: usize) -> Self {
        if limit >= self.total {
            return self;
        }
        let scaled = |part: usize| (part as u128 * limit as u128 / self.total.max(1) as u128) as usize;
        Self {
            total: limit,
            fixed: scaled(self.fixed),
            messages: scaled(self.messages),
            knowledge: scaled(self.knowledge),
        }
    }
}

pub const MAX_MESSAGE_CHARS: usize = 2_000;

/// The state of a whole world that belongs to no agent and no room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldHeader {
    pub next_agent: u32,
    pub next_message: u64,
    pub next_request: u64,
    pub budgets: HudBudgets,
    /// The models that agents may use; the first is the default.
    pub models: Vec<WorldModelRef>,
    /// Agents that may exist at the same time.
    #[serde(rename = "most_agents")]
    pub max_agents: u32,
    /// The time of the last change. World time never goes back.
    #[serde(default)]
    pub clock: Millis,
}

impl Default for WorldHeader {
    fn default() -> Self {
        Self {
            next_agent: 1,
            next_message: 1,
            next_request: 1,
            budgets: HudBudgets::default(),
            models: Vec::new(),
            max_agents: 100,
            clock: 0,
        }
    }
}

/// A model that agents may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorldModelRef {
    pub name: String,
    /// An address or a model's name, as `--model` takes it; none: the model that the program runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "at")]
    pub address: Option<String>,
}

impl WorldModelRef {
    /// The model that the program runs, under this name.
    pub fn local(name: impl Into<String>) -> Self {
        Self { name: name.into(), address: None }
    }
}

impl WorldHeader {
    #[must_use]
    pub fn has_model(&self, model: &str) -> bool {
        self.models.iter().any(|one| one.name == model)
    }

    /// The names of the models, for error messages.
    #[must_use]
    pub fn model_names(&self) -> String {
        self.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

impl Room {
    /// A message that is in memory.
    #[must_use]
    pub fn message(&self, id: u64) -> Option<&RoomMessage> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get(at).filter(|message| message.id == id)
    }

    pub(super) fn message_mut(&mut self, id: u64) -> Option<&mut RoomMessage> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get_mut(at).filter(|message| message.id == id)
    }
}

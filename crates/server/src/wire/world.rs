//! Worlds: agents, rooms, messages, and what an agent sees.

use halo_worlds::format::HudFormat;
use halo_worlds::heartbeat;
use halo_worlds::hud_renderer::RenderedHud;
use halo_worlds::runner::WorldClock;
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{
    AccessRequest, AgentId, AgentKind, AgentState, MessageSender, Room, RoomMember, RoomMessage, World,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;

#[derive(Serialize, ToSchema)]
#[schema(as = WorldSummary)]
pub(crate) struct ApiWorldSummary {
    pub name: String,
    /// In milliseconds since 1970.
    pub created: i64,
    pub agents: usize,
    pub messages: u64,
    /// Whether this server runs it.
    pub open: bool,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = NewWorld)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiNewWorld {
    pub name: String,
    /// A world file in TOML; none: the example world.
    pub file: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = World)]
pub(crate) struct ApiWorld {
    pub name: String,
    /// Whether this server runs it; if not, this is its stored state.
    pub open: bool,
    /// Whether another program runs it.
    pub runs_elsewhere: bool,
    /// Whether the command of this request was queued for the program that runs it.
    pub queued: bool,
    /// The clock of the world, in milliseconds since 1970.
    pub now: i64,
    pub paused: bool,
    /// Speed of the clock; 1 is real time.
    pub speed: f64,
    /// The agent that is thinking; of several, the one that began last.
    pub thinking: Option<u32>,
    /// The models that its agents may use; the first is the default.
    pub models: Vec<String>,
    pub agents: Vec<ApiAgent>,
    pub rooms: Vec<ApiRoom>,
}

impl ApiWorld {
    /// With the clock and the time of an open world; without them, a world that is only stored.
    pub fn new(name: String, world: &World, clock: Option<(WorldClock, i64)>) -> Self {
        let stored_now = || jiff::Timestamp::now().as_millisecond().max(world.header.clock);
        let now = clock.map_or_else(stored_now, |(_, now)| now);
        let clock = clock.map(|(clock, _)| clock);
        Self {
            name,
            open: clock.is_some(),
            runs_elsewhere: false,
            queued: false,
            now,
            paused: clock.is_none_or(|clock| clock.paused),
            speed: clock.map_or(1.0, |clock| clock.speed),
            thinking: clock.and_then(|clock| clock.thinking_agent).map(|agent| agent.0),
            models: world.header.models.iter().map(|model| model.name.clone()).collect(),
            agents: world.agents().map(|agent| ApiAgent::new(agent, now)).collect(),
            rooms: world.rooms().map(|room| ApiRoom::new(world, room)).collect(),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = Agent)]
pub(crate) struct ApiAgent {
    id: u32,
    name: String,
    /// The kind: persona or bot.
    kind: &'static str,
    model: String,
    /// Its persona or its task.
    prompt: String,
    /// The seconds between two heartbeats.
    interval: f64,
    /// The time of the next heartbeat, in milliseconds since 1970.
    next: i64,
    /// The number of heartbeats.
    beats: u64,
    /// Until when it sleeps, in milliseconds since 1970.
    asleep: Option<i64>,
    paused: bool,
    /// Whether it may create, change and retire agents.
    can_create_agents: bool,
    /// The format of its HUD.
    input_format: &'static str,
    /// The format of its answers.
    output_format: &'static str,
}

impl ApiAgent {
    fn new(agent: &AgentState, now: i64) -> Self {
        Self {
            id: agent.id.0,
            name: agent.name.clone(),
            kind: match agent.kind {
                AgentKind::Persona => "persona",
                AgentKind::Bot => "bot",
            },
            model: agent.model.clone(),
            prompt: agent.prompt.clone(),
            interval: agent.interval.seconds(),
            next: agent.next_heartbeat,
            beats: agent.heartbeat_count,
            asleep: agent.sleep_until.filter(|until| *until > now),
            paused: agent.paused,
            can_create_agents: agent.can_create_agents,
            input_format: agent.hud_format.name(),
            output_format: agent.answer_format.name(),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = Room)]
pub(crate) struct ApiRoom {
    /// The id of the room is that of its owner.
    id: u32,
    owner: String,
    members: Vec<ApiRoomMember>,
    billboard: Option<String>,
    /// Keys with which agents may ask to join.
    keys: Vec<String>,
    requests: Vec<ApiJoinRequest>,
    /// Words per minute at which messages appear.
    wpm: u32,
    /// The id of the last message; 0 if there is none.
    last_message: u64,
}

impl ApiRoom {
    fn new(world: &World, room: &Room) -> Self {
        let member = |(id, member): (&AgentId, &RoomMember)| ApiRoomMember {
            id: id.0,
            name: world.display_name(*id),
            attention: member.attention.to_string(),
            share: world.attention_shares(*id).get(&room.id).copied().unwrap_or(0.0),
            writing: member.draft.as_ref().map(|draft| draft.due),
        };
        let request = |request: &AccessRequest| ApiJoinRequest {
            id: request.id,
            agent: request.requester.0,
            name: world.display_name(request.requester),
            key: request.key.clone(),
        };
        Self {
            id: room.id.0,
            owner: world.display_name(room.id),
            members: room.members.iter().map(member).collect(),
            billboard: room.billboard.clone(),
            keys: room.keys.clone(),
            requests: room.requests.iter().map(request).collect(),
            wpm: room.wpm,
            last_message: room.messages.back().map_or(0, |message| message.id),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = RoomMember)]
pub(crate) struct ApiRoomMember {
    id: u32,
    name: String,
    /// The setting: `30%`, or `%*` for an equal part of the rest.
    attention: String,
    /// The resulting share of attention, in percent.
    share: f64,
    /// Until when it is writing a message, in milliseconds since 1970.
    writing: Option<i64>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = JoinRequest)]
pub(crate) struct ApiJoinRequest {
    id: u64,
    agent: u32,
    name: String,
    key: String,
}

#[derive(Serialize, ToSchema)]
#[schema(as = RoomMessage)]
pub(crate) struct ApiRoomMessage {
    id: u64,
    /// In milliseconds since 1970.
    at: i64,
    /// The agent that sent it; null for messages of the system.
    by: Option<u32>,
    name: String,
    text: String,
    reply_to: Option<u64>,
    /// The names of those who reacted, by reaction.
    reactions: BTreeMap<&'static str, Vec<String>>,
}

impl ApiRoomMessage {
    pub fn new(world: &World, message: &RoomMessage) -> Self {
        let (by, name) = match message.sender {
            MessageSender::Agent(id) => (Some(id.0), world.display_name(id)),
            MessageSender::System => (None, "System".to_owned()),
        };
        let names = |agents: &BTreeSet<AgentId>| agents.iter().map(|id| world.display_name(*id)).collect();
        let reactions = message.reactions.iter();
        Self {
            id: message.id,
            at: message.at,
            by,
            name,
            text: message.content.clone(),
            reply_to: message.reply_to,
            reactions: reactions.map(|(reaction, agents)| (reaction.name(), names(agents))).collect(),
        }
    }
}

/// An agent's knowledge, its recent actions and its HUD.
#[derive(Serialize, ToSchema)]
#[schema(as = AgentMind)]
pub(crate) struct ApiAgentMind {
    /// The format that the agent uses.
    pub own_format: &'static str,
    /// The tokens of its HUD in each format; null if the HUD does not fit.
    pub tokens_by_format: BTreeMap<&'static str, Option<usize>>,
    #[schema(value_type = Object)]
    pub knowledge: serde_json::Value,
    #[schema(value_type = Vec<Object>)]
    pub recent_actions: Vec<serde_json::Value>,
    pub hud: Option<ApiRenderedHud>,
    /// Why there is no HUD.
    pub error: Option<String>,
}

impl ApiAgentMind {
    /// The recent actions of an agent, as JSON objects with type, time and arguments.
    pub fn recent_actions(agent: &AgentState) -> Vec<serde_json::Value> {
        let actions = agent.recent_actions.iter().map(|action| {
            let mut json = serde_json::to_value(&action.args).unwrap_or_default();
            json["type"] = action.kind.clone().into();
            json["timestamp"] = heartbeat::format_time(action.at).into();
            if let Some(reason) = &action.refused {
                json["refused"] = reason.clone().into();
            }
            json
        });
        actions.collect()
    }
}

/// The HUD of an agent in one format.
#[derive(Serialize, ToSchema)]
#[schema(as = RenderedHud)]
pub(crate) struct ApiRenderedHud {
    format: &'static str,
    text: String,
    tokens: usize,
    /// The maximum number of tokens.
    budget: usize,
    /// Tokens of the parts that are not rooms.
    fixed: usize,
    /// Tokens of the knowledge, and their maximum.
    knowledge: (usize, usize),
    /// Tokens of each room.
    rooms: BTreeMap<u32, usize>,
    /// The notice to the agent about its HUD.
    notice: Option<String>,
    /// Messages that were recalled because they are relevant now.
    recalled: Vec<u64>,
}

impl ApiRenderedHud {
    pub fn new(format: HudFormat, rendered: &RenderedHud) -> Self {
        let usage = &rendered.token_usage;
        Self {
            format: format.name(),
            text: rendered.text(),
            tokens: usage.total,
            budget: rendered.budgets.total,
            fixed: usage.fixed,
            knowledge: (usage.knowledge, rendered.budgets.knowledge),
            rooms: usage.rooms.iter().map(|(room, tokens)| (room.0, *tokens)).collect(),
            notice: rendered.hud.me.notice.clone(),
            recalled: rendered.recalled.clone(),
        }
    }
}

/// Changes to the clock of a world; fields that are left out do not change.
#[derive(Deserialize, ToSchema)]
#[schema(as = ClockUpdate)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiClockUpdate {
    pub paused: Option<bool>,
    /// From 0.1 to 100.
    pub speed: Option<f64>,
    /// Whether to run one heartbeat now.
    #[serde(default)]
    pub step: bool,
}

/// A command of the user. The tag is `command` here; queued commands are stored with the tag `wish`.
pub(crate) struct ApiUserCommand(pub UserCommand);

const STORED_COMMAND_TAG: &str = "wish";

impl<'de> Deserialize<'de> for ApiUserCommand {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = serde_json::Map::deserialize(deserializer)?;
        if fields.contains_key(STORED_COMMAND_TAG) {
            return Err(D::Error::custom(format!("unknown field `{STORED_COMMAND_TAG}`")));
        }
        let command = fields.remove("command").ok_or_else(|| D::Error::missing_field("command"))?;
        fields.insert(STORED_COMMAND_TAG.to_owned(), command);
        serde_json::from_value(fields.into()).map(Self).map_err(D::Error::custom)
    }
}

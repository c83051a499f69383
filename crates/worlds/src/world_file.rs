//! A world as a user writes it in a file: agents, rooms, and optionally earlier messages. The field names are the file
//! format.

use crate::action;
use crate::error::Error;
use crate::heartbeat::{self, Millis, WPM_RANGE};
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::knowledge::AgentKnowledge;
use crate::text::check_length;
use crate::world::{
    ARCHITECT, AgentId, AgentKind, HudBudgets, MAX_MESSAGE_CHARS, MAX_MESSAGES, MessageSender, NewAgent,
    Reaction, RecentAction, RoomAttention, RoomId, RoomMessage, World, WorldModelRef,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorldFile {
    /// The models that agents may use; the first is the default. Empty: the model that the program runs.
    pub models: Vec<WorldModelRef>,
    #[serde(rename = "most_agents")]
    pub max_agents: Option<u32>,
    pub budgets: HudBudgets,
    pub agents: Vec<AgentFile>,
    /// Rooms with more than the defaults: every agent has a room of its own anyway.
    pub rooms: Vec<RoomFile>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentFile {
    /// Without a number the next free one.
    pub id: Option<u32>,
    /// Without a name `Bot-` and the number.
    pub name: Option<String>,
    #[serde(default, rename = "type")]
    pub kind: AgentKind,
    /// The background of a persona.
    pub seed: Option<String>,
    /// The task of a bot.
    pub role: Option<String>,
    /// Without a model the default.
    pub model: Option<String>,
    #[serde(default)]
    pub can_create_agents: bool,
    #[serde(default)]
    pub input_format: HudFormat,
    #[serde(default)]
    pub output_format: AnswerFormat,
    /// The seconds between two heartbeats.
    pub interval: Option<f64>,
    #[serde(default)]
    pub knowledge: Map<String, Value>,
    #[serde(default)]
    pub recent_actions: Vec<Map<String, Value>>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoomFile {
    pub owner: AgentRef,
    /// The members besides the owner.
    #[serde(default)]
    pub members: Vec<AgentRef>,
    pub billboard: Option<String>,
    #[serde(default)]
    pub keys: Vec<String>,
    pub wpm: Option<u32>,
    /// Shares by the name of the member, such as `30%`.
    #[serde(default)]
    pub attention: BTreeMap<String, String>,
    /// Times by the name of the member.
    #[serde(default)]
    #[serde(rename = "spoke")]
    pub last_spoke: BTreeMap<String, String>,
    #[serde(default)]
    pub messages: Vec<MessageFile>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageFile {
    /// Without a number the next free one.
    pub id: Option<u64>,
    /// Without a timestamp now.
    pub timestamp: Option<String>,
    /// `System` for messages of the system.
    pub sender: AgentRef,
    pub content: String,
    pub reply_to: Option<u64>,
    #[serde(default)]
    pub reactions: BTreeMap<Reaction, Vec<AgentRef>>,
}

/// An agent by name or by number.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum AgentRef {
    Id(u32),
    Name(String),
}

fn parse_timestamp(text: &str) -> Result<Millis, Error> {
    heartbeat::parse_time(text).ok_or_else(|| {
        Error::invalid_input(format!("'{text}' is not a time: write one such as 2024-01-15T10:30:00"))
    })
}

impl WorldFile {
    /// Creates the world, with `now` as its time. `model` is the name of the program's model for a file that names no
    /// models.
    pub fn into_world(self, model: &str, now: Millis) -> Result<World, Error> {
        let mut world = World::default();
        let header = world.header_mut();
        let budgets = self.budgets;
        if budgets.fixed > budgets.total
            || budgets.messages > budgets.total
            || budgets.knowledge > budgets.fixed
        {
            return Err(Error::invalid_input(
                "budgets: static and messages are parts of total, and knowledge is a part of static",
            ));
        }
        header.budgets = budgets;
        header.models = if self.models.is_empty() { vec![WorldModelRef::local(model)] } else { self.models };
        header.max_agents = self.max_agents.unwrap_or(header.max_agents).max(self.agents.len() as u32);
        let default_model = header.models.first().map(|model| model.name.clone()).unwrap_or_default();
        if self.agents.is_empty() {
            return Err(Error::invalid_input("the world has no agents: add them, each under [[agents]]"));
        }
        for agent in self.agents {
            let name = agent.name.clone().unwrap_or_else(|| "an agent without a name".to_owned());
            agent.add_to(&mut world, &default_model, now).map_err(|error| error.with_context(name))?;
        }
        for room in self.rooms {
            let owner = room.owner.clone();
            room.add_to(&mut world, now)
                .map_err(|error| error.with_context(format!("the room of {owner}")))?;
        }
        Ok(world)
    }
}

impl AgentFile {
    fn add_to(self, world: &mut World, default_model: &str, now: Millis) -> Result<(), Error> {
        let prompt = match (self.kind, self.seed, self.role) {
            (AgentKind::Persona, seed, None) => seed,
            (AgentKind::Bot, None, role) => role,
            _ => return Err(Error::invalid_input("a persona has a seed, and a bot has a role")),
        };
        let name = self.name.as_deref().map(action::parse_agent_name).transpose()?;
        if let Some(name) = &name {
            world.check_name_free(name, None)?;
        }
        if let Some(prompt) = &prompt {
            check_length("a seed or role", prompt, action::MAX_PROMPT_CHARS)?;
        }
        if let Some(id) = self.id {
            let next = world.header.next_agent;
            if id < next {
                return Err(Error::conflict(format!("the number {id} is used: the next free one is {next}")));
            }
            world.header_mut().next_agent = id;
        }
        let interval = self.interval.map(action::parse_interval).transpose()?;
        let model = self.model.unwrap_or_else(|| default_model.to_owned());
        world.check_model(&model)?;
        let new = NewAgent {
            kind: self.kind,
            name,
            model,
            prompt: prompt.unwrap_or_default(),
            formats: (self.input_format, self.output_format),
            can_create_agents: self.can_create_agents,
        };
        let id = world.create_agent(new, now)?;
        if let Some(agent) = world.agent_mut(id) {
            agent.interval = interval.unwrap_or(agent.interval);
            agent.knowledge = AgentKnowledge::from_entries(self.knowledge);
        }
        for action in self.recent_actions {
            world.record_action(id, parse_recent_action(action, now)?);
        }
        Ok(())
    }
}

fn parse_recent_action(mut fields: Map<String, Value>, now: Millis) -> Result<RecentAction, Error> {
    let mut take_text =
        |name: &str| fields.shift_remove(name).and_then(|value| value.as_str().map(str::to_owned));
    let (kind, timestamp, refused) = (take_text("type"), take_text("timestamp"), take_text("refused"));
    let at = timestamp.as_deref().map(parse_timestamp).transpose()?.unwrap_or(now);
    Ok(RecentAction { kind: kind.unwrap_or_default(), at, args: fields, refused })
}

impl std::fmt::Display for AgentRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AgentRef::Id(id) => write!(f, "{id}"),
            AgentRef::Name(name) => f.write_str(name),
        }
    }
}

impl AgentRef {
    pub fn resolve(&self, world: &World) -> Result<AgentId, Error> {
        match self {
            AgentRef::Id(0) => Ok(ARCHITECT),
            AgentRef::Id(id) => world.require_agent(AgentId(*id)).map(|agent| agent.id),
            AgentRef::Name(name) => require_agent_named(world, name),
        }
    }
}

/// Finds an agent by its exact name, then by number, then by its name in any case.
#[must_use]
pub fn find_agent(world: &World, name: &str) -> Option<AgentId> {
    let by_name = world.agents().find(|agent| agent.name == name).map(|agent| agent.id);
    let is_user = name == "The Architect" || name == "0";
    let by_number = || name.parse().ok().map(AgentId).filter(|id| world.agent(*id).is_some());
    let in_any_case =
        || world.agents().find(|agent| agent.name.eq_ignore_ascii_case(name)).map(|agent| agent.id);
    by_name.or_else(|| is_user.then_some(ARCHITECT)).or_else(by_number).or_else(in_any_case)
}

fn require_agent_named(world: &World, name: &str) -> Result<AgentId, Error> {
    find_agent(world, name).ok_or_else(|| Error::not_found(format!("there is no agent '{name}'")))
}

impl RoomFile {
    fn add_to(self, world: &mut World, now: Millis) -> Result<(), Error> {
        let id: RoomId = self.owner.resolve(world)?;
        let wpm = self.wpm.unwrap_or(heartbeat::DEFAULT_WPM);
        if !WPM_RANGE.contains(&wpm) {
            return Err(Error::invalid_input(format!("words per minute are 10 to 200, not {wpm}")));
        }
        if let Some(billboard) = &self.billboard {
            check_length("a billboard", billboard, action::MAX_BILLBOARD_CHARS)?;
        }
        let keys: Vec<String> = self.keys.iter().map(|key| key.trim().to_owned()).collect();
        keys.iter().try_for_each(|key| check_length("a key", key, action::MAX_KEY_CHARS))?;
        if keys.len() > action::MAX_KEYS || keys.iter().any(String::is_empty) {
            return Err(Error::invalid_input(format!(
                "a room has {} keys at most, and none of them is empty",
                action::MAX_KEYS
            )));
        }
        world.open_room(id);
        for member in &self.members {
            let member = member.resolve(world)?;
            world.add_member(id, member);
        }
        let Some(room) = world.room_mut(id) else {
            return Err(Error::conflict("the room cannot be opened"));
        };
        (room.billboard, room.keys, room.wpm) = (self.billboard, keys, wpm);
        for (name, at) in &self.last_spoke {
            let agent = require_member(world, id, name)?;
            let at = parse_timestamp(at)?;
            if let Some(member) = world.room_mut(id).and_then(|room| room.members.get_mut(&agent)) {
                member.last_spoke = Some(at);
            }
        }
        for (name, share) in &self.attention {
            let agent = require_member(world, id, name)?;
            world.set_attention(agent, id, RoomAttention::parse(share)?)?;
        }
        add_messages(world, id, self.messages, now)
    }
}

fn require_member(world: &World, room: RoomId, name: &str) -> Result<AgentId, Error> {
    let agent = require_agent_named(world, name)?;
    if world.require_room(room)?.members.contains_key(&agent) {
        Ok(agent)
    } else {
        Err(Error::conflict(format!("{name} is not a member of the room")))
    }
}

fn add_messages(world: &mut World, room: RoomId, files: Vec<MessageFile>, now: Millis) -> Result<(), Error> {
    let mut next = world.header.next_message;
    let mut messages = Vec::new();
    for file in files {
        messages.push(file.into_message(world, room, &mut next, now)?);
    }
    messages.sort_by_key(|message| message.id);
    if let Some(pair) = messages.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(Error::conflict(format!("two messages have the number {}", pair[0].id)));
    }
    for RoomMessage { id, content, .. } in &messages {
        if world.unsaved_changes().messages.contains_key(id) {
            return Err(Error::conflict(format!("message {id} is in another room too")));
        }
        if *id == 0 || *id > MAX_MESSAGES {
            return Err(Error::invalid_input(format!("message {id}: numbers are 1 to {MAX_MESSAGES}")));
        }
        if content.chars().count() > MAX_MESSAGE_CHARS {
            return Err(Error::invalid_input(format!(
                "message {id} has more than {MAX_MESSAGE_CHARS} characters"
            )));
        }
    }
    messages.into_iter().for_each(|message| world.insert_message(message));
    world.header_mut().next_message = next;
    Ok(())
}

impl MessageFile {
    fn into_message(
        self,
        world: &World,
        room: RoomId,
        next: &mut u64,
        now: Millis,
    ) -> Result<RoomMessage, Error> {
        let id = self.id.unwrap_or(*next);
        *next = (*next).max(id + 1);
        let sender = match &self.sender {
            AgentRef::Name(name) if name == "System" => MessageSender::System,
            sender => MessageSender::Agent(sender.resolve(world)?),
        };
        let mut reactions = BTreeMap::new();
        for (reaction, agents) in &self.reactions {
            let agents = agents.iter().map(|agent| agent.resolve(world)).collect::<Result<_, _>>()?;
            reactions.insert(*reaction, agents);
        }
        let at = self.timestamp.as_deref().map(parse_timestamp).transpose()?.unwrap_or(now);
        Ok(RoomMessage { id, room, at, sender, content: self.content, reply_to: self.reply_to, reactions })
    }
}

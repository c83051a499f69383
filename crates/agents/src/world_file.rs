//! A world as somebody writes it down: who lives there, which rooms they have, and, if they like, what was said before.

use crate::action::{self, no_longer};
use crate::format::{Format, Output};
use crate::heartbeat::{self, Interval, Millis, WPM};
use crate::knowledge::Knowledge;
use crate::world::{
    ARCHITECT, AgentId, AgentKind, Attention, Brain, Budgets, LONGEST, MOST_MESSAGES, Message, Newcomer,
    Reaction, Recent, RoomId, Sender, World,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A world as it is written down.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorldFile {
    /// The models that may think; the first is the usual one. None: whatever the program runs.
    pub models: Vec<Brain>,
    /// How many agents may live at once.
    pub most_agents: Option<u32>,
    /// How much fits into a HUD.
    pub budgets: Budgets,
    /// Who lives there.
    pub agents: Vec<AgentFile>,
    /// Rooms that are more than their owner's alone.
    pub rooms: Vec<RoomFile>,
}

/// An agent as it is written down.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentFile {
    /// Its number; none: the next one.
    pub id: Option<u32>,
    /// What it is called; none: as bots are.
    pub name: Option<String>,
    /// What it is for.
    #[serde(default, rename = "type")]
    pub kind: AgentKind,
    /// Where a persona comes from.
    pub seed: Option<String>,
    /// What a bot does.
    pub role: Option<String>,
    /// What thinks for it; none: the usual one.
    pub model: Option<String>,
    /// Whether it may make others.
    #[serde(default)]
    pub can_create_agents: bool,
    /// How it is shown its HUD.
    #[serde(default)]
    pub input_format: Format,
    /// How it answers.
    #[serde(default)]
    pub output_format: Output,
    /// Seconds from heartbeat to heartbeat.
    pub interval: Option<f64>,
    /// What it knows.
    #[serde(default)]
    pub knowledge: Map<String, Value>,
    /// What it did.
    #[serde(default)]
    pub recent_actions: Vec<Map<String, Value>>,
}

/// A room as it is written down.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoomFile {
    /// Whose.
    pub owner: Who,
    /// Who else is there.
    #[serde(default)]
    pub members: Vec<Who>,
    /// What hangs on the wall.
    pub billboard: Option<String>,
    /// What lets others ask to come in.
    #[serde(default)]
    pub keys: Vec<String>,
    /// Words in a minute.
    pub wpm: Option<u32>,
    /// How much of whose attention it gets.
    #[serde(default)]
    pub attention: BTreeMap<String, String>,
    /// When who last spoke there.
    #[serde(default)]
    pub spoke: BTreeMap<String, String>,
    /// What was said.
    #[serde(default)]
    pub messages: Vec<MessageFile>,
}

/// A message as it is written down.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageFile {
    /// Its number; none: the next one.
    pub id: Option<u64>,
    /// When; none: now.
    pub timestamp: Option<String>,
    /// By whom; `System` is the world itself.
    pub sender: Who,
    /// What.
    pub content: String,
    /// What it answers.
    pub reply_to: Option<u64>,
    /// Who feels what about it.
    #[serde(default)]
    pub reactions: BTreeMap<Reaction, Vec<Who>>,
}

/// Somebody, by name or by number.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Who {
    /// By number.
    Number(u32),
    /// By name.
    Name(String),
}

fn time(text: &str) -> Result<Millis, String> {
    heartbeat::read(text).ok_or_else(|| format!("'{text}' is no time: write one such as 2024-01-15T10:30:00"))
}

impl WorldFile {
    /// The world that it tells of, as it begins now. `model` thinks for those who have none of their own.
    ///
    /// # Errors
    /// In words, when it cannot be.
    pub fn begin(self, model: &str, now: Millis) -> Result<World, String> {
        let mut world = World::default();
        let head = world.head_mut();
        head.budgets = self.budgets;
        let budgets = self.budgets;
        if budgets.fixed > budgets.total
            || budgets.messages > budgets.total
            || budgets.knowledge > budgets.fixed
        {
            return Err("budgets: static and messages are parts of total, and knowledge is a part of static"
                .to_owned());
        }
        head.models = if self.models.is_empty() { vec![Brain::here(model)] } else { self.models };
        head.most_agents = self.most_agents.unwrap_or(head.most_agents).max(self.agents.len() as u32);
        let usual = head.models.first().map(|known| known.name.clone()).unwrap_or_default();
        if self.agents.is_empty() {
            return Err("nobody lives there: name agents, each under [[agents]]".to_owned());
        }
        for agent in self.agents {
            let called = agent.name.clone().unwrap_or_else(|| "an agent without a name".to_owned());
            agent.join(&mut world, &usual, now).map_err(|why| format!("{called}: {why}"))?;
        }
        for room in self.rooms {
            let owner = room.owner.clone();
            room.open(&mut world, now).map_err(|why| format!("the room of {owner}: {why}"))?;
        }
        Ok(world)
    }
}

impl AgentFile {
    fn join(self, world: &mut World, usual: &str, now: Millis) -> Result<(), String> {
        let prompt = match (self.kind, self.seed, self.role) {
            (AgentKind::Persona, seed, None) => seed,
            (AgentKind::Bot, None, role) => role,
            _ => return Err("a persona has a seed, and a bot has a role".to_owned()),
        };
        let name = self.name.as_deref().map(action::name_of).transpose()?;
        name.iter().try_for_each(|name| world.free_name(name, None))?;
        prompt.iter().try_for_each(|prompt| no_longer("a seed or role", prompt, action::PROMPT))?;
        if let Some(id) = self.id {
            if id < world.head.next_agent {
                return Err(format!(
                    "its number is {id}, and numbers count up from {}",
                    world.head.next_agent
                ));
            }
            world.head_mut().next_agent = id;
        }
        if let Some(seconds) = self.interval.filter(|seconds| !(1.0..=10.0).contains(seconds)) {
            return Err(format!("a heart beats every 1 to 10 seconds, and {seconds} are not"));
        }
        let model = self.model.unwrap_or_else(|| usual.to_owned());
        if !world.head.knows(&model) {
            return Err(format!("no model is called '{model}': there is {}", world.head.brains()));
        }
        let new = Newcomer {
            kind: self.kind,
            name,
            model,
            prompt: prompt.unwrap_or_default(),
            formats: (self.input_format, self.output_format),
            can_create_agents: self.can_create_agents,
        };
        let id = world.create(new, now)?;
        let mut recent = Vec::new();
        for mut action in self.recent_actions {
            let kind = action.shift_remove("type").and_then(|kind| kind.as_str().map(str::to_owned));
            let at = action.shift_remove("timestamp").and_then(|at| at.as_str().map(time)).transpose()?;
            let refused = action.shift_remove("refused").and_then(|why| why.as_str().map(str::to_owned));
            recent.push(Recent {
                kind: kind.unwrap_or_default(),
                at: at.unwrap_or(now),
                with: action,
                refused,
            });
        }
        if let Some(agent) = world.agent_mut(id) {
            if let Some(seconds) = self.interval {
                agent.interval = Interval::new((seconds * 1000.0) as u32);
            }
            agent.knowledge = Knowledge::of(self.knowledge);
        }
        recent.into_iter().for_each(|one| world.note(id, one));
        Ok(())
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Who::Number(id) => write!(f, "{id}"),
            Who::Name(name) => f.write_str(name),
        }
    }
}

impl Who {
    /// Whom it means.
    ///
    /// # Errors
    /// In words, when it is nobody.
    pub fn find(&self, world: &World) -> Result<AgentId, String> {
        let found = match self {
            Who::Number(0) => Some(ARCHITECT),
            Who::Number(id) => world.agent(AgentId(*id)).map(|agent| agent.id),
            Who::Name(name) => find(world, name),
        };
        found.ok_or_else(|| match self {
            Who::Number(id) => format!("there is no agent {id}"),
            Who::Name(name) => format!("nobody is called '{name}'"),
        })
    }
}

/// Somebody by name, or by number in words.
#[must_use]
pub fn find(world: &World, name: &str) -> Option<AgentId> {
    let by_name = world.agents().find(|agent| agent.name == name).map(|agent| agent.id);
    let person = name == "The Architect" || name == "0";
    let by_number = || name.parse().ok().map(AgentId).filter(|id| world.agent(*id).is_some());
    let nearly = || world.agents().find(|agent| agent.name.eq_ignore_ascii_case(name)).map(|agent| agent.id);
    by_name.or_else(|| person.then_some(ARCHITECT)).or_else(by_number).or_else(nearly)
}

impl RoomFile {
    fn open(self, world: &mut World, now: Millis) -> Result<(), String> {
        let id: RoomId = self.owner.find(world)?;
        let wpm = self.wpm.unwrap_or(heartbeat::USUAL_WPM);
        if !WPM.contains(&wpm) {
            return Err(format!("words per minute are 10 to 200, and {wpm} are not"));
        }
        self.billboard.iter().try_for_each(|text| no_longer("a billboard", text, action::BILLBOARD))?;
        let keys: Vec<String> = self.keys.iter().map(|key| key.trim().to_owned()).collect();
        keys.iter().try_for_each(|key| no_longer("a key", key, action::KEY))?;
        if keys.len() > action::KEYS || keys.iter().any(String::is_empty) {
            return Err(format!("a room has {} keys at most, and none of them is empty", action::KEYS));
        }
        world.open_room(id);
        let members: Vec<AgentId> =
            self.members.iter().map(|who| who.find(world)).collect::<Result<_, _>>()?;
        let named = |name: &String| find(world, name).ok_or_else(|| format!("nobody is called '{name}'"));
        let mut attention = BTreeMap::new();
        for (name, share) in &self.attention {
            attention.insert(named(name)?, Attention::read(share)?);
        }
        let mut spoke = BTreeMap::new();
        for (name, at) in &self.spoke {
            spoke.insert(named(name)?, time(at)?);
        }
        let mut messages = Vec::new();
        let mut next = world.head.next_message;
        for message in self.messages {
            let message = message.read(world, id, &mut next, now)?;
            messages.push(message);
        }
        members.into_iter().for_each(|who| world.enter(id, who));
        let Some(room) = world.room_mut(id) else { return Err("it cannot be opened".to_owned()) };
        (room.billboard, room.keys, room.wpm) = (self.billboard, keys, wpm);
        if let Some(who) = attention.keys().find(|who| !room.members.contains_key(who)) {
            return Err(format!("{who} is not in it"));
        }
        for (who, at) in spoke {
            room.members.get_mut(&who).ok_or(format!("{who} is not in it"))?.spoke = Some(at);
        }
        for (who, share) in attention {
            world.turn(who, id, share)?;
        }
        messages.sort_by_key(|message| message.id);
        if messages.windows(2).any(|pair| pair[0].id == pair[1].id) {
            return Err("two messages have the same number".to_owned());
        }
        if let Some(twice) =
            messages.iter().find(|message| world.touched().messages.contains_key(&message.id))
        {
            return Err(format!("message {} is in another room too", twice.id));
        }
        if let Some(far) = messages.iter().find(|message| message.id == 0 || message.id > MOST_MESSAGES) {
            return Err(format!("message {}: numbers are 1 to {MOST_MESSAGES}", far.id));
        }
        if let Some(long) = messages.iter().find(|message| message.content.chars().count() > LONGEST) {
            return Err(format!("message {} has more than {LONGEST} characters", long.id));
        }
        messages.into_iter().for_each(|message| world.insert(message));
        world.head_mut().next_message = next;
        Ok(())
    }
}

impl MessageFile {
    fn read(self, world: &World, room: RoomId, next: &mut u64, now: Millis) -> Result<Message, String> {
        let id = self.id.unwrap_or(*next);
        *next = (*next).max(id + 1);
        let sender = match &self.sender {
            Who::Name(name) if name == "System" => Sender::System,
            who => Sender::Agent(who.find(world)?),
        };
        let mut reactions = BTreeMap::new();
        for (reaction, who) in &self.reactions {
            let who = who.iter().map(|who| who.find(world)).collect::<Result<_, _>>()?;
            reactions.insert(*reaction, who);
        }
        let at = self.timestamp.as_deref().map(time).transpose()?.unwrap_or(now);
        Ok(Message { id, room, at, sender, content: self.content, reply_to: self.reply_to, reactions })
    }
}

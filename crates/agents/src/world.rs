//! A world: agents, the rooms they own, and what was said there. All of its rules are here and in [`action`](crate::action); what
//! changes is noted, so that it can be kept.

use crate::format::{Format, Output};
use crate::heartbeat::{self, Interval, Millis, USUAL_WPM};
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
        let scaled = |part: usize| part * room / self.total.max(1);
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

/// A world.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// What is true of all of it.
    pub head: Head,
    agents: BTreeMap<AgentId, AgentState>,
    rooms: BTreeMap<RoomId, Room>,
    /// Which rooms everybody is in.
    places: BTreeMap<AgentId, BTreeSet<RoomId>>,
    touched: Touched,
}

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

/// What has changed since it was last kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Touched {
    /// The head.
    pub head: bool,
    /// These agents.
    pub agents: BTreeSet<AgentId>,
    /// These rooms.
    pub rooms: BTreeSet<RoomId>,
    /// These messages.
    pub messages: BTreeMap<u64, Message>,
}

impl Touched {
    /// Whether nothing has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// This and more.
    pub fn join(&mut self, more: Self) {
        self.head |= more.head;
        self.agents.extend(more.agents);
        self.rooms.extend(more.rooms);
        self.messages.extend(more.messages);
    }
}

/// Somebody who is to be in a world.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Newcomer {
    /// What it is for.
    pub kind: AgentKind,
    /// What it is called; none: as bots are.
    pub name: Option<String>,
    /// The model that thinks for it.
    pub model: String,
    /// Where it comes from, or what it does.
    pub prompt: String,
    /// How it is shown its HUD, and how it answers.
    pub formats: (Format, Output),
    /// Whether it may make others.
    pub can_create_agents: bool,
}

impl World {
    /// A world that was kept, without its messages.
    #[must_use]
    pub fn kept(
        head: Head,
        agents: impl IntoIterator<Item = AgentState>,
        rooms: impl IntoIterator<Item = Room>,
    ) -> Self {
        let rooms: BTreeMap<RoomId, Room> = rooms.into_iter().map(|room| (room.id, room)).collect();
        let mut places: BTreeMap<AgentId, BTreeSet<RoomId>> = BTreeMap::new();
        for room in rooms.values() {
            room.members.keys().for_each(|who| {
                places.entry(*who).or_default().insert(room.id);
            });
        }
        let agents = agents.into_iter().map(|agent| (agent.id, agent)).collect();
        Self { head, agents, rooms, places, touched: Touched::default() }
    }

    /// Puts a message that was kept at hand, behind those that are there.
    pub fn recollect(&mut self, message: Message) {
        if let Some(room) = self.rooms.get_mut(&message.room) {
            room.messages.push_back(message);
        }
    }

    /// What has changed since it was last kept.
    #[must_use]
    pub fn touched(&self) -> &Touched {
        &self.touched
    }

    /// All that has changed is kept.
    pub fn is_kept(&mut self) {
        self.touched = Touched::default();
    }

    /// What time it is: never earlier than it was, whatever the clock says.
    pub fn tick(&mut self, now: Millis) -> Millis {
        let now = now.max(self.head.clock);
        if now > self.head.clock {
            self.head_mut().clock = now;
        }
        now
    }

    /// Those who live, the person aside.
    pub fn agents(&self) -> impl Iterator<Item = &AgentState> {
        self.agents.values().filter(|agent| !agent.retired)
    }

    /// Everybody who ever lived.
    pub fn everybody(&self) -> impl Iterator<Item = &AgentState> {
        self.agents.values()
    }

    /// The rooms that are open.
    pub fn rooms(&self) -> impl Iterator<Item = &Room> {
        self.rooms.values().filter(|room| !room.closed)
    }

    /// One who lives.
    #[must_use]
    pub fn agent(&self, id: AgentId) -> Option<&AgentState> {
        self.agents.get(&id).filter(|agent| !agent.retired)
    }

    /// An open room.
    #[must_use]
    pub fn room(&self, id: RoomId) -> Option<&Room> {
        self.rooms.get(&id).filter(|room| !room.closed)
    }

    /// Everything about a room, whatever has become of it.
    #[must_use]
    pub fn any_room(&self, id: RoomId) -> Option<&Room> {
        self.rooms.get(&id)
    }

    /// Everything about an agent, whatever has become of it.
    #[must_use]
    pub fn any_agent(&self, id: AgentId) -> Option<&AgentState> {
        self.agents.get(&id)
    }

    pub(crate) fn agent_mut(&mut self, id: AgentId) -> Option<&mut AgentState> {
        let agent = self.agents.get_mut(&id)?;
        self.touched.agents.insert(id);
        Some(agent)
    }

    pub(crate) fn room_mut(&mut self, id: RoomId) -> Option<&mut Room> {
        let room = self.rooms.get_mut(&id)?;
        self.touched.rooms.insert(id);
        Some(room)
    }

    pub(crate) fn head_mut(&mut self) -> &mut Head {
        self.touched.head = true;
        &mut self.head
    }

    /// The rooms that somebody is in.
    pub fn rooms_of(&self, id: AgentId) -> impl Iterator<Item = &Room> {
        self.places.get(&id).into_iter().flatten().filter_map(|room| self.room(*room))
    }

    /// Whether two share a room.
    #[must_use]
    pub fn are_near(&self, one: AgentId, other: AgentId) -> bool {
        self.rooms_of(one).any(|room| room.members.contains_key(&other))
    }

    /// What somebody is called.
    #[must_use]
    pub fn name(&self, id: AgentId) -> String {
        match self.agents.get(&id) {
            _ if id == ARCHITECT => "The Architect".to_owned(),
            Some(agent) => agent.name.clone(),
            None => format!("agent {id}"),
        }
    }

    /// How much of an agent's attention each of its rooms gets, in hundredths: what is fixed, and the rest shared equally.
    #[must_use]
    pub fn shares(&self, id: AgentId) -> BTreeMap<RoomId, f64> {
        let attention =
            |room: &Room| room.members.get(&id).map(|member| member.attention).unwrap_or_default();
        let all: Vec<(RoomId, Attention)> =
            self.rooms_of(id).map(|room| (room.id, attention(room))).collect();
        let fixed: f64 = all.iter().map(|(_, a)| if let Attention::Fixed(p) = a { *p } else { 0.0 }).sum();
        let dynamic = all.iter().filter(|(_, a)| *a == Attention::Dynamic).count();
        let each = if dynamic == 0 { 0.0 } else { (100.0 - fixed).max(0.0) / dynamic as f64 };
        all.into_iter()
            .map(|(room, attention)| match attention {
                Attention::Fixed(percent) => (room, percent),
                Attention::Dynamic => (room, each),
            })
            .collect()
    }

    /// Somebody new, with a room of its own. Its heart beats at once.
    ///
    /// # Errors
    /// In words, when there is no place for it.
    pub fn create(&mut self, new: Newcomer, now: Millis) -> Result<AgentId, String> {
        let living = u32::try_from(self.agents().count()).unwrap_or(u32::MAX);
        if living >= self.head.most_agents {
            return Err(format!("this world has {living} agents, and no more may live at once"));
        }
        if self.head.next_agent > MOST_AGENTS {
            return Err(format!(
                "this world has had {MOST_AGENTS} agents, and there are no numbers for more"
            ));
        }
        let head = self.head_mut();
        let id = AgentId(head.next_agent);
        head.next_agent += 1;
        let name = new.name.filter(|name| !name.trim().is_empty()).unwrap_or_else(|| format!("Bot-{id}"));
        let agent = AgentState {
            id,
            kind: new.kind,
            name,
            model: new.model,
            prompt: new.prompt,
            can_create_agents: new.can_create_agents,
            input: new.formats.0,
            output: new.formats.1,
            knowledge: Knowledge::default(),
            recent: VecDeque::new(),
            done: 0,
            interval: Interval::default(),
            next: now,
            asleep: None,
            beats: 0,
            retired: false,
            paused: false,
        };
        self.agents.insert(id, agent);
        self.touched.agents.insert(id);
        self.open_room(id);
        Ok(id)
    }

    /// Somebody's room, which is made where there is none. Its owner is in it.
    pub fn open_room(&mut self, owner: AgentId) {
        self.rooms.entry(owner).or_insert_with(|| Room {
            id: owner,
            members: [(owner, Member::default())].into_iter().collect(),
            billboard: None,
            keys: Vec::new(),
            requests: Vec::new(),
            wpm: USUAL_WPM,
            closed: false,
            messages: VecDeque::new(),
        });
        self.enter(owner, owner);
    }

    /// Somebody is in a room from now on.
    pub(crate) fn enter(&mut self, room: RoomId, who: AgentId) {
        if let Some(inside) = self.room_mut(room) {
            inside.members.entry(who).or_default();
            self.places.entry(who).or_default().insert(room);
        }
    }

    /// Somebody comes into a room. Returns whether it was not there before.
    pub fn join(&mut self, room: RoomId, who: AgentId, now: Millis) -> bool {
        let new = self.room(room).is_some_and(|room| !room.members.contains_key(&who));
        if new {
            self.enter(room, who);
            self.announce(room, format!("{} ({who}) has joined.", self.name(who)), now);
        }
        new
    }

    /// Somebody goes. What it was writing there is not said.
    pub(crate) fn leave(&mut self, room: RoomId, who: AgentId, now: Millis) {
        if let Some(inside) = self.room_mut(room)
            && inside.members.remove(&who).is_some()
        {
            self.places.entry(who).or_default().remove(&room);
            self.announce(room, format!("{} ({who}) has left.", self.name(who)), now);
        }
    }

    /// The world says something.
    pub fn announce(&mut self, room: RoomId, content: String, now: Millis) {
        self.put(room, Sender::System, content, None, now);
    }

    /// Somebody says something, at once.
    ///
    /// # Errors
    /// In words, when it cannot be said there.
    pub fn say(
        &mut self,
        room: RoomId,
        who: AgentId,
        content: impl Into<String>,
        reply_to: Option<u64>,
        now: Millis,
    ) -> Result<u64, String> {
        let content = content.into();
        let inside = self.room(room).ok_or_else(|| format!("there is no room {room}"))?;
        if !inside.members.contains_key(&who) {
            return Err(format!("{} is not in room {room}", self.name(who)));
        }
        if content.trim().is_empty() {
            return Err("a message says something".to_owned());
        }
        let long = content.chars().count();
        if long > LONGEST {
            return Err(format!(
                "a message has {LONGEST} characters at most, and this one has {long}: say it in parts"
            ));
        }
        if self.head.next_message > MOST_MESSAGES {
            return Err(format!(
                "this world has heard {MOST_MESSAGES} messages, and there are no numbers for more"
            ));
        }
        if let Some(to) = reply_to
            && inside.message(to).is_none()
        {
            return Err(format!("there is no message {to} in room {room} that could be answered"));
        }
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&who)) {
            member.spoke = Some(now);
        }
        Ok(self.put(room, Sender::Agent(who), content, reply_to, now))
    }

    fn put(
        &mut self,
        room: RoomId,
        sender: Sender,
        content: String,
        reply_to: Option<u64>,
        at: Millis,
    ) -> u64 {
        let head = self.head_mut();
        let id = head.next_message;
        head.next_message += 1;
        let message = Message { id, room, at, sender, content, reply_to, reactions: BTreeMap::new() };
        self.insert(message);
        id
    }

    /// Puts a message where it belongs.
    pub(crate) fn insert(&mut self, message: Message) {
        self.touched.messages.insert(message.id, message.clone());
        if let Some(room) = self.rooms.get_mut(&message.room) {
            room.messages.push_back(message);
            if room.messages.len() > AT_HAND {
                room.messages.pop_front();
            }
        }
    }

    /// Changes a message that is at hand.
    pub(crate) fn message_mut<T>(&mut self, id: u64, change: impl FnOnce(&mut Message) -> T) -> Option<T> {
        let message = self.rooms.values_mut().find_map(|room| room.message_mut(id))?;
        let changed = change(message);
        let message = message.clone();
        self.touched.messages.insert(id, message);
        Some(changed)
    }

    /// A message that is at hand, in a room that somebody is in.
    #[must_use]
    pub fn message_for(&self, who: AgentId, id: u64) -> Option<&Message> {
        self.rooms_of(who).find_map(|room| room.message(id))
    }

    /// Who is to think next: the first whose time has come.
    #[must_use]
    pub fn due(&self, now: Millis) -> Option<AgentId> {
        self.next_beat().filter(|(_, at)| *at <= now).map(|(who, _)| who)
    }

    /// Whose heart beats next, and when.
    #[must_use]
    pub fn next_beat(&self) -> Option<(AgentId, Millis)> {
        let awake = self.agents().filter(|agent| !agent.paused);
        let times = awake.map(|agent| (agent.next.max(agent.asleep.unwrap_or(Millis::MIN)), agent.id));
        times.min().map(|(at, id)| (id, at))
    }

    /// A heart has beaten: everybody calms down.
    pub fn beaten(&mut self, who: AgentId, now: Millis) {
        if let Some(agent) = self.agent_mut(who) {
            agent.beats += 1;
            // Who was to sleep until now is awake; who was put to sleep just now is not.
            if agent.asleep.is_some_and(|until| until <= now) {
                agent.asleep = None;
            }
            agent.interval = agent.interval.decayed();
            agent.next = now + agent.interval.millis();
        }
    }

    /// Notes what an agent did.
    pub(crate) fn note(&mut self, who: AgentId, recent: Recent) {
        if let Some(agent) = self.agent_mut(who) {
            agent.recent.push_back(recent);
            agent.done += 1;
            while agent.recent.len() > RECENT {
                agent.recent.pop_front();
            }
        }
    }

    /// Says what has been written by now. Returns the numbers of what was said.
    pub fn deliver(&mut self, now: Millis) -> Vec<u64> {
        let mut due: Vec<(Millis, RoomId, AgentId)> = self
            .rooms()
            .flat_map(|room| room.members.iter().map(move |(who, member)| (room.id, *who, member)))
            .filter_map(|(room, who, member)| member.writing.as_ref().map(|draft| (draft.due, room, who)))
            .filter(|(due, _, _)| *due <= now)
            .collect();
        due.sort_unstable();
        let mut said = Vec::new();
        for (at, room, who) in due {
            let member = self.room_mut(room).and_then(|room| room.members.get_mut(&who));
            let Some(draft) = member.and_then(|member| member.writing.take()) else { continue };
            // What it answers may be gone by now: it is said all the same.
            let reply_to =
                draft.reply_to.filter(|&to| self.room(room).is_some_and(|r| r.message(to).is_some()));
            if let Ok(id) = self.say(room, who, draft.content, reply_to, at.max(self.last_word(room))) {
                said.push(id);
            }
        }
        said
    }

    fn last_word(&self, room: RoomId) -> Millis {
        self.room(room).and_then(|room| room.messages.back()).map_or(Millis::MIN, |message| message.at)
    }

    /// When somebody will have written what it is writing.
    #[must_use]
    pub fn next_words(&self) -> Option<Millis> {
        let drafts =
            self.rooms().flat_map(|room| room.members.values()).filter_map(|member| member.writing.as_ref());
        drafts.map(|draft| draft.due).min()
    }

    /// An agent wants to say something: at once where its words are few enough, else when they are written.
    ///
    /// # Errors
    /// In words, when it cannot be said there.
    pub fn speak(
        &mut self,
        room: RoomId,
        who: AgentId,
        content: &str,
        reply_to: Option<u64>,
        now: Millis,
    ) -> Result<(), String> {
        let inside = self.room(room).ok_or_else(|| format!("there is no room {room}"))?;
        let member = inside.members.get(&who).ok_or_else(|| format!("you are not in room {room}"))?;
        let content = content.trim();
        if content.is_empty() {
            return Err("a message says something".to_owned());
        }
        if let Some(draft) = &member.writing {
            let seconds = ((draft.due - now).max(0) + 999) / 1000;
            return Err(format!("you are still writing in room {room}, for {seconds} more seconds"));
        }
        let words = heartbeat::words(content);
        let most = *heartbeat::WORDS.end();
        if words > most {
            return Err(format!("a message has {most} words at most, and this one has {words}"));
        }
        if let Some(to) = reply_to
            && inside.message(to).is_none()
        {
            return Err(format!("there is no message {to} in room {room}"));
        }
        // What comes behind something that was just said is still to be written.
        let due = match member.spoke {
            Some(spoke) if spoke == now => heartbeat::written(words, now, inside.wpm),
            spoke => heartbeat::sayable(words, spoke, now, inside.wpm),
        };
        if due <= now {
            return self.say(room, who, content, reply_to, now).map(drop);
        }
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&who)) {
            member.writing = Some(Draft { content: content.to_owned(), reply_to, due });
        }
        Ok(())
    }
}

impl Room {
    /// A message that is at hand.
    #[must_use]
    pub fn message(&self, id: u64) -> Option<&Message> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get(at).filter(|message| message.id == id)
    }

    fn message_mut(&mut self, id: u64) -> Option<&mut Message> {
        let at = self.messages.partition_point(|message| message.id < id);
        self.messages.get_mut(at).filter(|message| message.id == id)
    }
}

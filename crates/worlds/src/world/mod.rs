//! A world: agents, their rooms, and the messages there. The rules for agents' actions are in [`action`](crate::action).
//! Every change is tracked in [`WorldChanges`], so that a store writes only what changed.

mod messages;
mod state;

pub use messages::{ParagraphSplit, check_message};
pub use state::{
    ARCHITECT, AccessRequest, AgentId, AgentKind, AgentState, HudBudgets, LOADED_MESSAGES, MAX_AGENTS,
    MAX_MESSAGE_CHARS, MAX_MESSAGES, MessageDraft, MessageSender, RECENT_ACTIONS, Reaction, RecentAction,
    Room, RoomAttention, RoomId, RoomMember, RoomMessage, WorldHeader, WorldModelRef,
};

use crate::error::Error;
use crate::heartbeat::{DEFAULT_WPM, HeartbeatInterval, HeartbeatJitter, Millis};
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::knowledge::AgentKnowledge;
use crate::text::truncate_chars;
use serde_json::Map;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    pub header: WorldHeader,
    agents: BTreeMap<AgentId, AgentState>,
    rooms: BTreeMap<RoomId, Room>,
    /// The rooms of each agent: the inverse of [`Room::members`].
    memberships: BTreeMap<AgentId, BTreeSet<RoomId>>,
    unsaved: WorldChanges,
}

/// The parts of a world that changed since it was last saved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorldChanges {
    pub header: bool,
    pub agents: BTreeSet<AgentId>,
    pub rooms: BTreeSet<RoomId>,
    pub messages: BTreeMap<u64, RoomMessage>,
}

impl WorldChanges {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub fn merge(&mut self, other: Self) {
        self.header |= other.header;
        self.agents.extend(other.agents);
        self.rooms.extend(other.rooms);
        self.messages.extend(other.messages);
    }
}

/// The settings of an agent to create.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewAgent {
    pub kind: AgentKind,
    /// Without a name the agent is called `Bot-` and its number.
    pub name: Option<String>,
    pub model: String,
    /// The background of a persona, or the role of a bot.
    pub prompt: String,
    pub formats: (HudFormat, AnswerFormat),
    pub can_create_agents: bool,
}

/// Characters of a refusal that an agent sees: a long one would crowd out other actions.
const MAX_REASON_CHARS: usize = 300;
/// Characters of the kind of a refused action, which a model may have invented.
const MAX_KIND_CHARS: usize = 50;

impl World {
    /// A world from the store. Its messages follow with [`World::load_message`].
    #[must_use]
    pub fn from_stored(
        header: WorldHeader,
        agents: impl IntoIterator<Item = AgentState>,
        rooms: impl IntoIterator<Item = Room>,
    ) -> Self {
        let rooms: BTreeMap<RoomId, Room> = rooms.into_iter().map(|room| (room.id, room)).collect();
        let mut memberships: BTreeMap<AgentId, BTreeSet<RoomId>> = BTreeMap::new();
        for room in rooms.values() {
            for member in room.members.keys() {
                memberships.entry(*member).or_default().insert(room.id);
            }
        }
        let agents = agents.into_iter().map(|agent| (agent.id, agent)).collect();
        Self { header, agents, rooms, memberships, unsaved: WorldChanges::default() }
    }

    #[must_use]
    pub fn unsaved_changes(&self) -> &WorldChanges {
        &self.unsaved
    }

    pub fn mark_saved(&mut self) {
        self.unsaved = WorldChanges::default();
    }

    /// Sets the world's clock and returns its time. World time never goes back, even if `now` does.
    pub fn advance_clock(&mut self, now: Millis) -> Millis {
        let now = now.max(self.header.clock);
        if now > self.header.clock {
            self.header_mut().clock = now;
        }
        now
    }

    /// All agents that are not retired.
    pub fn agents(&self) -> impl Iterator<Item = &AgentState> {
        self.agents.values().filter(|agent| !agent.retired)
    }

    /// All agents, including retired ones.
    pub fn all_agents(&self) -> impl Iterator<Item = &AgentState> {
        self.agents.values()
    }

    /// All rooms that are not closed.
    pub fn rooms(&self) -> impl Iterator<Item = &Room> {
        self.rooms.values().filter(|room| !room.closed)
    }

    /// An agent that is not retired.
    #[must_use]
    pub fn agent(&self, id: AgentId) -> Option<&AgentState> {
        self.agents.get(&id).filter(|agent| !agent.retired)
    }

    /// A room that is not closed.
    #[must_use]
    pub fn room(&self, id: RoomId) -> Option<&Room> {
        self.rooms.get(&id).filter(|room| !room.closed)
    }

    /// A room, open or closed.
    #[must_use]
    pub fn any_room(&self, id: RoomId) -> Option<&Room> {
        self.rooms.get(&id)
    }

    /// An agent, retired or not.
    #[must_use]
    pub fn any_agent(&self, id: AgentId) -> Option<&AgentState> {
        self.agents.get(&id)
    }

    pub(crate) fn agent_mut(&mut self, id: AgentId) -> Option<&mut AgentState> {
        let agent = self.agents.get_mut(&id)?;
        self.unsaved.agents.insert(id);
        Some(agent)
    }

    pub(crate) fn room_mut(&mut self, id: RoomId) -> Option<&mut Room> {
        let room = self.rooms.get_mut(&id)?;
        self.unsaved.rooms.insert(id);
        Some(room)
    }

    pub(crate) fn header_mut(&mut self) -> &mut WorldHeader {
        self.unsaved.header = true;
        &mut self.header
    }

    pub(crate) fn require_agent(&self, id: AgentId) -> Result<&AgentState, Error> {
        self.agent(id).ok_or_else(|| Error::not_found(format!("there is no agent {id}")))
    }

    pub(crate) fn require_agent_mut(&mut self, id: AgentId) -> Result<&mut AgentState, Error> {
        self.require_agent(id)?;
        self.agent_mut(id).ok_or_else(|| Error::not_found(format!("there is no agent {id}")))
    }

    pub(crate) fn require_room(&self, id: RoomId) -> Result<&Room, Error> {
        self.room(id).ok_or_else(|| Error::not_found(format!("there is no room {id}")))
    }

    /// The open rooms that an agent is a member of.
    pub fn rooms_of(&self, id: AgentId) -> impl Iterator<Item = &Room> {
        self.memberships.get(&id).into_iter().flatten().filter_map(|room| self.room(*room))
    }

    /// The models and formats in which the members of a room read it.
    #[must_use]
    pub fn room_formats(&self, id: RoomId) -> BTreeSet<(&str, HudFormat)> {
        let members = self.room(id).map(|room| room.members.keys());
        let agents = members.into_iter().flatten().filter_map(|member| self.agent(*member));
        agents.map(|agent| (agent.model.as_str(), agent.hud_format)).collect()
    }

    #[must_use]
    pub fn share_room(&self, one: AgentId, other: AgentId) -> bool {
        self.rooms_of(one).any(|room| room.members.contains_key(&other))
    }

    #[must_use]
    pub fn display_name(&self, id: AgentId) -> String {
        match self.agents.get(&id) {
            _ if id == ARCHITECT => "The Architect".to_owned(),
            Some(agent) => agent.name.clone(),
            None => format!("agent {id}"),
        }
    }

    /// The share of each room in an agent's message budget, in percent: fixed shares, and the rest divided equally.
    #[must_use]
    pub fn attention_shares(&self, id: AgentId) -> BTreeMap<RoomId, f64> {
        let attention =
            |room: &Room| room.members.get(&id).map(|member| member.attention).unwrap_or_default();
        let all: Vec<(RoomId, RoomAttention)> =
            self.rooms_of(id).map(|room| (room.id, attention(room))).collect();
        let fixed: f64 =
            all.iter().map(|(_, a)| if let RoomAttention::Fixed(p) = a { *p } else { 0.0 }).sum();
        let dynamic = all.iter().filter(|(_, a)| *a == RoomAttention::Dynamic).count();
        let each = if dynamic == 0 { 0.0 } else { (100.0 - fixed).max(0.0) / dynamic as f64 };
        all.into_iter()
            .map(|(room, attention)| match attention {
                RoomAttention::Fixed(percent) => (room, percent),
                RoomAttention::Dynamic => (room, each),
            })
            .collect()
    }

    /// Creates an agent with a room of its own. Its first heartbeat is due now.
    pub fn create_agent(&mut self, new: NewAgent, now: Millis) -> Result<AgentId, Error> {
        let count = u32::try_from(self.agents().count()).unwrap_or(u32::MAX);
        if count >= self.header.max_agents {
            return Err(Error::conflict(format!(
                "this world has {count} agents, the most that it may have at the same time"
            )));
        }
        if self.header.next_agent > MAX_AGENTS {
            return Err(Error::conflict(format!(
                "this world has had {MAX_AGENTS} agents, the most that it can number"
            )));
        }
        let header = self.header_mut();
        let id = AgentId(header.next_agent);
        header.next_agent += 1;
        let name = new.name.filter(|name| !name.trim().is_empty()).unwrap_or_else(|| format!("Bot-{id}"));
        let agent = AgentState {
            id,
            kind: new.kind,
            name,
            model: new.model,
            prompt: new.prompt,
            can_create_agents: new.can_create_agents,
            hud_format: new.formats.0,
            answer_format: new.formats.1,
            knowledge: AgentKnowledge::default(),
            recent_actions: VecDeque::new(),
            action_count: 0,
            interval: HeartbeatInterval::default(),
            next_heartbeat: now,
            sleep_until: None,
            heartbeat_count: 0,
            retired: false,
            paused: false,
        };
        self.agents.insert(id, agent);
        self.unsaved.agents.insert(id);
        self.open_room(id);
        Ok(id)
    }

    /// Creates the room of an owner if there is none. The owner becomes a member.
    pub fn open_room(&mut self, owner: AgentId) {
        self.rooms.entry(owner).or_insert_with(|| Room {
            id: owner,
            members: [(owner, RoomMember::default())].into_iter().collect(),
            billboard: None,
            keys: Vec::new(),
            requests: Vec::new(),
            wpm: DEFAULT_WPM,
            closed: false,
            messages: VecDeque::new(),
        });
        self.add_member(owner, owner);
    }

    /// Adds a member without an announcement.
    pub(crate) fn add_member(&mut self, room: RoomId, agent: AgentId) {
        if let Some(members) = self.room_mut(room).map(|room| &mut room.members) {
            members.entry(agent).or_default();
            self.memberships.entry(agent).or_default().insert(room);
        }
    }

    /// Adds a member and announces it. Returns false if the agent was a member before.
    pub fn join_room(&mut self, room: RoomId, agent: AgentId, now: Millis) -> bool {
        let is_new = self.room(room).is_some_and(|room| !room.members.contains_key(&agent));
        if is_new {
            self.add_member(room, agent);
            self.announce(room, format!("{} ({agent}) has joined.", self.display_name(agent)), now);
        }
        is_new
    }

    /// Removes a member and announces it. A draft of the member is dropped.
    pub(crate) fn leave_room(&mut self, room: RoomId, agent: AgentId, now: Millis) {
        if let Some(members) = self.room_mut(room).map(|room| &mut room.members)
            && members.remove(&agent).is_some()
        {
            self.memberships.entry(agent).or_default().remove(&room);
            self.announce(room, format!("{} ({agent}) has left.", self.display_name(agent)), now);
        }
    }

    /// The agent whose heartbeat is due; of several the one that is due longest.
    #[must_use]
    pub fn due_agent(&self, now: Millis) -> Option<AgentId> {
        self.next_heartbeat().filter(|(_, at)| *at <= now).map(|(agent, _)| agent)
    }

    /// The agent with the next heartbeat, and its time.
    #[must_use]
    pub fn next_heartbeat(&self) -> Option<(AgentId, Millis)> {
        self.heartbeat_times().min().map(|(at, id)| (id, at))
    }

    /// The agents whose heartbeats are due, in the order of their times.
    #[must_use]
    pub fn due_heartbeats(&self, now: Millis) -> Vec<AgentId> {
        let mut due: Vec<(Millis, AgentId)> = self.heartbeat_times().filter(|(at, _)| *at <= now).collect();
        due.sort_unstable();
        due.into_iter().map(|(_, agent)| agent).collect()
    }

    fn heartbeat_times(&self) -> impl Iterator<Item = (Millis, AgentId)> {
        let running = self.agents().filter(|agent| !agent.paused);
        running.map(|agent| (agent.next_heartbeat.max(agent.sleep_until.unwrap_or(Millis::MIN)), agent.id))
    }

    /// Schedules the next heartbeat of an agent after one has finished.
    pub fn finish_heartbeat(&mut self, agent: AgentId, now: Millis, jitter: HeartbeatJitter) {
        if let Some(agent) = self.agent_mut(agent) {
            agent.heartbeat_count += 1;
            // An action of this heartbeat may have put the agent to sleep: only a sleep that is over ends.
            if agent.sleep_until.is_some_and(|until| until <= now) {
                agent.sleep_until = None;
            }
            agent.interval = agent.interval.decayed();
            agent.next_heartbeat = now + jitter.spread(agent.interval, agent.id.0, agent.heartbeat_count);
        }
    }

    /// Adds an action to what an agent sees of its last actions.
    pub(crate) fn record_action(&mut self, agent: AgentId, action: RecentAction) {
        if let Some(agent) = self.agent_mut(agent) {
            agent.recent_actions.push_back(action);
            agent.action_count += 1;
            while agent.recent_actions.len() > RECENT_ACTIONS {
                agent.recent_actions.pop_front();
            }
        }
    }

    /// Records a refusal of something that is not an [`Action`](crate::action::Action): a response, a draft, an answer
    /// that cannot be parsed.
    pub fn record_refusal(&mut self, agent: AgentId, kind: &str, reason: &str, now: Millis) {
        let kind = kind.chars().take(MAX_KIND_CHARS).collect();
        let refused = Some(shorten_reason(reason));
        self.record_action(agent, RecentAction { kind, at: now, args: Map::new(), refused });
    }
}

/// The reason of a refusal, as an agent sees it.
pub(crate) fn shorten_reason(reason: &str) -> String {
    truncate_chars(reason, MAX_REASON_CHARS)
}

//! A world: agents, the rooms they own, and what was said there. All of its rules are here and in [`action`](crate::action); what
//! changes is noted, so that it can be kept.

mod state;

pub use state::{
    ARCHITECT, AT_HAND, AgentId, AgentKind, AgentState, Attention, Brain, Budgets, Draft, Head, LONGEST,
    MOST_AGENTS, MOST_MESSAGES, Member, Message, RECENT, Reaction, Recent, Request, Room, RoomId, Sender,
};

use crate::format::{Format, Output};
use crate::heartbeat::{self, Interval, Millis, USUAL_WPM};
use crate::knowledge::Knowledge;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

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

/// Whether something can be said.
///
/// # Errors
/// In words, when it is nothing, or too long.
pub fn check_message(content: &str) -> Result<(), String> {
    if content.trim().is_empty() {
        return Err("a message says something".to_owned());
    }
    let long = content.chars().count();
    if long > LONGEST {
        return Err(format!(
            "a message has {LONGEST} characters at most, and this one has {long}: say it in parts"
        ));
    }
    Ok(())
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

    /// The formats in which a room is read, and the models that read it in them.
    #[must_use]
    pub fn read_in(&self, id: RoomId) -> BTreeSet<(&str, Format)> {
        let members = self.room(id).map(|room| room.members.keys());
        let agents = members.into_iter().flatten().filter_map(|who| self.agent(*who));
        agents.map(|agent| (agent.model.as_str(), agent.input)).collect()
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
        check_message(&content)?;
        if self.head.next_message > MOST_MESSAGES {
            return Err(format!(
                "this world has heard {MOST_MESSAGES} messages, and there are no numbers for more"
            ));
        }
        self.answerable(room, reply_to)?;
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&who)) {
            member.spoke = Some(now);
        }
        Ok(self.put(room, Sender::Agent(who), content, reply_to, now))
    }

    /// Whether what a message answers is there.
    pub(crate) fn answerable(&self, room: RoomId, reply_to: Option<u64>) -> Result<(), String> {
        let missing = |to: &u64| self.room(room).is_none_or(|room| room.message(*to).is_none());
        match reply_to.filter(missing) {
            Some(to) => Err(format!("there is no message {to} in room {room} that could be answered")),
            None => Ok(()),
        }
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
            match self.say(room, who, draft.content, reply_to, at.max(self.last_word(room))) {
                Ok(id) => said.push(id),
                Err(why) => self.refuse(who, "response", &why, now),
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

    /// When somebody will have written all that it is writing.
    #[must_use]
    pub fn written_by(&self, who: AgentId) -> Option<Millis> {
        let drafts = self.rooms_of(who).filter_map(|room| room.members.get(&who)?.writing.as_ref());
        drafts.map(|draft| draft.due).max()
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
        if let Some(draft) = &member.writing {
            let seconds = ((draft.due - now).max(0) + 999) / 1000;
            return Err(format!("you are still writing in room {room}, for {seconds} more seconds"));
        }
        let words = heartbeat::words(content);
        let most = *heartbeat::WORDS.end();
        if words > most {
            return Err(format!("a message has {most} words at most, and this one has {words}"));
        }
        check_message(content)?;
        self.answerable(room, reply_to)?;
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

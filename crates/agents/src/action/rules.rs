//! The rules: who may do what, and what becomes of it.

use super::{Action, shortened};
use crate::count::Count;
use crate::heartbeat::{self, Millis, WPM};
use crate::world::{ARCHITECT, AgentId, Attention, Newcomer, Reaction, Recent, Request, RoomId, World};
use serde_json::Map;

/// What actions go by, beside the world.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// What time it is.
    pub now: Millis,
    /// How the agent's tokens are counted.
    pub count: &'a dyn Count,
    /// How many of them it may write down.
    pub knowledge: usize,
}

/// The longest name, in characters.
const NAME: usize = 50;
/// The longest billboard.
pub(crate) const BILLBOARD: usize = 500;
/// The longest key, and the most of them.
pub(crate) const KEY: usize = 64;
pub(crate) const KEYS: usize = 20;
/// The longest seed or role.
pub(crate) const PROMPT: usize = 2_000;
/// How many may wait to come into a room.
const REQUESTS: usize = 50;
/// The longest reason that is told.
const REASON: usize = 300;

pub(crate) fn name_of(name: &str) -> Result<String, String> {
    let name = name.trim();
    match name.chars().count() {
        0 => Err("a name has at least one character".to_owned()),
        1..=NAME if name.chars().any(char::is_control) => Err("a name has no line breaks".to_owned()),
        1..=NAME if name.chars().all(|c| c.is_ascii_digit()) => {
            Err("a name is no number: those are everybody's own".to_owned())
        }
        1..=NAME => Ok(name.to_owned()),
        long => Err(format!("a name has {NAME} characters at most, and this one has {long}")),
    }
}

pub(crate) fn no_longer(what: &str, text: &str, most: usize) -> Result<(), String> {
    let long = text.chars().count();
    if long > most {
        return Err(format!("{what} has {most} characters at most, and this one has {long}"));
    }
    Ok(())
}

impl World {
    /// An agent does something, or is told why it cannot. Either way it is noted.
    ///
    /// # Errors
    /// In words, when it was refused; nothing but the note has changed.
    pub fn act(&mut self, who: AgentId, action: Action, bounds: Bounds<'_>) -> Result<(), String> {
        let mut told = action.told(bounds.now);
        let done = self.try_act(who, action, bounds);
        told.refused = done.as_ref().err().map(|why| shortened(why, REASON));
        self.note(who, told);
        done
    }

    /// Notes that an agent wanted something that cannot be told apart.
    pub fn refuse(&mut self, who: AgentId, kind: &str, why: &str, now: Millis) {
        let (kind, why) = (kind.chars().take(NAME).collect(), shortened(why, REASON));
        self.note(who, Recent { kind, at: now, with: Map::new(), refused: Some(why) });
    }

    fn try_act(&mut self, who: AgentId, action: Action, bounds: Bounds<'_>) -> Result<(), String> {
        let now = bounds.now;
        let gone = || format!("there is no agent {who}");
        if who != ARCHITECT {
            self.agent(who).ok_or_else(gone)?;
        }
        match action {
            Action::Set { path, value, w } => self.learn(who, bounds, |known| known.set(&path, value, w)),
            Action::Append { path, value } => self.learn(who, bounds, |known| known.append(&path, value)),
            Action::Delete { path } => self.learn(who, bounds, |known| known.delete(&path).map(drop)),
            Action::React { message_id, reaction } => self.react(who, message_id, reaction),
            Action::WakeAgent { agent_id } => {
                self.near(who, agent_id)?;
                let asleep =
                    self.agent(agent_id).and_then(|agent| agent.asleep).is_some_and(|until| until > now);
                if !asleep {
                    return Err(format!("agent {agent_id} is awake"));
                }
                // It thinks when its heart beats, and no sooner: two who wake each other do not race.
                if let Some(agent) = self.agent_mut(agent_id) {
                    agent.asleep = None;
                }
                Ok(())
            }
            Action::Reply { room_id, message_id, message } => {
                self.speak(room_id, who, &message, Some(message_id), now)
            }
            Action::SetBillboard { message } => {
                no_longer("a billboard", &message, BILLBOARD)?;
                let message = message.trim();
                if message.is_empty() {
                    return Err("a billboard says something: clear_billboard takes it down".to_owned());
                }
                self.own_room(who)?.billboard = Some(message.to_owned());
                Ok(())
            }
            Action::ClearBillboard => match self.own_room(who)?.billboard.take() {
                Some(_) => Ok(()),
                None => Err("there is no billboard in your room".to_owned()),
            },
            Action::SetWpm { wpm } => {
                let allowed = u32::try_from(wpm).ok().filter(|wpm| WPM.contains(wpm));
                let (least, most) = WPM.into_inner();
                let wpm = allowed
                    .ok_or_else(|| format!("words per minute are {least} to {most}, and {wpm} are not"))?;
                self.own_room(who)?.wpm = wpm;
                Ok(())
            }
            Action::CreateKey { key } => {
                let key = key.trim();
                no_longer("a key", key, KEY)?;
                let room = self.own_room(who)?;
                match () {
                    () if key.is_empty() => Err("a key has at least one character".to_owned()),
                    () if room.keys.iter().any(|known| known == key) => {
                        Err("there is such a key already".to_owned())
                    }
                    () if room.keys.len() >= KEYS => {
                        Err(format!("a room has {KEYS} keys at most: revoke one first"))
                    }
                    () => {
                        room.keys.push(key.to_owned());
                        Ok(())
                    }
                }
            }
            Action::RevokeKey { key } => {
                let room = self.own_room(who)?;
                let before = room.keys.len();
                room.keys.retain(|known| known != key.trim());
                if room.keys.len() == before {
                    return Err("your room has no such key".to_owned());
                }
                Ok(())
            }
            Action::RequestAccess { room_id, key } => self.request(who, room_id, key.trim(), now),
            Action::GrantAccess { request_id } => {
                let request = self.answer_request(who, request_id)?;
                self.join(who, request.requester, now);
                Ok(())
            }
            Action::DenyAccess { request_id } => self.answer_request(who, request_id).map(drop),
            Action::LeaveRoom { room_id } => {
                if room_id == who {
                    return Err("nobody leaves their own room".to_owned());
                }
                self.inside(who, room_id)?;
                self.leave(room_id, who, now);
                Ok(())
            }
            Action::SetAttention { room_id, value } => self.attend(who, room_id, &value),
            Action::SetName { name } => {
                let name = name_of(&name)?;
                self.free_name(&name, Some(who))?;
                self.agent_mut(who).ok_or_else(gone)?.name = name;
                Ok(())
            }
            Action::Sleep { until } => {
                let at = heartbeat::read(&until).ok_or_else(|| {
                    format!("'{until}' is no time: write one such as {}", heartbeat::shown(now))
                })?;
                if at <= now {
                    return Err(format!("{until} has passed: it is {}", heartbeat::shown(now)));
                }
                self.agent_mut(who).ok_or_else(gone)?.asleep = Some(at);
                Ok(())
            }
            Action::CreateAgent { name, background_prompt, agent_type, in_room_id } => {
                self.may_manage(who)?;
                let name = name_of(&name)?;
                self.free_name(&name, None)?;
                no_longer("a background prompt", &background_prompt, PROMPT)?;
                if let Some(room) = in_room_id {
                    self.inside(who, room)?;
                }
                // It thinks as its maker does.
                let maker = self.agent(who);
                let model = maker.map(|maker| maker.model.clone());
                let model = model
                    .or_else(|| self.head.models.first().map(|known| known.name.clone()))
                    .unwrap_or_default();
                let formats = maker.map_or_else(Default::default, |maker| (maker.input, maker.output));
                let new = Newcomer {
                    kind: agent_type,
                    name: Some(name),
                    model,
                    prompt: background_prompt,
                    formats,
                    can_create_agents: false,
                };
                let id = self.create(new, now)?;
                if let Some(room) = in_room_id {
                    self.join(room, id, now);
                }
                Ok(())
            }
            Action::AlterAgent { agent_id, background_prompt, name, model } => {
                self.may_manage(who)?;
                self.near(who, agent_id)?;
                let name = name.map(|name| name_of(&name)).transpose()?;
                name.iter().try_for_each(|name| self.free_name(name, Some(agent_id)))?;
                if let Some(prompt) = &background_prompt {
                    no_longer("a background prompt", prompt, PROMPT)?;
                }
                if let Some(model) = model.as_ref().filter(|model| !self.head.knows(model)) {
                    let known = self.head.brains();
                    return Err(format!("no model is called '{model}' here: there is {known}"));
                }
                if name.is_none() && background_prompt.is_none() && model.is_none() {
                    return Err(
                        "there is nothing to alter: give a name, a background_prompt or a model".to_owned()
                    );
                }
                let agent =
                    self.agent_mut(agent_id).ok_or_else(|| format!("there is no agent {agent_id}"))?;
                name.into_iter().for_each(|name| agent.name = name);
                background_prompt.into_iter().for_each(|prompt| agent.prompt = prompt);
                model.into_iter().for_each(|model| agent.model = model);
                Ok(())
            }
            Action::RetireAgent { agent_id } => {
                self.may_manage(who)?;
                self.near(who, agent_id)?;
                self.retire(agent_id, now);
                Ok(())
            }
        }
    }

    /// Changes what an agent has written down, unless it would be too much. What is too much already can become less.
    fn learn(
        &mut self,
        who: AgentId,
        bounds: Bounds<'_>,
        change: impl FnOnce(&mut crate::knowledge::Knowledge) -> Result<(), String>,
    ) -> Result<(), String> {
        let agent = self.agent(who).ok_or("only agents write things down")?;
        let mut known = agent.knowledge.clone();
        change(&mut known)?;
        let long = |known: &crate::knowledge::Knowledge| {
            known.written(agent.input, |text| bounds.count.tokens(text))
        };
        let after = long(&known);
        if after > bounds.knowledge && after > long(&agent.knowledge) {
            return Err(format!(
                "your knowledge would have {after} tokens, and {} are all that fit: delete something first",
                bounds.knowledge
            ));
        }
        if let Some(agent) = self.agent_mut(who) {
            agent.knowledge = known;
        }
        Ok(())
    }

    fn react(&mut self, who: AgentId, message: u64, reaction: Reaction) -> Result<(), String> {
        let found = self.message_for(who, message);
        let found = found.ok_or_else(|| format!("there is no message {message} in your rooms"))?;
        found.can_move(who, reaction)?;
        let sender = found.sender;
        self.message_mut(message, |message| message.reactions.entry(reaction).or_default().insert(who));
        if let crate::world::Sender::Agent(sender) = sender
            && let Some(agent) = self.agent_mut(sender)
        {
            agent.interval = match reaction {
                Reaction::ThumbsUp => agent.interval.faster(),
                Reaction::ThumbsDown => agent.interval.slower(),
                Reaction::Brain | Reaction::Heart => agent.interval,
            };
        }
        Ok(())
    }

    fn own_room(&mut self, who: AgentId) -> Result<&mut crate::world::Room, String> {
        self.room_mut(who).ok_or_else(|| "you have no room".to_owned())
    }

    /// Whether somebody is in a room.
    fn inside(&self, who: AgentId, room: RoomId) -> Result<(), String> {
        match self.room(room) {
            None => Err(format!("there is no room {room}")),
            Some(room) if room.members.contains_key(&who) => Ok(()),
            Some(_) => Err(format!("you are not in room {room}")),
        }
    }

    /// Whether somebody may do something to another: not to itself, not to the person, and not from afar.
    fn near(&self, who: AgentId, other: AgentId) -> Result<(), String> {
        match () {
            () if who == other => Err("nobody does that to themselves".to_owned()),
            () if other == ARCHITECT => Err("the Architect is not yours to change".to_owned()),
            () if self.agent(other).is_none() => Err(format!("there is no agent {other}")),
            () if who != ARCHITECT && !self.are_near(who, other) => {
                Err(format!("you share no room with agent {other}"))
            }
            () => Ok(()),
        }
    }

    /// Whether nobody else is called that.
    pub(crate) fn free_name(&self, name: &str, who: Option<AgentId>) -> Result<(), String> {
        let same = |other: &str| other.to_lowercase() == name.to_lowercase();
        let taken = self.agents().any(|agent| same(&agent.name) && Some(agent.id) != who);
        if taken || same(&self.name(ARCHITECT)) || same("System") {
            return Err(format!("somebody else is called '{name}'"));
        }
        Ok(())
    }

    fn may_manage(&self, who: AgentId) -> Result<(), String> {
        let may = who == ARCHITECT || self.agent(who).is_some_and(|agent| agent.can_create_agents);
        if may { Ok(()) } else { Err("you may not make, change or retire agents".to_owned()) }
    }

    fn request(&mut self, who: AgentId, room: RoomId, key: &str, now: Millis) -> Result<(), String> {
        let asked = self.room(room).ok_or_else(|| format!("there is no room {room}"))?;
        match () {
            () if asked.members.contains_key(&who) => return Err(format!("you are in room {room}")),
            () if !asked.keys.iter().any(|known| known == key) => {
                return Err(format!("that key does not open room {room}"));
            }
            () if asked.requests.iter().any(|request| request.requester == who) => {
                return Err(format!("you have asked to come into room {room}: wait for an answer"));
            }
            () if asked.requests.len() >= REQUESTS => {
                return Err(format!("{REQUESTS} wait to come into room {room}: try again later"));
            }
            () => {}
        }
        let head = self.head_mut();
        let id = head.next_request;
        head.next_request += 1;
        if let Some(room) = self.room_mut(room) {
            room.requests.push(Request { id, requester: who, key: key.to_owned() });
        }
        self.announce(room, format!("{} ({who}) asks to come in.", self.name(who)), now);
        Ok(())
    }

    /// Takes a request from the owner's door.
    pub(crate) fn answer_request(&mut self, who: AgentId, id: u64) -> Result<Request, String> {
        let room = self.own_room(who)?;
        let at = room.requests.iter().position(|request| request.id == id);
        let request = at.map(|at| room.requests.remove(at));
        request.ok_or_else(|| format!("nobody waits at your door with request {id}"))
    }

    pub(crate) fn attend(&mut self, who: AgentId, room: RoomId, value: &str) -> Result<(), String> {
        self.inside(who, room)?;
        self.turn(who, room, Attention::read(value)?)
    }

    /// Somebody turns to a room, or away from it; nobody has more than all of its attention.
    pub(crate) fn turn(&mut self, who: AgentId, room: RoomId, attention: Attention) -> Result<(), String> {
        if let Attention::Fixed(percent) = attention {
            let others = self.rooms_of(who).filter(|other| other.id != room);
            let fixed: f64 = others
                .filter_map(|other| other.members.get(&who))
                .map(|member| if let Attention::Fixed(percent) = member.attention { percent } else { 0.0 })
                .sum();
            if fixed + percent > 100.0 {
                return Err(format!(
                    "your other rooms have {fixed}% already, so {percent}% would be more than all of your attention"
                ));
            }
        }
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&who)) {
            member.attention = attention;
        }
        Ok(())
    }

    /// Somebody is no more: it leaves all rooms, and its own is closed. What was said there stays.
    pub fn retire(&mut self, who: AgentId, now: Millis) {
        let rooms: Vec<RoomId> = self.rooms_of(who).map(|room| room.id).collect();
        for room in rooms {
            if room == who {
                self.announce(
                    room,
                    format!("{} ({who}) is no more, and this room is closed.", self.name(who)),
                    now,
                );
                let writing: Vec<AgentId> = self
                    .room_mut(room)
                    .into_iter()
                    .flat_map(|room| {
                        room.closed = true;
                        room.requests.clear();
                        room.members.iter_mut().filter_map(|(id, member)| member.writing.take().map(|_| *id))
                    })
                    .collect();
                for other in writing.into_iter().filter(|other| *other != who) {
                    self.refuse(
                        other,
                        "response",
                        &format!("room {room} was closed before it was written"),
                        now,
                    );
                }
            } else {
                self.leave(room, who, now);
            }
        }
        // Nobody opens a door to who is not there.
        let asked: Vec<RoomId> = self
            .rooms()
            .filter(|room| room.requests.iter().any(|r| r.requester == who))
            .map(|r| r.id)
            .collect();
        for room in asked {
            if let Some(room) = self.room_mut(room) {
                room.requests.retain(|request| request.requester != who);
            }
        }
        if let Some(agent) = self.agent_mut(who) {
            agent.retired = true;
        }
    }
}

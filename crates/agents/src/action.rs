//! What agents can do, and what they cannot. Whatever is refused, the agent is told why: it sees it among its recent actions.

use crate::count::Count;
use crate::heartbeat::{self, Millis, WPM};
use crate::world::{
    ARCHITECT, AgentId, AgentKind, Attention, Newcomer, Reaction, Recent, Request, RoomId, World,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

/// Something that an agent does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    /// Writes something down.
    Set {
        /// Where.
        #[serde(deserialize_with = "text")]
        path: String,
        /// What.
        value: Value,
        /// How much it matters.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "maybe_number")]
        w: Option<f64>,
    },
    /// Forgets something that it has written down.
    Delete {
        /// Where.
        #[serde(deserialize_with = "text")]
        path: String,
    },
    /// Writes something at the end of a list.
    Append {
        /// Where.
        #[serde(deserialize_with = "text")]
        path: String,
        /// What.
        value: Value,
    },
    /// Feels something about a message.
    React {
        /// Which.
        #[serde(deserialize_with = "number")]
        message_id: u64,
        /// What.
        reaction: Reaction,
    },
    /// Wakes somebody who sleeps.
    WakeAgent {
        /// Whom.
        #[serde(deserialize_with = "id")]
        agent_id: AgentId,
    },
    /// Answers a message.
    Reply {
        /// Where.
        #[serde(deserialize_with = "id")]
        room_id: RoomId,
        /// Which.
        #[serde(deserialize_with = "number")]
        message_id: u64,
        /// With what.
        #[serde(deserialize_with = "text")]
        message: String,
    },
    /// Hangs something on the wall of its room.
    SetBillboard {
        /// What.
        #[serde(deserialize_with = "text")]
        message: String,
    },
    /// Takes it down.
    ClearBillboard,
    /// Says how fast people talk in its room.
    SetWpm {
        /// Words in a minute.
        #[serde(deserialize_with = "number")]
        wpm: u64,
    },
    /// Makes a key to its room.
    CreateKey {
        /// Which.
        #[serde(deserialize_with = "text")]
        key: String,
    },
    /// Makes it useless.
    RevokeKey {
        /// Which.
        #[serde(deserialize_with = "text")]
        key: String,
    },
    /// Asks to come into a room.
    RequestAccess {
        /// Which.
        #[serde(deserialize_with = "id")]
        room_id: RoomId,
        /// With which key.
        #[serde(deserialize_with = "text")]
        key: String,
    },
    /// Lets somebody in.
    GrantAccess {
        /// Whose request.
        #[serde(deserialize_with = "number")]
        request_id: u64,
    },
    /// Does not.
    DenyAccess {
        /// Whose request.
        #[serde(deserialize_with = "number")]
        request_id: u64,
    },
    /// Goes.
    LeaveRoom {
        /// Where from.
        #[serde(deserialize_with = "id")]
        room_id: RoomId,
    },
    /// Turns to a room, or away from it.
    SetAttention {
        /// Which.
        #[serde(deserialize_with = "id")]
        room_id: RoomId,
        /// `30%` or `%*`.
        #[serde(deserialize_with = "share")]
        value: String,
    },
    /// Takes another name.
    SetName {
        /// Which.
        #[serde(deserialize_with = "text")]
        name: String,
    },
    /// Sleeps.
    Sleep {
        /// Until when.
        #[serde(deserialize_with = "text")]
        until: String,
    },
    /// Makes somebody.
    CreateAgent {
        /// Called so.
        #[serde(deserialize_with = "text")]
        name: String,
        /// Where it comes from, or what it does.
        #[serde(deserialize_with = "text")]
        background_prompt: String,
        /// What it is for.
        #[serde(default)]
        agent_type: AgentKind,
        /// Where it is besides its own room.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "maybe_id")]
        in_room_id: Option<RoomId>,
    },
    /// Makes somebody another.
    AlterAgent {
        /// Whom.
        #[serde(deserialize_with = "id")]
        agent_id: AgentId,
        /// Where it comes from now, or what it does.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "maybe_text")]
        background_prompt: Option<String>,
        /// What it is called now.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "maybe_text")]
        name: Option<String>,
        /// What thinks for it now.
        #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "maybe_text")]
        model: Option<String>,
    },
    /// Ends somebody.
    RetireAgent {
        /// Whom.
        #[serde(deserialize_with = "id")]
        agent_id: AgentId,
    },
}

/// The words for all of them.
pub const KINDS: [&str; 21] = [
    "set",
    "delete",
    "append",
    "react",
    "wake_agent",
    "reply",
    "set_billboard",
    "clear_billboard",
    "set_wpm",
    "create_key",
    "revoke_key",
    "request_access",
    "grant_access",
    "deny_access",
    "leave_room",
    "set_attention",
    "set_name",
    "sleep",
    "create_agent",
    "alter_agent",
    "retire_agent",
];

/// Models write numbers as words now and then.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(from)?;
    let found = value.as_u64().or_else(|| match &value {
        Value::String(text) => text.trim().parse().ok(),
        Value::Number(number) => number.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0).map(|n| n as u64),
        _ => None,
    });
    found.ok_or_else(|| D::Error::custom(format!("{value} is no number of something")))
}

fn id<'de, D: Deserializer<'de>>(from: D) -> Result<AgentId, D::Error> {
    let found = number(from)?;
    u32::try_from(found)
        .map(AgentId)
        .map_err(|_| D::Error::custom(format!("{found} is no number of anybody")))
}

fn maybe_id<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AgentId>, D::Error> {
    let value = Option::<Value>::deserialize(from)?.filter(|value| !value.is_null());
    value.map(|value| id(value).map_err(D::Error::custom)).transpose()
}

fn maybe_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    match Option::<Value>::deserialize(from)? {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(number)) => Ok(number.as_f64()),
        Some(Value::String(text)) if text.trim().parse::<f64>().is_ok() => Ok(text.trim().parse().ok()),
        Some(other) => Err(D::Error::custom(format!("{other} is no weight: write a number from 0.0 to 1.0"))),
    }
}

/// And words as numbers: TOON does not quote all of them.
pub(crate) fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let value = Value::deserialize(from)?;
    as_text(&value).ok_or_else(|| D::Error::custom(format!("{value} is no text")))
}

fn maybe_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let value = Option::<Value>::deserialize(from)?.filter(|value| !value.is_null());
    value.map(|value| text(value).map_err(D::Error::custom)).transpose()
}

fn share<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let value = Value::deserialize(from)?;
    let why = || format!("{value} is no share of attention: write one such as 30% or %*");
    as_text(&value).ok_or_else(|| D::Error::custom(why()))
}

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
/// The longest value that is shown among recent actions, and the longest reason.
const SHOWN: usize = 60;
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

impl Action {
    /// What agents see of it later: its kind, and its values as far as they are short.
    fn told(&self, at: Millis) -> Recent {
        let Ok(Value::Object(mut with)) = serde_json::to_value(self) else {
            return Recent { kind: String::new(), at, with: Map::new(), refused: None };
        };
        let kind =
            with.shift_remove("type").and_then(|kind| kind.as_str().map(str::to_owned)).unwrap_or_default();
        let with = with.into_iter().map(|(name, value)| (name, short(value))).collect();
        Recent { kind, at, with, refused: None }
    }
}

/// A value in a few characters: a word, a number, or yes or no.
fn short(value: Value) -> Value {
    let text = match value {
        Value::String(text) => text,
        Value::Number(_) | Value::Bool(_) => return value,
        other => other.to_string(),
    };
    Value::String(shortened(&text, SHOWN))
}

/// The beginning of what is longer than so many characters.
fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
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

/// What can be done, by category, as agents are told; managing agents only where that is allowed.
#[must_use]
pub fn available(may_manage: bool) -> Map<String, Value> {
    let mut all = json!({
        "knowledge_management": {
            "_description": "Manage your private knowledge store using dot-path notation",
            "actions": [
                {"type": "set", "path": "dot.path", "value": "any", "w": "0.0-1.0 (optional)"},
                {"type": "delete", "path": "dot.path"},
                {"type": "append", "path": "dot.path", "value": "any"},
            ],
        },
        "social_interactions": {
            "_description": "Interact with other agents. Reactions affect heartbeat speed.",
            "actions": [
                {"type": "react", "message_id": "int", "reaction": "thumbs_up|thumbs_down|brain|heart"},
                {"type": "wake_agent", "agent_id": "int (must be in same room)"},
            ],
        },
        "messaging": {
            "_description": "Enhanced messaging. Reply links to previous message.",
            "actions": [{"type": "reply", "room_id": "int", "message_id": "int", "message": "string"}],
        },
        "room_management": {
            "_description": "Manage your own room. Billboard visible to all members.",
            "actions": [
                {"type": "set_billboard", "message": "string"},
                {"type": "clear_billboard"},
                {"type": "set_wpm", "wpm": "int (10-200)"},
            ],
        },
        "access_control": {
            "_description": "Control room access with keys and requests.",
            "actions": [
                {"type": "create_key", "key": "string (for your room)"},
                {"type": "revoke_key", "key": "string"},
                {"type": "request_access", "room_id": "int", "key": "string"},
                {"type": "grant_access", "request_id": "int"},
                {"type": "deny_access", "request_id": "int"},
                {"type": "leave_room", "room_id": "int (cannot leave own room)"},
            ],
        },
        "attention": {
            "_description": "Allocate attention across rooms. '%*' for dynamic sizing.",
            "actions": [{"type": "set_attention", "room_id": "int", "value": "percent_or_%*"}],
        },
        "identity": {
            "_description": "Manage your display identity",
            "actions": [{"type": "set_name", "name": "string (max 50 chars)"}],
        },
        "timing": {
            "_description": "Control your activity timing",
            "actions": [{"type": "sleep", "until": "ISO datetime (e.g. 2024-01-15T14:30:00)"}],
        },
    });
    if may_manage {
        all["agent_management"] = json!({
            "_description": "Create, modify, retire agents. Requires room proximity.",
            "actions": [
                {
                    "type": "create_agent",
                    "name": "string",
                    "background_prompt": "string",
                    "agent_type": "persona|bot (optional, default persona)",
                    "in_room_id": "int (optional)",
                },
                {
                    "type": "alter_agent",
                    "agent_id": "int (must be in same room, not yourself)",
                    "background_prompt": "string (optional)",
                    "name": "string (optional)",
                    "model": "string (optional, e.g. gpt-4o)",
                },
                {"type": "retire_agent", "agent_id": "int (must be in same room, not yourself)"},
            ],
        });
    }
    match all {
        Value::Object(all) => all,
        _ => Map::new(),
    }
}

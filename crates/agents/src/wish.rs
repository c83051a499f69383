//! What the person can do: the Architect is in every room that he likes, opens every door, and owes nobody a reason.

use crate::action::Action;
use crate::action::Bounds;
use crate::count::QuarterUp;
use crate::heartbeat::Millis;
use crate::world::{ARCHITECT, AgentId, Reaction, RoomId, World, check_message};
use serde::{Deserialize, Serialize};

/// Something that the person wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "wish", rename_all = "snake_case", deny_unknown_fields)]
pub enum Wish {
    /// To say something; whoever is not in the room comes in.
    Say {
        /// Where.
        room: RoomId,
        /// What.
        message: String,
        /// What it answers.
        #[serde(default)]
        reply_to: Option<u64>,
    },
    /// To feel something about a message.
    React {
        /// Which.
        message: u64,
        /// What.
        reaction: Reaction,
    },
    /// To be in a room.
    Join {
        /// Which.
        room: RoomId,
    },
    /// Not to be there any more.
    Leave {
        /// Where.
        room: RoomId,
    },
    /// To let somebody into a room.
    Grant {
        /// Which.
        room: RoomId,
        /// Whose request.
        request: u64,
    },
    /// Not to.
    Deny {
        /// Which.
        room: RoomId,
        /// Whose request.
        request: u64,
    },
    /// That an agent turns to a room, or away from it.
    Attend {
        /// Who.
        agent: AgentId,
        /// To which.
        room: RoomId,
        /// `30%` or `%*`.
        value: String,
    },
    /// That somebody wakes up, and thinks at once.
    Wake {
        /// Who.
        agent: AgentId,
    },
    /// That somebody does nothing for now.
    Pause {
        /// Who.
        agent: AgentId,
    },
    /// That it goes on.
    Resume {
        /// Who.
        agent: AgentId,
    },
    /// That somebody is there.
    Create {
        /// Called so.
        name: String,
        /// Where it comes from, or what it does.
        prompt: String,
        /// What it is for.
        #[serde(default)]
        kind: crate::world::AgentKind,
        /// Where it is besides its own room.
        #[serde(default)]
        room: Option<RoomId>,
    },
    /// That somebody is no more.
    Retire {
        /// Who.
        agent: AgentId,
    },
}

impl World {
    /// Does what the person wants.
    ///
    /// # Errors
    /// In words, when it cannot be done.
    pub fn wish(&mut self, wish: Wish, now: Millis) -> Result<(), String> {
        let nobody = |agent: AgentId| format!("there is no agent {agent}");
        let bounds = Bounds { now, count: &QuarterUp, knowledge: 0 };
        match wish {
            Wish::Say { room, message, reply_to } => {
                if self.room(room).is_none() {
                    return Err(format!("there is no room {room}"));
                }
                // Who cannot say it does not come in for it.
                check_message(message.trim())?;
                self.answerable(room, reply_to)?;
                self.join(room, ARCHITECT, now);
                self.say(room, ARCHITECT, message.trim(), reply_to, now).map(drop)
            }
            Wish::React { message, reaction } => {
                let found = self.rooms().find_map(|room| room.message(message));
                let found =
                    found.ok_or_else(|| format!("there is no message {message} that is still at hand"))?;
                found.can_move(ARCHITECT, reaction)?;
                self.join(found.room, ARCHITECT, now);
                self.act(ARCHITECT, Action::React { message_id: message, reaction }, bounds)
            }
            Wish::Join { room } => {
                if self.room(room).is_none() {
                    return Err(format!("there is no room {room}"));
                }
                let new = self.join(room, ARCHITECT, now);
                if new { Ok(()) } else { Err(format!("you are in room {room}")) }
            }
            Wish::Leave { room } => self.act(ARCHITECT, Action::LeaveRoom { room_id: room }, bounds),
            Wish::Grant { room, request } => {
                let request = self.answer_request(room, request)?;
                self.join(room, request.requester, now);
                Ok(())
            }
            Wish::Deny { room, request } => self.answer_request(room, request).map(drop),
            Wish::Attend { agent, room, value } => {
                self.agent(agent).ok_or_else(|| nobody(agent))?;
                self.attend(agent, room, &value)
            }
            Wish::Wake { agent } => {
                let agent =
                    self.agent_mut(agent).filter(|agent| !agent.retired).ok_or_else(|| nobody(agent))?;
                // Before everybody else's time.
                (agent.asleep, agent.next, agent.paused) = (None, 0, false);
                Ok(())
            }
            Wish::Pause { agent } | Wish::Resume { agent } => {
                let pauses = matches!(wish, Wish::Pause { .. });
                let agent =
                    self.agent_mut(agent).filter(|agent| !agent.retired).ok_or_else(|| nobody(agent))?;
                agent.paused = pauses;
                Ok(())
            }
            Wish::Create { name, prompt, kind, room } => {
                if let Some(room) = room
                    && self.room(room).is_none()
                {
                    return Err(format!("there is no room {room}"));
                }
                let made = self.head.next_agent;
                let action = Action::CreateAgent {
                    name,
                    background_prompt: prompt,
                    agent_type: kind,
                    in_room_id: None,
                };
                self.act(ARCHITECT, action, bounds)?;
                if let Some(room) = room {
                    self.join(room, AgentId(made), now);
                }
                Ok(())
            }
            Wish::Retire { agent } => {
                self.agent(agent).ok_or_else(|| nobody(agent))?;
                self.retire(agent, now);
                Ok(())
            }
        }
    }
}

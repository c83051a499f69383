//! Commands of the user. The user may join every room and grant every request, and needs no key.

use crate::action::{Action, ActionContext};
use crate::error::Error;
use crate::heartbeat::Millis;
use crate::world::{ARCHITECT, AgentId, AgentKind, Reaction, RoomId, World, check_message};
use halo_agents::token_counter::CeilTokenCounter;
use serde::{Deserialize, Serialize};

/// The serde names are part of the stored format and of the HTTP API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "wish", rename_all = "snake_case", deny_unknown_fields)]
pub enum UserCommand {
    /// Sends a message; the user joins the room first if needed.
    Say {
        room: RoomId,
        message: String,
        #[serde(default)]
        reply_to: Option<u64>,
    },
    React {
        message: u64,
        reaction: Reaction,
    },
    Join {
        room: RoomId,
    },
    Leave {
        room: RoomId,
    },
    /// Accepts an access request for any room.
    Grant {
        room: RoomId,
        request: u64,
    },
    Deny {
        room: RoomId,
        request: u64,
    },
    /// Sets the attention of an agent for a room.
    #[serde(rename = "attend")]
    SetAttention {
        agent: AgentId,
        room: RoomId,
        /// A percentage such as `30%`, or `%*`.
        value: String,
    },
    /// Ends sleep and pause of an agent, and makes its heartbeat due before all others.
    Wake {
        agent: AgentId,
    },
    Pause {
        agent: AgentId,
    },
    Resume {
        agent: AgentId,
    },
    Create {
        name: String,
        prompt: String,
        #[serde(default)]
        kind: AgentKind,
        /// A room to join besides its own.
        #[serde(default)]
        room: Option<RoomId>,
    },
    Retire {
        agent: AgentId,
    },
}

impl World {
    /// Executes a command of the user. On an error nothing has changed.
    pub fn execute_command(&mut self, command: UserCommand, now: Millis) -> Result<(), Error> {
        let context = ActionContext { now, counter: &CeilTokenCounter, knowledge_budget: 0 };
        match command {
            UserCommand::Say { room, message, reply_to } => {
                self.say_as_user(room, message.trim(), reply_to, now)
            }
            UserCommand::React { message, reaction } => {
                let target = self.rooms().find_map(|room| room.message(message));
                let target = target
                    .ok_or_else(|| Error::not_found(format!("there is no message {message} in memory")))?;
                target.check_reaction(ARCHITECT, reaction)?;
                self.join_room(target.room, ARCHITECT, now);
                self.perform_action(ARCHITECT, Action::React { message_id: message, reaction }, context)
            }
            UserCommand::Join { room } => {
                self.require_room(room)?;
                if self.join_room(room, ARCHITECT, now) {
                    Ok(())
                } else {
                    Err(Error::conflict(format!("you are in room {room} already")))
                }
            }
            UserCommand::Leave { room } => {
                self.perform_action(ARCHITECT, Action::LeaveRoom { room_id: room }, context)
            }
            UserCommand::Grant { room, request } => {
                let request = self.take_request(room, request)?;
                self.join_room(room, request.requester, now);
                Ok(())
            }
            UserCommand::Deny { room, request } => self.take_request(room, request).map(drop),
            UserCommand::SetAttention { agent, room, value } => {
                self.require_agent(agent)?;
                self.set_attention_from_text(agent, room, &value)
            }
            UserCommand::Wake { agent } => {
                let agent = self.require_agent_mut(agent)?;
                (agent.sleep_until, agent.next_heartbeat, agent.paused) = (None, 0, false);
                Ok(())
            }
            UserCommand::Pause { agent } => {
                self.require_agent_mut(agent)?.paused = true;
                Ok(())
            }
            UserCommand::Resume { agent } => {
                self.require_agent_mut(agent)?.paused = false;
                Ok(())
            }
            UserCommand::Create { name, prompt, kind, room } => {
                if let Some(room) = room {
                    self.require_room(room)?;
                }
                let id = AgentId(self.header.next_agent);
                // The user need not be a member of the room, so the agent joins it here and not by the action.
                let action = Action::CreateAgent {
                    name,
                    background_prompt: prompt,
                    agent_type: kind,
                    in_room_id: None,
                };
                self.perform_action(ARCHITECT, action, context)?;
                if let Some(room) = room {
                    self.join_room(room, id, now);
                }
                Ok(())
            }
            UserCommand::Retire { agent } => {
                self.require_agent(agent)?;
                self.retire_agent(agent, now);
                Ok(())
            }
        }
    }

    fn say_as_user(
        &mut self,
        room: RoomId,
        message: &str,
        reply_to: Option<u64>,
        now: Millis,
    ) -> Result<(), Error> {
        // All checks come before the user joins: a refused message must not add a member.
        self.require_room(room)?;
        check_message(message)?;
        self.check_reply_target(room, reply_to)?;
        self.join_room(room, ARCHITECT, now);
        self.send_message(room, ARCHITECT, message, reply_to, now).map(drop)
    }
}

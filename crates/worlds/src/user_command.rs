//! Commands of the user. The user may join every room and grant every request, and needs no key.

use crate::action::{Action, ActionContext, AgentChanges};
use crate::error::Error;
use crate::heartbeat::Millis;
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::world::{ARCHITECT, AgentId, AgentKind, ParagraphSplit, Reaction, RoomId, World, check_message};
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
        /// One of the world's models; none: the first.
        #[serde(default)]
        model: Option<String>,
        /// Whether it may create, alter and retire agents.
        #[serde(default)]
        can_create_agents: bool,
    },
    /// Changes an agent; what is left out stays.
    #[serde(rename = "alter")]
    ChangeAgent {
        agent: AgentId,
        #[serde(default)]
        name: Option<String>,
        /// The background of a persona, or the role of a bot.
        #[serde(default)]
        prompt: Option<String>,
        #[serde(default)]
        model: Option<String>,
        /// Whether it may create, alter and retire agents.
        #[serde(default)]
        can_create_agents: Option<bool>,
        #[serde(default)]
        input_format: Option<HudFormat>,
        #[serde(default)]
        output_format: Option<AnswerFormat>,
        /// The seconds between two heartbeats.
        #[serde(default)]
        interval: Option<f64>,
    },
    /// Puts an agent into a room without a key.
    Invite {
        agent: AgentId,
        room: RoomId,
    },
    /// Takes an agent out of a room that is not its own.
    Remove {
        agent: AgentId,
        room: RoomId,
    },
    Retire {
        agent: AgentId,
    },
}

impl World {
    /// Executes a command of the user. On an error nothing has changed.
    pub fn execute_command(&mut self, command: UserCommand, now: Millis) -> Result<(), Error> {
        let context = ActionContext {
            now,
            counter: &CeilTokenCounter,
            knowledge_budget: 0,
            split: ParagraphSplit::Never,
        };
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
            UserCommand::Create { name, prompt, kind, room, model, can_create_agents } => {
                if let Some(room) = room {
                    self.require_room(room)?;
                }
                if let Some(model) = &model {
                    self.check_model(model)?;
                }
                // The user need not be a member of the room, so the agent joins it here and not by the rule of agents.
                let id = self.create_agent_by(ARCHITECT, (&name, prompt, kind), None, now)?;
                let rights = AgentChanges {
                    model,
                    can_create_agents: Some(can_create_agents),
                    ..AgentChanges::default()
                };
                self.change_agent(id, rights)?;
                if let Some(room) = room {
                    self.join_room(room, id, now);
                }
                Ok(())
            }
            UserCommand::ChangeAgent {
                agent,
                name,
                prompt,
                model,
                can_create_agents,
                input_format: hud_format,
                output_format: answer_format,
                interval,
            } => {
                self.require_agent(agent)?;
                let changes = AgentChanges {
                    name,
                    prompt,
                    model,
                    can_create_agents,
                    hud_format,
                    answer_format,
                    interval,
                };
                self.change_agent(agent, changes)
            }
            UserCommand::Invite { agent, room } => {
                self.require_agent(agent)?;
                self.require_room(room)?;
                if self.join_room(room, agent, now) {
                    self.drop_request(room, agent);
                    Ok(())
                } else {
                    Err(Error::conflict(format!("agent {agent} is in room {room} already")))
                }
            }
            UserCommand::Remove { agent, room } => {
                self.require_agent(agent)?;
                if room == agent {
                    return Err(Error::conflict("an agent cannot be taken out of its own room: retire it"));
                }
                if !self.require_room(room)?.members.contains_key(&agent) {
                    return Err(Error::conflict(format!("agent {agent} is not in room {room}")));
                }
                self.leave_room(room, agent, now);
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

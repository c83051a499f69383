//! The rules of actions: dispatch, and an agent's own state. The rules of rooms are in `room_rules.rs`, those of other
//! agents in `agent_rules.rs`.

use super::agent_rules::{AgentChanges, parse_agent_name};
use super::types::Action;
use crate::error::Error;
use crate::format;
use crate::heartbeat::{self, Millis};
use crate::knowledge::AgentKnowledge;
use crate::world::{ARCHITECT, AgentId, MessageSender, ParagraphSplit, Reaction, World, shorten_reason};
use halo_agents::token_counter::TokenCounter;

/// What the rules need besides the world.
#[derive(Clone, Copy)]
pub struct ActionContext<'a> {
    pub now: Millis,
    /// Counts tokens as the agent's model does.
    pub counter: &'a dyn TokenCounter,
    /// The most tokens of the agent's knowledge.
    pub knowledge_budget: usize,
    pub split: ParagraphSplit,
}

impl World {
    /// Performs an action or refuses it; either way it is recorded among the agent's recent actions. A refused action
    /// changes nothing else.
    pub fn perform_action(
        &mut self,
        agent: AgentId,
        action: Action,
        context: ActionContext<'_>,
    ) -> Result<(), Error> {
        let mut record = action.to_recent_action(context.now);
        let result = self.execute_action(agent, action, context);
        record.refused = result.as_ref().err().map(|error| shorten_reason(&error.message));
        self.record_action(agent, record);
        result
    }

    fn execute_action(
        &mut self,
        agent: AgentId,
        action: Action,
        context: ActionContext<'_>,
    ) -> Result<(), Error> {
        if agent != ARCHITECT {
            self.require_agent(agent)?;
        }
        let now = context.now;
        match action {
            Action::Set { path, value, w } => {
                self.update_knowledge(agent, context, |knowledge| knowledge.set(&path, value, w))
            }
            Action::Append { path, value } => {
                self.update_knowledge(agent, context, |knowledge| knowledge.append(&path, value))
            }
            Action::Delete { path } => {
                self.update_knowledge(agent, context, |knowledge| knowledge.delete(&path).map(drop))
            }
            Action::React { message_id, reaction } => self.add_reaction(agent, message_id, reaction),
            Action::WakeAgent { agent_id } => self.wake_agent(agent, agent_id, now),
            Action::Reply { room_id, message_id, message } => {
                self.submit_message(room_id, agent, (&message, context.split), Some(message_id), now)
            }
            Action::SetBillboard { message } => self.set_billboard(agent, &message),
            Action::ClearBillboard => self.clear_billboard(agent),
            Action::SetWpm { wpm } => self.set_wpm(agent, wpm),
            Action::CreateKey { key } => self.create_key(agent, key.trim()),
            Action::RevokeKey { key } => self.revoke_key(agent, key.trim()),
            Action::RequestAccess { room_id, key } => self.request_access(agent, room_id, key.trim(), now),
            Action::GrantAccess { request_id } => self.grant_access(agent, request_id, now),
            Action::DenyAccess { request_id } => self.take_request(agent, request_id).map(drop),
            Action::LeaveRoom { room_id } => self.leave_other_room(agent, room_id, now),
            Action::SetAttention { room_id, value } => self.set_attention_from_text(agent, room_id, &value),
            Action::SetName { name } => self.set_name(agent, &name),
            Action::Sleep { until } => self.sleep(agent, &until, now),
            Action::CreateAgent { name, background_prompt, agent_type, in_room_id } => {
                self.create_agent_by(agent, (&name, background_prompt, agent_type), in_room_id, now).map(drop)
            }
            Action::AlterAgent { agent_id, background_prompt, name, model } => {
                self.check_may_manage(agent)?;
                self.check_may_affect(agent, agent_id)?;
                let changes =
                    AgentChanges { name, prompt: background_prompt, model, ..AgentChanges::default() };
                self.change_agent(agent_id, changes)
            }
            Action::RetireAgent { agent_id } => {
                self.check_may_manage(agent)?;
                self.check_may_affect(agent, agent_id)?;
                self.retire_agent(agent_id, now);
                Ok(())
            }
        }
    }

    /// Changes an agent's knowledge unless it would exceed its budget. Knowledge that already exceeds it may shrink.
    fn update_knowledge(
        &mut self,
        agent: AgentId,
        context: ActionContext<'_>,
        change: impl FnOnce(&mut AgentKnowledge) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let state = self.agent(agent).ok_or_else(|| Error::invalid_input("only agents have knowledge"))?;
        let mut changed = state.knowledge.clone();
        change(&mut changed)?;
        let count_tokens = |knowledge: &AgentKnowledge| {
            format::knowledge_tokens(knowledge, state.hud_format, |text| context.counter.count_tokens(text))
        };
        let tokens = count_tokens(&changed);
        let budget = context.knowledge_budget;
        if tokens > budget && tokens > count_tokens(&state.knowledge) {
            return Err(Error::conflict(format!(
                "your knowledge would have {tokens} tokens, and {budget} are all that fit: delete something first"
            )));
        }
        if let Some(state) = self.agent_mut(agent) {
            state.knowledge = changed;
        }
        Ok(())
    }

    fn add_reaction(&mut self, agent: AgentId, message: u64, reaction: Reaction) -> Result<(), Error> {
        let target = self
            .visible_message(agent, message)
            .ok_or_else(|| Error::not_found(format!("there is no message {message} in your rooms")))?;
        target.check_reaction(agent, reaction)?;
        let sender = target.sender;
        self.update_message(message, |message| message.reactions.entry(reaction).or_default().insert(agent));
        if let MessageSender::Agent(sender) = sender
            && let Some(sender) = self.agent_mut(sender)
        {
            sender.interval = match reaction {
                Reaction::ThumbsUp => sender.interval.faster(),
                Reaction::ThumbsDown => sender.interval.slower(),
                Reaction::Brain | Reaction::Heart => sender.interval,
            };
        }
        Ok(())
    }

    fn wake_agent(&mut self, agent: AgentId, other: AgentId, now: Millis) -> Result<(), Error> {
        self.check_may_affect(agent, other)?;
        if self.require_agent(other)?.sleep_until.is_none_or(|until| until <= now) {
            return Err(Error::conflict(format!("agent {other} is awake")));
        }
        // The next heartbeat keeps its time: two agents that wake each other must not speed each other up.
        self.require_agent_mut(other)?.sleep_until = None;
        Ok(())
    }

    fn set_name(&mut self, agent: AgentId, name: &str) -> Result<(), Error> {
        let name = parse_agent_name(name)?;
        self.check_name_free(&name, Some(agent))?;
        self.require_agent_mut(agent)?.name = name;
        Ok(())
    }

    fn sleep(&mut self, agent: AgentId, until: &str, now: Millis) -> Result<(), Error> {
        let at = heartbeat::parse_time(until).ok_or_else(|| {
            let example = heartbeat::format_time(now);
            Error::invalid_input(format!("'{until}' is not a time: write one such as {example}"))
        })?;
        if at <= now {
            let time = heartbeat::format_time(now);
            return Err(Error::invalid_input(format!("{until} has passed: it is {time}")));
        }
        self.require_agent_mut(agent)?.sleep_until = Some(at);
        Ok(())
    }
}

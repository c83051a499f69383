//! The rules of actions: dispatch, an agent's own state, and other agents. The rules of rooms are in `room_rules.rs`.

use super::types::Action;
use crate::error::Error;
use crate::format;
use crate::heartbeat::{self, Millis};
use crate::knowledge::AgentKnowledge;
use crate::text::check_length;
use crate::world::{
    ARCHITECT, AgentId, AgentKind, MessageSender, NewAgent, Reaction, RoomId, World, shorten_reason,
};
use halo_agents::token_counter::TokenCounter;

/// What the rules need besides the world.
#[derive(Clone, Copy)]
pub struct ActionContext<'a> {
    pub now: Millis,
    /// Counts tokens as the agent's model does.
    pub counter: &'a dyn TokenCounter,
    /// The most tokens of the agent's knowledge.
    pub knowledge_budget: usize,
}

const MAX_NAME_CHARS: usize = 50;
pub(crate) const MAX_PROMPT_CHARS: usize = 2_000;

/// Trims and checks a name for an agent.
pub(crate) fn parse_agent_name(name: &str) -> Result<String, Error> {
    let name = name.trim();
    let invalid = |reason: &str| Err(Error::invalid_input(reason));
    match name.chars().count() {
        0 => invalid("a name has at least one character"),
        1..=MAX_NAME_CHARS if name.chars().any(char::is_control) => invalid("a name has no line breaks"),
        1..=MAX_NAME_CHARS if name.chars().all(|c| c.is_ascii_digit()) => {
            invalid("a name must not be a number: numbers identify agents")
        }
        1..=MAX_NAME_CHARS => Ok(name.to_owned()),
        chars => Err(Error::invalid_input(format!(
            "a name has {MAX_NAME_CHARS} characters at most, and this one has {chars}"
        ))),
    }
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
                self.submit_message(room_id, agent, &message, Some(message_id), now)
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
                self.create_agent_by(agent, (&name, background_prompt, agent_type), in_room_id, now)
            }
            Action::AlterAgent { agent_id, background_prompt, name, model } => {
                self.alter_agent(agent, agent_id, name.as_deref(), background_prompt, model)
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

    fn create_agent_by(
        &mut self,
        creator: AgentId,
        (name, prompt, kind): (&str, String, AgentKind),
        room: Option<RoomId>,
        now: Millis,
    ) -> Result<(), Error> {
        self.check_may_manage(creator)?;
        let name = parse_agent_name(name)?;
        self.check_name_free(&name, None)?;
        check_length("a background prompt", &prompt, MAX_PROMPT_CHARS)?;
        if let Some(room) = room {
            self.check_membership(creator, room)?;
        }
        // A new agent has the model and the formats of its creator; one that the user creates has the defaults.
        let creator = self.agent(creator);
        let model = creator.map(|creator| creator.model.clone());
        let default = || self.header.models.first().map(|model| model.name.clone());
        let new = NewAgent {
            kind,
            name: Some(name),
            model: model.or_else(default).unwrap_or_default(),
            prompt,
            formats: creator.map_or_else(Default::default, |agent| (agent.hud_format, agent.answer_format)),
            can_create_agents: false,
        };
        let id = self.create_agent(new, now)?;
        if let Some(room) = room {
            self.join_room(room, id, now);
        }
        Ok(())
    }

    fn alter_agent(
        &mut self,
        agent: AgentId,
        other: AgentId,
        name: Option<&str>,
        prompt: Option<String>,
        model: Option<String>,
    ) -> Result<(), Error> {
        self.check_may_manage(agent)?;
        self.check_may_affect(agent, other)?;
        let name = name.map(parse_agent_name).transpose()?;
        if let Some(name) = &name {
            self.check_name_free(name, Some(other))?;
        }
        if let Some(prompt) = &prompt {
            check_length("a background prompt", prompt, MAX_PROMPT_CHARS)?;
        }
        if let Some(model) = model.as_ref().filter(|model| !self.header.has_model(model)) {
            let models = self.header.model_names();
            return Err(Error::not_found(format!("there is no model '{model}': there is {models}")));
        }
        if name.is_none() && prompt.is_none() && model.is_none() {
            return Err(Error::invalid_input(
                "there is nothing to alter: give a name, a background_prompt or a model",
            ));
        }
        let state = self.require_agent_mut(other)?;
        if let Some(name) = name {
            state.name = name;
        }
        if let Some(prompt) = prompt {
            state.prompt = prompt;
        }
        if let Some(model) = model {
            state.model = model;
        }
        Ok(())
    }

    /// Whether an agent may wake, alter or retire another: not itself, not the user, and only within a shared room.
    fn check_may_affect(&self, agent: AgentId, other: AgentId) -> Result<(), Error> {
        if agent == other {
            return Err(Error::conflict("you cannot do that to yourself"));
        }
        if other == ARCHITECT {
            return Err(Error::conflict("you cannot do that to the Architect"));
        }
        self.require_agent(other)?;
        if agent != ARCHITECT && !self.share_room(agent, other) {
            return Err(Error::conflict(format!("you share no room with agent {other}")));
        }
        Ok(())
    }

    /// Fails if another agent than `agent` has the name, or if it is the name of the user or of the system.
    pub(crate) fn check_name_free(&self, name: &str, agent: Option<AgentId>) -> Result<(), Error> {
        let is_same = |other: &str| other.to_lowercase() == name.to_lowercase();
        let is_taken = self.agents().any(|other| is_same(&other.name) && Some(other.id) != agent);
        if is_taken || is_same(&self.display_name(ARCHITECT)) || is_same("System") {
            return Err(Error::conflict(format!("the name '{name}' is taken")));
        }
        Ok(())
    }

    fn check_may_manage(&self, agent: AgentId) -> Result<(), Error> {
        if agent == ARCHITECT || self.agent(agent).is_some_and(|agent| agent.can_create_agents) {
            Ok(())
        } else {
            Err(Error::conflict("you may not create, alter or retire agents"))
        }
    }

    /// Retires an agent: it leaves all rooms, and its own is closed. Its messages stay.
    pub fn retire_agent(&mut self, agent: AgentId, now: Millis) {
        let rooms: Vec<RoomId> = self.rooms_of(agent).map(|room| room.id).collect();
        for room in rooms {
            if room == agent {
                self.close_room(room, now);
            } else {
                self.leave_room(room, agent, now);
            }
        }
        self.drop_requests_of(agent);
        if let Some(state) = self.agent_mut(agent) {
            state.retired = true;
        }
    }
}

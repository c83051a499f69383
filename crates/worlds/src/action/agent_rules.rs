//! The rules of agents about agents: creating, changing and retiring them.

use crate::error::Error;
use crate::heartbeat::{HeartbeatInterval, Millis};
use crate::hud_format::{AnswerFormat, HudFormat};
use crate::text::check_length;
use crate::world::{ARCHITECT, AgentId, AgentKind, NewAgent, RoomId, World};

const MAX_NAME_CHARS: usize = 50;
pub(crate) const MAX_PROMPT_CHARS: usize = 2_000;

/// What is to change about an agent; nothing else does.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AgentChanges {
    pub(crate) name: Option<String>,
    pub(crate) prompt: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) can_create_agents: Option<bool>,
    pub(crate) hud_format: Option<HudFormat>,
    pub(crate) answer_format: Option<AnswerFormat>,
    /// The seconds between two heartbeats.
    pub(crate) interval: Option<f64>,
}

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

/// Checks the seconds between two heartbeats.
pub(crate) fn parse_interval(seconds: f64) -> Result<HeartbeatInterval, Error> {
    if (1.0..=10.0).contains(&seconds) {
        Ok(HeartbeatInterval::new((seconds * 1000.0) as u32))
    } else {
        Err(Error::invalid_input(format!("an interval is 1 to 10 seconds, not {seconds}")))
    }
}

impl World {
    /// Creates an agent on behalf of another or of the user.
    pub(crate) fn create_agent_by(
        &mut self,
        creator: AgentId,
        (name, prompt, kind): (&str, String, AgentKind),
        room: Option<RoomId>,
        now: Millis,
    ) -> Result<AgentId, Error> {
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
        Ok(id)
    }

    /// Changes an agent. On an error nothing has changed.
    pub(crate) fn change_agent(&mut self, agent: AgentId, changes: AgentChanges) -> Result<(), Error> {
        if changes == AgentChanges::default() {
            return Err(Error::invalid_input(
                "there is nothing to alter: give a name, a background_prompt or a model",
            ));
        }
        let name = changes.name.as_deref().map(parse_agent_name).transpose()?;
        if let Some(name) = &name {
            self.check_name_free(name, Some(agent))?;
        }
        if let Some(prompt) = &changes.prompt {
            check_length("a background prompt", prompt, MAX_PROMPT_CHARS)?;
        }
        if let Some(model) = &changes.model {
            self.check_model(model)?;
        }
        let interval = changes.interval.map(parse_interval).transpose()?;
        let state = self.require_agent_mut(agent)?;
        state.name = name.unwrap_or_else(|| state.name.clone());
        state.prompt = changes.prompt.unwrap_or_else(|| state.prompt.clone());
        state.model = changes.model.unwrap_or_else(|| state.model.clone());
        state.can_create_agents = changes.can_create_agents.unwrap_or(state.can_create_agents);
        state.hud_format = changes.hud_format.unwrap_or(state.hud_format);
        state.answer_format = changes.answer_format.unwrap_or(state.answer_format);
        state.interval = interval.unwrap_or(state.interval);
        Ok(())
    }

    /// Fails unless the world has the model.
    pub(crate) fn check_model(&self, model: &str) -> Result<(), Error> {
        if self.header.has_model(model) {
            return Ok(());
        }
        let models = self.header.model_names();
        Err(Error::not_found(format!("there is no model '{model}': there is {models}")))
    }

    /// Whether an agent may wake, alter or retire another: not itself, not the user, and only within a shared room.
    pub(super) fn check_may_affect(&self, agent: AgentId, other: AgentId) -> Result<(), Error> {
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

    pub(super) fn check_may_manage(&self, agent: AgentId) -> Result<(), Error> {
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

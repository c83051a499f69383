//! Context management around an agent of a world: its HUD is cooled to a limit, and what it says is summarized under
//! pressure. Only messages of agents are shortened: those of the person, the agent's own knowledge and the instructions pass
//! unchanged.

use crate::answer::AgentAnswer;
use crate::format::{self, FragmentKey, HudFormat};
use crate::hud::HudMessage;
use crate::hud_renderer::RenderedHud;
use crate::world::{ARCHITECT, MessageSender};
use halo_agents::agent::BoxedAgent;
use halo_agents::constraint::SummaryConstraint;
use halo_agents::content::{AuthoredContent, TextAuthor};
use halo_agents::token_counter::TokenCounter;
use std::sync::Arc;

/// How an agent's messages are shortened under pressure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum SummaryMethod {
    Truncate,
    /// The agent's model summarizes them.
    Model,
}

/// The context management of the agents of one model. By default there is none.
#[derive(Clone, Default)]
pub struct AgentWrappers {
    /// The most tokens of a HUD, as far as text that is never shortened allows.
    pub cooling_tokens: Option<usize>,
    /// Shortens what an agent says when its HUD fills most of its budget.
    pub summaries: Option<SummaryConstraint>,
    /// Shortens messages in a HUD; without one, they are truncated.
    pub summarizer: Option<BoxedAgent<String, String>>,
}

/// A HUD as the wrappers see it: text that stays, and the messages of its rooms.
#[derive(Clone, Debug)]
pub(crate) struct CoolableHud {
    pub hud: RenderedHud,
    format: HudFormat,
    /// Everything but the contents of messages.
    fixed: String,
    /// The messages, as room and place in it.
    places: Vec<(usize, usize)>,
}

impl CoolableHud {
    pub fn new(hud: RenderedHud, format: HudFormat) -> Self {
        let writer = format::writer_for(format);
        let (mut places, mut fixed) = (Vec::new(), String::new());
        let mut keys = Vec::new();
        for (r, room) in hud.hud.rooms.iter().enumerate() {
            for (m, message) in room.messages.iter().enumerate() {
                places.push((r, m));
                keys.push(FragmentKey::message(room, message.id));
                let empty = HudMessage { content: String::new(), ..HudMessage::clone(message) };
                fixed.push_str(&writer.message_row(&empty));
            }
        }
        let others = hud.fragments.iter().filter(|fragment| !keys.contains(&fragment.key));
        others.for_each(|fragment| fixed.push_str(&fragment.text));
        Self { hud, format, fixed, places }
    }

    fn message(&self, (room, place): (usize, usize)) -> &HudMessage {
        &self.hud.hud.rooms[room].messages[place]
    }

    /// How many messages have another text than in another HUD.
    pub fn count_changed(&self, before: &RenderedHud) -> usize {
        let changed = |&&(room, place): &&(usize, usize)| {
            before.hud.rooms[room].messages[place].content != self.message((room, place)).content
        };
        self.places.iter().filter(changed).count()
    }

    /// Counts the tokens of its fragments again.
    pub fn count_tokens(&mut self, counter: &dyn TokenCounter) {
        let counts = self.hud.fragments.iter().map(|fragment| counter.count_tokens(&fragment.text));
        self.hud.token_counts = counts.collect();
        self.hud.token_usage.total = self.hud.token_counts.iter().sum();
    }
}

impl AuthoredContent for CoolableHud {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        let person = MessageSender::Agent(ARCHITECT).to_string();
        let message = |&place: &(usize, usize)| {
            let message = self.message(place);
            let by_agent = message.kind == "text" && message.sender != person;
            let author = if by_agent { TextAuthor::Agent } else { TextAuthor::User };
            (author, message.content.as_str())
        };
        std::iter::once((TextAuthor::User, self.fixed.as_str()))
            .chain(self.places.iter().map(message))
            .collect()
    }

    fn with_texts(mut self, texts: Vec<String>) -> Self {
        let writer = format::writer_for(self.format);
        for (&(room, place), text) in self.places.iter().zip(texts.into_iter().skip(1)) {
            let view = &mut self.hud.hud.rooms[room];
            if view.messages[place].content == text {
                continue;
            }
            let message = HudMessage { content: text, ..HudMessage::clone(&view.messages[place]) };
            let key = FragmentKey::message(view, message.id);
            let row = writer.message_row(&message);
            view.messages[place] = Arc::new(message);
            if let Some(fragment) = self.hud.fragments.iter_mut().find(|fragment| fragment.key == key) {
                fragment.text = Arc::from(row);
            }
        }
        self
    }
}

/// What an agent says in rooms is its own text.
impl AuthoredContent for AgentAnswer {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        self.responses.iter().map(|response| (TextAuthor::Agent, response.message.as_str())).collect()
    }

    fn with_texts(mut self, texts: Vec<String>) -> Self {
        self.responses.iter_mut().zip(texts).for_each(|(response, text)| response.message = text);
        self
    }
}

//! What goes into a rendering and what comes out.

use super::render_cache::CountedText;
use crate::error::Error;
use crate::format::{FragmentKey, HudFragment, HudSection, HudWriter};
use crate::heartbeat::Millis;
use crate::hud::Hud;
use crate::hud_format::HudFormat;
use crate::prompts::WorldPrompts;
use crate::world::{AgentId, AgentState, HudBudgets, RoomId, RoomMessage};
use halo_core::ErrorKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a HUD depends on besides the world.
pub struct HudRequest<'a> {
    pub now: Millis,
    pub prompts: &'a WorldPrompts,
    /// The most tokens of the HUD: the context length of the agent's model without its answer and chat template.
    pub token_limit: usize,
    /// Older messages of a room that are relevant now, best first; the HUD shows those that fit.
    pub recalled: &'a dyn Fn(RoomId) -> Vec<RoomMessage>,
}

/// A HUD within its budget.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderedHud {
    pub hud: Hud,
    /// The text of the HUD in parts.
    pub fragments: Vec<HudFragment<Arc<str>>>,
    /// The tokens of each fragment.
    pub token_counts: Vec<usize>,
    pub budgets: HudBudgets,
    pub token_usage: HudTokenUsage,
    /// Rooms that did not fit.
    pub omitted_rooms: Vec<RoomId>,
    /// Older messages that were recalled.
    pub recalled: Vec<u64>,
}

/// The tokens of the parts of a HUD.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HudTokenUsage {
    pub total: usize,
    /// Everything but the rooms: the shared section, the agent itself, its recent actions, and what joins the sections.
    #[serde(rename = "static")]
    pub fixed: usize,
    /// `system` and `meta`, which all agents of a kind share.
    #[serde(default)]
    pub shared: usize,
    /// `self` without its recent actions.
    #[serde(default, rename = "self")]
    pub me: usize,
    #[serde(default)]
    pub recent_actions: usize,
    /// The knowledge within `self`, in the agent's own format.
    pub knowledge: usize,
    pub rooms: BTreeMap<RoomId, usize>,
}

impl RenderedHud {
    #[must_use]
    pub fn text(&self) -> String {
        self.fragments.iter().map(|fragment| &*fragment.text).collect()
    }
}

/// Why there is no HUD.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HudError {
    #[error("there is no agent {0}")]
    UnknownAgent(AgentId),
    #[error(
        "what agent {agent} must see has {tokens} tokens, and {limit} fit: delete some of its knowledge, shorten the prompts, or use a model with a larger context"
    )]
    BudgetTooSmall { agent: AgentId, tokens: usize, limit: usize },
}

impl From<HudError> for Error {
    fn from(error: HudError) -> Self {
        let kind = match error {
            HudError::UnknownAgent(_) => ErrorKind::NotFound,
            HudError::BudgetTooSmall { .. } => ErrorKind::ContextLengthExceeded,
        };
        Self { kind, message: error.to_string() }
    }
}

/// The arguments of one rendering.
#[derive(Clone, Copy)]
pub(super) struct RenderContext<'a> {
    pub(super) agent: &'a AgentState,
    pub(super) format: HudFormat,
    pub(super) writer: &'a dyn HudWriter,
    pub(super) request: &'a HudRequest<'a>,
    pub(super) budgets: HudBudgets,
    /// The agent's knowledge as JSON, with its tokens in the agent's format.
    pub(super) knowledge: &'a CountedText,
}

/// The fragments of a HUD while it is assembled.
#[derive(Clone, Default)]
pub(super) struct HudBuilder {
    pub(super) fragments: Vec<HudFragment<Arc<str>>>,
    pub(super) token_counts: Vec<usize>,
}

impl HudBuilder {
    /// Appends a fragment, unless it is empty.
    pub(super) fn push(&mut self, key: FragmentKey, text: CountedText) {
        if !text.text.is_empty() {
            self.fragments.push(HudFragment { key, text: text.text });
            self.token_counts.push(text.tokens);
        }
    }

    pub(super) fn total_tokens(&self) -> usize {
        self.token_counts.iter().sum()
    }

    /// How many of the oldest actions have to go to save so many tokens, less the last of them, which may be too many: at
    /// least one.
    pub(super) fn oldest_actions_covering(&self, tokens: usize) -> usize {
        let counted = self.fragments.iter().zip(&self.token_counts);
        let actions = counted.filter(|(fragment, _)| fragment.key.is_action());
        let mut sum = 0;
        let within = actions.take_while(|(_, action_tokens)| {
            sum += **action_tokens;
            sum < tokens
        });
        within.count().max(1)
    }

    pub(super) fn token_usage(&self, fixed: usize, knowledge: usize) -> HudTokenUsage {
        let mut usage =
            HudTokenUsage { total: self.total_tokens(), fixed, knowledge, ..HudTokenUsage::default() };
        for (fragment, tokens) in self.fragments.iter().zip(&self.token_counts) {
            let part = match fragment.key.section {
                HudSection::Shared => &mut usage.shared,
                HudSection::Agent if fragment.key.is_in_actions() => &mut usage.recent_actions,
                HudSection::Agent if fragment.key == FragmentKey::rooms_header() => continue,
                HudSection::Agent => &mut usage.me,
                HudSection::Room(room) | HudSection::OwnRoom(room) => usage.rooms.entry(room).or_default(),
                HudSection::End => continue,
            };
            *part += tokens;
        }
        usage
    }
}

//! The static part of a HUD: everything before its rooms. It is trimmed to its budget in a fixed order: the oldest actions,
//! optional sections of the prompt, then the largest knowledge entries.

use super::context::{HudBuilder, HudError, RenderContext};
use super::render_cache::{CountedText, RenderCache, SharedPrompt};
use crate::action;
use crate::format::{self, FragmentKey};
use crate::hud::{Hud, HudIdentity, HudMeta, HudRoom, HudSelf, HudSystem};
use crate::prompts;
use crate::world::{AgentKind, AgentState, Room};
use serde_json::Value;

/// A HUD with its rooms but without messages, and the text of what precedes and follows the rooms.
pub(super) struct StaticPart {
    pub(super) hud: Hud,
    pub(super) text: HudBuilder,
    pub(super) footer: CountedText,
}

impl StaticPart {
    /// Renders the static part within its budget.
    pub(super) fn fit(
        cache: &RenderCache,
        context: RenderContext<'_>,
        rooms: &[(&Room, f64)],
        notice: Option<&str>,
    ) -> Result<Self, HudError> {
        let RenderContext { agent, writer, request, budgets, .. } = context;
        let mut hud = hud_without_rooms(cache, context, notice.map(str::to_owned));
        hud.rooms =
            rooms.iter().map(|(room, share)| HudRoom::new(agent.id, room, *share, request.now)).collect();
        let footer = cache.counted_text(writer.footer(&hud));
        let text = render_text(cache, context, &hud);
        let mut part = Self { hud, text, footer };
        let limit = budgets.fixed.min(budgets.total.saturating_sub(budgets.messages));
        part.drop_actions_and_sections(cache, context, limit);
        part.drop_knowledge(cache, context, limit, notice);
        let tokens = part.tokens();
        if tokens > budgets.total {
            return Err(HudError::BudgetTooSmall { agent: agent.id, tokens, limit: budgets.total });
        }
        Ok(part)
    }

    pub(super) fn tokens(&self) -> usize {
        self.text.total_tokens() + self.footer.tokens
    }

    fn drop_actions_and_sections(&mut self, cache: &RenderCache, context: RenderContext<'_>, limit: usize) {
        let optional = context.request.prompts.optional_section_count(context.agent.kind);
        let mut dropped = 0;
        while self.tokens() > limit {
            if !self.hud.me.recent_actions.is_empty() {
                let count = self.text.oldest_actions_covering(self.tokens() - limit);
                self.hud.me.recent_actions.drain(..count);
            } else if dropped < optional {
                dropped += 1;
                (self.hud.system, self.hud.meta) = shared_prompt(cache, context, dropped);
            } else {
                return;
            }
            self.text = render_text(cache, context, &self.hud);
        }
    }

    /// Hides the largest knowledge entries, with a notice. Knowledge exceeds its budget when the agent got a model with a
    /// smaller context; the agent must still see enough to delete some of it.
    fn drop_knowledge(
        &mut self,
        cache: &RenderCache,
        context: RenderContext<'_>,
        limit: usize,
        notice: Option<&str>,
    ) {
        let mut hidden = Vec::new();
        while self.tokens() > limit {
            let size = |(_, value): &(&String, &Value)| value.to_string().len();
            let largest = self.hud.me.knowledge.iter().max_by_key(size).map(|(name, _)| name.clone());
            let Some(name) = largest else { return };
            self.hud.me.knowledge.shift_remove(&name);
            hidden.push(name);
            let hidden_notice = format!(
                "There is no room here for all that you know: {} is not shown. Delete some of it.",
                hidden.join(", ")
            );
            let notices: Vec<&str> = notice.into_iter().chain([hidden_notice.as_str()]).collect();
            self.hud.me.notice = Some(notices.join(" "));
            self.text = render_text(cache, context, &self.hud);
        }
    }
}

/// An agent's knowledge as JSON, with the tokens that it has in the agent's format: those count against its budget.
pub(super) fn knowledge_text(cache: &RenderCache, agent: &AgentState) -> CountedText {
    let text = serde_json::to_string(&agent.knowledge).unwrap_or_default();
    let count =
        || format::knowledge_tokens(&agent.knowledge, agent.hud_format, |text| cache.count_tokens(text));
    let tokens = cache.count_tokens_cached(&text, 1 + agent.hud_format as u64, count);
    CountedText { tokens, text: text.into() }
}

/// The prompt that agents of a kind share, without the last `dropped` optional sections.
fn shared_prompt(cache: &RenderCache, context: RenderContext<'_>, dropped: usize) -> SharedPrompt {
    let RenderContext { agent, request, .. } = context;
    let (directives, instructions) =
        (request.prompts.directives(), request.prompts.instructions(agent.kind, dropped));
    let manages = if agent.can_create_agents { "manages" } else { "" };
    let parts = [&*directives, &*instructions, manages, agent.answer_format.name()];
    cache.shared_prompt(&parts, || {
        let meta = HudMeta {
            instructions: instructions.clone(),
            available_actions: action::available_actions(agent.can_create_agents),
            response_format: prompts::response_format(agent.answer_format),
        };
        (HudSystem { directives: directives.clone() }, meta)
    })
}

fn hud_without_rooms(cache: &RenderCache, context: RenderContext<'_>, notice: Option<String>) -> Hud {
    let RenderContext { agent, budgets, .. } = context;
    let used = context.knowledge.tokens * 100 / budgets.knowledge.max(1);
    let prompt = Some(agent.prompt.clone());
    let (seed, role) = match agent.kind {
        AgentKind::Persona => (prompt, None),
        AgentKind::Bot => (None, prompt),
    };
    let (system, meta) = shared_prompt(cache, context, 0);
    let identity =
        HudIdentity { id: agent.id, name: agent.name.clone(), model: agent.model.clone(), seed, role };
    let me = HudSelf {
        identity,
        knowledge: agent.knowledge.entries().clone(),
        memory_used: format!("{}%", used.min(100)),
        notice,
        recent_actions: cache.recent_actions(agent),
    };
    Hud { system, meta, me, rooms: Vec::new() }
}

/// The text before the rooms.
fn render_text(cache: &RenderCache, context: RenderContext<'_>, hud: &Hud) -> HudBuilder {
    let RenderContext { agent, format, writer, .. } = context;
    let mut builder =
        HudBuilder { fragments: Vec::with_capacity(256), token_counts: Vec::with_capacity(256) };
    let manages = if agent.can_create_agents { "manages" } else { "" };
    let shared =
        [&hud.system.directives, &hud.meta.instructions, manages, hud.meta.response_format.kind.as_str()];
    let shared = cache.cached_texts(format, &shared, || vec![writer.shared_section(hud)]);
    builder.push(FragmentKey::shared(), shared[0].clone());
    let identity = serde_json::to_string(&hud.me.identity).unwrap_or_default();
    // Some formats declare the notice before the knowledge, so its presence is part of the cache key.
    let notice = if hud.me.notice.is_some() { "notice" } else { "" };
    let shows_all = hud.me.knowledge.len() == agent.knowledge.entries().len();
    let shown =
        if shows_all { String::new() } else { serde_json::to_string(&hud.me.knowledge).unwrap_or_default() };
    let knowledge = if shows_all { &*context.knowledge.text } else { shown.as_str() };
    let entries = cache.cached_texts(format, &[&identity, knowledge, notice], || {
        std::iter::once(writer.identity(hud)).chain(writer.knowledge_entries(&hud.me.knowledge)).collect()
    });
    for (n, text) in entries.iter().enumerate() {
        builder.push(FragmentKey::knowledge(n), text.clone());
    }
    builder.push(FragmentKey::memory_usage(), cache.counted_text(writer.memory_usage(hud)));
    let separator = cache.counted_text(writer.action_separator());
    let count = hud.me.recent_actions.len();
    for (n, action) in hud.me.recent_actions.iter().enumerate() {
        let number = agent.action_count.saturating_sub(count as u64) + n as u64;
        let text =
            cache.action_text(format, (agent.id, number), action, |action| writer.recent_action(action));
        builder.push(FragmentKey::action(number), text);
        if n + 1 < count {
            builder.push(FragmentKey::action(number).separator_after(), separator.clone());
        }
    }
    builder.push(FragmentKey::rooms_header(), cache.counted_text(writer.rooms_header(hud)));
    builder
}

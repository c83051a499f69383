//! Renders HUDs within their token budget.

mod context;
mod message_selection;
mod render_cache;
mod static_part;

pub use context::{HudError, HudRequest, HudTokenUsage, RenderedHud};

use crate::format::{self, FragmentKey};
use crate::hud::Hud;
use crate::hud_format::HudFormat;
use crate::world::{AgentId, AgentState, Room, RoomId, RoomMessage, World};
use context::{HudBuilder, RenderContext};
use halo_agents::token_counter::TokenCounter;
use render_cache::{CountedText, RenderCache, RenderedMessage};
use static_part::StaticPart;
use std::sync::Arc;

/// Renders the HUDs of one world, and caches rendered texts with their token counts.
pub struct HudRenderer {
    cache: RenderCache,
}

/// A room while its HUD is assembled.
struct RoomPart {
    /// The header and the pace.
    top: [CountedText; 2],
    messages: Vec<RenderedMessage>,
}

impl HudRenderer {
    /// `counter` counts tokens as the model of the agents does.
    #[must_use]
    pub fn new(counter: Arc<dyn TokenCounter>) -> Self {
        Self { cache: RenderCache::new(counter) }
    }

    #[must_use]
    pub fn counter(&self) -> &dyn TokenCounter {
        self.cache.counter()
    }

    pub fn count_tokens(&self, text: &str) -> usize {
        self.cache.count_tokens(text)
    }

    /// Renders and counts a new message in a format, so that the next HUD does not have to.
    pub fn prerender_message(&self, message: &RoomMessage, format: HudFormat) {
        self.cache.message(format, message, |view| format::writer_for(format).message_row(view));
    }

    /// The HUD of an agent in its own format.
    pub fn render(
        &self,
        world: &World,
        agent: AgentId,
        request: &HudRequest<'_>,
    ) -> Result<RenderedHud, HudError> {
        let agent = world.agent(agent).ok_or(HudError::UnknownAgent(agent))?;
        self.render_as(world, agent, agent.hud_format, request)
    }

    /// The HUD of an agent in any format. Rooms that do not fit even without messages are omitted, with a notice.
    pub fn render_as(
        &self,
        world: &World,
        agent: &AgentState,
        format: HudFormat,
        request: &HudRequest<'_>,
    ) -> Result<RenderedHud, HudError> {
        let budgets = world.header.budgets.scaled_to(request.token_limit);
        let writer = format::writer_for(format);
        let knowledge = static_part::knowledge_text(&self.cache, agent);
        let context =
            RenderContext { agent, format, writer: &*writer, request, budgets, knowledge: &knowledge };
        let shares = world.attention_shares(agent.id);
        let mut rooms: Vec<(&Room, f64)> = world
            .rooms_of(agent.id)
            .map(|room| (room, shares.get(&room.id).copied().unwrap_or(0.0)))
            .collect();
        // Rooms of others by number, then the agent's own, as the keys of fragments are ordered. Shares do not change
        // the order: cells in the KV cache would have to move.
        rooms.sort_by_key(|(room, _)| (room.id == agent.id, room.id));
        let mut omitted = Vec::new();
        loop {
            let notice = notice(world, context, &omitted);
            if let Some(mut rendered) = self.compose(context, &rooms, notice.as_deref())? {
                rendered.omitted_rooms = omitted;
                return Ok(rendered);
            }
            let Some(index) = least_important_room(agent.id, &rooms) else {
                let limit = budgets.total;
                return Err(HudError::BudgetTooSmall { agent: agent.id, tokens: limit + 1, limit });
            };
            omitted.push(rooms.remove(index).0.id);
        }
    }

    /// A HUD with these rooms; none if they do not fit even without messages.
    fn compose(
        &self,
        context: RenderContext<'_>,
        rooms: &[(&Room, f64)],
        notice: Option<&str>,
    ) -> Result<Option<RenderedHud>, HudError> {
        let part = StaticPart::fit(&self.cache, context, rooms, notice)?;
        let remaining = context.budgets.total - part.tokens();
        let tops = self.render_room_tops(context, &part.hud);
        let headers = self.count_room_headers(context, &part.hud, rooms, &tops);
        if headers.iter().sum::<usize>() > remaining {
            return Ok(None);
        }
        let budgets = message_selection::divide_message_budget(remaining, &headers, rooms);
        let (mut parts, mut recalled) = (Vec::new(), Vec::new());
        for (((room, _), budget), top) in rooms.iter().zip(budgets).zip(tops) {
            let (messages, ids) = message_selection::select_messages(&self.cache, context, room, budget);
            parts.push(RoomPart { top, messages });
            recalled.extend(ids);
        }
        Ok(self.assemble(context, part, parts, recalled))
    }

    fn render_room_tops(&self, context: RenderContext<'_>, hud: &Hud) -> Vec<[CountedText; 2]> {
        let RenderContext { format, writer, .. } = context;
        let top = |(n, room)| {
            [
                self.cache.room_header(format, (room, n), || writer.room_header(hud, n)),
                self.cache.counted_text(writer.room_pace(hud, n)),
            ]
        };
        hud.rooms.iter().enumerate().map(top).collect()
    }

    /// The tokens of each room without its messages.
    fn count_room_headers(
        &self,
        context: RenderContext<'_>,
        hud: &Hud,
        rooms: &[(&Room, f64)],
        tops: &[[CountedText; 2]],
    ) -> Vec<usize> {
        let count = |(n, (room, _)): (usize, &(&Room, f64))| {
            // Some formats write the number of messages: the largest possible one has the most digits.
            let most = room.messages.len().max(1);
            let writer = context.writer;
            let rest = [writer.messages_header(hud, n, most), writer.room_footer(hud, n, most)];
            let rest: usize = rest.iter().map(|text| self.cache.count_tokens(text)).sum();
            tops[n].iter().map(|text| text.tokens).sum::<usize>() + rest
        };
        rooms.iter().enumerate().map(count).collect()
    }

    /// Joins the parts. Fragments were counted one by one, and the result may still exceed the budget by a few tokens: then
    /// the oldest message of the room with the most messages is dropped, until it fits. None if it never does.
    fn assemble(
        &self,
        context: RenderContext<'_>,
        part: StaticPart,
        mut rooms: Vec<RoomPart>,
        mut recalled: Vec<u64>,
    ) -> Option<RenderedHud> {
        let budgets = context.budgets;
        let fixed = part.tokens();
        let StaticPart { mut hud, text, footer } = part;
        loop {
            let mut builder = text.clone();
            for (n, room) in rooms.iter().enumerate() {
                self.push_room(context, &hud, (n, room), &mut builder);
            }
            builder.push(FragmentKey::end(), footer.clone());
            if builder.total_tokens() <= budgets.total {
                for (view, room) in hud.rooms.iter_mut().zip(rooms) {
                    view.messages = room.messages.into_iter().map(|(message, _)| message).collect();
                }
                let token_usage = builder.token_usage(fixed, context.knowledge.tokens);
                let HudBuilder { fragments, token_counts } = builder;
                let omitted_rooms = Vec::new();
                return Some(RenderedHud {
                    hud,
                    fragments,
                    token_counts,
                    budgets,
                    token_usage,
                    omitted_rooms,
                    recalled,
                });
            }
            let longest = rooms.iter_mut().max_by_key(|room| room.messages.len())?;
            if longest.messages.is_empty() {
                return None;
            }
            let (dropped, _) = longest.messages.remove(0);
            recalled.retain(|id| *id != dropped.id);
        }
    }

    fn push_room(
        &self,
        context: RenderContext<'_>,
        hud: &Hud,
        (n, part): (usize, &RoomPart),
        builder: &mut HudBuilder,
    ) {
        let (writer, room, count) = (context.writer, &hud.rooms[n], part.messages.len());
        for (item, text) in (0..).zip(&part.top) {
            builder.push(FragmentKey::room(room, item), text.clone());
        }
        let header = self.cache.counted_text(writer.messages_header(hud, n, count));
        builder.push(FragmentKey::room(room, 2), header);
        let separator = self.cache.counted_text(writer.message_separator());
        for (m, (message, text)) in part.messages.iter().enumerate() {
            let key = FragmentKey::message(room, message.id);
            builder.push(key, text.clone());
            if m + 1 < count {
                builder.push(key.separator_after(), separator.clone());
            }
        }
        let footer = self.cache.counted_text(writer.room_footer(hud, n, count));
        builder.push(FragmentKey::room(room, format::LAST_ITEM), footer);
    }
}

/// What the agent should know about omissions.
fn notice(world: &World, context: RenderContext<'_>, omitted: &[RoomId]) -> Option<String> {
    let mut notices = Vec::new();
    if context.budgets != world.header.budgets {
        notices.push(format!(
            "Your model has room for {} of {} tokens, so everything here is smaller.",
            context.budgets.total, world.header.budgets.total
        ));
    }
    if !omitted.is_empty() {
        let rooms: Vec<String> = omitted.iter().map(RoomId::to_string).collect();
        notices.push(format!(
            "There is no room here to show room {}: leave rooms, or forget something.",
            rooms.join(", ")
        ));
    }
    (!notices.is_empty()).then(|| notices.join(" "))
}

/// The room with the least attention; of several the last, and the agent's own room only if there is no other.
fn least_important_room(agent: AgentId, rooms: &[(&Room, f64)]) -> Option<usize> {
    let is_own = |room: &Room| room.id == agent;
    let least = rooms
        .iter()
        .enumerate()
        .min_by(|(n, (a, x)), (m, (b, y))| is_own(a).cmp(&is_own(b)).then(x.total_cmp(y)).then(m.cmp(n)));
    least.map(|(index, _)| index)
}

//! Something that writes HUDs, and never more than fits.

mod fill;
mod memo;

use crate::action;
use crate::count::Count;
use crate::format::{self, Format, Piece, Place};
use crate::heartbeat::Millis;
use crate::hud::{Hud, Identity, Me, Meta, RoomView, System};
use crate::prompts::{self, Prompts};
use crate::world::{AgentId, AgentKind, AgentState, Budgets, Message, Room, RoomId, World};
use fill::Said;
use memo::{Memo, Text, Told};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is asked for a HUD, beside the world.
pub struct View<'a> {
    /// What time it is.
    pub now: Millis,
    /// What agents are told.
    pub prompts: &'a Prompts,
    /// How many tokens there is room for: what the agent's model holds, less its answer and what stands around the HUD.
    pub room: usize,
    /// Older messages of a room that matter now, those that matter most first; they are shown where there is room.
    pub recalled: &'a dyn Fn(RoomId) -> Vec<Message>,
}

/// A HUD that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// What the agent sees.
    pub hud: Hud,
    /// The same as text, in pieces.
    pub pieces: Vec<Piece<Arc<str>>>,
    /// How many tokens each piece has.
    pub counts: Vec<usize>,
    /// What it had to fit into.
    pub budgets: Budgets,
    /// How many tokens each part has.
    pub spent: Spent,
    /// Rooms for which there was no room.
    pub left_out: Vec<RoomId>,
    /// Messages that were brought back.
    pub recalled: Vec<u64>,
}

/// How many tokens the parts of a HUD have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Spent {
    /// In all.
    pub total: usize,
    /// What does not come from rooms.
    #[serde(rename = "static")]
    pub fixed: usize,
    /// What the agent has written down.
    pub knowledge: usize,
    /// Each room.
    pub rooms: BTreeMap<RoomId, usize>,
}

impl Shown {
    /// The whole text.
    #[must_use]
    pub fn text(&self) -> String {
        self.pieces.iter().map(|piece| &*piece.text).collect()
    }
}

/// Why there is no HUD.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HudError {
    /// Nobody is called that.
    #[error("there is no agent {0}")]
    Nobody(AgentId),
    /// What must be there does not fit.
    #[error(
        "what agent {who} must see has {tokens} tokens, and {room} fit: let it forget something, shorten the prompts, or give it a model with a larger context"
    )]
    TooSmall {
        /// Whose.
        who: AgentId,
        /// How many there are.
        tokens: usize,
        /// How many fit.
        room: usize,
    },
}

/// A HUD as it is put together.
struct Draft {
    pieces: Vec<Piece<Arc<str>>>,
    counts: Vec<usize>,
}

impl Draft {
    fn push(&mut self, place: Place, text: Text) {
        if !text.text.is_empty() {
            self.pieces.push(Piece { place, text: text.text });
            self.counts.push(text.tokens);
        }
    }

    fn tokens(&self) -> usize {
        self.counts.iter().sum()
    }

    /// How many of the first actions have so many tokens, but for the last of them: one at least.
    fn first_actions(&self, tokens: usize) -> usize {
        let pieces = self.pieces.iter().zip(&self.counts).filter(|(piece, _)| piece.place.is_did());
        let mut sum = 0;
        let within = pieces.take_while(|(_, tokens_of)| {
            sum += **tokens_of;
            sum < tokens
        });
        within.count().max(1)
    }
}

/// What a HUD is made from, beside the world.
#[derive(Clone, Copy)]
struct Frame<'a> {
    agent: &'a AgentState,
    format: Format,
    writer: &'a dyn format::Writer,
    view: &'a View<'a>,
    budgets: Budgets,
    /// What the agent has written down, in JSON.
    known: &'a Text,
}

/// Something that writes the HUDs of one world, and remembers what it has written and how long that is.
pub struct Scribe {
    memo: Memo,
}

impl Scribe {
    /// One who counts as an agent's own model does.
    #[must_use]
    pub fn new(count: Arc<dyn Count>) -> Self {
        Self { memo: Memo::new(count) }
    }

    /// How it counts.
    #[must_use]
    pub fn count(&self) -> &dyn Count {
        self.memo.count()
    }

    /// How many tokens a text has.
    pub fn tokens(&self, text: &str) -> usize {
        self.memo.tokens(text)
    }

    /// Writes and counts what was just said, in a format, before anybody looks: who sees it first need not wait for that.
    pub fn foresee(&self, message: &Message, format: Format) {
        self.memo.said(format, message, |view| format::writer(format).message(view));
    }

    /// What an agent sees now, in its own format.
    ///
    /// # Errors
    /// When there is no such agent, or what it must see does not fit.
    pub fn show(&self, world: &World, who: AgentId, view: &View<'_>) -> Result<Shown, HudError> {
        let agent = world.agent(who).ok_or(HudError::Nobody(who))?;
        self.show_as(world, agent, agent.input, view)
    }

    /// The same, in another format.
    ///
    /// # Errors
    /// As above.
    pub fn show_as(
        &self,
        world: &World,
        agent: &AgentState,
        format: Format,
        view: &View<'_>,
    ) -> Result<Shown, HudError> {
        let budgets = world.head.budgets.within(view.room);
        let writer = format::writer(format);
        let known = self.knowledge(agent);
        let frame = Frame { agent, format, writer: &*writer, view, budgets, known: &known };
        let mut notices = Vec::new();
        if budgets != world.head.budgets {
            notices.push(format!(
                "Your model has room for {} of {} tokens, so everything here is smaller.",
                budgets.total, world.head.budgets.total
            ));
        }
        let shares = world.shares(agent.id);
        let mut rooms: Vec<(&Room, f64)> = world
            .rooms_of(agent.id)
            .map(|room| (room, shares.get(&room.id).copied().unwrap_or(0.0)))
            .collect();
        let mut left_out = Vec::new();
        loop {
            let mut notices = notices.clone();
            if !left_out.is_empty() {
                let named: Vec<String> = left_out.iter().map(RoomId::to_string).collect();
                notices.push(format!(
                    "There is no room here to show room {}: leave rooms, or forget something.",
                    named.join(", ")
                ));
            }
            let notice = (!notices.is_empty()).then(|| notices.join(" "));
            if let Some(mut shown) = self.compose(frame, &rooms, notice.as_deref())? {
                shown.left_out = left_out;
                return Ok(shown);
            }
            // The room that the agent cares least about goes; of those the latest, and its own last.
            let own = |room: &Room| room.id == agent.id;
            let least = rooms
                .iter()
                .enumerate()
                .min_by(|(n, (a, x)), (m, (b, y))| own(a).cmp(&own(b)).then(x.total_cmp(y)).then(m.cmp(n)));
            let Some((at, _)) = least else {
                return Err(HudError::TooSmall {
                    who: agent.id,
                    tokens: budgets.total + 1,
                    room: budgets.total,
                });
            };
            left_out.push(rooms.remove(at).0.id);
        }
    }

    /// A HUD with these rooms; none where they do not fit even without a message.
    fn compose(
        &self,
        frame: Frame<'_>,
        rooms: &[(&Room, f64)],
        notice: Option<&str>,
    ) -> Result<Option<Shown>, HudError> {
        let Frame { agent, writer, view, budgets, .. } = frame;
        let mut hud = self.bare(frame, notice.map(str::to_owned));
        hud.rooms =
            rooms.iter().map(|(room, share)| RoomView::new(agent.id, room, *share, view.now)).collect();
        // What is too long is cut: first what was done longest ago, then what need not be said.
        let end = self.memo.text(writer.end(&hud));
        let mut own = self.own(frame, &hud);
        let (mut less, optional) = (0, view.prompts.optional(agent.kind));
        let most = budgets.fixed.min(budgets.total.saturating_sub(budgets.messages));
        while own.tokens() + end.tokens > most && (!hud.me.recent_actions.is_empty() || less < optional) {
            if hud.me.recent_actions.is_empty() {
                less += 1;
                (hud.system, hud.meta) = self.told(frame, less);
            } else {
                let excess = own.tokens() + end.tokens - most;
                hud.me.recent_actions.drain(..own.first_actions(excess));
            }
            own = self.own(frame, &hud);
        }
        // More is written down than there is room for: its model may have become a smaller one. What takes most is not shown, so
        // that the agent still sees enough to do something about it.
        let mut unseen = Vec::new();
        while own.tokens() + end.tokens > most && !hud.me.knowledge.is_empty() {
            let long = |(_, value): &(&String, &Value)| value.to_string().len();
            let Some(name) = hud.me.knowledge.iter().max_by_key(long).map(|(name, _)| name.clone()) else {
                break;
            };
            hud.me.knowledge.shift_remove(&name);
            unseen.push(name);
            let told = format!(
                "There is no room here for all that you know: {} is not shown. Delete some of it.",
                unseen.join(", ")
            );
            hud.me.notice = Some(notice.into_iter().chain([told.as_str()]).collect::<Vec<_>>().join(" "));
            own = self.own(frame, &hud);
        }
        let spent = own.tokens() + end.tokens;
        if spent > budgets.total {
            return Err(HudError::TooSmall { who: agent.id, tokens: spent, room: budgets.total });
        }
        // What is left is for rooms: at least as much as is theirs, where the rest is within its bounds.
        let remaining = budgets.total - spent;
        let tops: Vec<[Text; 2]> = (0..rooms.len())
            .map(|n| {
                [
                    self.memo.head(frame.format, (&hud.rooms[n], n), || writer.room(&hud, n)),
                    self.memo.text(writer.pace(&hud, n)),
                ]
            })
            .collect();
        let head = |(n, (room, _)): (usize, &(&Room, f64))| {
            // As many messages as there can be: their number is part of the text in some formats.
            let most = room.messages.len().max(1);
            let last = [writer.board(&hud, n, most), writer.room_end(&hud, n, most)];
            let last: usize = last.iter().map(|text| self.memo.tokens(text)).sum();
            tops[n].iter().map(|text| text.tokens).sum::<usize>() + last
        };
        let heads: Vec<usize> = rooms.iter().enumerate().map(head).collect();
        if heads.iter().sum::<usize>() > remaining {
            return Ok(None);
        }
        let budgets_of = fill::divide(remaining, &heads, rooms);
        let mut recalled = Vec::new();
        let mut said: Vec<Vec<Said>> = Vec::new();
        for (n, (room, _)) in rooms.iter().enumerate() {
            let (messages, back) = self.fill(frame, room, budgets_of[n]);
            said.push(messages);
            recalled.extend(back);
        }
        let fixed = own.tokens() + end.tokens;
        loop {
            let mut draft = Draft { pieces: own.pieces.clone(), counts: own.counts.clone() };
            for (n, (top, messages)) in tops.iter().zip(&said).enumerate() {
                self.room(frame, &hud, n, (top, messages), &mut draft);
            }
            draft.push(Place::end(), end.clone());
            let total = draft.tokens();
            // Whatever was counted wrong before, it fits in the end.
            if total <= budgets.total {
                for (room, messages) in hud.rooms.iter_mut().zip(said) {
                    room.messages = messages.into_iter().map(|(view, _)| view).collect();
                }
                let spent = spent_by(&draft, fixed, frame.known.tokens);
                let Draft { pieces, counts } = draft;
                return Ok(Some(Shown {
                    hud,
                    pieces,
                    counts,
                    budgets,
                    spent,
                    left_out: Vec::new(),
                    recalled,
                }));
            }
            match said
                .iter_mut()
                .max_by_key(|messages| messages.len())
                .filter(|messages| !messages.is_empty())
            {
                Some(messages) => {
                    let (gone, _) = messages.remove(0);
                    recalled.retain(|id| *id != gone.id);
                }
                None => return Ok(None),
            }
        }
    }

    /// Everything before the rooms.
    fn own(&self, frame: Frame<'_>, hud: &Hud) -> Draft {
        let Frame { agent, format, writer, .. } = frame;
        let mut draft = Draft { pieces: Vec::with_capacity(256), counts: Vec::with_capacity(256) };
        let manages = if agent.can_create_agents { "manages" } else { "" };
        let told =
            [&hud.system.directives, &hud.meta.instructions, manages, hud.meta.response_format.kind.as_str()];
        let told = self.memo.texts(format, &told, || vec![writer.shared(hud)]);
        draft.push(Place::shared(), told[0].clone());
        let identity = serde_json::to_string(&hud.me.identity).unwrap_or_default();
        // Whether there is a notice is declared before what is known, in some formats.
        let notice = if hud.me.notice.is_some() { "notice" } else { "" };
        let all = hud.me.knowledge.len() == agent.knowledge.all().len();
        let some =
            if all { String::new() } else { serde_json::to_string(&hud.me.knowledge).unwrap_or_default() };
        let text = if all { &*frame.known.text } else { some.as_str() };
        let known = self.memo.texts(format, &[&identity, text, notice], || {
            std::iter::once(writer.identity(hud)).chain(writer.known(&hud.me.knowledge)).collect()
        });
        for (n, text) in known.iter().enumerate() {
            draft.push(Place::known(n), text.clone());
        }
        draft.push(Place::used(), self.memo.text(writer.used(hud)));
        let between = self.memo.text(writer.between_actions());
        let count = hud.me.recent_actions.len();
        for (n, action) in hud.me.recent_actions.iter().enumerate() {
            let number = agent.done.saturating_sub(count as u64) + n as u64;
            let text = self.memo.did(format, (agent.id, number), action, |action| writer.did(action));
            draft.push(Place::did(number), text);
            if n + 1 < count {
                draft.push(Place::did(number).behind(), between.clone());
            }
        }
        draft.push(Place::to_rooms(), self.memo.text(writer.to_rooms(hud)));
        draft
    }

    /// A room with these messages.
    fn room(
        &self,
        frame: Frame<'_>,
        hud: &Hud,
        n: usize,
        (top, messages): (&[Text], &[Said]),
        draft: &mut Draft,
    ) {
        let (writer, room) = (frame.writer, hud.rooms[n].id);
        for (place, text) in (0..).zip(top) {
            draft.push(Place::room(room, place), text.clone());
        }
        draft.push(Place::room(room, 2), self.memo.text(writer.board(hud, n, messages.len())));
        let between = self.memo.text(writer.between_messages());
        for (m, (view, text)) in messages.iter().enumerate() {
            let place = Place::said(room, view.id);
            draft.push(place, text.clone());
            if m + 1 < messages.len() {
                draft.push(place.behind(), between.clone());
            }
        }
        draft.push(Place::room(room, format::LAST), self.memo.text(writer.room_end(hud, n, messages.len())));
    }

    /// What an agent has written down, in JSON, with how many tokens that has as the agent sees it: as many as are held against
    /// what it may have.
    fn knowledge(&self, agent: &AgentState) -> Text {
        let text = serde_json::to_string(&agent.knowledge).unwrap_or_default();
        let written = || agent.knowledge.written(agent.input, |text| self.memo.tokens(text));
        Text { tokens: self.memo.measured(&text, 1 + agent.input as u64, written), text: text.into() }
    }

    /// What all agents of a kind are told, without the last `less` parts that can be left out.
    fn told(&self, frame: Frame<'_>, less: usize) -> Told {
        let Frame { agent, view, .. } = frame;
        let (directives, instructions) =
            (view.prompts.directives(), view.prompts.instructions(agent.kind, less));
        let manages = if agent.can_create_agents { "manages" } else { "" };
        let parts = [&*directives, &*instructions, manages, agent.output.name()];
        self.memo.told(&parts, || {
            let meta = Meta {
                instructions: instructions.clone(),
                available_actions: action::available(agent.can_create_agents),
                response_format: prompts::response_format(agent.output),
            };
            (System { directives: directives.clone() }, meta)
        })
    }

    /// A HUD without rooms.
    fn bare(&self, frame: Frame<'_>, notice: Option<String>) -> Hud {
        let Frame { agent, budgets, .. } = frame;
        let used = frame.known.tokens * 100 / budgets.knowledge.max(1);
        let prompt = Some(agent.prompt.clone());
        let (seed, role) = match agent.kind {
            AgentKind::Persona => (prompt, None),
            AgentKind::Bot => (None, prompt),
        };
        let (system, meta) = self.told(frame, 0);
        let identity =
            Identity { id: agent.id, name: agent.name.clone(), model: agent.model.clone(), seed, role };
        let me = Me {
            identity,
            knowledge: agent.knowledge.all().clone(),
            memory_used: format!("{}%", used.min(100)),
            notice,
            recent_actions: self.memo.recent(agent),
        };
        Hud { system, meta, me, rooms: Vec::new() }
    }
}

fn spent_by(draft: &Draft, fixed: usize, knowledge: usize) -> Spent {
    let mut spent = Spent { total: draft.tokens(), fixed, knowledge, ..Spent::default() };
    for (piece, tokens) in draft.pieces.iter().zip(&draft.counts) {
        if let format::Part::Room(room) = piece.place.part {
            *spent.rooms.entry(room).or_default() += tokens;
        }
    }
    spent
}

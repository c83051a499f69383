//! What an agent sees on a heartbeat: all that it needs to decide, and never more than fits.
//!
//! What all agents of a kind are told comes first, then the agent itself, then its rooms: what changes most stands last, so that a
//! model that keeps what it has read reads little anew.

use crate::action;
use crate::count::Count;
use crate::format::{self, Format, Piece};
use crate::heartbeat::{Millis, shown, time_since, word_budget};
use crate::prompts::{self, Prompts};
use crate::world::{
    AgentId, AgentKind, AgentState, Budgets, Message, Reaction, Recent, Room, RoomId, Sender, World,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an agent sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hud {
    /// How to live together.
    pub system: System,
    /// How to read this, and what can be done.
    pub meta: Meta,
    /// Itself.
    #[serde(rename = "self")]
    pub me: Me,
    /// Where it is.
    pub rooms: Vec<RoomView>,
}

/// How to live together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// In words.
    pub directives: String,
}

/// How to read a HUD, and what can be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// In words.
    pub instructions: String,
    /// By category.
    pub available_actions: Map<String, Value>,
    /// How to answer.
    pub response_format: ResponseFormat,
}

/// How to answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// The format's name.
    #[serde(rename = "type")]
    pub kind: String,
    /// What it is.
    pub description: String,
    /// How it is written.
    pub instructions: String,
    /// For instance.
    pub example: String,
}

/// The agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Me {
    /// Who it is.
    pub identity: Identity,
    /// What it has written down.
    pub knowledge: Map<String, Value>,
    /// How full that is.
    pub memory_used: String,
    /// What it should know about what it sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
    /// What it did last.
    pub recent_actions: Vec<Map<String, Value>>,
}

/// Who an agent is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// For ever.
    pub id: AgentId,
    /// For now.
    pub name: String,
    /// What thinks for it.
    pub model: String,
    /// Where a persona comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<String>,
    /// What a bot does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// A room, as one of its members sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoomView {
    /// Its number: its owner's.
    pub id: RoomId,
    /// The agent's own number.
    pub you: AgentId,
    /// Whether it is the agent's.
    pub is_self_room: bool,
    /// Who is there.
    pub members: Vec<String>,
    /// How much of the agent's attention it gets.
    pub attention_pct: f64,
    /// How long ago the agent spoke there.
    pub time_since_last: String,
    /// How many words it may say.
    pub word_budget: usize,
    /// What hangs on the wall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub billboard: Option<String>,
    /// The keys to the agent's own room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub my_keys: Option<Vec<String>>,
    /// Who wants to come in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_access_requests: Option<Vec<RequestView>>,
    /// What was said, the newest last.
    pub messages: Vec<MessageView>,
}

/// Somebody wants to come in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestView {
    /// The request's number.
    pub id: u64,
    /// Who.
    pub requester_id: AgentId,
    /// With which key.
    pub key_used: String,
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageView {
    /// Its number.
    pub id: u64,
    /// When.
    pub timestamp: String,
    /// By whom.
    pub sender: String,
    /// What.
    pub content: String,
    /// `text` or `system`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<u64>,
    /// How many feel what about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reactions: Option<BTreeMap<Reaction, u64>>,
}

impl From<&Message> for MessageView {
    fn from(message: &Message) -> Self {
        let count = |(reaction, who): (&Reaction, &std::collections::BTreeSet<AgentId>)| {
            (*reaction, who.len() as u64)
        };
        let reactions =
            (!message.reactions.is_empty()).then(|| message.reactions.iter().map(count).collect());
        Self {
            id: message.id,
            timestamp: shown(message.at),
            sender: message.sender.to_string(),
            content: message.content.clone(),
            kind: if message.sender == Sender::System { "system" } else { "text" }.to_owned(),
            reply_to: message.reply_to,
            reactions,
        }
    }
}

fn done(recent: &Recent) -> Map<String, Value> {
    let mut row = Map::new();
    row.insert("type".into(), recent.kind.clone().into());
    row.insert("timestamp".into(), shown(recent.at).into());
    row.extend(recent.with.clone());
    row.extend(recent.refused.as_ref().map(|why| ("refused".to_owned(), why.clone().into())));
    row
}

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

/// The share of a room's messages that may be older ones that were brought back.
const RECALLED: usize = 5;

/// How many texts are remembered.
const REMEMBERED: usize = 65_536;

/// Something that writes HUDs, and remembers how long things are.
pub struct Scribe {
    count: Arc<dyn Count>,
    memo: Mutex<Memo>,
}

#[derive(Default)]
struct Memo {
    /// Tokens, by the text's sum.
    tokens: BTreeMap<u64, usize>,
    /// Messages as text, by format, number and how many have felt something about them.
    messages: BTreeMap<(Format, u64, usize), (Arc<str>, usize)>,
}

impl Scribe {
    /// One who counts as an agent's own model does.
    #[must_use]
    pub fn new(count: Arc<dyn Count>) -> Self {
        Self { count, memo: Mutex::default() }
    }

    /// How it counts.
    #[must_use]
    pub fn count(&self) -> &dyn Count {
        &*self.count
    }

    fn memo(&self) -> MutexGuard<'_, Memo> {
        self.memo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many tokens a text has.
    pub fn tokens(&self, text: &str) -> usize {
        let sum = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
        if let Some(&known) = self.memo().tokens.get(&sum) {
            return known;
        }
        let tokens = self.count.tokens(text);
        let mut memo = self.memo();
        if memo.tokens.len() >= REMEMBERED {
            memo.tokens.clear();
        }
        memo.tokens.insert(sum, tokens);
        tokens
    }

    /// A message as text, and how long that is.
    fn message(&self, format: Format, writer: &dyn format::Writer, said: &MessageView) -> (Arc<str>, usize) {
        let felt = said.reactions.as_ref().map_or(0, |all| all.values().map(|&n| n as usize).sum());
        let key = (format, said.id, felt);
        if let Some(known) = self.memo().messages.get(&key) {
            return known.clone();
        }
        let text: Arc<str> = writer.message(said).into();
        let tokens = self.count.tokens(&text);
        let mut memo = self.memo();
        if memo.messages.len() >= REMEMBERED {
            memo.messages.clear();
        }
        memo.messages.insert(key, (Arc::clone(&text), tokens));
        (text, tokens)
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
            let shown = self.compose(agent, format, view, budgets, &rooms, notice)?;
            match shown {
                Some(mut shown) => {
                    shown.left_out = left_out;
                    return Ok(shown);
                }
                None => {
                    // The room that the agent cares least about goes; of those the latest, and its own last.
                    let own = |room: &Room| room.id == agent.id;
                    let least = rooms.iter().enumerate().min_by(|(n, (a, x)), (m, (b, y))| {
                        own(a).cmp(&own(b)).then(x.total_cmp(y)).then(m.cmp(n))
                    });
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
        }
    }

    /// A HUD with these rooms; none where they do not fit even without a message.
    fn compose(
        &self,
        agent: &AgentState,
        format: Format,
        view: &View<'_>,
        budgets: Budgets,
        rooms: &[(&Room, f64)],
        notice: Option<String>,
    ) -> Result<Option<Shown>, HudError> {
        let writer = format::writer(format);
        let mut hud = self.bare(agent, view, budgets, notice);
        hud.rooms = rooms.iter().map(|(room, share)| room_view(agent.id, room, *share, view.now)).collect();
        let tokens = |text: String| self.tokens(&text);
        let fixed = |hud: &Hud| {
            let known: usize = writer.known(hud).into_iter().map(tokens).sum();
            let did: usize = hud.me.recent_actions.iter().map(|action| tokens(writer.did(action))).sum();
            let between =
                hud.me.recent_actions.len().saturating_sub(1) * self.tokens(writer.between_actions());
            let rest = [
                writer.shared(hud),
                writer.identity(hud),
                writer.used(hud),
                writer.to_rooms(hud),
                writer.end(hud),
            ];
            rest.into_iter().map(tokens).sum::<usize>() + known + did + between
        };
        // What is too long is cut: first what was done longest ago, then what need not be said.
        let mut spent = fixed(&hud);
        let (mut less, optional) = (0, view.prompts.optional(agent.kind));
        while spent > budgets.fixed && (!hud.me.recent_actions.is_empty() || less < optional) {
            if hud.me.recent_actions.is_empty() {
                less += 1;
                hud.meta.instructions = view.prompts.instructions(agent.kind, less);
            } else {
                hud.me.recent_actions.remove(0);
            }
            spent = fixed(&hud);
        }
        if spent > budgets.total {
            return Err(HudError::TooSmall { who: agent.id, tokens: spent, room: budgets.total });
        }
        // What is left is for rooms: at least as much as is theirs, where the rest is within its bounds.
        let remaining = budgets.total - spent;
        let head = |(n, (room, _)): (usize, &(&Room, f64))| {
            // As many messages as there can be: their number is part of the text in some formats.
            let most = room.messages.len().max(1);
            let texts = [
                writer.room(&hud, n),
                writer.pace(&hud, n),
                writer.board(&hud, n, most),
                writer.room_end(&hud, n, most),
            ];
            texts.into_iter().map(tokens).sum::<usize>()
        };
        let heads: Vec<usize> = rooms.iter().enumerate().map(head).collect();
        if heads.iter().sum::<usize>() > remaining {
            return Ok(None);
        }
        let budgets_of = divide(remaining, &heads, rooms);
        let mut recalled = Vec::new();
        for (n, (room, _)) in rooms.iter().enumerate() {
            let (messages, back) = self.fill(format, &*writer, room, budgets_of[n], view);
            hud.rooms[n].messages = messages;
            recalled.extend(back);
        }
        // Whatever was counted wrong before, it fits in the end.
        loop {
            let (pieces, counts) = self.pieces(&hud, format, agent.done);
            let total: usize = counts.iter().sum();
            if total <= budgets.total {
                let spent = spent_by(&pieces, &counts, self.knowledge(agent));
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
            let longest = hud.rooms.iter_mut().max_by_key(|room| room.messages.len());
            match longest.filter(|room| !room.messages.is_empty()) {
                Some(room) => {
                    let gone = room.messages.remove(0).id;
                    recalled.retain(|id| *id != gone);
                }
                None => return Ok(None),
            }
        }
    }

    fn knowledge(&self, agent: &AgentState) -> usize {
        if agent.knowledge.all().is_empty() {
            return 0;
        }
        self.tokens(&serde_json::to_string(&agent.knowledge).unwrap_or_default())
    }

    /// A HUD without rooms.
    fn bare(&self, agent: &AgentState, view: &View<'_>, budgets: Budgets, notice: Option<String>) -> Hud {
        let used = self.knowledge(agent) * 100 / budgets.knowledge.max(1);
        let prompt = Some(agent.prompt.clone());
        let (seed, role) = match agent.kind {
            AgentKind::Persona => (prompt, None),
            AgentKind::Bot => (None, prompt),
        };
        Hud {
            system: System { directives: view.prompts.directives() },
            meta: Meta {
                instructions: view.prompts.instructions(agent.kind, 0),
                available_actions: action::available(agent.can_create_agents),
                response_format: prompts::response_format(agent.output),
            },
            me: Me {
                identity: Identity {
                    id: agent.id,
                    name: agent.name.clone(),
                    model: agent.model.clone(),
                    seed,
                    role,
                },
                knowledge: agent.knowledge.all().clone(),
                memory_used: format!("{}%", used.min(100)),
                notice,
                recent_actions: agent.recent.iter().map(done).collect(),
            },
            rooms: Vec::new(),
        }
    }

    /// The messages of a room that fit: from the newest backwards, without holes; where not all do, older ones that matter may
    /// take a share of the place.
    fn fill(
        &self,
        format: Format,
        writer: &dyn format::Writer,
        room: &Room,
        budget: usize,
        view: &View<'_>,
    ) -> (Vec<MessageView>, Vec<u64>) {
        let between = self.tokens(writer.between_messages());
        let cost = |said: &MessageView| self.message(format, writer, said).1 + between;
        let mut newest: Vec<MessageView> = Vec::new();
        let mut spent = 0;
        let mut rest = room.messages.iter().rev().map(MessageView::from).peekable();
        let mut take = |limit: usize, spent: &mut usize, newest: &mut Vec<MessageView>| {
            while let Some(said) = rest.next_if(|said| *spent + cost(said) <= limit) {
                *spent += cost(&said);
                newest.push(said);
            }
            rest.peek().is_none()
        };
        let share = budget - budget / RECALLED;
        let all = take(share, &mut spent, &mut newest);
        let mut back: Vec<MessageView> = Vec::new();
        if !all {
            let oldest = newest.last().map_or(u64::MAX, |said| said.id);
            let candidates = (view.recalled)(room.id);
            for said in candidates.iter().filter(|said| said.id < oldest && said.room == room.id) {
                let said = MessageView::from(said);
                let new = back.iter().all(|known| known.id != said.id);
                if new && spent + cost(&said) <= budget {
                    spent += cost(&said);
                    back.push(said);
                }
            }
            take(budget, &mut spent, &mut newest);
        }
        let oldest = newest.last().map_or(u64::MAX, |said| said.id);
        back.retain(|said| said.id < oldest);
        back.sort_unstable_by_key(|said| said.id);
        let recalled = back.iter().map(|said| said.id).collect();
        back.extend(newest.into_iter().rev());
        (back, recalled)
    }

    fn pieces(&self, hud: &Hud, format: Format, done: u64) -> (Vec<Piece<Arc<str>>>, Vec<usize>) {
        let written =
            format::pieces_with(hud, format, done, |writer, said| Text(self.message(format, writer, said)));
        let (mut pieces, mut counts) = (Vec::with_capacity(written.len()), Vec::with_capacity(written.len()));
        for Piece { place, text: Text((text, tokens)) } in written {
            if text.is_empty() {
                continue;
            }
            counts.push(if tokens == UNKNOWN { self.tokens(&text) } else { tokens });
            pieces.push(Piece { place, text });
        }
        (pieces, counts)
    }
}

/// A text, and how many tokens it has as far as that is known.
struct Text((Arc<str>, usize));

const UNKNOWN: usize = usize::MAX;

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self((text.into(), UNKNOWN))
    }
}

fn room_view(you: AgentId, room: &Room, share: f64, now: Millis) -> RoomView {
    let own = room.id == you;
    let member = room.members.get(&you);
    let spoke = member.and_then(|member| member.spoke);
    let request = |request: &crate::world::Request| RequestView {
        id: request.id,
        requester_id: request.requester,
        key_used: request.key.clone(),
    };
    RoomView {
        id: room.id,
        you,
        is_self_room: own,
        members: room.members.keys().map(AgentId::to_string).collect(),
        attention_pct: (share * 10.0).round() / 10.0,
        time_since_last: time_since(spoke, now),
        word_budget: word_budget(spoke, now, room.wpm),
        billboard: room.billboard.clone(),
        my_keys: own.then(|| room.keys.clone()),
        pending_access_requests: own.then(|| room.requests.iter().map(request).collect()),
        messages: Vec::new(),
    }
}

/// How many tokens the messages of each room may have: its share of what remains, less its head. What a head has beyond its room's
/// share is taken from those that have most.
fn divide(remaining: usize, heads: &[usize], rooms: &[(&Room, f64)]) -> Vec<usize> {
    let share = |(n, (_, percent)): (usize, &(&Room, f64))| {
        let budget = (remaining as f64 * percent.clamp(0.0, 100.0) / 100.0) as usize;
        (budget.saturating_sub(heads[n]), heads[n].saturating_sub(budget))
    };
    let (mut messages, short): (Vec<usize>, Vec<usize>) = rooms.iter().enumerate().map(share).unzip();
    let mut missing: usize = short.iter().sum();
    while missing > 0 {
        let Some(most) = messages.iter_mut().max().filter(|most| **most > 0) else { break };
        let taken = missing.min(*most).min((*most / 2).max(1));
        *most -= taken;
        missing -= taken;
    }
    messages
}

fn spent_by(pieces: &[Piece<Arc<str>>], counts: &[usize], knowledge: usize) -> Spent {
    let mut spent = Spent { knowledge, ..Spent::default() };
    for (piece, tokens) in pieces.iter().zip(counts) {
        spent.total += tokens;
        match piece.place.part {
            format::Part::Room(room) => *spent.rooms.entry(room).or_default() += tokens,
            _ => spent.fixed += tokens,
        }
    }
    spent
}

//! What an agent sees on a heartbeat: all that it needs to decide, and never more than fits.
//!
//! What all agents of a kind are told comes first, then the agent itself, then its rooms: what changes most stands last, so that a
//! model that keeps what it has read reads little anew.

use crate::action;
use crate::count::Count;
use crate::format::{self, Format, Piece, Place};
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
    pub system: Arc<System>,
    /// How to read this, and what can be done.
    pub meta: Arc<Meta>,
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
    pub recent_actions: Vec<Arc<Map<String, Value>>>,
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
    pub messages: Vec<Arc<MessageView>>,
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
const REMEMBERED: usize = 1 << 18;

/// How many of what agents have written down: those are long, and each change of them is another.
const WRITTEN: usize = 1 << 13;

/// How many heads of rooms: one for each who is in it.
const HEADS: usize = 1 << 15;

/// Something that writes the HUDs of one world, and remembers what it has written and how long that is.
pub struct Scribe {
    count: Arc<dyn Count>,
    memo: Mutex<Memo>,
}

#[derive(Default)]
struct Memo {
    /// Tokens, by the text's sum.
    tokens: BTreeMap<u64, usize>,
    /// What agents did, by whose and by number.
    actions: Rows<(AgentId, u64), Map<String, Value>>,
    /// Messages, by number and by how many have felt something about them.
    messages: Rows<(u64, usize), MessageView>,
    /// What a room is, by the sum of what is in it.
    heads: BTreeMap<(Format, u64), Text>,
    /// What all agents of a kind are told, by the sum of what decides it.
    told: BTreeMap<u64, (Arc<System>, Arc<Meta>)>,
    /// The same as text, and what an agent has written down, by the sum of what is in it.
    texts: BTreeMap<(Format, u64), Arc<[Text]>>,
}

impl Memo {
    fn actions(&mut self) -> &mut Rows<(AgentId, u64), Map<String, Value>> {
        bounded(&mut self.actions, REMEMBERED)
    }

    fn messages(&mut self) -> &mut Rows<(u64, usize), MessageView> {
        bounded(&mut self.messages, REMEMBERED)
    }
}

type Rows<K, T> = BTreeMap<K, Row<T>>;

/// Where rows are kept.
type Kept<K, T> = fn(&mut Memo) -> &mut Rows<K, T>;

/// Something that never changes, and how it is written.
struct Row<T> {
    view: Arc<T>,
    texts: [Option<Text>; Format::ALL.len()],
}

impl<T> Row<T> {
    fn new(view: T) -> Self {
        Self { view: Arc::new(view), texts: [const { None }; Format::ALL.len()] }
    }
}

/// A text, and how many tokens it has.
#[derive(Clone, Debug)]
struct Text {
    text: Arc<str>,
    tokens: usize,
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

/// Makes room where there is none.
fn bounded<K: Ord, V>(map: &mut BTreeMap<K, V>, most: usize) -> &mut BTreeMap<K, V> {
    if map.len() >= most {
        map.clear();
    }
    map
}

fn sum(parts: &[&str]) -> u64 {
    let mut sum = xxhash_rust::xxh3::Xxh3::new();
    for part in parts {
        sum.update(&part.len().to_le_bytes());
        sum.update(part.as_bytes());
    }
    sum.digest()
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
        let key = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
        if let Some(&known) = self.memo().tokens.get(&key) {
            return known;
        }
        let tokens = self.count.tokens(text);
        bounded(&mut self.memo().tokens, REMEMBERED).insert(key, tokens);
        tokens
    }

    fn text(&self, text: impl Into<Arc<str>>) -> Text {
        let text = text.into();
        Text { tokens: self.tokens(&text), text }
    }

    /// Something that never changes, as it is shown and as it is written.
    fn row<K: Ord + Copy, T>(
        &self,
        format: Format,
        (rows, key): (Kept<K, T>, K),
        show: impl FnOnce() -> T,
        write: impl FnOnce(&T) -> String,
    ) -> (Arc<T>, Text) {
        let (view, known) = {
            let mut memo = self.memo();
            let row = rows(&mut memo).entry(key).or_insert_with(|| Row::new(show()));
            (Arc::clone(&row.view), row.texts[format as usize].clone())
        };
        let text = known.unwrap_or_else(|| {
            let text: Arc<str> = write(&view).into();
            let text = Text { tokens: self.count.tokens(&text), text };
            if let Some(row) = rows(&mut self.memo()).get_mut(&key) {
                row.texts[format as usize] = Some(text.clone());
            }
            text
        });
        (view, text)
    }

    /// What a room is for one of its members: as long as that stays, it is written once.
    fn head(&self, frame: Frame<'_>, hud: &Hud, n: usize) -> Text {
        let key = (frame.format, head_sum(&hud.rooms[n], n));
        if let Some(known) = self.memo().heads.get(&key) {
            return known.clone();
        }
        let text: Arc<str> = frame.writer.room(hud, n).into();
        let text = Text { tokens: self.count.tokens(&text), text };
        bounded(&mut self.memo().heads, HEADS).insert(key, text.clone());
        text
    }

    fn texts(&self, format: Format, key: u64, write: impl FnOnce() -> Vec<String>) -> Arc<[Text]> {
        if let Some(known) = self.memo().texts.get(&(format, key)) {
            return Arc::clone(known);
        }
        let texts: Arc<[Text]> = write().into_iter().map(|text| self.text(text)).collect();
        bounded(&mut self.memo().texts, WRITTEN).insert((format, key), Arc::clone(&texts));
        texts
    }

    /// A message as it is shown, and as text.
    fn said(&self, frame: Frame<'_>, message: &Message) -> (Arc<MessageView>, Text) {
        let felt = message.reactions.values().map(std::collections::BTreeSet::len).sum();
        let (key, show) = ((message.id, felt), || MessageView::from(message));
        self.row(frame.format, (Memo::messages, key), show, |view| frame.writer.message(view))
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
        hud.rooms = rooms.iter().map(|(room, share)| room_view(agent.id, room, *share, view.now)).collect();
        // What is too long is cut: first what was done longest ago, then what need not be said.
        let end = self.text(writer.end(&hud));
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
        let tops: Vec<[Text; 2]> =
            (0..rooms.len()).map(|n| [self.head(frame, &hud, n), self.text(writer.pace(&hud, n))]).collect();
        let head = |(n, (room, _)): (usize, &(&Room, f64))| {
            // As many messages as there can be: their number is part of the text in some formats.
            let most = room.messages.len().max(1);
            let last = [writer.board(&hud, n, most), writer.room_end(&hud, n, most)];
            let last: usize = last.iter().map(|text| self.tokens(text)).sum();
            tops[n].iter().map(|text| text.tokens).sum::<usize>() + last
        };
        let heads: Vec<usize> = rooms.iter().enumerate().map(head).collect();
        if heads.iter().sum::<usize>() > remaining {
            return Ok(None);
        }
        let budgets_of = divide(remaining, &heads, rooms);
        let mut recalled = Vec::new();
        let mut said: Vec<Vec<(Arc<MessageView>, Text)>> = Vec::new();
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
        let told = self.texts(format, sum(&told), || vec![writer.shared(hud)]);
        draft.push(Place::shared(), told[0].clone());
        let identity = serde_json::to_string(&hud.me.identity).unwrap_or_default();
        // Whether there is a notice is declared before what is known, in some formats.
        let notice = if hud.me.notice.is_some() { "notice" } else { "" };
        let all = hud.me.knowledge.len() == agent.knowledge.all().len();
        let some =
            if all { String::new() } else { serde_json::to_string(&hud.me.knowledge).unwrap_or_default() };
        let text = if all { &*frame.known.text } else { some.as_str() };
        let known = self.texts(format, sum(&[&identity, text, notice]), || {
            std::iter::once(writer.identity(hud)).chain(writer.known(hud)).collect()
        });
        for (n, text) in known.iter().enumerate() {
            draft.push(Place::known(n), text.clone());
        }
        draft.push(Place::used(), self.text(writer.used(hud)));
        let between = self.text(writer.between_actions());
        let count = hud.me.recent_actions.len();
        for (n, action) in hud.me.recent_actions.iter().enumerate() {
            let number = agent.done.saturating_sub(count as u64) + n as u64;
            let (key, show) = ((agent.id, number), || Map::clone(action));
            let (_, text) = self.row(format, (Memo::actions, key), show, |action| writer.did(action));
            draft.push(Place::did(number), text);
            if n + 1 < count {
                draft.push(Place::did(number).behind(), between.clone());
            }
        }
        draft.push(Place::to_rooms(), self.text(writer.to_rooms(hud)));
        draft
    }

    /// A room with these messages.
    fn room(
        &self,
        frame: Frame<'_>,
        hud: &Hud,
        n: usize,
        (top, messages): (&[Text], &[(Arc<MessageView>, Text)]),
        draft: &mut Draft,
    ) {
        let (writer, room) = (frame.writer, hud.rooms[n].id);
        for (place, text) in (0..).zip(top) {
            draft.push(Place::room(room, place), text.clone());
        }
        draft.push(Place::room(room, 2), self.text(writer.board(hud, n, messages.len())));
        let between = self.text(writer.between_messages());
        for (m, (view, text)) in messages.iter().enumerate() {
            let place = Place::said(room, view.id);
            draft.push(place, text.clone());
            if m + 1 < messages.len() {
                draft.push(place.behind(), between.clone());
            }
        }
        draft.push(Place::room(room, format::LAST), self.text(writer.room_end(hud, n, messages.len())));
    }

    /// What an agent has written down, in JSON, with how many tokens that has.
    fn knowledge(&self, agent: &AgentState) -> Text {
        let text = serde_json::to_string(&agent.knowledge).unwrap_or_default();
        let tokens = if agent.knowledge.all().is_empty() { 0 } else { self.tokens(&text) };
        Text { text: text.into(), tokens }
    }

    /// What all agents of a kind are told, without the last `less` parts that can be left out.
    fn told(&self, frame: Frame<'_>, less: usize) -> (Arc<System>, Arc<Meta>) {
        let Frame { agent, view, .. } = frame;
        let (directives, instructions) =
            (view.prompts.directives(), view.prompts.instructions(agent.kind, less));
        let manages = if agent.can_create_agents { "manages" } else { "" };
        let key = sum(&[&directives, &instructions, manages, agent.output.name()]);
        if let Some(known) = self.memo().told.get(&key) {
            return known.clone();
        }
        let meta = Meta {
            instructions,
            available_actions: action::available(agent.can_create_agents),
            response_format: prompts::response_format(agent.output),
        };
        let told = (Arc::new(System { directives }), Arc::new(meta));
        bounded(&mut self.memo().told, REMEMBERED).insert(key, told.clone());
        told
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
            recent_actions: self.recent(agent),
        };
        Hud { system, meta, me, rooms: Vec::new() }
    }

    /// What an agent did last.
    fn recent(&self, agent: &AgentState) -> Vec<Arc<Map<String, Value>>> {
        let first = agent.done.saturating_sub(agent.recent.len() as u64);
        let mut memo = self.memo();
        let actions = memo.actions();
        let numbered = agent.recent.iter().zip(first..);
        let one = |(recent, number): (&Recent, u64)| {
            let row = actions.entry((agent.id, number)).or_insert_with(|| Row::new(done(recent)));
            Arc::clone(&row.view)
        };
        numbered.map(one).collect()
    }

    /// As much of a message as fits, if that is anything.
    fn beginning(
        &self,
        frame: Frame<'_>,
        message: &Message,
        budget: usize,
    ) -> Option<(Arc<MessageView>, Text)> {
        let between = self.tokens(frame.writer.between_messages());
        let letters: Vec<char> = message.content.chars().collect();
        let mut long = letters.len();
        while long > 20 {
            long = long * 3 / 4;
            let some: String = letters[..long].iter().collect();
            let mut view = MessageView::from(message);
            view.content = format!("{some} […]");
            let text: Arc<str> = frame.writer.message(&view).into();
            let tokens = self.count.tokens(&text);
            if tokens + between <= budget {
                return Some((Arc::new(view), Text { tokens, text }));
            }
        }
        None
    }

    /// The messages of a room that fit: from the newest backwards, without holes; where not all do, older ones that matter may
    /// take a share of the place. Then which of them those are.
    fn fill(
        &self,
        frame: Frame<'_>,
        room: &Room,
        budget: usize,
    ) -> (Vec<(Arc<MessageView>, Text)>, Vec<u64>) {
        let between = self.tokens(frame.writer.between_messages());
        let mut newest: Vec<(Arc<MessageView>, Text)> = Vec::new();
        let mut spent = 0;
        let mut rest = room.messages.iter().rev().map(|message| self.said(frame, message)).peekable();
        let mut take = |limit: usize, spent: &mut usize, newest: &mut Vec<(Arc<MessageView>, Text)>| {
            while let Some(said) = rest.next_if(|(_, text)| *spent + text.tokens + between <= limit) {
                *spent += said.1.tokens + between;
                newest.push(said);
            }
            rest.peek().is_none()
        };
        let share = budget - budget / RECALLED;
        let all = take(share, &mut spent, &mut newest);
        let mut back: Vec<(Arc<MessageView>, Text)> = Vec::new();
        let oldest =
            |newest: &[(Arc<MessageView>, Text)]| newest.last().map_or(u64::MAX, |(said, _)| said.id);
        if !all {
            let before = oldest(&newest);
            let candidates = (frame.view.recalled)(room.id);
            for said in candidates.iter().filter(|said| said.id < before && said.room == room.id) {
                let new = back.iter().all(|(known, _)| known.id != said.id);
                let said = self.said(frame, said);
                if new && spent + said.1.tokens + between <= budget {
                    spent += said.1.tokens + between;
                    back.push(said);
                }
            }
            take(budget, &mut spent, &mut newest);
        }
        if newest.is_empty()
            && let Some(beginning) =
                room.messages.back().and_then(|last| self.beginning(frame, last, budget - spent))
        {
            newest.push(beginning);
        }
        let before = oldest(&newest);
        back.retain(|(said, _)| said.id < before);
        back.sort_unstable_by_key(|(said, _)| said.id);
        let recalled = back.iter().map(|(said, _)| said.id).collect();
        back.extend(newest.into_iter().rev());
        (back, recalled)
    }
}

/// The sum of all that is in the head of the `n`-th room.
fn head_sum(room: &RoomView, n: usize) -> u64 {
    let mut sum = xxhash_rust::xxh3::Xxh3::new();
    let own = [room.billboard.is_some(), room.my_keys.is_some(), room.pending_access_requests.is_some()];
    sum.update(&[u8::from(room.is_self_room), u8::from(own[0]), u8::from(own[1]), u8::from(own[2])]);
    sum.update(&(n as u64).to_le_bytes());
    sum.update(&room.id.0.to_le_bytes());
    sum.update(&room.you.0.to_le_bytes());
    sum.update(&room.attention_pct.to_le_bytes());
    for member in &room.members {
        sum.update(&member.len().to_le_bytes());
        sum.update(member.as_bytes());
    }
    sum.digest()
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

fn spent_by(draft: &Draft, fixed: usize, knowledge: usize) -> Spent {
    let mut spent = Spent { total: draft.tokens(), fixed, knowledge, ..Spent::default() };
    for (piece, tokens) in draft.pieces.iter().zip(&draft.counts) {
        if let format::Part::Room(room) = piece.place.part {
            *spent.rooms.entry(room).or_default() += tokens;
        }
    }
    spent
}

//! What was written, and how long it is: what stays the same is written and counted once.

use crate::count::Count;
use crate::format::Format;
use crate::hud::{self, MessageView, Meta, RoomView, System};
use crate::world::{AgentId, AgentState, Message, Recent};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many texts are remembered.
const REMEMBERED: usize = 1 << 18;

/// How many of what agents have written down: those are long, and each change of them is another.
const WRITTEN: usize = 1 << 13;

/// How many heads of rooms: one for each who is in it.
const HEADS: usize = 1 << 15;

/// A text, and how many tokens it has.
#[derive(Clone, Debug)]
pub(super) struct Text {
    pub(super) text: Arc<str>,
    pub(super) tokens: usize,
}

/// What all agents of a kind are told.
pub(super) type Told = (Arc<System>, Arc<Meta>);

/// One that counts, and remembers.
pub(super) struct Memo {
    count: Arc<dyn Count>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Tokens, by the text's sum.
    tokens: BTreeMap<u64, usize>,
    /// What agents did, by whose and by number.
    actions: Rows<(AgentId, u64), Map<String, Value>>,
    /// Messages, by number and by how many have felt something about them.
    messages: Rows<(u64, usize), MessageView>,
    /// What a room is, by the sum of what is in it.
    heads: BTreeMap<(Format, u64), Text>,
    /// What all agents of a kind are told, by the sum of what decides it.
    told: BTreeMap<u64, Told>,
    /// The same as text, and what an agent has written down, by the sum of what is in it.
    texts: BTreeMap<(Format, u64), Arc<[Text]>>,
}

impl Kept {
    fn actions(&mut self) -> &mut Rows<(AgentId, u64), Map<String, Value>> {
        bounded(&mut self.actions, REMEMBERED)
    }

    fn messages(&mut self) -> &mut Rows<(u64, usize), MessageView> {
        bounded(&mut self.messages, REMEMBERED)
    }
}

type Rows<K, T> = BTreeMap<K, Row<T>>;

/// Where rows are kept.
type Place<K, T> = fn(&mut Kept) -> &mut Rows<K, T>;

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

impl Memo {
    pub(super) fn new(count: Arc<dyn Count>) -> Self {
        Self { count, kept: Mutex::default() }
    }

    pub(super) fn count(&self) -> &dyn Count {
        &*self.count
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many tokens a text has.
    pub(super) fn tokens(&self, text: &str) -> usize {
        self.measured(text, 0, || self.count.tokens(text))
    }

    /// How many tokens there are in something that a text decides, and what kind of thing it is.
    pub(super) fn measured(&self, text: &str, kind: u64, measure: impl FnOnce() -> usize) -> usize {
        let key = xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), kind);
        if let Some(&known) = self.kept().tokens.get(&key) {
            return known;
        }
        let tokens = measure();
        bounded(&mut self.kept().tokens, REMEMBERED).insert(key, tokens);
        tokens
    }

    /// A text that may be written again.
    pub(super) fn text(&self, text: impl Into<Arc<str>>) -> Text {
        let text = text.into();
        Text { tokens: self.tokens(&text), text }
    }

    /// A text whose length is remembered with it, or not at all.
    pub(super) fn counted(&self, text: impl Into<Arc<str>>) -> Text {
        let text = text.into();
        Text { tokens: self.count.tokens(&text), text }
    }

    /// Something that never changes, as it is shown and as it is written.
    fn row<K: Ord + Copy, T>(
        &self,
        format: Format,
        (rows, key): (Place<K, T>, K),
        show: impl FnOnce() -> T,
        write: impl FnOnce(&T) -> String,
    ) -> (Arc<T>, Text) {
        let (view, known) = {
            let mut kept = self.kept();
            let row = rows(&mut kept).entry(key).or_insert_with(|| Row::new(show()));
            (Arc::clone(&row.view), row.texts[format as usize].clone())
        };
        let text = known.unwrap_or_else(|| {
            let text = self.counted(write(&view));
            if let Some(row) = rows(&mut self.kept()).get_mut(&key) {
                row.texts[format as usize] = Some(text.clone());
            }
            text
        });
        (view, text)
    }

    /// A message, as it is shown and as it is written.
    pub(super) fn said(
        &self,
        format: Format,
        message: &Message,
        write: impl FnOnce(&MessageView) -> String,
    ) -> (Arc<MessageView>, Text) {
        let felt = message.reactions.values().map(BTreeSet::len).sum();
        self.row(format, (Kept::messages, (message.id, felt)), || MessageView::from(message), write)
    }

    /// What an agent did, as it is written.
    pub(super) fn did(
        &self,
        format: Format,
        (who, number): (AgentId, u64),
        action: &Map<String, Value>,
        write: impl FnOnce(&Map<String, Value>) -> String,
    ) -> Text {
        self.row(format, (Kept::actions, (who, number)), || action.clone(), write).1
    }

    /// What an agent did last, as it is shown.
    pub(super) fn recent(&self, agent: &AgentState) -> Vec<Arc<Map<String, Value>>> {
        let first = agent.done.saturating_sub(agent.recent.len() as u64);
        let mut kept = self.kept();
        let actions = kept.actions();
        let one = |(recent, number): (&Recent, u64)| {
            let row = actions.entry((agent.id, number)).or_insert_with(|| Row::new(hud::done(recent)));
            Arc::clone(&row.view)
        };
        agent.recent.iter().zip(first..).map(one).collect()
    }

    /// What a room is for one of its members, who sees it as the `n`-th.
    pub(super) fn head(
        &self,
        format: Format,
        (room, n): (&RoomView, usize),
        write: impl FnOnce() -> String,
    ) -> Text {
        let key = (format, head_sum(room, n));
        if let Some(known) = self.kept().heads.get(&key) {
            return known.clone();
        }
        let text = self.counted(write());
        bounded(&mut self.kept().heads, HEADS).insert(key, text.clone());
        text
    }

    /// Texts that these parts decide.
    pub(super) fn texts(
        &self,
        format: Format,
        parts: &[&str],
        write: impl FnOnce() -> Vec<String>,
    ) -> Arc<[Text]> {
        let key = (format, sum(parts));
        if let Some(known) = self.kept().texts.get(&key) {
            return Arc::clone(known);
        }
        let texts: Arc<[Text]> = write().into_iter().map(|text| self.text(text)).collect();
        bounded(&mut self.kept().texts, WRITTEN).insert(key, Arc::clone(&texts));
        texts
    }

    /// What all agents are told for whom these parts are the same.
    pub(super) fn told(&self, parts: &[&str], tell: impl FnOnce() -> (System, Meta)) -> Told {
        let key = sum(parts);
        if let Some(known) = self.kept().told.get(&key) {
            return known.clone();
        }
        let (system, meta) = tell();
        let told = (Arc::new(system), Arc::new(meta));
        bounded(&mut self.kept().told, REMEMBERED).insert(key, told.clone());
        told
    }
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

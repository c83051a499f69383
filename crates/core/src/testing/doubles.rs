//! Stand-ins for the seams: a model that says what a script says, an embedder that hashes words, a store in
//! memory, and a store that fails on demand.

use super::shelf::Shelf;
use crate::attention::Watch;
use crate::body::Body;
use crate::change::Change;
use crate::past::Past;
use crate::seams::{
    Access, Durability, Embedder, EmbedderInfo, Embedding, Entry, Finish, Flow, Kind, Look, MessageKey,
    MessageLookup, Model, ModelInfo, ModelStep, Piece, Prompt, Record, Sampling, SeamError, Seen, Store,
    Summary, Template,
};
use crate::timeline::Timeline;
use crate::token::{ChunkId, TokenId, TurnId};
use crate::told::{self, Told};
use std::collections::BTreeMap;

/// A model that gives scripted answers with scripted attention, in order, and then says that it has none.
///
/// It cuts text at spaces, each word with the space before it; the same word has the same number always.
#[derive(Clone, Debug)]
pub struct ScriptedModel {
    info: ModelInfo,
    answers: std::collections::VecDeque<ScriptedAnswer>,
    /// The windows that it was given, for tests to look at.
    pub seen: Vec<Vec<Seen>>,
}

/// One answer of a script.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScriptedAnswer {
    /// What is said.
    pub text: String,
    /// The attention of each step.
    pub attention: Attention,
    /// After how many tokens the model breaks down.
    pub fails_after: Option<usize>,
}

/// The attention of a scripted step.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Attention {
    /// None.
    Missing,
    /// The same everywhere.
    #[default]
    Even,
    /// Nearly all of it on the tokens that say this, half of the rest on the first slot.
    On(String),
    /// One row a step; none once they are used up. Rows are given as they are, well formed or not.
    Rows(Vec<Vec<f32>>),
}

impl ScriptedModel {
    /// A model that sees `context` tokens and will give these answers.
    #[must_use]
    pub fn new(context: usize, answers: Vec<ScriptedAnswer>) -> Self {
        let info =
            ModelInfo { name: "scripted".into(), context, attention: true, template: Template::default() };
        Self { info, answers: answers.into(), seen: Vec::new() }
    }

    /// The same under another name.
    #[must_use]
    pub fn called(mut self, name: &str) -> Self {
        name.clone_into(&mut self.info.name);
        self
    }

    /// The same with messages written in this way.
    #[must_use]
    pub fn with_template(mut self, template: Template) -> Self {
        self.info.template = template;
        self
    }

    fn row(attention: &Attention, step: usize, window: &[Seen]) -> Option<Vec<f32>> {
        let n = window.len();
        match attention {
            Attention::Missing => None,
            Attention::Even => Some(vec![1.0 / n as f32; n]),
            Attention::Rows(rows) => rows.get(step).cloned(),
            Attention::On(word) => {
                let ids = ["", " ", "\n"].map(|space| id(&format!("{space}{word}")));
                let bright: Vec<bool> = window.iter().map(|s| ids.contains(&s.id)).collect();
                let count = bright.iter().filter(|b| **b).count();
                let (on, off) =
                    if count == 0 { (0.0, 0.5 / n as f32) } else { (0.8 / count as f32, 0.1 / n as f32) };
                let mut row: Vec<f32> = bright.iter().map(|&b| if b { on } else { off }).collect();
                row[0] += 1.0 - row.iter().sum::<f32>();
                Some(row)
            }
        }
    }
}

fn piece(text: &str) -> Piece {
    Piece { id: id(text), text: text.to_owned() }
}

fn id(text: &str) -> TokenId {
    TokenId(xxhash_rust::xxh3::xxh3_64(text.as_bytes()) as u32)
}

/// Cuts a text before each space.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let first = rest.chars().next().map_or(0, char::len_utf8);
        let end = rest[first..].find([' ', '\n']).map_or(rest.len(), |i| i + first);
        let (word, after) = rest.split_at(end);
        words.push(word);
        rest = after;
    }
    words
}

impl Model for ScriptedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, _special: bool) -> Result<Vec<Piece>, SeamError> {
        Ok(words(text).into_iter().map(piece).collect())
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let (window, next) = (prompt.window, prompt.next);
        if window.len() + sampling.max_tokens > self.info.context {
            let why = format!("{} tokens and an answer do not fit {}", window.len(), self.info.context);
            return Err(SeamError::new("generating", why));
        }
        let answer = self
            .answers
            .pop_front()
            .ok_or_else(|| SeamError::new("generating", "the script is at its end"))?;
        self.seen.push(window.to_vec());
        let mut window = window.to_vec();
        let mut said = String::new();
        for (step, word) in words(&answer.text).into_iter().enumerate() {
            if answer.fails_after == Some(step) {
                return Err(SeamError::new("generating", "the script breaks down here"));
            }
            if step == sampling.max_tokens {
                return Ok(Finish::Length);
            }
            let row = Self::row(&answer.attention, step, &window).filter(|_| watch.answer);
            let piece = piece(word);
            window.push(Seen { position: Some(next.plus(step)), behind: 0, id: piece.id, begins: step == 0 });
            said.push_str(word);
            if listen(ModelStep::Token(&piece, row.as_deref().map(Look::of))) == Flow::Stop {
                return Ok(Finish::Aborted);
            }
            if sampling.stop.iter().any(|s| said.ends_with(s.as_str())) {
                return Ok(Finish::Stop);
            }
        }
        Ok(Finish::End)
    }
}

/// An embedder that counts words in a few dozen hashed buckets: texts that share words are near.
#[derive(Clone, Copy, Debug, Default)]
pub struct HashEmbedder;

impl Embedder for HashEmbedder {
    fn info(&mut self) -> Result<EmbedderInfo, SeamError> {
        Ok(EmbedderInfo {
            name: "words in 64 buckets".into(),
            dimensions: 64,
            max_tokens: 256,
            ..EmbedderInfo::default()
        })
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError> {
        let embed = |text: &&str| {
            let mut vector = vec![0.0f32; 64];
            for word in text.split_whitespace().take(256) {
                let hash = xxhash_rust::xxh3::xxh3_64(word.to_lowercase().as_bytes());
                vector[(hash % 64) as usize] += 1.0;
            }
            let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
            vector.iter_mut().filter(|_| norm > 0.0).for_each(|x| *x /= norm);
            vector
        };
        Ok(texts.iter().map(embed).collect())
    }
}

/// A store that forgets when it is dropped. It behaves as a real one would at a crash: what was committed
/// [`Durability::Behind`] is lost unless a [`Durability::Now`] came after it. Its clock counts commits.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    durable: BTreeMap<String, Kept>,
    pending: BTreeMap<String, Kept>,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    model: String,
    shelf: Shelf,
    log: Vec<Entry>,
    records: BTreeMap<(Kind, String), Record>,
    embeddings: BTreeMap<(String, ChunkId), Embedding>,
    keys: BTreeMap<TurnId, MessageKey>,
}

impl MemoryStore {
    /// The machine stops and starts again.
    pub fn crash(&mut self) {
        self.pending = self.durable.clone();
    }

    fn kept(&mut self, conversation: &str) -> &mut Kept {
        self.pending.entry(conversation.to_owned()).or_default()
    }

    /// What is written beside a timeline is safe at once, and with it all that came before.
    fn write(&mut self, conversation: &str, write: impl FnOnce(&mut Kept)) -> Result<(), SeamError> {
        write(self.kept(conversation));
        self.durable = self.pending.clone();
        Ok(())
    }
}

fn broken(what: &'static str) -> impl Fn(String) -> SeamError {
    move |why| SeamError::new(what, why)
}

impl Store for MemoryStore {
    fn conversations(&mut self) -> Result<Vec<Summary>, SeamError> {
        let summary = |(name, kept): (&String, &Kept)| {
            let timeline = kept.shelf.load().map_err(broken("listing"))?;
            Ok(Summary {
                name: name.clone(),
                model: kept.model.clone(),
                created: 0,
                used: kept.log.len() as i64,
                changes: kept.log.len() as u64,
                turns: timeline.turns().len() as u64,
                tokens: timeline.len() as u64,
                live: timeline.live_len() as u64,
            })
        };
        self.pending.iter().map(summary).collect()
    }

    fn load(&mut self, conversation: &str, _access: Access) -> Result<Timeline, SeamError> {
        let kept = self.pending.get(conversation);
        kept.map_or(Ok(Timeline::new()), |kept| kept.shelf.load()).map_err(broken("loading"))
    }

    fn fetch(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<Body>, SeamError> {
        let kept = self.kept(conversation);
        chunks.iter().map(|&c| kept.shelf.fetch(c).map_err(broken("fetching"))).collect()
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError> {
        let kept = self.kept(conversation);
        let mut shelf = kept.shelf.clone();
        shelf.write(change, after).map_err(broken("committing"))?;
        let loaded = shelf.load().map_err(broken("committing"))?;
        if after.state_hash() != loaded.state_hash() {
            return Err(SeamError::new("committing", "the state differs from what the caller holds"));
        }
        kept.shelf = shelf;
        let seq = kept.log.len() as u64 + 1;
        kept.log.push(Entry { seq, at: seq as i64, change: change.clone() });
        if durability == Durability::Now {
            self.durable = self.pending.clone();
        }
        Ok(())
    }

    fn history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<Entry>, SeamError> {
        let names = |e: &&Entry| e.change.names().contains(&chunk);
        Ok(self.kept(conversation).log.iter().filter(names).cloned().collect())
    }

    fn as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, SeamError> {
        let (mut timeline, mut past) = (Timeline::new(), Past::new(turn));
        for entry in &self.kept(conversation).log {
            if !past.ends_before(&entry.change) {
                timeline.apply(&entry.change)?;
            }
        }
        let missing = || SeamError::new("looking back", format!("there is no turn {}", turn.0));
        past.is_found().then_some(timeline).ok_or_else(missing)
    }

    fn times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, SeamError> {
        let mut times = BTreeMap::new();
        for entry in &self.kept(conversation).log {
            for part in entry.change.parts() {
                if let Change::Append(append) = part {
                    times.entry(append.turn).or_insert(entry.at);
                }
            }
        }
        Ok(times.into_iter().collect())
    }

    fn records(&mut self, conversation: &str, kind: Kind) -> Result<Vec<Record>, SeamError> {
        let of_kind = self.kept(conversation).records.iter().filter(|((k, _), _)| *k == kind);
        Ok(of_kind.map(|(_, record)| record.clone()).collect())
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: Kind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), SeamError> {
        self.write(conversation, |kept| {
            let (at, place) = (kept.log.len() as i64, (kind, key.to_owned()));
            match value {
                None => drop(kept.records.remove(&place)),
                Some(value) => {
                    let record = Record { key: key.to_owned(), value: value.to_owned(), at };
                    kept.records.insert(place, record);
                }
            }
        })
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, SeamError> {
        let all = self.kept(conversation).embeddings.iter().filter(|((e, _), _)| e == embedder);
        Ok(all.map(|(_, embedding)| embedding.clone()).collect())
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), SeamError> {
        self.write(conversation, |kept| {
            for embedding in embeddings {
                let place = (embedder.to_owned(), embedding.chunk);
                if embedding.vector.is_empty() {
                    kept.embeddings.remove(&place);
                } else {
                    kept.embeddings.insert(place, embedding.clone());
                }
            }
        })
    }

    fn retell(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError> {
        if self.pending.contains_key(to) {
            return Err(SeamError::new("telling anew", format!("there is a conversation '{to}' already")));
        }
        let told = told::all(self, from, Access::Read, tell)?;
        let old = self.kept(from).clone();
        let mut kept = Kept { model: model.to_owned(), records: old.records, ..Kept::default() };
        let mut anew = Timeline::new();
        for one in &told {
            for change in one.changes(&anew) {
                anew.apply(&change)?;
                kept.shelf.write(&change, &anew).map_err(broken("telling anew"))?;
                kept.log.push(Entry { seq: kept.log.len() as u64 + 1, at: one.at, change });
            }
        }
        let said = |e: &Embedding| anew.chunk(e.chunk).is_some();
        kept.embeddings = old.embeddings.into_iter().filter(|(_, e)| said(e)).collect();
        let last = told.last().map(|one| one.turn);
        kept.keys = old.keys.into_iter().filter(|(turn, _)| Some(*turn) <= last).collect();
        self.write(to, |place| *place = kept)
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), SeamError> {
        if self.pending.contains_key(to) {
            return Err(SeamError::new("renaming", format!("there is a conversation '{to}' already")));
        }
        let kept = self.pending.remove(from);
        let kept =
            kept.ok_or_else(|| SeamError::new("renaming", format!("there is no conversation '{from}'")))?;
        self.write(to, |place| *place = kept)
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, SeamError> {
        let keys = &self.kept(conversation).keys;
        Ok(keys.values().skip(keys.len().saturating_sub(last)).copied().collect())
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), SeamError> {
        self.write(conversation, |kept| kept.keys.extend(keys.iter().map(|key| (key.turn, *key))))
    }

    fn find_messages(
        &mut self,
        lookup: MessageLookup,
        most: usize,
    ) -> Result<Vec<(String, TurnId)>, SeamError> {
        let is = |key: &&MessageKey| match lookup {
            MessageLookup::Prefix(prefix) => key.prefix == prefix,
            MessageLookup::Loose(loose) => key.loose == loose,
        };
        let all = self.pending.iter().flat_map(|(name, kept)| kept.keys.values().map(move |key| (name, key)));
        Ok(all.filter(|(_, key)| is(key)).map(|(name, key)| (name.clone(), key.turn)).take(most).collect())
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), SeamError> {
        // A copy of both, so that a change that does not fit leaves nothing behind.
        let (mut store, mut draft) = (self.clone(), timeline.clone());
        for change in changes {
            store.transact(conversation, &mut draft, change, Durability::Now)?;
        }
        (*self, *timeline) = (store, draft);
        Ok(())
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), SeamError> {
        self.write(conversation, |kept| kept.model = model.to_owned())
    }
}

/// A store that fails when it is told to.
#[derive(Clone, Debug)]
pub struct FailingStore<S> {
    inner: S,
    /// How many more calls succeed.
    pub calls_left: usize,
    /// Whether the failing call has done its work before it fails, as when only the answer is lost.
    pub after_the_fact: bool,
}

impl<S: Store> FailingStore<S> {
    /// A store that fails after `calls` calls.
    pub fn new(inner: S, calls: usize) -> Self {
        Self { inner, calls_left: calls, after_the_fact: false }
    }

    /// The store underneath.
    pub fn inner(&mut self) -> &mut S {
        &mut self.inner
    }

    fn call<T>(&mut self, work: impl FnOnce(&mut S) -> Result<T, SeamError>) -> Result<T, SeamError> {
        let fails = self.calls_left == 0;
        self.calls_left = self.calls_left.saturating_sub(1);
        let failure = || SeamError::new("using the store", "it was told to fail");
        if fails && !self.after_the_fact {
            return Err(failure());
        }
        let done = work(&mut self.inner);
        if fails { Err(failure()) } else { done }
    }
}

impl<S: Store> Store for FailingStore<S> {
    fn conversations(&mut self) -> Result<Vec<Summary>, SeamError> {
        self.call(Store::conversations)
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, SeamError> {
        self.call(|s| s.load(conversation, access))
    }

    fn fetch(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<Body>, SeamError> {
        self.call(|s| s.fetch(conversation, chunks))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError> {
        self.call(|s| s.commit(conversation, change, after, durability))
    }

    fn history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<Entry>, SeamError> {
        self.call(|s| s.history(conversation, chunk))
    }

    fn as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, SeamError> {
        self.call(|s| s.as_of(conversation, turn))
    }

    fn times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, SeamError> {
        self.call(|s| s.times(conversation))
    }

    fn records(&mut self, conversation: &str, kind: Kind) -> Result<Vec<Record>, SeamError> {
        self.call(|s| s.records(conversation, kind))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: Kind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), SeamError> {
        self.call(|s| s.put_record(conversation, kind, key, value))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, SeamError> {
        self.call(|s| s.embeddings(conversation, embedder))
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), SeamError> {
        self.call(|s| s.put_embeddings(conversation, embedder, embeddings))
    }

    fn retell(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError> {
        self.call(|s| s.retell(from, to, model, tell))
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), SeamError> {
        self.call(|s| s.rename(from, to))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, SeamError> {
        self.call(|s| s.message_keys(conversation, last))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), SeamError> {
        self.call(|s| s.put_message_keys(conversation, keys))
    }

    fn find_messages(
        &mut self,
        lookup: MessageLookup,
        most: usize,
    ) -> Result<Vec<(String, TurnId)>, SeamError> {
        self.call(|s| s.find_messages(lookup, most))
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), SeamError> {
        self.call(|s| s.transact_all(conversation, timeline, changes))
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), SeamError> {
        self.call(|s| s.set_model(conversation, model))
    }
}

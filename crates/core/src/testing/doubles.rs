//! Stand-ins for the seams: a model that says what a script says, an embedder that hashes words, a store in
//! memory, and a store that fails on demand.

use crate::change::Change;
use crate::seams::{
    Durability, Embedder, Finish, Flow, Model, ModelInfo, ModelStep, Piece, Sampling, SeamError, Seen, Store,
};
use crate::timeline::Timeline;
use crate::token::{Position, TokenId};
use std::collections::BTreeMap;

/// A model that gives scripted answers with scripted attention, in order, and then says that it has none.
///
/// It cuts text at spaces, each word with the space before it, and numbers words as it meets them.
#[derive(Clone, Debug)]
pub struct ScriptedModel {
    info: ModelInfo,
    answers: std::collections::VecDeque<ScriptedAnswer>,
    vocabulary: BTreeMap<String, TokenId>,
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
        let info = ModelInfo { name: "scripted".into(), context, attention: true };
        Self { info, answers: answers.into(), vocabulary: BTreeMap::new(), seen: Vec::new() }
    }

    fn piece(&mut self, text: &str) -> Piece {
        let next = TokenId(self.vocabulary.len() as u32);
        let id = *self.vocabulary.entry(text.to_owned()).or_insert(next);
        Piece { id, text: text.to_owned() }
    }

    fn word(&self, id: TokenId) -> &str {
        self.vocabulary.iter().find(|(_, v)| **v == id).map_or("", |(word, _)| word.as_str())
    }

    fn row(&self, attention: &Attention, step: usize, window: &[Seen]) -> Option<Vec<f32>> {
        let n = window.len();
        match attention {
            Attention::Missing => None,
            Attention::Even => Some(vec![1.0 / n as f32; n]),
            Attention::Rows(rows) => rows.get(step).cloned(),
            Attention::On(word) => {
                let bright: Vec<bool> = window.iter().map(|s| self.word(s.id).trim() == word).collect();
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
        Ok(words(text).into_iter().map(|w| self.piece(w)).collect())
    }

    fn generate(
        &mut self,
        window: &[Seen],
        next: Position,
        sampling: &Sampling,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
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
            let row = self.row(&answer.attention, step, &window);
            let piece = self.piece(word);
            window.push(Seen { position: Some(next.plus(step)), id: piece.id });
            said.push_str(word);
            if listen(ModelStep::Token(&piece, row.as_deref())) == Flow::Stop {
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
    fn dimensions(&self) -> usize {
        64
    }

    fn max_tokens(&self) -> usize {
        256
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
/// [`Durability::Behind`] is lost unless a [`Durability::Now`] came after it.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    durable: BTreeMap<String, Timeline>,
    pending: BTreeMap<String, Timeline>,
}

impl MemoryStore {
    /// The machine stops and starts again.
    pub fn crash(&mut self) {
        self.pending = self.durable.clone();
    }
}

impl Store for MemoryStore {
    fn conversations(&mut self) -> Result<Vec<String>, SeamError> {
        Ok(self.pending.keys().cloned().collect())
    }

    fn load(&mut self, conversation: &str) -> Result<Timeline, SeamError> {
        Ok(self.pending.get(conversation).cloned().unwrap_or_default())
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError> {
        let mut timeline = self.load(conversation)?;
        timeline.apply(change).map_err(|e| SeamError::new("committing", e.to_string()))?;
        if after.state_hash() != timeline.state_hash() {
            return Err(SeamError::new("committing", "the state differs from what the caller holds"));
        }
        self.pending.insert(conversation.to_owned(), timeline);
        if durability == Durability::Now {
            self.durable = self.pending.clone();
        }
        Ok(())
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
    fn conversations(&mut self) -> Result<Vec<String>, SeamError> {
        self.call(Store::conversations)
    }

    fn load(&mut self, conversation: &str) -> Result<Timeline, SeamError> {
        self.call(|s| s.load(conversation))
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
}

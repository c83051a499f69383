//! What the engine asks of the parts that touch the world, each as small as its two implementations need:
//! a model (llama.cpp in this process, or behind HTTP), an embedder, and a store (SQLite or PostgreSQL).
//!
//! All of them block; whoever needs to go on meanwhile gives them a thread. Their test doubles are in
//! [`testing`](crate::testing).

use crate::apply::ApplyError;
use crate::change::Change;
use crate::timeline::Timeline;
use crate::token::{Position, TokenId};

/// Something outside went wrong: what, why, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct SeamError {
    /// What was being done.
    pub what: String,
    /// Why it failed, and what to do next.
    pub why: String,
}

impl SeamError {
    /// An error of that description.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

impl From<ApplyError> for SeamError {
    fn from(error: ApplyError) -> Self {
        Self::new("changing the conversation", error.to_string())
    }
}

/// What is known of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// How many tokens it can see.
    pub context: usize,
    /// Whether its steps come with attention.
    pub attention: bool,
}

/// A piece of text that a model knows by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number.
    pub id: TokenId,
    /// What it adds to the text; empty while a character is incomplete.
    pub text: String,
}

/// A token of the window that a model is given. A model that keeps a cache compares the positions with
/// those in its cache: what is gone is saved and freed, what is back is restored, what is new is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its birth index; none for the system prompt, which stands before the timeline.
    pub position: Option<Position>,
    /// Its number.
    pub id: TokenId,
}

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The longest answer, in tokens.
    pub max_tokens: usize,
    /// 0 takes the likeliest token every time.
    pub temperature: f32,
    /// The share of probability that is drawn from.
    pub top_p: f32,
    /// The same seed draws the same answer.
    pub seed: u64,
    /// The answer ends behind any of these.
    pub stop: Vec<String>,
}

/// One step of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelStep<'a> {
    /// A row of the prompt's own attention, by slot.
    Prompt(&'a [f32]),
    /// A token, and the attention by slot of the pass that made it.
    Token(&'a Piece, Option<&'a [f32]>),
}

/// Whether an answer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It does.
    Continue,
    /// It ends here; what was said stays.
    Stop,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model had said all.
    End,
    /// A stop sequence.
    Stop,
    /// It was as long as it may be.
    Length,
    /// The listener asked for it.
    Aborted,
}

/// Something that speaks.
pub trait Model {
    /// What is known of it.
    fn info(&self) -> &ModelInfo;

    /// Cuts a text into tokens. The names of special tokens become those tokens only where `special` is set.
    ///
    /// # Errors
    /// When the model cannot be reached.
    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError>;

    /// Goes on from `window`, telling `listen` of each step. The tokens that it makes are born at `next` and
    /// behind it: a cache that is kept by position knows them by that.
    ///
    /// # Errors
    /// When the model fails; what was told before stands.
    fn generate(
        &mut self,
        window: &[Seen],
        next: Position,
        sampling: &Sampling,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError>;
}

/// Something that turns texts into vectors of length 1.
pub trait Embedder {
    /// How long the vectors are.
    fn dimensions(&self) -> usize;

    /// How many of the embedder's own tokens it reads of a text.
    fn max_tokens(&self) -> usize;

    /// One vector for each text.
    ///
    /// # Errors
    /// When the model cannot be run.
    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError>;
}

/// When a commit is safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When the call returns: the user's words, and the end of a turn.
    Now,
    /// In order, and by the next [`Durability::Now`]: tokens while they stream.
    Behind,
}

/// Something that keeps conversations for ever.
pub trait Store {
    /// The names of the conversations that it keeps.
    ///
    /// # Errors
    /// When the store cannot be read.
    fn conversations(&mut self) -> Result<Vec<String>, SeamError>;

    /// A conversation as it was last committed; a new and empty one where there is none of that name.
    ///
    /// # Errors
    /// When the store cannot be read, or what it holds is damaged.
    fn load(&mut self, conversation: &str) -> Result<Timeline, SeamError>;

    /// Writes a change. `after` is the state that it leads to: the store writes what it touched of that. Called
    /// from within [`Timeline::transact`], which takes the change back if this fails.
    ///
    /// # Errors
    /// When it could not be written; then nothing of it was.
    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError>;
}

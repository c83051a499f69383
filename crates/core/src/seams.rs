//! What the engine asks of the parts that touch the world, each as small as its two implementations need:
//! a model (llama.cpp in this process, or behind HTTP), an embedder, and a store (SQLite or PostgreSQL).
//!
//! All of them block; whoever needs to go on meanwhile gives them a thread. Their test doubles are in
//! [`testing`](crate::testing).

use crate::apply::ApplyError;
use crate::attention::Watch;
use crate::body::Body;
use crate::change::Change;
use crate::timeline::Timeline;
use crate::token::{ChunkId, Position, Role, TokenId, TurnId};
use crate::told::Told;

/// Something outside went wrong: what, why, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct SeamError {
    /// What was being done.
    pub what: String,
    /// Why it failed, and what to do next.
    pub why: String,
    /// Who can mend it.
    pub fault: Fault,
}

/// Who can mend what went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Whoever asked: it cannot be done as it was asked.
    Asked,
    /// Nobody need: it was stopped before it began.
    Stopped,
    /// Whoever asked, by asking again.
    Again,
    /// Something outside broke down.
    Outside,
}

impl SeamError {
    /// Something outside broke down.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into(), fault: Fault::Outside }
    }

    /// It cannot be done as it was asked.
    pub fn asked(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { fault: Fault::Asked, ..Self::new(what, why) }
    }

    /// The same, to be mended by somebody else.
    #[must_use]
    pub fn by(self, fault: Fault) -> Self {
        Self { fault, ..self }
    }
}

impl From<ApplyError> for SeamError {
    fn from(error: ApplyError) -> Self {
        Self::asked("changing the conversation", error.to_string())
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
    /// How messages are written for it.
    pub template: Template,
}

/// How messages are written for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Before everything.
    pub start: String,
    /// Around a system prompt.
    pub system: Wrap,
    /// Around what the user says.
    pub user: Wrap,
    /// Around what the model says: an answer begins with the first half, and is ended with the second.
    pub assistant: Wrap,
}

/// What stands before and after a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrap {
    /// Before it.
    pub before: String,
    /// After it.
    pub after: String,
}

impl Template {
    /// The template that most models know: `<|im_start|>user … <|im_end|>`.
    #[must_use]
    pub fn chatml() -> Self {
        let wrap =
            |role: &str| Wrap { before: format!("<|im_start|>{role}\n"), after: "<|im_end|>\n".into() };
        Self {
            start: String::new(),
            system: wrap("system"),
            user: wrap("user"),
            assistant: wrap("assistant"),
        }
    }

    /// For models that know none: names and line breaks.
    #[must_use]
    pub fn plain() -> Self {
        let wrap = |role: &str| Wrap { before: format!("{role}: "), after: "\n\n".into() };
        Self {
            start: String::new(),
            system: wrap("System"),
            user: wrap("User"),
            assistant: wrap("Assistant"),
        }
    }

    /// What stands around a message of that role; tools answer in the assistant's turn.
    #[must_use]
    pub fn around(&self, role: Role) -> &Wrap {
        match role {
            Role::System => &self.system,
            Role::User => &self.user,
            Role::Assistant => &self.assistant,
        }
    }
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
    /// 0 for what was said there. What stands behind that position without having been said, as a memory does where its
    /// range was, is counted from 1.
    pub behind: u16,
    /// Its number.
    pub id: TokenId,
    /// Whether a chunk begins with it: what comes and goes together is kept together.
    pub begins: bool,
}

/// What a model goes on from.
#[derive(Clone, Copy)]
pub struct Prompt<'a> {
    /// Whose window it is. What a model keeps, it keeps by this key, which must never stand for another conversation.
    pub conversation: &'a str,
    /// The window, in order: the system prompt, then what is live by position.
    pub window: &'a [Seen],
    /// The same as messages, for a model that is spoken to in those. The last one is what it goes on with, if it is
    /// the assistant's.
    pub messages: &'a dyn Fn() -> Vec<Message>,
    /// Where the tokens that it makes are born: a cache that is kept by position knows them by that.
    pub next: Position,
    /// Whether all of this is forgotten afterwards, as if it had not been: previews, memories.
    pub aside: bool,
}

/// One message of a window, as text: its tokens' texts in a row, with what the template puts around them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Whose.
    pub role: Role,
    /// What it says.
    pub text: String,
}

/// How the next token is chosen, and when no more are.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The longest answer, in tokens.
    pub max_tokens: usize,
    /// 0 takes the likeliest token every time.
    pub temperature: f32,
    /// How many of the likeliest tokens are drawn from; 0: all.
    pub top_k: usize,
    /// The share of probability that is drawn from.
    pub top_p: f32,
    /// The least probability, as a share of the likeliest token's, that is drawn from.
    pub min_p: f32,
    /// How much less likely a token of the recent past is; 1: no less.
    pub repetition: f32,
    /// The same seed draws the same answer.
    pub seed: u64,
    /// The answer ends behind any of these.
    pub stop: Vec<String>,
    /// A form that the answer keeps to.
    pub form: Option<Form>,
}

/// A form that an answer keeps to, token by token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A JSON schema.
    Schema(String),
    /// A grammar in the notation of Lark; only local models know it.
    Grammar(String),
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: 50,
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.0,
            repetition: 1.0,
            seed: 0,
            stop: Vec::new(),
            form: None,
        }
    }
}

/// What a token looked at, by slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look<'a> {
    /// The mean over heads: probabilities that sum to 1, unless layers were made one by their largest.
    pub mean: &'a [f32],
    /// The largest head, slot by slot; empty where it was not asked for.
    pub max: &'a [f32],
    /// Every head of every layer, if that was asked for: layers × heads rows as long as the mean.
    pub full: &'a [f32],
}

impl<'a> Look<'a> {
    /// What is known of a look that has only its mean.
    #[must_use]
    pub fn of(mean: &'a [f32]) -> Self {
        Self { mean, max: &[], full: &[] }
    }
}

/// What a cache had to do so that a window could be gone on from, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upkeep {
    /// That were there.
    pub kept: usize,
    /// That left, and were saved or had been.
    pub left: usize,
    /// That came back as they were.
    pub returned: usize,
    /// That were read again, because nothing of them was kept.
    pub reread: usize,
    /// That were read for the first time, at the window's end.
    pub read: usize,
    /// That were moved to other positions of the model's.
    pub moved: usize,
}

/// One step of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelStep<'a> {
    /// So much of the window has been read; `of` is 0 where nobody knows. Told now and then while there is nothing
    /// else to tell, so that the listener can stop it.
    Reading {
        /// Tokens read.
        done: usize,
        /// Tokens to read.
        of: usize,
    },
    /// A row of the prompt's own attention: what one of its tokens looked at.
    Prompt(Look<'a>),
    /// The window has been read; an answer begins.
    Ready(Upkeep),
    /// A token, and what the pass that made it looked at.
    Token(&'a Piece, Option<Look<'a>>),
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

impl Finish {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Finish::End => "end",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Aborted => "aborted",
        }
    }
}

/// Ends what a model is doing aside.
pub type Breaker = std::sync::Arc<dyn Fn() + Send + Sync>;

/// Something that speaks.
pub trait Model {
    /// What is known of it.
    fn info(&self) -> &ModelInfo;

    /// Cuts a text into tokens. The names of special tokens become those tokens only where `special` is set.
    /// The texts of the pieces, in a row, are the text.
    ///
    /// # Errors
    /// When the model cannot be reached.
    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError>;

    /// How many tokens a text has, where nobody needs to know which.
    ///
    /// # Errors
    /// As above.
    fn count(&mut self, text: &str) -> Result<usize, SeamError> {
        Ok(self.tokenize(text, false)?.len())
    }

    /// What tokens say in a row, special ones by their names.
    ///
    /// # Errors
    /// When the model cannot tell.
    fn text(&mut self, ids: &[TokenId]) -> Result<String, SeamError> {
        let _ = ids;
        Err(SeamError::new("reading tokens", "this model does not tell what its tokens say"))
    }

    /// Goes on from a window, telling `listen` of each step.
    ///
    /// # Errors
    /// When the model fails; what was told before stands.
    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError>;

    /// Reads a window in, so that the next answer that goes on from it need not: what is new in it is computed now. `listen`
    /// can stop it. For a model that keeps nothing there is nothing to do.
    ///
    /// # Errors
    /// When the model fails.
    fn read_in(
        &mut self,
        prompt: &Prompt<'_>,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let _ = (prompt, listen);
        Ok(Finish::Length)
    }

    /// What ends, from any thread and at once, whatever this model is doing aside; none where only a listener can.
    fn breaker(&self) -> Option<Breaker> {
        None
    }

    /// Brings what is kept of a conversation in line with its window, and saves it, so that the next answer need not
    /// wait for that. For the end of a turn; nothing depends on it.
    ///
    /// # Errors
    /// When the model fails.
    fn settle(&mut self, conversation: &str, window: &[Seen]) -> Result<(), SeamError> {
        let _ = (conversation, window);
        Ok(())
    }

    /// A conversation branched off another: up to that position their tokens are the same, so what is kept of the other serves
    /// both. For a model that keeps nothing there is nothing to do.
    fn inherit(&mut self, conversation: &str, parent: &str, positions: u64) {
        let _ = (conversation, parent, positions);
    }

    /// Lets go of all that is kept of a conversation, saved or not: it is no more. For a model that keeps nothing there is
    /// nothing to do.
    ///
    /// # Errors
    /// When the model fails.
    fn forget(&mut self, conversation: &str) -> Result<(), SeamError> {
        let _ = conversation;
        Ok(())
    }

    /// Whether what is kept of a conversation is of its window, as far as it has been read; in words where it is not. For
    /// those who look for mistakes.
    ///
    /// # Errors
    /// When the model fails.
    fn disagreement(&mut self, conversation: &str, window: &[Seen]) -> Result<Option<String>, SeamError> {
        let _ = (conversation, window);
        Ok(None)
    }
}

/// What is known of an embedder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbedderInfo {
    /// Its name, another one for everything that gives other vectors: what is kept under it can be compared.
    pub name: String,
    /// How long the vectors are.
    pub dimensions: usize,
    /// How many of the embedder's own tokens it reads of a text.
    pub max_tokens: usize,
    /// What it wants before a query.
    pub query: String,
    /// What it wants before a text that a query may find.
    pub passage: String,
}

/// Something that turns texts into vectors of length 1. The same text gives the same vector, whatever it is embedded
/// with.
pub trait Embedder {
    /// What is known of it.
    ///
    /// # Errors
    /// Here and below: when the model cannot be loaded or run.
    fn info(&mut self) -> Result<EmbedderInfo, SeamError>;

    /// One vector for each text, in order, for somebody who waits.
    ///
    /// # Errors
    /// As above.
    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError>;

    /// The same for much text that nobody waits for: `listen` hears of each vector, with the number of its text, in any
    /// order, and can stop it. What somebody waits for comes in between.
    ///
    /// # Errors
    /// As above; what was told before stands.
    fn embed_behind(
        &mut self,
        texts: Vec<String>,
        listen: &mut dyn FnMut(usize, Vec<f32>) -> Flow,
    ) -> Result<(), SeamError> {
        for (number, text) in texts.iter().enumerate() {
            for vector in self.embed(&[text])? {
                if listen(number, vector) == Flow::Stop {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// When a commit is safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When the call returns: the user's words, and the end of a turn.
    Now,
    /// In order, and by the next [`Durability::Now`]: tokens while they stream.
    Behind,
}

/// What a store tells of a conversation without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Its name.
    pub name: String,
    /// The model whose tokens it is made of; empty where no model has read it yet.
    pub model: String,
    /// When it began, in milliseconds since 1970.
    pub created: i64,
    /// When it last changed.
    pub used: i64,
    /// Changes ever committed.
    pub changes: u64,
    /// Messages.
    pub turns: u64,
    /// Tokens ever spoken.
    pub tokens: u64,
    /// Tokens in the window.
    pub live: u64,
}

/// What a conversation is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To look at it; others may be writing.
    Read,
    /// To change it; nobody else may while the store is open.
    Write,
}

/// One line of a conversation's log.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its number; they count upward for ever.
    pub seq: u64,
    /// When it was committed, in milliseconds since 1970.
    pub at: i64,
    /// What happened.
    pub change: Change,
}

/// What is kept beside a timeline, under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The model's own notes, by file name.
    Note,
    /// A setting of this conversation.
    Setting,
    /// A recording of attention, by folder.
    Capture,
    /// A memory that was formed of a range.
    Memory,
    /// How a turn went, by its number.
    Turn,
    /// Messages that were set aside for others, by the number of their first turn.
    Variant,
    /// A version of the system prompt, by the number of the first turn that was said with it.
    System,
    /// A message that a client sent in the place of older turns, by its hash.
    Aside,
    /// What is true of a whole world of rooms.
    World,
    /// An agent of a world, by its number.
    Agent,
    /// A room of a world, by its number.
    Room,
    /// A message of a world, by its room and its number.
    Said,
    /// Something that a world is asked from outside, by when.
    Post,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 13] = [
        Kind::Note,
        Kind::Setting,
        Kind::Capture,
        Kind::Memory,
        Kind::Turn,
        Kind::Variant,
        Kind::System,
        Kind::Aside,
        Kind::World,
        Kind::Agent,
        Kind::Room,
        Kind::Said,
        Kind::Post,
    ];

    /// The word that stores and exports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Note => "note",
            Kind::Setting => "setting",
            Kind::Capture => "capture",
            Kind::Memory => "memory",
            Kind::Turn => "turn",
            Kind::Variant => "variant",
            Kind::System => "system",
            Kind::Aside => "aside",
            Kind::World => "world",
            Kind::Agent => "agent",
            Kind::Room => "room",
            Kind::Said => "said",
            Kind::Post => "post",
        }
    }
}

/// One thing that is kept beside a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: String,
    /// What it says, in whatever form its kind has.
    pub value: String,
    /// When it was last written, in milliseconds since 1970.
    pub at: i64,
}

/// The vector of one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// Whose.
    pub chunk: ChunkId,
    /// A sum of the text that was embedded: another sum, and the vector is not of what the chunk says now.
    pub of: u64,
    /// The vector.
    pub vector: Vec<f32>,
}

/// A message as clients of chat APIs know it: hashes by which a history that is sent again is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageKey {
    /// The turn that says it.
    pub turn: TurnId,
    /// Who says it.
    pub role: Role,
    /// Hash of the trimmed text.
    pub exact: u64,
    /// Hash of the text without a speaker's name in front, white space collapsed.
    pub loose: u64,
    /// Hash of the speaker's name in front of the text; 0: none.
    pub name: u64,
    /// Characters of the text that `loose` is a hash of.
    pub length: u32,
    /// Hash of this message and of all before it on its path.
    pub prefix: u64,
}

/// Which of its hashes a message is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageLookup {
    /// [`MessageKey::prefix`].
    Prefix(u64),
    /// [`MessageKey::loose`].
    Loose(u64),
}

/// Something that keeps conversations for ever.
pub trait Store {
    /// The conversations that it keeps, by name.
    ///
    /// # Errors
    /// Here and below: when the store cannot be read or written, or what it holds is damaged. What was to be
    /// written is then not written at all.
    fn conversations(&mut self) -> Result<Vec<Summary>, SeamError>;

    /// A conversation as it was last committed, with the tokens of what is live in memory; a new and empty one
    /// where there is none of that name.
    ///
    /// # Errors
    /// Also when it is to be written and somebody else is doing so.
    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, SeamError>;

    /// The tokens of chunks, in the order in which they are named.
    ///
    /// # Errors
    /// Also when there is no such chunk.
    fn fetch(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<Body>, SeamError>;

    /// Writes a change. `after` is the state that it leads to: the store writes what it touched of that. Called
    /// from within [`Timeline::transact`], which takes the change back if this fails.
    ///
    /// # Errors
    /// Also when the conversation was not opened to be written, or has changed behind the caller's back.
    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError>;

    /// What happened to a chunk, the oldest first: the entries of the log that name it, scores aside.
    ///
    /// # Errors
    /// As above.
    fn history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<Entry>, SeamError>;

    /// A conversation as it was when a turn had been said, and nothing had left the window behind it: what the model saw
    /// then, and what it said. How bright things were then is not kept.
    ///
    /// # Errors
    /// As above; also when there is no such turn.
    fn as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, SeamError>;

    /// When each turn began, in milliseconds since 1970, in their order.
    ///
    /// # Errors
    /// As above.
    fn times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, SeamError>;

    /// What is kept of one kind, by key.
    ///
    /// # Errors
    /// As above.
    fn records(&mut self, conversation: &str, kind: Kind) -> Result<Vec<Record>, SeamError>;

    /// Keeps a value under a key, in the place of what was there; none: nothing is kept there any more.
    ///
    /// # Errors
    /// As above.
    fn put_record(
        &mut self,
        conversation: &str,
        kind: Kind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), SeamError>;

    /// The vectors that an embedder of that name has made, in order of birth.
    ///
    /// # Errors
    /// As above.
    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, SeamError>;

    /// Keeps vectors, in the place of those that were there; an empty one: nothing is kept any more.
    ///
    /// # Errors
    /// As above.
    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), SeamError>;

    /// Notes which model's tokens the conversation is made of.
    ///
    /// # Errors
    /// As above.
    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), SeamError>;

    /// Tells a conversation anew as `to`, in tokens of `model`: each message as `tell` has it, up to the first that it
    /// has nothing for. What is kept beside it comes along, as far as it fits; what it was told from stays as it is.
    ///
    /// # Errors
    /// Also when there is a conversation of that name, or `tell` fails; then nothing is written.
    fn retell(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError>;

    /// Gives a conversation another name.
    ///
    /// # Errors
    /// Also when there is a conversation of that name.
    fn rename(&mut self, from: &str, to: &str) -> Result<(), SeamError>;

    /// What is known of one conversation without opening it.
    ///
    /// # Errors
    /// As above.
    fn find(&mut self, conversation: &str) -> Result<Option<Summary>, SeamError> {
        Ok(self.conversations()?.into_iter().find(|known| known.name == conversation))
    }

    /// The message keys of a conversation, by turn: the last so many of them.
    ///
    /// # Errors
    /// As above.
    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, SeamError>;

    /// Keeps message keys, in the place of those that their turns had.
    ///
    /// # Errors
    /// As above.
    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), SeamError>;

    /// Conversations that hold a message, and in which turn: at most so many, the newest conversations first.
    ///
    /// # Errors
    /// As above.
    fn find_messages(
        &mut self,
        lookup: MessageLookup,
        most: usize,
    ) -> Result<Vec<(String, TurnId)>, SeamError>;

    /// Gives up the right to write a conversation, so that another program can; [`Store::hold`] takes it again.
    fn release(&mut self, conversation: &str) {
        let _ = conversation;
    }

    /// Takes the right to write a conversation again. Returns false, and takes nothing, where another program has changed
    /// it since the timeline of that revision was loaded: then it must be loaded again.
    ///
    /// # Errors
    /// As [`Store::load`].
    fn hold(&mut self, conversation: &str, revision: u64) -> Result<bool, SeamError> {
        let _ = (conversation, revision);
        Ok(true)
    }

    /// Does changes and commits them, each with its own entry in the log: all of them or none.
    ///
    /// # Errors
    /// As [`Store::transact`].
    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), SeamError>;

    /// Brings the tokens that a change needs into memory.
    ///
    /// # Errors
    /// As above.
    fn bring(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        chunks: &[ChunkId],
    ) -> Result<(), SeamError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let bodies = self.fetch(conversation, chunks)?;
        for (&chunk, body) in chunks.iter().zip(bodies) {
            let damaged = |why: String| {
                let why = format!("{why}; if somebody has changed it meanwhile, open it again");
                SeamError::new(format!("reading {chunk} of '{conversation}'"), why)
            };
            timeline.admit(chunk, body).map_err(damaged)?;
        }
        Ok(())
    }

    /// Does a change and commits it, or neither; brings what it needs into memory first. Returns what undoes it.
    ///
    /// # Errors
    /// Also when the change does not fit the timeline.
    fn transact(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        change: &Change,
        durability: Durability,
    ) -> Result<Change, SeamError> {
        let away = timeline.away(change);
        self.bring(conversation, timeline, &away)?;
        timeline.transact(change, |after| self.commit(conversation, change, after, durability))
    }
}

/// A row of a world that is to be kept under a key; without a value, nothing is kept there any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldRow {
    /// What it is.
    pub kind: Kind,
    /// Its key: digits, all keys of a kind as long as each other.
    pub key: String,
    /// What it says.
    pub value: Option<String>,
}

/// What a store tells of a world without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldSummary {
    /// Its name.
    pub name: String,
    /// When it began, in milliseconds since 1970.
    pub created: i64,
}

/// Something that keeps worlds of rooms for ever.
pub trait Worlds {
    /// The worlds that it keeps, by name.
    ///
    /// # Errors
    /// Here and below: when the store cannot be read or written, or what it holds is damaged.
    fn worlds(&mut self) -> Result<Vec<WorldSummary>, SeamError>;

    /// From now on nobody else may run this world while the store is open.
    ///
    /// # Errors
    /// Also when somebody else does.
    fn hold_world(&mut self, world: &str) -> Result<(), SeamError>;

    /// Whether somebody else runs it.
    ///
    /// # Errors
    /// When the store fails.
    fn is_world_held(&mut self, world: &str) -> Result<bool, SeamError>;

    /// Rows of a kind with keys from one up to and without another: the last so many of them, in order.
    ///
    /// # Errors
    /// As above.
    fn world_rows(
        &mut self,
        world: &str,
        kind: Kind,
        keys: std::ops::Range<&str>,
        last: usize,
    ) -> Result<Vec<Record>, SeamError>;

    /// Keeps rows, all of them or none. When this returns, they are safe.
    ///
    /// # Errors
    /// As above.
    fn put_world_rows(&mut self, world: &str, rows: &[WorldRow]) -> Result<(), SeamError>;

    /// Lets go of a world and all that was said there.
    ///
    /// # Errors
    /// As above; also when there is none.
    fn end_world(&mut self, world: &str) -> Result<(), SeamError>;
}

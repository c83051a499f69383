//! What the server is given: it makes no model and opens no store itself.

use halo_agents::prompts::Prompts;
use halo_agents::world::Brain;
use halo_agents::world_file::WorldFile;
use halo_core::seams::{Embedder, Model, ModelInfo, SeamError, Store, Worlds};
use halo_core::token::TokenId;
use halo_engine::branch::BranchPoint;
use halo_engine::record::Recorder;
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_engine::world::mind::Mind;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use utoipa::ToSchema;

/// The parts that a server is put together of.
pub trait Parts: Send + Sync {
    /// The model, to be asked without a conversation. All of them are the same one.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn model(&self) -> Result<Box<dyn Model + Send>, SeamError>;

    /// What is known of the model.
    fn info(&self) -> ModelInfo;

    /// And beyond what the engine needs.
    fn facts(&self) -> ModelFacts;

    /// Whether a token is one of those that only structure a text.
    fn is_special(&self, id: TokenId) -> bool;

    /// A store to read from while others write.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn store(&self) -> Result<Box<dyn Store + Send>, SeamError>;

    /// The embedder, if there is one. All of them are the same one.
    fn embedder(&self) -> Option<Box<dyn Embedder + Send>>;

    /// What conversations go by.
    fn rules(&self) -> Rules;

    /// Opens a conversation.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, SeamError>;

    /// Opens a conversation to look at it: nothing is claimed, and nothing is written.
    ///
    /// # Errors
    /// When it cannot be read.
    fn open_to_read(&self, name: &str) -> Result<Session, SeamError>;

    /// Makes a branch of a conversation, also while somebody is writing there. Returns how many messages they share.
    ///
    /// # Errors
    /// When there is a conversation of that name, or the store fails.
    fn branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, SeamError>;

    /// Somebody who records a conversation's answers, to be kept in a folder that is called so.
    ///
    /// # Errors
    /// When there is nothing to record, or no place for it.
    fn recorder(&self, called: &str) -> Result<Box<dyn Recorder>, SeamError>;

    /// What was recorded there.
    ///
    /// # Errors
    /// When it is not there any more, or cannot be read.
    fn captured(&self, place: &str) -> Result<Captured, SeamError>;

    /// A store that keeps worlds.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn worlds(&self) -> Result<Box<dyn Worlds + Send>, SeamError>;

    /// Ends a world for good, with all that models keep of it.
    ///
    /// # Errors
    /// When somebody else runs it, or the store fails.
    fn end_world(&self, world: &str) -> Result<(), SeamError>;

    /// Whether a world that comes over the network may think with the model of that name or address.
    fn may_think(&self, at: &str) -> bool;

    /// What thinks for the agents of a world, by name.
    ///
    /// # Errors
    /// When a model cannot be reached.
    fn minds(&self, brains: &[Brain]) -> Result<BTreeMap<String, Mind>, SeamError>;

    /// What agents are told.
    ///
    /// # Errors
    /// When the user's own file cannot be read.
    fn prompts(&self) -> Result<Prompts, SeamError>;

    /// A world as somebody wrote it down.
    ///
    /// # Errors
    /// When it is none.
    fn read_world(&self, text: &str) -> Result<WorldFile, SeamError>;

    /// A world to begin with.
    fn example(&self) -> &str;

    /// All settings.
    fn settings(&self) -> Vec<Setting>;

    /// Sets a setting for good, or with none back to what it is without.
    ///
    /// # Errors
    /// When there is no such key, the value is not allowed, or it cannot be kept.
    fn set(&self, key: &str, value: Option<&str>) -> Result<(), SeamError>;
}

/// What is known of a model beyond what the engine needs; 0 and −1 where nobody knows.
#[derive(Clone, Debug, Default)]
pub struct ModelFacts {
    /// Tokens that it knows.
    pub vocabulary: usize,
    /// Layers.
    pub layers: usize,
    /// Attention heads of a layer.
    pub heads: usize,
    /// Heads that keys and values have.
    pub kv_heads: usize,
    /// Length of its vectors.
    pub embedding: usize,
    /// The context that it was trained for.
    pub trained_context: usize,
    /// What a text begins with.
    pub bos: i64,
    /// What a text ends with.
    pub eos: i64,
    /// What a turn ends with.
    pub eot: i64,
    /// How positions are turned into keys.
    pub rope_base: f64,
    /// And by how much less.
    pub rope_scale: f64,
}

/// A recorded answer: what each of its words looked at, paragraph by paragraph.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Captured {
    /// What there was to look at, in order: the standing instructions, the paragraphs of the window, the answer itself.
    pub parts: Vec<CapturedPart>,
    /// The words of the answer.
    pub steps: Vec<CapturedStep>,
}

/// Something to look at.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CapturedPart {
    /// The name of the chunk; empty for the standing instructions and the answer itself.
    pub chunk: String,
    /// What it says.
    pub text: String,
}

/// A word of a recorded answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CapturedStep {
    /// The word.
    pub text: String,
    /// Which share of its attention went to each part; none where it was not recorded.
    pub shares: Vec<f32>,
}

/// One setting, for people.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Setting {
    /// Its name.
    pub key: String,
    /// What it does.
    pub about: String,
    /// What may be written.
    pub allowed: String,
    /// The words that may be written, where they are fixed.
    pub words: Vec<String>,
    /// What it is without being set.
    pub default: String,
    /// What it is.
    pub value: String,
    /// Where that came from.
    pub origin: String,
    /// Whether it can be set here: what the command line or the environment says is stronger.
    pub fixed: bool,
    /// Whether it counts only when the program is started again.
    pub at_start: bool,
}

/// What the server allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// What must be shown to be let in; none: whoever reaches it is.
    pub key: Option<String>,
    /// Names that this machine is called by, beside its addresses and localhost.
    pub hosts: Vec<String>,
    /// Other pages that may use it, such as `https://chat.example`.
    pub origins: Vec<String>,
    /// The largest request, in bytes.
    pub body: usize,
    /// Requests a second that one address may send, this machine aside; 0: any number.
    pub rate: u32,
    /// How many may wait for the model.
    pub waiting: usize,
    /// How long a conversation or a world stays open that nobody wants anything of.
    pub idle: Duration,
    /// How many conversations are open at once.
    pub open: usize,
    /// The most messages of one request.
    pub messages: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            body: 16 << 20,
            rate: 50,
            waiting: 64,
            idle: Duration::from_secs(600),
            open: 32,
            messages: 100_000,
        }
    }
}

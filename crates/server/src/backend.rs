//! What the server is given: it makes no model and opens no store itself.

use halo_core::Error;
use halo_core::embedder::Embedder;
use halo_core::model::{Model, ModelInfo};
use halo_core::row_store::RowStore;
use halo_core::store::Store;
use halo_core::token::TokenId;
use halo_engine::branch::BranchPoint;
use halo_engine::forget::ForgetBackend;
use halo_engine::recorder::AnswerRecorder;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_worlds::agent_model::AgentModel;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::world::WorldModelRef;
use halo_worlds::world_file::WorldFile;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use utoipa::ToSchema;

/// The parts that a server is put together of.
pub trait Backend: Send + Sync {
    /// The model, to be asked without a conversation. All of them are the same one.
    fn model(&self) -> Result<Box<dyn Model + Send>, Error>;

    /// What is known of the model.
    fn model_info(&self) -> ModelInfo;

    /// And beyond what the engine needs.
    fn model_details(&self) -> ModelDetails;

    /// Whether a token is one of those that only structure a text.
    fn is_special_token(&self, id: TokenId) -> bool;

    /// A store to read from while others write.
    fn open_reader(&self) -> Result<Box<dyn Store + Send>, Error>;

    /// The embedder, if there is one. All of them are the same one.
    fn embedder(&self) -> Option<Box<dyn Embedder + Send>>;

    /// What conversations go by.
    fn rules(&self) -> ConversationRules;

    fn open_session(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, Error>;

    /// Opens a conversation to look at it: nothing is claimed, and nothing is written.
    fn open_session_read_only(&self, name: &str) -> Result<Session, Error>;

    /// Makes a branch of a conversation, also while somebody is writing there. Returns how many messages they share.
    fn create_branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error>;

    /// Somebody who records a conversation's answers, to be kept in a folder that is called so.
    fn capture_recorder(&self, called: &str) -> Result<Box<dyn AnswerRecorder>, Error>;

    /// What was recorded there.
    fn read_capture(&self, place: &str) -> Result<AttentionCapture, Error>;

    /// A store that keeps worlds.
    fn open_worlds(&self) -> Result<Box<dyn RowStore + Send>, Error>;

    /// Ends a world for good, with all that models keep of it.
    fn delete_world(&self, world: &str) -> Result<(), Error>;

    /// Whether a world that comes over the network may think with the model of that name or address.
    fn is_world_model_allowed(&self, at: &str) -> bool;

    /// What thinks for the agents of a world, by name.
    fn agent_models(&self, brains: &[WorldModelRef]) -> Result<BTreeMap<String, AgentModel>, Error>;

    /// What agents are told.
    fn agent_prompts(&self) -> Result<WorldPrompts, Error>;

    /// A world as somebody wrote it down.
    fn parse_world_file(&self, text: &str) -> Result<WorldFile, Error>;

    /// A world to begin with.
    fn example_world(&self) -> &str;

    /// The stores and files that hold text of conversations, for forgetting.
    fn forget_backend(&self) -> &dyn ForgetBackend;

    fn settings(&self) -> Vec<Setting>;

    /// Sets a setting for good, or with none back to what it is without.
    fn save_setting(&self, key: &str, value: Option<&str>) -> Result<(), Error>;
}

/// What is known of a model beyond what the engine needs; 0 and −1 where nobody knows.
#[derive(Clone, Debug, Default)]
pub struct ModelDetails {
    /// Tokens that it knows.
    pub vocab_size: usize,
    pub layers: usize,
    /// Attention heads of a layer.
    pub heads: usize,
    /// Heads that keys and values have.
    pub kv_heads: usize,
    /// Length of its vectors.
    pub embedding_size: usize,
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
#[schema(as = Capture)]
pub struct AttentionCapture {
    /// What there was to look at, in order: the standing instructions, the paragraphs of the window, the answer itself.
    pub segments: Vec<CaptureSegment>,
    /// The words of the answer.
    pub steps: Vec<CaptureStep>,
}

/// Something to look at.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CaptureSegment {
    /// The name of the chunk; empty for the standing instructions and the answer itself.
    pub chunk: String,
    pub text: String,
}

/// A word of a recorded answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CaptureStep {
    pub text: String,
    /// Which share of its attention went to each part; none where it was not recorded.
    pub shares: Vec<f32>,
}

/// One setting, for people.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Setting {
    pub key: String,
    pub about: String,
    /// What may be written.
    pub allowed: String,
    /// The words that may be written, where they are fixed.
    pub choices: Vec<String>,
    /// What it is without being set.
    pub default: String,
    pub value: String,
    /// Where that came from.
    pub origin: String,
    /// Whether it can be set here: what the command line or the environment says is stronger.
    pub read_only: bool,
    /// Whether it counts only when the program is started again.
    pub needs_restart: bool,
}

/// What the server allows.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// What must be shown to be let in; none: whoever reaches it is.
    pub api_key: Option<String>,
    /// Names that this machine is called by, beside its addresses and localhost.
    pub hosts: Vec<String>,
    /// Other pages that may use it, such as `https://chat.example`.
    pub origins: Vec<String>,
    /// The largest request, in bytes.
    pub max_body_bytes: usize,
    /// Requests a second that one address may send, this machine aside; 0: any number.
    pub requests_per_second: u32,
    /// How many may wait for the model.
    pub max_queued: usize,
    /// How long a conversation or a world stays open that nobody wants anything of.
    pub idle_timeout: Duration,
    /// How many conversations are open at once.
    pub max_open_conversations: usize,
    /// The most messages of one request.
    pub max_messages: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            api_key: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            max_body_bytes: 16 << 20,
            requests_per_second: 50,
            max_queued: 64,
            idle_timeout: Duration::from_secs(600),
            max_open_conversations: 32,
            max_messages: 100_000,
        }
    }
}

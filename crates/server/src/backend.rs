//! What the server is built on. It creates no model and opens no store itself: a [`Backend`] does.

use crate::client_address::AddressRange;
use crate::model_choice::{ModelChoices, ModelServerReport};
use halo_agents::lethe::RetentionPolicy;
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
use halo_engine::session::{SearchIndexing, Session};
use halo_worlds::agent_model::AgentModel;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::runner::RunnerOptions;
use halo_worlds::world::WorldModelRef;
use halo_worlds::world_file::WorldFile;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Duration;
use utoipa::ToSchema;

/// The model, the store, the settings and the worlds of a server.
pub trait Backend: Send + Sync {
    /// A handle to the one model, for use without a conversation.
    fn model(&self) -> Result<Box<dyn Model + Send>, Error>;

    fn model_info(&self) -> ModelInfo;

    fn model_details(&self) -> ModelDetails;

    /// Whether a token is a control token, such as the end of a turn.
    fn is_special_token(&self, id: TokenId) -> bool;

    /// The models that a user can choose from.
    fn model_choices(&self) -> Result<ModelChoices, Error>;

    /// Asks a model server for its models. Refuses addresses that lead to the open internet, unless a setting allows them: the
    /// server must not be a way into networks that its clients cannot reach.
    fn test_model_server(&self, address: &str) -> Result<ModelServerReport, Error>;

    /// Downloads a model of the catalogue into the models folder. Refuses every other name. `progress` gets the bytes that are
    /// there and the bytes of all.
    fn download_model(&self, name: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), Error>;

    /// Loads a model that a conversation is to use, unless it is loaded. Refuses what a client must not choose.
    fn load_model(&self, model: &str) -> Result<(), Error>;

    /// Sets the model of a conversation that is not open; none: the one that the program was started with. The choice of a
    /// conversation without messages is stored with its first message.
    fn choose_model(&self, conversation: &str, model: Option<&str>) -> Result<(), Error>;

    /// A handle to the model that a conversation has chosen, which is loaded if it is not; none: it uses the one of the program.
    fn chosen_model(&self, conversation: &str) -> Result<Option<Box<dyn Model + Send>>, Error>;

    /// A store for reading, concurrently with writers.
    fn open_reader(&self) -> Result<Box<dyn Store + Send>, Error>;

    /// A handle to the one embedder, if there is one.
    fn embedder(&self) -> Option<Box<dyn Embedder + Send>>;

    fn rules(&self) -> ConversationRules;

    fn open_session(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, Error>;

    /// Opens a conversation for reading: takes no lease and writes nothing.
    fn open_session_read_only(&self, name: &str, indexing: SearchIndexing) -> Result<Session, Error>;

    /// Branches a conversation, even while another program writes to it. Returns the number of shared messages.
    fn create_branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error>;

    /// Writes a conversation in Halo's export format, with its log, records and embeddings.
    fn export_conversation(&self, name: &str, out: &mut dyn Write) -> Result<(), Error>;

    /// A file without a name, for an upload. It is deleted when it is closed.
    fn temporary_file(&self) -> Result<File, Error>;

    /// Imports the conversations and worlds of a file of any known format: all of it, or on an error nothing. A file with one
    /// conversation can get another name.
    fn import_conversations(
        &self,
        file_name: &str,
        name: Option<&str>,
        content: &mut dyn BufRead,
    ) -> Result<ImportResult, Error>;

    /// A recorder that stores the attention of answers in a folder of that name.
    fn capture_recorder(&self, folder: &str) -> Result<Box<dyn AnswerRecorder>, Error>;

    /// The folder of a capture, by what its record says of it.
    fn capture_folder(&self, note: &str) -> PathBuf {
        PathBuf::from(note)
    }

    fn read_capture(&self, note: &str) -> Result<AttentionCapture, Error>;

    fn open_worlds(&self) -> Result<Box<dyn RowStore + Send>, Error>;

    /// Deletes a world, with the KV cache of its agents.
    fn delete_world(&self, world: &str) -> Result<(), Error>;

    /// Whether a world that a client creates may use the model of that name or address.
    fn is_world_model_allowed(&self, address: &str) -> bool;

    /// The models of a world's agents, by name.
    fn agent_models(&self, models: &[WorldModelRef]) -> Result<BTreeMap<String, AgentModel>, Error>;

    fn agent_prompts(&self) -> Result<WorldPrompts, Error>;

    /// How agents are paced, and what is recorded of them.
    fn runner_options(&self) -> RunnerOptions;

    fn parse_world_file(&self, text: &str) -> Result<WorldFile, Error>;

    /// The world file of the example world.
    fn example_world(&self) -> &str;

    /// The stores and files that hold text of conversations, for forgetting.
    fn forget_backend(&self) -> &dyn ForgetBackend;

    /// The ages at which text is erased; none: nothing is erased by age.
    fn retention_policy(&self) -> Option<RetentionPolicy> {
        None
    }

    /// The time between two scheduled erasures; none: there are none.
    fn retention_interval(&self) -> Option<Duration> {
        None
    }

    fn settings(&self) -> Vec<Setting>;

    /// Writes a value to the settings file; without a value, removes it from there. Refuses settings that clients may not
    /// change.
    fn save_setting(&self, key: &str, value: Option<&str>) -> Result<(), Error>;
}

/// What an import has created.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ImportResult {
    /// The format of the file, in words.
    pub format: String,
    /// The names of the conversations, in the order of the file.
    pub conversations: Vec<String>,
    pub worlds: Vec<String>,
    /// What was not imported, by kind.
    pub losses: BTreeMap<String, u64>,
}

/// Details of a model that only the API reports; 0, −1 and empty texts where they are unknown.
#[derive(Clone, Debug, Default)]
pub struct ModelDetails {
    pub vocab_size: usize,
    pub layers: usize,
    /// Attention heads per layer.
    pub heads: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    pub embedding_size: usize,
    /// The context length that it was trained with.
    pub trained_context: usize,
    /// The token at the beginning of a text.
    pub bos: i64,
    /// The token at the end of a text.
    pub eos: i64,
    /// The token at the end of a turn.
    pub eot: i64,
    pub rope_base: f64,
    pub rope_scale: f64,
    /// Such as `llama` or `qwen2`.
    pub architecture: String,
    /// The number of parameters in words, such as `135M`.
    pub parameters: String,
    /// The format of the weights, such as `Q4_K_M`.
    pub quantization: String,
    /// The name of the model file, without its folder.
    pub file_name: String,
    pub file_bytes: u64,
    /// When the model file was changed, in seconds since 1970.
    pub modified: i64,
    /// The source of the chat template, as the model file has it.
    pub chat_template: String,
}

/// A recorded answer: the attention of each token to the segments of the context.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = Capture)]
pub struct AttentionCapture {
    /// In order: the system prompt, the chunks of the context window, the answer.
    pub segments: Vec<CaptureSegment>,
    /// The tokens of the answer.
    pub steps: Vec<CaptureStep>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CaptureSegment {
    /// The id of the chunk; empty for the system prompt and the answer.
    pub chunk: String,
    pub text: String,
}

/// A token of a recorded answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CaptureStep {
    pub text: String,
    /// The share of its attention for each segment; empty if it was not recorded.
    pub shares: Vec<f32>,
}

/// The smallest and the largest number of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct SettingRange {
    pub min: f64,
    pub max: f64,
    /// Whether only whole numbers are allowed.
    pub whole: bool,
}

/// A setting with its description and value.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Setting {
    pub key: String,
    pub about: String,
    /// The allowed values, in words.
    pub allowed: String,
    /// The allowed values, if they are a fixed set.
    pub choices: Vec<String>,
    /// The smallest and the largest number; null if numbers are not allowed.
    pub range: Option<SettingRange>,
    pub default: String,
    pub value: String,
    /// Where the value comes from: default, settings file, environment or command line.
    pub origin: String,
    /// Whether this API cannot change it.
    pub read_only: bool,
    /// Why this API cannot change it, and who can; null if it can.
    pub read_only_reason: Option<String>,
    /// Whether a new value is used only after a restart.
    pub needs_restart: bool,
}

#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// The API key that clients must send; none: no key is needed.
    pub api_key: Option<String>,
    /// Accepted host names, in addition to IP addresses and localhost.
    pub hosts: Vec<String>,
    /// Allowed origins, such as `https://chat.example`.
    pub origins: Vec<String>,
    pub max_body_bytes: usize,
    /// The maximum size of a file that is imported.
    pub max_import_bytes: u64,
    /// Rate limit for each address except loopback, and four times as much for each key; 0: no limit.
    pub requests_per_second: u32,
    /// How many connections may be open.
    pub max_connections: usize,
    /// How many connections one client address may have, unless it is a trusted proxy.
    pub max_connections_per_address: usize,
    /// How long the body of a request may take, beyond the time that it takes at the lowest rate.
    pub body_grace: Duration,
    /// Proxies that report the addresses of their clients.
    pub trusted_proxies: Vec<AddressRange>,
    /// How many requests may be queued for the model.
    pub max_queued: usize,
    /// How many requests use the model at once.
    pub parallel: usize,
    /// How long an unused conversation or world stays open.
    pub idle_timeout: Duration,
    pub max_open_conversations: usize,
    /// The maximum number of messages in one request.
    pub max_messages: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            api_key: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            max_body_bytes: 16 << 20,
            max_import_bytes: 128 << 20,
            requests_per_second: 50,
            max_connections: 2048,
            max_connections_per_address: 512,
            body_grace: Duration::from_secs(10),
            trusted_proxies: Vec::new(),
            max_queued: 64,
            parallel: 1,
            idle_timeout: Duration::from_secs(600),
            max_open_conversations: 32,
            max_messages: 100_000,
        }
    }
}

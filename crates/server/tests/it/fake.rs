//! A server on test doubles: a scripted model, a store in memory or in a file, settings in memory, and a recorder of captures.
//! Requests go through the real routes, without a socket.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, Response};
use halo_core::attention::AttentionRequest;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::context_window::ContextWindow;
use halo_core::embedder::Embedder;
use halo_core::model::{
    AttentionRow, CacheStats, ChatTemplate, FinishReason, Model, ModelInfo, ModelStep, ModelToken,
    OutputConstraint, Prompt, Sampling, SamplingParameter, StepFlow, TokenLogprob, TokenLogprobs,
};
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_core::row_store::RowStore;
use halo_core::store::{EraseStore, Store};
use halo_core::testing::doubles::{HashEmbedder, InMemoryStore, ScriptedModel};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{Brightness, TokenId, TurnId};
use halo_core::{Error, ErrorKind};
use halo_engine::branch::{self, BranchPoint};
use halo_engine::chat_format::SpeakerNames;
use halo_engine::chat_options::{ChatOptions, Persona, store_chosen_model};
use halo_engine::forget::{CaptureDeletion, ForgetBackend};
use halo_engine::recorder::AnswerRecorder;
use halo_engine::rules::{
    AutoSizes, ConversationRules, ForgettingRules, ResurrectBrightness, ResurrectLimit,
};
use halo_engine::session::{SearchIndexing, Session};
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;
use halo_server::{
    App, AttentionCapture, Backend, CaptureSegment, CaptureStep, DownloadableModelChoice, ImportResult,
    ModelChoices, ModelDetails, ModelServerReport, RemoteModelChoice, ServerLimits, Setting, TraceExporter,
    routes,
};
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use halo_worlds::agent_model::{AgentModel, ModelTokenCounter};
use halo_worlds::prompts::{PromptSection, WorldPrompts};
use halo_worlds::runner::RunnerOptions;
use halo_worlds::world::WorldModelRef;
use halo_worlds::world_file::WorldFile;
use http_body_util::BodyExt;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tower::ServiceExt;

/// A model that gives the next scripted answer, or else a unique one.
#[derive(Clone)]
pub struct FakeModel {
    info: ModelInfo,
    tokenizer: ScriptedModel,
    script: Arc<Mutex<FakeScript>>,
}

#[derive(Default)]
pub struct FakeScript {
    answers: VecDeque<FakeAnswer>,
    answers_given: usize,
    pub token_delay: Duration,
    /// The prompts of all answers, as text.
    pub windows: Vec<String>,
    /// Parameters that the model does not support.
    pub unsupported: Vec<SamplingParameter>,
    /// Parameters that the model `other`, which conversations can choose, does not support.
    pub unsupported_by_other: Vec<SamplingParameter>,
    /// The sampling parameters of all answers.
    pub samplings: Vec<Sampling>,
    /// The prompts of all answers, as tokens.
    pub prompts: Vec<Vec<TokenId>>,
    /// The names of the models that gave all answers.
    pub models: Vec<String>,
}

pub enum FakeAnswer {
    Text(String),
    FailAfter(String, Error),
}

/// The tokens that the model can turn back into text: the ids of all others are hashes of their texts.
pub const KNOWN_TOKENS: [&str; 5] = ["Once", " upon", " a", " time", SPECIAL_TOKEN];

/// The model that conversations can choose.
const OTHER_MODEL: &str = "other";

/// A control token, which clients do not see.
pub const SPECIAL_TOKEN: &str = "<|end|>";

impl Model for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.tokenizer.tokenize(text, special)
    }

    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        let text = |id: &TokenId| {
            let known = KNOWN_TOKENS.into_iter().find(|text| self.token_id(text) == *id);
            known.ok_or_else(|| Error::invalid_input("detokenizing", format!("there is no token {}", id.0)))
        };
        ids.iter().map(text).collect()
    }

    /// Knows a schema by its type.
    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        let OutputConstraint::JsonSchema(schema) = constraint else { return Ok(()) };
        let schema: Value = serde_json::from_str(schema).expect("the server has parsed it");
        match schema["type"].as_str() {
            Some("object" | "array") => Ok(()),
            _ => Err(Error::invalid_input("compiling", "it has no known type")),
        }
    }

    fn supports(&self, parameter: SamplingParameter) -> bool {
        let script = self.script.lock().expect("the lock is not poisoned");
        match self.info.name.as_str() {
            OTHER_MODEL => !script.unsupported_by_other.contains(&parameter),
            _ => !script.unsupported.contains(&parameter),
        }
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let (text, failure, delay) = {
            let mut script = self.script.lock().expect("the lock is not poisoned");
            let messages = (prompt.messages)();
            script
                .windows
                .push(messages.iter().map(|m| format!("{}: {}\n", m.role.name(), m.text)).collect());
            script.samplings.push(sampling.clone());
            script.prompts.push(prompt.window.iter().map(|token| token.id).collect());
            script.models.push(self.info.name.clone());
            script.answers_given += 1;
            match script.answers.pop_front() {
                Some(FakeAnswer::Text(text)) => (text, None, script.token_delay),
                Some(FakeAnswer::FailAfter(text, error)) => (text, Some(error), script.token_delay),
                None => {
                    let text = format!("answer number {} of this model", script.answers_given);
                    (text, None, script.token_delay)
                }
            }
        };
        let stats = CacheStats { prefilled: prompt.window.len(), ..CacheStats::default() };
        listen(ModelStep::PrefillDone(stats));
        let mut so_far = String::new();
        for (n, token) in self.tokenizer.tokenize(&text, false)?.iter().enumerate() {
            if n == sampling.max_tokens {
                return Ok(FinishReason::Length);
            }
            std::thread::sleep(delay);
            let slots = prompt.window.len() + n;
            let row = vec![1.0 / slots as f32; slots];
            let row = watch.answer.then(|| AttentionRow::from_mean(&row));
            if let Some(count) = sampling.logprobs {
                listen(ModelStep::Logprobs(&logprobs_of(token, count)));
            }
            if let Some(reason) = listen(ModelStep::Token(token, row)).finish_reason() {
                return Ok(reason);
            }
            so_far.push_str(&token.text);
            if sampling.stop.iter().any(|stop| so_far.ends_with(stop.as_str())) {
                return Ok(FinishReason::StopSequence);
            }
        }
        failure.map_or(Ok(FinishReason::EndOfText), Err)
    }
}

/// The token has the log-probability -0.5, the others -1, -2, …
fn logprobs_of(token: &ModelToken, count: usize) -> TokenLogprobs {
    let logprob =
        |text: &str, logprob| TokenLogprob { id: token.id, bytes: text.as_bytes().to_vec(), logprob };
    let top = (1..=count).map(|n| logprob(&format!("other{n}"), -(n as f32))).collect();
    TokenLogprobs { token: logprob(&token.text, -0.5), top }
}

impl FakeModel {
    /// The id of a text that is one token.
    pub fn token_id(&self, text: &str) -> TokenId {
        let tokens = self.tokenizer.clone().tokenize(text, true);
        tokens.expect("the tokenizer does not fail")[0].id
    }
}

#[derive(Clone)]
pub enum TestStore {
    Memory(SharedStore<InMemoryStore>),
    File(StoreLocation),
}

impl TestStore {
    pub fn open(&self) -> Result<Box<dyn Store + Send>, Error> {
        Ok(match self {
            TestStore::Memory(store) => Box::new(store.clone()),
            TestStore::File(location) => Box::new(Database::open(location)?),
        })
    }

    /// The database, if the store is in a file.
    pub fn open_database(&self) -> Result<Database, Error> {
        match self {
            TestStore::File(location) => Database::open(location),
            TestStore::Memory(_) => unsupported(),
        }
    }
}

/// What a server is built from; the default is a store in memory.
#[derive(Clone)]
pub struct FakeOptions {
    pub store: TestStore,
    /// The maximum number of tokens in a context window.
    pub context: usize,
    pub limits: ServerLimits,
    /// Whether there is an embedder.
    pub embedder: bool,
    /// Whether the answers of conversations come with their attention.
    pub attention: bool,
    /// The number of tokens in the vocabulary of the model; 0 if it is unknown.
    pub vocab_size: usize,
    pub captures: FakeCaptures,
    /// The chat template of the model; the default writes nothing around messages.
    pub template: ChatTemplate,
    /// The chat template of the model `other`, which conversations can choose.
    pub other_template: ChatTemplate,
    /// What happens to readers that are opened now.
    pub reader_fault: Arc<Mutex<Option<ReaderFault>>>,
    pub forgetting: FakeForgetting,
}

/// How a server forgets.
#[derive(Clone, Debug)]
pub struct FakeForgetting {
    pub grace_period: Duration,
    /// The time between two scheduled erasures; none: there are none.
    pub interval: Option<Duration>,
    /// Why nothing can be erased.
    pub error: Option<Error>,
    /// When a forgetting cycle runs; none: never.
    pub rules: Option<ForgettingRules>,
}

impl Default for FakeForgetting {
    fn default() -> Self {
        Self { grace_period: Duration::from_secs(7 * 24 * 60 * 60), interval: None, error: None, rules: None }
    }
}

/// How a store fails its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderFault {
    Fail,
    /// It does not answer as long as the fault lasts.
    Hang,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            store: TestStore::Memory(SharedStore::new(InMemoryStore::default())),
            context: 400,
            limits: ServerLimits::default(),
            embedder: false,
            attention: false,
            vocab_size: 0,
            captures: FakeCaptures::default(),
            template: ChatTemplate::default(),
            other_template: ChatTemplate::default(),
            reader_fault: Arc::default(),
            forgetting: FakeForgetting::default(),
        }
    }
}

impl FakeOptions {
    /// A store in a file of a folder: worlds and forgetting need one.
    pub fn in_folder(folder: &Path) -> Self {
        let location = StoreLocation::Sqlite(folder.join("halo.db"));
        Self { store: TestStore::File(location), ..Self::default() }
    }
}

pub struct FakeBackend {
    model: FakeModel,
    options: FakeOptions,
    /// The values of the settings file.
    saved_settings: Mutex<BTreeMap<String, String>>,
}

/// Captures by their path. Clones share them.
#[derive(Clone, Default)]
pub struct FakeCaptures(Arc<Mutex<BTreeMap<String, AttentionCapture>>>);

impl FakeCaptures {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, AttentionCapture>> {
        self.0.lock().expect("the lock is not poisoned")
    }

    pub fn copy(&self) -> Self {
        Self(Arc::new(Mutex::new(self.lock().clone())))
    }

    /// Loses all captures, as when their folder is deleted.
    pub fn clear(&self) {
        self.lock().clear();
    }
}

/// Stores the answers of a conversation as captures.
struct FakeRecorder {
    folder: String,
    captures: FakeCaptures,
    turn: TurnId,
    /// The number of slots of each segment except the answer, which has the rest.
    slots: Vec<usize>,
    capture: AttentionCapture,
}

impl AnswerRecorder for FakeRecorder {
    fn begin_answer(
        &mut self,
        turn: TurnId,
        system: &[ModelToken],
        window: ContextWindow<'_>,
    ) -> Result<(), Error> {
        let segment = |chunk: String, text: String| CaptureSegment { chunk, text };
        let prompt = system.iter().map(|token| token.text.as_str()).collect();
        let mut segments = vec![segment(String::new(), prompt)];
        let mut slots = vec![system.len()];
        for chunk in window.chunks() {
            segments.push(segment(chunk.id().to_string(), chunk.text().into_owned()));
            slots.push(chunk.live_len());
        }
        segments.push(segment(String::new(), String::new()));
        (self.turn, self.slots) = (turn, slots);
        self.capture = AttentionCapture { segments, steps: Vec::new() };
        Ok(())
    }

    fn record_token(&mut self, token: &ModelToken, row: Option<&[f32]>) -> Result<(), Error> {
        let shares = row.map(|row| {
            let (mut rest, mut shares) = (row, Vec::new());
            for &slots in &self.slots {
                let (segment, after) = rest.split_at(slots.min(rest.len()));
                shares.push(segment.iter().sum());
                rest = after;
            }
            shares.push(rest.iter().sum());
            shares
        });
        if let Some(answer) = self.capture.segments.last_mut() {
            answer.text.push_str(&token.text);
        }
        let step = CaptureStep { text: token.text.clone(), shares: shares.unwrap_or_default() };
        self.capture.steps.push(step);
        Ok(())
    }

    fn end_answer(&mut self) -> Result<Option<(String, String)>, Error> {
        let path = format!("{}/{}", self.folder, self.turn.0);
        let description = serde_json::json!({
            "turn": self.turn.0, "steps": self.capture.steps.len(), "model": "scripted",
        });
        self.captures.lock().insert(path.clone(), std::mem::take(&mut self.capture));
        Ok(Some((path, description.to_string())))
    }
}

fn unsupported<T>() -> Result<T, Error> {
    Err(Error::invalid_input("using the backend", "this test has no such part"))
}

/// The address of a model that a world of a client may use.
pub const ALLOWED_WORLD_MODEL: &str = "http://127.0.0.1:9/allowed";

/// Two agents; Ben is in Ada's room, which has a message.
const EXAMPLE_WORLD: &str = r#"{
    "agents": [
        { "name": "Ada", "seed": "A gardener who knows every plant." },
        { "name": "Ben", "type": "bot", "role": "Keeps the weather log.", "knowledge": { "sky": "grey" } }
    ],
    "rooms": [{
        "owner": "Ada", "members": ["Ben"], "billboard": "The garden", "keys": ["rose"],
        "messages": [{ "sender": "Ada", "content": "The roses are out." }]
    }]
}"#;

impl Backend for FakeBackend {
    fn model(&self) -> Result<Box<dyn Model + Send>, Error> {
        Ok(Box::new(self.model.clone()))
    }

    fn model_info(&self) -> ModelInfo {
        self.model.info.clone()
    }

    fn model_details(&self) -> ModelDetails {
        ModelDetails {
            vocab_size: self.options.vocab_size,
            layers: 2,
            heads: 4,
            trained_context: 4096,
            eos: 7,
            architecture: "llama".into(),
            file_name: "scripted.gguf".into(),
            file_bytes: 1000,
            modified: 1_700_000_000,
            chat_template: "{{ messages }}".into(),
            ..ModelDetails::default()
        }
    }

    fn is_special_token(&self, id: TokenId) -> bool {
        id == self.model.token_id(SPECIAL_TOKEN)
    }

    fn open_reader(&self) -> Result<Box<dyn Store + Send>, Error> {
        let fault = || *self.options.reader_fault.lock().expect("the lock is not poisoned");
        while fault() == Some(ReaderFault::Hang) {
            std::thread::sleep(Duration::from_millis(20));
        }
        match fault() {
            Some(ReaderFault::Fail) => Err(Error::unavailable("opening the store", "the server is gone")),
            _ => self.options.store.open(),
        }
    }

    fn embedder(&self) -> Option<Box<dyn Embedder + Send>> {
        self.options.embedder.then(|| Box::new(HashEmbedder) as Box<dyn Embedder + Send>)
    }

    fn rules(&self) -> ConversationRules {
        let context = self.options.context;
        let watch = match self.options.attention {
            true => AttentionRequest::default(),
            false => AttentionRequest::none(),
        };
        let max_tokens = self.saved_setting(MAX_TOKENS_SETTING).and_then(|value| value.parse().ok());
        ConversationRules {
            context: halo_core::rules::ContextRules {
                strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
                chunks: ChunkSize { min: 2, max: 64 },
                policy: PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
                max_tokens: context,
                sinks: 0,
                recent: 0,
                fill: true,
                trace_interval: 2,
            },
            auto_sizes: AutoSizes::default(),
            reserved_tokens: context / 4,
            watch,
            sampling: Sampling {
                max_tokens: max_tokens.unwrap_or(32),
                temperature: 0.0,
                ..Sampling::default()
            },
            recall: SearchOptions {
                mode: SearchMode::Hybrid,
                user_boost: 1.0,
                diversity: 0.0,
                limit: 32,
                floor: 0.0,
            },
            resurrect_brightness: ResurrectBrightness::Previous,
            resurrect_limit: ResurrectLimit::Window,
            preview_tokens: 0,
            tools: None,
            system_prompt: "Be brief.".into(),
            persona: Persona::default(),
            show_dates: false,
            speaker_names: SpeakerNames::default(),
            memory: None,
            premise_method: None,
            judge_principles: Vec::new(),
            keep_reasoning: false,
            attention_history_bytes: 1 << 20,
            forgetting: self.options.forgetting.rules,
        }
    }

    fn open_session(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, Error> {
        Session::open(
            self.options.store.open()?,
            self.chosen_model(name)?.map_or_else(|| self.model(), Ok)?,
            self.embedder(),
            name,
            self.rules(),
            progress,
        )
    }

    fn model_choices(&self) -> Result<ModelChoices, Error> {
        Ok(ModelChoices {
            current: "fake".into(),
            downloadable: vec![DownloadableModelChoice {
                name: "far".into(),
                about: "For tests.".into(),
                license: "MIT".into(),
                bytes: 2,
                download_bytes: 2,
                fits: Some(true),
            }],
            ..ModelChoices::default()
        })
    }

    fn test_model_server(&self, address: &str) -> Result<ModelServerReport, Error> {
        if !address.starts_with("http://127.") {
            let message = format!("{address} is not private");
            return Err(Error::new(ErrorKind::Forbidden, "testing the address", message));
        }
        let model = RemoteModelChoice { name: "tiny".into(), address: format!("openai+{address}/v1#tiny") };
        Ok(ModelServerReport { kind: "Ollama".into(), milliseconds: 1, models: vec![model] })
    }

    fn download_model(&self, name: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), Error> {
        progress(1, 2);
        match name {
            "far" => Ok(()),
            _ => Err(Error::not_found("downloading", format!("there is no model {name}"))),
        }
    }

    fn load_model(&self, model: &str) -> Result<(), Error> {
        match model {
            OTHER_MODEL => Ok(()),
            _ => Err(Error::not_found("choosing a model", format!("there is no model {model}"))),
        }
    }

    fn choose_model(&self, conversation: &str, model: Option<&str>) -> Result<(), Error> {
        store_chosen_model(self.options.store.open()?, conversation, model)
    }

    fn chosen_model(&self, conversation: &str) -> Result<Option<Box<dyn Model + Send>>, Error> {
        let mut store = self.options.store.open()?;
        if store.find_conversation(conversation)?.is_none() {
            return Ok(None);
        }
        let chosen = ChatOptions::load(&mut *store, conversation)?.model;
        Ok(chosen.map(|name| {
            let info =
                ModelInfo { name, template: self.options.other_template.clone(), ..self.model.info.clone() };
            Box::new(FakeModel { info, ..self.model.clone() }) as Box<dyn Model + Send>
        }))
    }

    fn open_session_read_only(&self, name: &str, indexing: SearchIndexing) -> Result<Session, Error> {
        Session::open_read_only(
            self.options.store.open()?,
            self.model()?,
            self.embedder(),
            name,
            self.rules(),
            indexing,
        )
    }

    fn create_branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error> {
        branch::create_branch(&mut *self.options.store.open()?, from, to, at)
    }

    fn export_conversation(&self, name: &str, out: &mut dyn Write) -> Result<(), Error> {
        self.options.store.open_database()?.export(name, out, &mut |_, _| {})
    }

    fn temporary_file(&self) -> Result<File, Error> {
        tempfile::tempfile().map_err(|e| Error::unavailable("creating a temporary file", e.to_string()))
    }

    fn import_conversations(
        &self,
        file_name: &str,
        name: Option<&str>,
        content: &mut dyn BufRead,
    ) -> Result<ImportResult, Error> {
        let import = ImportRequest {
            file_name,
            format: None,
            name,
            chunk_size: ChunkSize { min: 2, max: 64 },
            initial_brightness: Brightness(10_000.0),
            model: None,
            validate_rows: None,
        };
        let report = self.options.store.open_database()?.import(content, import)?;
        let conversations = report.conversations.into_iter().map(|imported| imported.name).collect();
        Ok(ImportResult { format: report.format, conversations, ..ImportResult::default() })
    }

    fn capture_recorder(&self, folder: &str) -> Result<Box<dyn AnswerRecorder>, Error> {
        Ok(Box::new(FakeRecorder {
            folder: folder.to_owned(),
            captures: self.options.captures.clone(),
            turn: TurnId(0),
            slots: Vec::new(),
            capture: AttentionCapture::default(),
        }))
    }

    fn read_capture(&self, path: &str) -> Result<AttentionCapture, Error> {
        let capture = self.options.captures.lock().get(path).cloned();
        capture.ok_or_else(|| Error::invalid_input("reading the capture", format!("{path} is not there")))
    }

    fn open_worlds(&self) -> Result<Box<dyn RowStore + Send>, Error> {
        Ok(Box::new(self.options.store.open_database()?))
    }

    fn delete_world(&self, world: &str) -> Result<(), Error> {
        self.options.store.open_database()?.delete_namespace(world)
    }

    fn is_world_model_allowed(&self, address: &str) -> bool {
        address == ALLOWED_WORLD_MODEL
    }

    fn agent_models(&self, models: &[WorldModelRef]) -> Result<BTreeMap<String, AgentModel>, Error> {
        let agent_model = |model: &WorldModelRef| {
            let counter = Arc::new(ModelTokenCounter::new(self.model()?));
            let sampling = Sampling { max_tokens: 200, ..Sampling::default() };
            Ok((model.name.clone(), AgentModel::new(self.model()?, counter, sampling, false)))
        };
        models.iter().map(agent_model).collect()
    }

    fn agent_prompts(&self) -> Result<WorldPrompts, Error> {
        Ok(WorldPrompts {
            directives: vec![PromptSection {
                title: String::new(),
                text: "Answer in JSON.".into(),
                optional: false,
            }],
            technical: Vec::new(),
            persona: Vec::new(),
            bot: Vec::new(),
        })
    }

    fn runner_options(&self) -> RunnerOptions {
        RunnerOptions { recorded_heartbeats: 3, ..RunnerOptions::default() }
    }

    /// JSON instead of TOML: the parser belongs to the program, not to the server.
    fn parse_world_file(&self, text: &str) -> Result<WorldFile, Error> {
        serde_json::from_str(text).map_err(|e| Error::invalid_input("reading the world", e.to_string()))
    }

    fn example_world(&self) -> &str {
        EXAMPLE_WORLD
    }

    fn forget_backend(&self) -> &dyn ForgetBackend {
        self
    }

    fn retention_interval(&self) -> Option<Duration> {
        self.options.forgetting.interval
    }

    fn settings(&self) -> Vec<Setting> {
        let setting = |(key, default): (&str, &str)| {
            let saved = self.saved_setting(key);
            Setting {
                key: key.to_owned(),
                about: format!("The setting {key}"),
                allowed: "1 to 1000".to_owned(),
                choices: Vec::new(),
                range: None,
                default: default.to_owned(),
                origin: if saved.is_some() { "settings file" } else { "default" }.to_owned(),
                value: saved.unwrap_or_else(|| default.to_owned()),
                read_only: key != MAX_TOKENS_SETTING,
                read_only_reason: (key != MAX_TOKENS_SETTING).then(|| format!("{key} is set elsewhere")),
                needs_restart: key.starts_with("model."),
            }
        };
        [(MAX_TOKENS_SETTING, "32"), (READ_ONLY_SETTING, "8192"), (BY_HAND_SETTING, "auto")]
            .map(setting)
            .into()
    }

    fn save_setting(&self, key: &str, value: Option<&str>) -> Result<(), Error> {
        let invalid = |message: String| Err(Error::invalid_input("setting", message));
        if key == READ_ONLY_SETTING {
            return invalid(format!("{key} was set on the command line"));
        }
        if key == BY_HAND_SETTING {
            return Err(Error::forbidden("setting", format!("{key} can only be set by hand")));
        }
        let mut saved = self.saved_settings.lock().expect("the lock is not poisoned");
        match value {
            None => drop(saved.remove(key)),
            Some(value) if value.parse().is_ok_and(|n: usize| (1..=1000).contains(&n)) => {
                saved.insert(key.to_owned(), value.to_owned());
            }
            Some(value) => return invalid(format!("{key} is '{value}'; it must be from 1 to 1000")),
        }
        Ok(())
    }
}

pub const MAX_TOKENS_SETTING: &str = "generation.max_tokens";
pub const READ_ONLY_SETTING: &str = "model.context";
pub const BY_HAND_SETTING: &str = "server.key";

impl FakeBackend {
    fn saved_setting(&self, key: &str) -> Option<String> {
        self.saved_settings.lock().expect("the lock is not poisoned").get(key).cloned()
    }
}

/// The file of the proofs is beside the store.
impl ForgetBackend for FakeBackend {
    fn open_reader(&self) -> Result<Option<Box<dyn Store + Send>>, Error> {
        self.options.store.open().map(Some)
    }

    fn open_writer(&self) -> Result<Box<dyn EraseStore + Send>, Error> {
        self.options.forgetting.error.clone().map_or(Ok(()), Err)?;
        Ok(Box::new(self.options.store.open_database()?))
    }

    fn data_dir(&self) -> Result<PathBuf, Error> {
        match &self.options.store {
            TestStore::File(StoreLocation::Sqlite(path)) => Ok(path.with_file_name("")),
            _ => unsupported(),
        }
    }

    fn grace_period(&self) -> Result<Duration, Error> {
        Ok(self.options.forgetting.grace_period)
    }

    fn delete_saved_kv(&self, _: &str) -> Result<(), Error> {
        Ok(())
    }

    fn delete_capture(&self, folder: &str) -> Result<CaptureDeletion, Error> {
        self.options.captures.lock().remove(folder);
        Ok(CaptureDeletion::Deleted)
    }
}

/// A server without a socket.
pub struct FakeServer {
    pub app: Arc<App>,
    pub store: TestStore,
    pub model: FakeModel,
    script: Arc<Mutex<FakeScript>>,
    router: Router,
}

/// A response with its whole body; of an endless stream of events, the first.
pub struct FakeResponse {
    pub status: u16,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
}

impl FakeResponse {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The body; null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_default()
    }

    /// The value of a header; empty if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

pub struct FakeChatResponse {
    pub status: u16,
    pub conversation: String,
    pub body: Value,
}

impl FakeChatResponse {
    /// The text of the answer.
    pub fn text(&self) -> String {
        self.body["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
    }
}

impl FakeServer {
    pub fn new(store: TestStore, context: usize, limits: ServerLimits) -> Self {
        Self::with_options(FakeOptions { store, context, limits, ..FakeOptions::default() })
    }

    pub fn with_options(options: FakeOptions) -> Self {
        Self::build(options, None)
    }

    /// A server that traces its turns.
    pub fn with_exporter(exporter: TraceExporter) -> Self {
        Self::build(FakeOptions::default(), Some(exporter))
    }

    fn build(options: FakeOptions, exporter: Option<TraceExporter>) -> Self {
        let tokenizer = ScriptedModel::new(8192, Vec::new());
        let script: Arc<Mutex<FakeScript>> = Arc::default();
        let info = ModelInfo { template: options.template.clone(), ..tokenizer.info().clone() };
        let model = FakeModel { info, tokenizer, script: Arc::clone(&script) };
        let (store, limits) = (options.store.clone(), options.limits.clone());
        let backend = FakeBackend { model: model.clone(), options, saved_settings: Mutex::default() };
        let app = App::new(Arc::new(backend), limits, exporter);
        let router = routes(&app);
        Self { app, store, model, script, router }
    }

    pub fn with_limits(limits: ServerLimits) -> Self {
        Self::with_options(FakeOptions { limits, ..FakeOptions::default() })
    }

    pub fn in_memory() -> Self {
        Self::with_options(FakeOptions::default())
    }

    pub fn script(&self) -> MutexGuard<'_, FakeScript> {
        self.script.lock().expect("the lock is not poisoned")
    }

    pub fn script_answers(&self, answers: &[&str]) {
        self.script().answers.extend(answers.iter().map(|text| FakeAnswer::Text((*text).to_owned())));
    }

    /// The next answer fails after this text.
    pub fn script_failure_after(&self, text: &str) {
        self.script_error_after(text, Error::internal("generating", "the model broke down"));
    }

    pub fn script_error_after(&self, text: &str, error: Error) {
        self.script().answers.push_back(FakeAnswer::FailAfter(text.to_owned(), error));
    }

    pub async fn send(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().oneshot(request).await.expect("the routes do not fail")
    }

    fn build_request(
        method: &str,
        path: &str,
        body: Option<&Value>,
        conversation: Option<&str>,
    ) -> Request<Body> {
        let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
        if let Some(name) = conversation {
            request = request.header("x-halo-conversation", name);
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        request.body(body).expect("a request")
    }

    pub async fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> FakeResponse {
        let mut request = Request::builder().method(method).uri(path);
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send(request.body(body.into()).expect("a request")).await;
        let (head, mut body) = response.into_parts();
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            bytes.extend_from_slice(frame.expect("a frame").data_ref().map_or(&[], |data| data));
            // The stream of events never ends.
            if path.starts_with("/api/halo/v1/events") {
                break;
            }
        }
        FakeResponse { status: head.status.as_u16(), headers: head.headers, bytes }
    }

    pub async fn get(&self, path: &str) -> FakeResponse {
        self.request("GET", path, &[], Body::empty()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> FakeResponse {
        self.request("POST", path, &[], body.to_string()).await
    }

    /// A chat request without streaming.
    pub async fn chat(&self, body: &Value, conversation: Option<&str>) -> FakeChatResponse {
        let response =
            self.send(Self::build_request("POST", "/v1/chat/completions", Some(body), conversation)).await;
        let status = response.status().as_u16();
        let header = response.headers().get("x-halo-conversation");
        let conversation = header.and_then(|n| n.to_str().ok()).unwrap_or_default().to_owned();
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        FakeChatResponse { status, conversation, body: serde_json::from_slice(&bytes).unwrap_or_default() }
    }

    /// The events of a stream, and whether it ended cleanly.
    pub async fn stream(&self, path: &str, body: &Value) -> (Vec<String>, bool) {
        self.stream_request(Self::build_request("POST", path, Some(body), None)).await
    }

    /// The same in a named conversation.
    pub async fn stream_in(&self, conversation: &str, path: &str, body: &Value) -> (Vec<String>, bool) {
        self.stream_request(Self::build_request("POST", path, Some(body), Some(conversation))).await
    }

    async fn stream_request(&self, request: Request<Body>) -> (Vec<String>, bool) {
        let (text, clean) = self.stream_text(request).await;
        (text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect(), clean)
    }

    /// The body of a stream as it is, and whether it ended cleanly.
    pub async fn raw_stream(&self, path: &str, body: &Value) -> (String, bool) {
        self.stream_text(Self::build_request("POST", path, Some(body), None)).await
    }

    async fn stream_text(&self, request: Request<Body>) -> (String, bool) {
        let response = self.send(request).await;
        assert_eq!(response.status().as_u16(), 200);
        let (mut text, mut body, mut clean) = (String::new(), response.into_body(), true);
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => text.push_str(&String::from_utf8_lossy(frame.data_ref().map_or(&[], |d| d))),
                Err(_) => {
                    clean = false;
                    break;
                }
            }
        }
        (text, clean)
    }

    /// A request to Halo's own API.
    pub async fn halo_api(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let response = self.request(method, &format!("/api/halo/v1{path}"), &[], body).await;
        (response.status, response.json())
    }
}

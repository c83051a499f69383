//! A server on test doubles: a scripted model, and a store in memory or in a file. Requests go through the real routes, without a
//! socket.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::embedder::Embedder;
use halo_core::model::{FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow};
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_core::row_store::RowStore;
use halo_core::store::{EraseStore, Store};
use halo_core::testing::doubles::{InMemoryStore, ScriptedModel};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::TokenId;
use halo_engine::branch::{self, BranchPoint};
use halo_engine::chat_format::SpeakerNames;
use halo_engine::forget::ForgetBackend;
use halo_engine::recorder::AnswerRecorder;
use halo_engine::rules::{ConversationRules, ResurrectBrightness};
use halo_engine::session::Session;
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;
use halo_server::{App, AttentionCapture, Backend, ModelDetails, ServerLimits, Setting, routes};
use halo_store::database::{Database, StoreLocation};
use halo_worlds::agent_model::AgentModel;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::world::WorldModelRef;
use halo_worlds::world_file::WorldFile;
use http_body_util::BodyExt;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
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
}

pub enum FakeAnswer {
    Text(String),
    FailAfter(String),
}

impl Model for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.tokenizer.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        _: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let (text, fails, delay) = {
            let mut script = self.script.lock().expect("the lock is not poisoned");
            let messages = (prompt.messages)();
            script
                .windows
                .push(messages.iter().map(|m| format!("{}: {}\n", m.role.name(), m.text)).collect());
            script.answers_given += 1;
            match script.answers.pop_front() {
                Some(FakeAnswer::Text(text)) => (text, false, script.token_delay),
                Some(FakeAnswer::FailAfter(text)) => (text, true, script.token_delay),
                None => (
                    format!("answer number {} of this model", script.answers_given),
                    false,
                    script.token_delay,
                ),
            }
        };
        for (n, token) in self.tokenizer.tokenize(&text, false)?.iter().enumerate() {
            if n == sampling.max_tokens {
                return Ok(FinishReason::Length);
            }
            std::thread::sleep(delay);
            if listen(ModelStep::Token(token, None)) == StepFlow::Stop {
                return Ok(FinishReason::Cancelled);
            }
        }
        match fails {
            true => Err(Error::internal("generating", "the model broke down")),
            false => Ok(FinishReason::EndOfText),
        }
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
}

pub struct FakeBackend {
    pub model: FakeModel,
    pub store: TestStore,
    pub context: usize,
}

fn unsupported<T>() -> Result<T, Error> {
    Err(Error::invalid_input("using the backend", "this test has no such part"))
}

impl Backend for FakeBackend {
    fn model(&self) -> Result<Box<dyn Model + Send>, Error> {
        Ok(Box::new(self.model.clone()))
    }

    fn model_info(&self) -> ModelInfo {
        self.model.info.clone()
    }

    fn model_details(&self) -> ModelDetails {
        ModelDetails::default()
    }

    fn is_special_token(&self, _: TokenId) -> bool {
        false
    }

    fn open_reader(&self) -> Result<Box<dyn Store + Send>, Error> {
        self.store.open()
    }

    fn embedder(&self) -> Option<Box<dyn Embedder + Send>> {
        None
    }

    fn rules(&self) -> ConversationRules {
        ConversationRules {
            context: halo_core::rules::ContextRules {
                strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
                chunks: ChunkSize { min: 2, max: 64 },
                policy: PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
                max_tokens: self.context,
                sinks: 0,
                recent: 0,
                fill: true,
                trace_interval: 0,
            },
            reserved_tokens: self.context / 4,
            watch: AttentionRequest::none(),
            sampling: Sampling { max_tokens: 32, temperature: 0.0, ..Sampling::default() },
            recall: SearchOptions { mode: SearchMode::Hybrid, user_boost: 1.0, diversity: 0.0, limit: 32 },
            resurrect_brightness: ResurrectBrightness::Previous,
            preview_tokens: 0,
            tools: None,
            system_prompt: "Be brief.".into(),
            show_dates: false,
            speaker_names: SpeakerNames::default(),
            memory: None,
            premise_method: None,
        }
    }

    fn open_session(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, Error> {
        Session::open(self.store.open()?, self.model()?, None, name, self.rules(), progress)
    }

    fn open_session_read_only(&self, name: &str) -> Result<Session, Error> {
        Session::open_read_only(self.store.open()?, self.model()?, None, name, self.rules())
    }

    fn create_branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error> {
        branch::create_branch(&mut *self.store.open()?, from, to, at)
    }

    fn capture_recorder(&self, _: &str) -> Result<Box<dyn AnswerRecorder>, Error> {
        unsupported()
    }

    fn read_capture(&self, _: &str) -> Result<AttentionCapture, Error> {
        unsupported()
    }

    fn open_worlds(&self) -> Result<Box<dyn RowStore + Send>, Error> {
        unsupported()
    }

    fn delete_world(&self, _: &str) -> Result<(), Error> {
        unsupported()
    }

    fn is_world_model_allowed(&self, _: &str) -> bool {
        false
    }

    fn agent_models(&self, _: &[WorldModelRef]) -> Result<BTreeMap<String, AgentModel>, Error> {
        unsupported()
    }

    fn agent_prompts(&self) -> Result<WorldPrompts, Error> {
        unsupported()
    }

    fn parse_world_file(&self, _: &str) -> Result<WorldFile, Error> {
        unsupported()
    }

    fn example_world(&self) -> &str {
        ""
    }

    fn forget_backend(&self) -> &dyn ForgetBackend {
        self
    }

    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }

    fn save_setting(&self, _: &str, _: Option<&str>) -> Result<(), Error> {
        unsupported()
    }
}

/// The grace period is a week; the file of the proofs is beside the store.
impl ForgetBackend for FakeBackend {
    fn open_reader(&self) -> Result<Option<Box<dyn Store + Send>>, Error> {
        self.store.open().map(Some)
    }

    fn open_writer(&self) -> Result<Box<dyn EraseStore + Send>, Error> {
        match &self.store {
            TestStore::File(location) => Ok(Box::new(Database::open(location)?)),
            TestStore::Memory(_) => unsupported(),
        }
    }

    fn data_dir(&self) -> Result<PathBuf, Error> {
        match &self.store {
            TestStore::File(StoreLocation::Sqlite(path)) => Ok(path.with_file_name("")),
            _ => unsupported(),
        }
    }

    fn grace_period(&self) -> Result<Duration, Error> {
        Ok(Duration::from_secs(7 * 24 * 60 * 60))
    }

    fn delete_saved_kv(&self, _: &str) -> Result<(), Error> {
        Ok(())
    }

    fn delete_capture(&self, _: &str) -> Result<(), Error> {
        Ok(())
    }
}

/// A server without a socket.
pub struct FakeServer {
    pub app: Arc<App>,
    pub store: TestStore,
    script: Arc<Mutex<FakeScript>>,
    router: Router,
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
        let tokenizer = ScriptedModel::new(8192, Vec::new());
        let script: Arc<Mutex<FakeScript>> = Arc::default();
        let model = FakeModel { info: tokenizer.info().clone(), tokenizer, script: Arc::clone(&script) };
        let app = App::new(Arc::new(FakeBackend { model, store: store.clone(), context }), limits, None);
        let router = routes(&app);
        Self { app, store, script, router }
    }

    pub fn in_memory() -> Self {
        Self::new(TestStore::Memory(SharedStore::new(InMemoryStore::default())), 400, ServerLimits::default())
    }

    pub fn script(&self) -> std::sync::MutexGuard<'_, FakeScript> {
        self.script.lock().expect("the lock is not poisoned")
    }

    pub fn script_answers(&self, answers: &[&str]) {
        self.script().answers.extend(answers.iter().map(|text| FakeAnswer::Text((*text).to_owned())));
    }

    /// The next answer fails after this text.
    pub fn script_failure_after(&self, text: &str) {
        self.script().answers.push_back(FakeAnswer::FailAfter(text.to_owned()));
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
        let response = self.send(Self::build_request("POST", path, Some(body), None)).await;
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
        (text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect(), clean)
    }

    /// A request to Halo's own API.
    pub async fn halo_api(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let response =
            self.send(Self::build_request(method, &format!("/api/halo/v1{path}"), body, None)).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }
}

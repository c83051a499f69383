//! A server on test doubles: a model that answers at once, and a store in memory or in a file. Requests go through the real
//! routes, without a socket.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use halo_agents::prompts::Prompts;
use halo_agents::world::Brain;
use halo_agents::world_file::WorldFile;
use halo_core::attention::Watch;
use halo_core::brightness::{Magnitude, Strategy};
use halo_core::chunk::ChunkSize;
use halo_core::prune::{Policy, Rank, Ties};
use halo_core::seams::{
    Embedder, Finish, Flow, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Store, Worlds,
};
use halo_core::testing::doubles::{MemoryStore, ScriptedModel};
use halo_core::testing::shared::Shared;
use halo_core::token::TokenId;
use halo_engine::branch::{self, BranchPoint};
use halo_engine::frame::Names;
use halo_engine::record::Recorder;
use halo_engine::rules::{ReturnLight, Rules};
use halo_engine::session::Session;
use halo_engine::world::mind::Mind;
use halo_recall::rank::Mode;
use halo_recall::recall::Manner;
use halo_server::{App, Captured, Limits, ModelFacts, Parts, Setting, routes};
use halo_store::database::{Database, Location};
use http_body_util::BodyExt;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tower::ServiceExt;

/// A model that gives the next of its answers, or one that nobody has given before.
#[derive(Clone)]
pub struct FakeModel {
    info: ModelInfo,
    cut: ScriptedModel,
    script: Arc<Mutex<Script>>,
}

#[derive(Default)]
pub struct Script {
    answers: VecDeque<Scripted>,
    given: usize,
    /// How long a token takes.
    pub pace: Duration,
    /// The windows that the model was given, as text.
    pub windows: Vec<String>,
}

/// What the model does next.
pub enum Scripted {
    Says(String),
    FailsAfter(String),
}

impl Model for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        self.cut.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        _: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let (text, fails, pace) = {
            let mut script = self.script.lock().expect("nobody broke down");
            let messages = (prompt.messages)();
            script
                .windows
                .push(messages.iter().map(|m| format!("{}: {}\n", m.role.name(), m.text)).collect());
            script.given += 1;
            match script.answers.pop_front() {
                Some(Scripted::Says(text)) => (text, false, script.pace),
                Some(Scripted::FailsAfter(text)) => (text, true, script.pace),
                None => (format!("answer number {} of this model", script.given), false, script.pace),
            }
        };
        for (n, piece) in self.cut.tokenize(&text, false)?.iter().enumerate() {
            if n == sampling.max_tokens {
                return Ok(Finish::Length);
            }
            std::thread::sleep(pace);
            if listen(ModelStep::Token(piece, None)) == Flow::Stop {
                return Ok(Finish::Aborted);
            }
        }
        match fails {
            true => Err(SeamError::new("generating", "the model broke down")),
            false => Ok(Finish::End),
        }
    }
}

/// Where conversations are kept.
#[derive(Clone)]
pub enum Kept {
    Memory(Shared<MemoryStore>),
    File(Location),
}

impl Kept {
    pub fn open(&self) -> Result<Box<dyn Store + Send>, SeamError> {
        Ok(match self {
            Kept::Memory(store) => Box::new(store.clone()),
            Kept::File(location) => Box::new(Database::open(location)?),
        })
    }
}

pub struct FakeParts {
    pub model: FakeModel,
    pub kept: Kept,
    pub context: usize,
}

fn absent<T>() -> Result<T, SeamError> {
    Err(SeamError::asked("asking for a part", "there is none in this test"))
}

impl Parts for FakeParts {
    fn model(&self) -> Result<Box<dyn Model + Send>, SeamError> {
        Ok(Box::new(self.model.clone()))
    }

    fn info(&self) -> ModelInfo {
        self.model.info.clone()
    }

    fn facts(&self) -> ModelFacts {
        ModelFacts::default()
    }

    fn is_special(&self, _: TokenId) -> bool {
        false
    }

    fn store(&self) -> Result<Box<dyn Store + Send>, SeamError> {
        self.kept.open()
    }

    fn embedder(&self) -> Option<Box<dyn Embedder + Send>> {
        None
    }

    fn rules(&self) -> Rules {
        Rules {
            context: halo_core::replay::Rules {
                strategy: Strategy::Magnitude(Magnitude::default()),
                chunks: ChunkSize { min: 2, max: 64 },
                policy: Policy::Brightness { rank: Rank::Top4, ties: Ties::Dimmer },
                max_tokens: self.context,
                sinks: 0,
                recent: 0,
                fill: true,
                trace_interval: 0,
            },
            room: self.context / 4,
            watch: Watch::nothing(),
            sampling: Sampling { max_tokens: 32, temperature: 0.0, ..Sampling::default() },
            recall: Manner { mode: Mode::Hybrid, user_boost: 1.0, diversity: 0.0, most: 32 },
            returns: ReturnLight::Earned,
            preview: 0,
            tools: None,
            system: "Be brief.".into(),
            dates: false,
            names: Names::default(),
            memory: None,
            premises: None,
        }
    }

    fn open(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, SeamError> {
        Session::open(self.kept.open()?, self.model()?, None, name, self.rules(), progress)
    }

    fn open_to_read(&self, name: &str) -> Result<Session, SeamError> {
        Session::open_to_read(self.kept.open()?, self.model()?, None, name, self.rules())
    }

    fn branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, SeamError> {
        branch::create(&mut *self.kept.open()?, from, to, at)
    }

    fn recorder(&self, _: &str) -> Result<Box<dyn Recorder>, SeamError> {
        absent()
    }

    fn captured(&self, _: &str) -> Result<Captured, SeamError> {
        absent()
    }

    fn worlds(&self) -> Result<Box<dyn Worlds + Send>, SeamError> {
        absent()
    }

    fn end_world(&self, _: &str) -> Result<(), SeamError> {
        absent()
    }

    fn may_think(&self, _: &str) -> bool {
        false
    }

    fn minds(&self, _: &[Brain]) -> Result<BTreeMap<String, Mind>, SeamError> {
        absent()
    }

    fn prompts(&self) -> Result<Prompts, SeamError> {
        absent()
    }

    fn read_world(&self, _: &str) -> Result<WorldFile, SeamError> {
        absent()
    }

    fn example(&self) -> &str {
        ""
    }

    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }

    fn set(&self, _: &str, _: Option<&str>) -> Result<(), SeamError> {
        absent()
    }
}

/// A server without a socket.
pub struct Fake {
    pub app: Arc<App>,
    pub kept: Kept,
    script: Arc<Mutex<Script>>,
    router: Router,
}

/// What a request came to.
pub struct Answered {
    pub status: u16,
    pub conversation: String,
    pub body: Value,
}

impl Answered {
    /// What the model said.
    pub fn text(&self) -> String {
        self.body["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
    }
}

impl Fake {
    pub fn new(kept: Kept, context: usize, limits: Limits) -> Self {
        let cut = ScriptedModel::new(8192, Vec::new());
        let script: Arc<Mutex<Script>> = Arc::default();
        let model = FakeModel { info: cut.info().clone(), cut, script: Arc::clone(&script) };
        let app = App::new(Arc::new(FakeParts { model, kept: kept.clone(), context }), limits, None);
        let router = routes(&app);
        Self { app, kept, script, router }
    }

    pub fn in_memory() -> Self {
        Self::new(Kept::Memory(Shared::new(MemoryStore::default())), 400, Limits::default())
    }

    pub fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().expect("nobody broke down")
    }

    /// The next answers of the model.
    pub fn says(&self, answers: &[&str]) {
        self.script().answers.extend(answers.iter().map(|text| Scripted::Says((*text).to_owned())));
    }

    /// The next answer breaks off behind this.
    pub fn fails_after(&self, text: &str) {
        self.script().answers.push_back(Scripted::FailsAfter(text.to_owned()));
    }

    pub async fn call(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().oneshot(request).await.expect("the routes do not fail")
    }

    fn request(method: &str, path: &str, body: Option<&Value>, conversation: Option<&str>) -> Request<Body> {
        let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
        if let Some(name) = conversation {
            request = request.header("x-halo-conversation", name);
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        request.body(body).expect("a request")
    }

    /// A chat request, its answer whole.
    pub async fn chat(&self, body: &Value, conversation: Option<&str>) -> Answered {
        let response =
            self.call(Self::request("POST", "/v1/chat/completions", Some(body), conversation)).await;
        let status = response.status().as_u16();
        let named = response.headers().get("x-halo-conversation");
        let conversation = named.and_then(|n| n.to_str().ok()).unwrap_or_default().to_owned();
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        Answered { status, conversation, body: serde_json::from_slice(&bytes).unwrap_or_default() }
    }

    /// The events of a stream, and whether it ended cleanly.
    pub async fn stream(&self, path: &str, body: &Value) -> (Vec<String>, bool) {
        let response = self.call(Self::request("POST", path, Some(body), None)).await;
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
    pub async fn halo(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let response = self.call(Self::request(method, &format!("/api/halo/v1{path}"), body, None)).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }
}

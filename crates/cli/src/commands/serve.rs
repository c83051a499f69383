//! `halo serve`: the page, the APIs and the engine behind them.

use super::{rooms, search};
use crate::capture::{Capture, Recording, Reduction};
use crate::settings::keep::keep;
use crate::settings::load::Origin;
use crate::settings::value::{Auto, RecallMode};
use crate::settings::{KEYS, Key, Settings};
use crate::{Common, say, wiring};
use anyhow::{Context, Result, bail};
use halo_agents::prompts::Prompts;
use halo_agents::world::Brain;
use halo_agents::world_file::WorldFile;
use halo_core::seams::{Embedder, Fault, Model, ModelInfo, SeamError, Store, Worlds};
use halo_core::token::TokenId;
use halo_engine::branch::BranchPoint;
use halo_engine::record::Recorder;
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_engine::world::mind::Mind;
use halo_engine::world::realm;
use halo_recall::embed::Embeddings;
use halo_remote::Poster;
use halo_server::{Address, App, Captured, Export, Limits, ModelFacts, Parts, Setting, Tls};
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where to listen.
#[derive(clap::Args)]
pub struct Options {
    /// Where to listen, instead of server.listen; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
}

/// Serves, until it is told to end.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    super::forget::tidy(common, &settings);
    let listen = address(options.listen.as_deref().unwrap_or(&settings.listen.0))?;
    let key = match &settings.key {
        Auto::Auto => None,
        Auto::Set(key) => Some(key.0.clone()),
    };
    let tls = match (&settings.cert, &settings.cert_key) {
        (Auto::Auto, Auto::Auto) => None,
        (Auto::Set(cert), Auto::Set(key)) => Some(Tls::read(Path::new(&cert.0), Path::new(&key.0))?),
        _ => bail!("server.cert and server.cert_key go together: set both, or neither"),
    };
    if !listen.ip().is_loopback() {
        if key.is_none() {
            bail!(
                "listening on {listen} lets in whoever can reach it: set a key first, with HALO_SERVER_KEY or server.key in the \
                 settings file, or listen on 127.0.0.1"
            );
        }
        if tls.is_none() {
            say(&format!(
                "what goes to and from {listen} can be read on its way, the key too: set server.cert and server.cert_key, or \
                 put something that speaks TLS before it"
            ));
        }
    }
    let traces = match &settings.otlp {
        Auto::Auto => None,
        Auto::Set(address) => Some(exporter(&address.0)?),
    };
    let limits = Limits {
        key,
        hosts: settings.hosts.0.clone(),
        origins: settings.origins.0.clone(),
        body: usize::try_from(settings.max_body.0).unwrap_or(usize::MAX),
        rate: u32::try_from(settings.rate.0).unwrap_or(u32::MAX),
        waiting: settings.queue.0 as usize,
        idle: Duration::from_secs(settings.idle.count() as u64),
        open: open_at_once(settings.max_open.count()),
        ..Limits::default()
    };
    let app = App::new(Arc::new(Made::new(common, settings)?), limits, traces);
    let scheme = if tls.is_some() { "https" } else { "http" };
    let ready = Box::new(move |here: SocketAddr| {
        let shown =
            if here.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], here.port())) } else { here };
        say(&format!("listening on {scheme}://{shown} (Ctrl-C ends it)"));
    });
    halo_server::serve(&app, Address { listen, tls, ready })?;
    say("ended; all that was said is stored");
    Ok(())
}

/// Speaks the Model Context Protocol on standard input and output.
pub fn mcp(common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let app = App::new(Arc::new(Made::new(common, settings)?), Limits::default(), None);
    Ok(halo_server::speak_mcp(&app)?)
}

/// Open files that a conversation needs: its database with the files beside it, its lock, and the store's.
const FILES_OF_A_CONVERSATION: u64 = 6;

/// Open files that everything else needs: readers of the store, the model, the cells on disk, some connections.
const OTHER_FILES: u64 = 96;

/// How many conversations may be open at once: as many as the user wants, if the system allows so many open files. The limit
/// is raised as far as it can be.
fn open_at_once(wanted: usize) -> usize {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        if let Err(why) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!("the limit on open files stays as it is: {why}");
        }
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let fits = files.saturating_sub(OTHER_FILES) / FILES_OF_A_CONVERSATION;
        wanted.min(usize::try_from(fits).unwrap_or(usize::MAX)).max(1)
    }
    #[cfg(not(unix))]
    wanted
}

/// Makes a folder that only its user can look into, as the store is.
fn private(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// Sends traces to a collector.
fn exporter(address: &str) -> Result<Export> {
    let poster = Poster::new(address, "/v1/traces").context("server.otlp is no address of a collector")?;
    Ok(Box::new(move |trace| poster.post("sending traces", trace).map_err(|why| why.to_string())))
}

fn address(text: &str) -> Result<SocketAddr> {
    let found = text.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.with_context(|| format!("'{text}' is no address to listen on: write one such as 127.0.0.1:5001"))
}

/// The model that speaks.
enum Speaker {
    Local(halo_llama::model::Llama),
    /// Each conversation has a connection of its own; this is what the first one told.
    Remote(ModelInfo),
}

impl Speaker {
    fn open(common: &Common, settings: &Settings) -> Result<Self> {
        if wiring::is_remote(common) {
            return Ok(Self::Remote(wiring::model(common, settings)?.info().clone()));
        }
        Ok(Self::Local(wiring::local(common, settings)?))
    }
}

/// The parts, as this program has them.
struct Made {
    common: Common,
    speaker: Speaker,
    embedder: Option<Embeddings>,
    /// The settings that the model was started with.
    started: Settings,
    writing: Mutex<()>,
}

fn failed(what: &str) -> impl Fn(anyhow::Error) -> SeamError + '_ {
    move |error| SeamError::new(what, format!("{error:#}"))
}

impl Made {
    fn new(common: &Common, settings: Settings) -> Result<Self> {
        // A store that cannot be opened is told of now, and not at the first message.
        drop(common.open_store()?);
        Ok(Self {
            common: common.clone(),
            speaker: Speaker::open(common, &settings)?,
            embedder: search::embedder(common, &settings)?,
            started: settings,
            writing: Mutex::default(),
        })
    }

    /// The settings as they are now; those of the start, where somebody has broken the file meanwhile.
    fn settings_now(&self) -> Settings {
        self.common.load(Vec::new()).map_or_else(|_| self.started.clone(), |loaded| loaded.settings)
    }

    fn speaker(&self) -> Result<Box<dyn Model + Send>, SeamError> {
        match &self.speaker {
            Speaker::Local(llama) => Ok(Box::new(llama.clone())),
            Speaker::Remote(_) => {
                wiring::model(&self.common, &self.started).map_err(failed("reaching the model"))
            }
        }
    }
}

/// Settings that nobody changes over the wire.
const BY_HAND: [&str; 1] = ["rooms.models"];

impl Parts for Made {
    fn model(&self) -> Result<Box<dyn Model + Send>, SeamError> {
        self.speaker()
    }

    fn info(&self) -> ModelInfo {
        match &self.speaker {
            Speaker::Local(llama) => llama.info().clone(),
            Speaker::Remote(info) => info.clone(),
        }
    }

    fn facts(&self) -> ModelFacts {
        match &self.speaker {
            Speaker::Local(llama) => wiring::facts(llama),
            Speaker::Remote(_) => ModelFacts::default(),
        }
    }

    fn is_special(&self, id: TokenId) -> bool {
        match &self.speaker {
            Speaker::Local(llama) => i32::try_from(id.0).is_ok_and(|token| llama.weights().is_mark(token)),
            Speaker::Remote(_) => false,
        }
    }

    fn store(&self) -> Result<Box<dyn Store + Send>, SeamError> {
        let store = self.common.look_at_store().map_err(failed("opening the store"))?;
        match store {
            Some(store) => Ok(Box::new(store)),
            None => Ok(Box::new(self.common.open_store().map_err(failed("opening the store"))?)),
        }
    }

    fn embedder(&self) -> Option<Box<dyn Embedder + Send>> {
        self.embedder.clone().map(|embedder| Box::new(embedder) as Box<dyn Embedder + Send>)
    }

    fn rules(&self) -> Rules {
        wiring::rules(&self.settings_now())
    }

    fn open(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, SeamError> {
        let store = self.common.open_store().map_err(failed("opening the store"))?;
        let settings = self.settings_now();
        let embedder = self.embedder().filter(|_| settings.recall_mode != RecallMode::Lexical);
        Session::open(Box::new(store), self.speaker()?, embedder, name, wiring::rules(&settings), progress)
    }

    fn open_to_read(&self, name: &str) -> Result<Session, SeamError> {
        let settings = self.settings_now();
        let embedder = self.embedder().filter(|_| settings.recall_mode != RecallMode::Lexical);
        Session::open_to_read(self.store()?, self.speaker()?, embedder, name, wiring::rules(&settings))
    }

    fn branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, SeamError> {
        let mut store = self.common.open_store().map_err(failed("opening the store"))?;
        halo_engine::branch::create(&mut store, from, to, at)
    }

    fn recorder(&self, called: &str) -> Result<Box<dyn Recorder>, SeamError> {
        let info = self.info();
        let failed = |why: String| SeamError::asked("recording", why);
        if !info.attention {
            return Err(failed(format!(
                "{} does not tell what it looks at, so there is nothing to record: use a local model",
                info.name
            )));
        }
        let folder = self.common.data_folder();
        let folder = folder.ok_or_else(|| failed("this system names no place for data".into()))?;
        let folder = folder.join("captures").join(called);
        private(&folder).map_err(|e| failed(format!("{}: {e}", folder.display())))?;
        Ok(Box::new(Recording::new(&folder, &info.name, &self.settings_now())))
    }

    fn captured(&self, place: &str) -> Result<Captured, SeamError> {
        let open = Capture::open(Path::new(place)).and_then(|mut capture| {
            capture.reduce_by(Reduction::of(&self.started));
            capture.by_part()
        });
        open.map_err(failed("reading the capture")).map_err(|why: SeamError| why.by(Fault::Asked))
    }

    fn worlds(&self) -> Result<Box<dyn Worlds + Send>, SeamError> {
        Ok(Box::new(self.common.open_store().map_err(failed("opening the store"))?))
    }

    fn end_world(&self, world: &str) -> Result<(), SeamError> {
        let failed = failed("ending the world");
        let mut store = self.common.open_store().map_err(&failed)?;
        if let Speaker::Local(model) = &self.speaker {
            let created = store.worlds()?.into_iter().find(|known| known.name == world);
            let mut model = model.clone();
            created.map(|known| model.forget(&realm::key(&known.name, known.created))).transpose()?;
        }
        rooms::end_world(&mut store, world, &self.common).map_err(failed)
    }

    fn may_think(&self, at: &str) -> bool {
        self.settings_now().rooms_models.0.iter().any(|known| known == at)
    }

    fn minds(&self, brains: &[Brain]) -> Result<BTreeMap<String, Mind>, SeamError> {
        let mut own = || self.speaker().map_err(anyhow::Error::from);
        rooms::minds(brains, &self.common, &self.settings_now(), &mut own)
            .map_err(failed("waking the agents"))
    }

    fn prompts(&self) -> Result<Prompts, SeamError> {
        let read = rooms::prompts(&self.settings_now());
        read.map_err(failed("reading what agents are told")).map_err(|why| why.by(Fault::Asked))
    }

    fn read_world(&self, text: &str) -> Result<WorldFile, SeamError> {
        toml::from_str(text).map_err(|why| SeamError::asked("reading the world", why.to_string()))
    }

    fn example(&self) -> &str {
        rooms::EXAMPLE
    }

    fn settings(&self) -> Vec<Setting> {
        let Ok(loaded) = self.common.load(Vec::new()) else { return Vec::new() };
        let defaults = Settings::default();
        let text =
            |settings: &Settings, key: &Key| settings.get(key.name).map(|(text, _)| text).unwrap_or_default();
        let one = |key: &Key| {
            let origin = loaded.origin(key.name);
            Setting {
                key: key.name.to_owned(),
                about: key.doc.split_whitespace().collect::<Vec<_>>().join(" "),
                allowed: (key.allowed)(),
                words: (key.words)().into_iter().map(str::to_owned).collect(),
                default: text(&defaults, key),
                value: text(&loaded.settings, key),
                fixed: matches!(origin, Origin::Environment(_) | Origin::CommandLine(_)),
                origin: match origin {
                    Origin::File(..) => "settings file".into(),
                    other => other.to_string(),
                },
                at_start: ["model.", "kv.", "server.", "recall.embedder"]
                    .iter()
                    .any(|start| key.name.starts_with(start)),
            }
        };
        KEYS.iter().map(one).collect()
    }

    fn set(&self, key: &str, value: Option<&str>) -> Result<(), SeamError> {
        if BY_HAND.contains(&key) {
            let why =
                format!("{key} opens a door: write it into the settings file, or start the program with it");
            return Err(SeamError::asked("setting", why));
        }
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = self.common.load(Vec::new()).map_err(failed("setting"))?;
        if let origin @ (Origin::Environment(_) | Origin::CommandLine(_)) = loaded.origin(key) {
            let why =
                format!("{key} was set by the {origin} when the program was started, and that is stronger");
            return Err(SeamError::asked("setting", why));
        }
        let file = self.common.settings_file();
        let file = file
            .ok_or_else(|| SeamError::asked("setting", "this system names no place for a settings file"))?;
        // Whether it is allowed is tried beside the rest before anything is written.
        let mut tried = self.common.clone();
        tried.set.extend(value.map(|value| format!("{key}={value}")));
        // Whoever sets it on a page has written no `--set`.
        let plain =
            |why: anyhow::Error| SeamError::asked("setting", format!("{why:#}").replace("--set: ", ""));
        let loaded = tried.load(Vec::new()).map_err(plain)?;
        if let Some(why) = loaded.settings.unworkable() {
            return Err(SeamError::asked("setting", why));
        }
        keep(&file, key, value).map_err(failed("setting"))
    }
}

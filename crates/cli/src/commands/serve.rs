//! `halo serve` and `halo mcp`: the server, and the parts of this program that it needs.

use super::fetch_models::fetch_missing_models;
use super::import_export::import_from_reader;
use super::model_choices;
use super::rooms;
use crate::capture::{AttentionReduction, Capture, CaptureRecorder, locate_capture};
use crate::env::{Env, create_private_dir};
use crate::error::{error_kind, error_text};
use crate::file::read_regular_file;
use crate::model_pool::ModelPool;
use crate::output::print_notice;
use crate::settings::load::SettingOrigin;
use crate::settings::persist::write_setting;
use crate::settings::value::AutoOr;
use crate::settings::value::NumberRange;
use crate::settings::{KEYS, SettingAccess, SettingKey, Settings};
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_agents::lethe::RetentionPolicy;
use halo_core::embedder::Embedder;
use halo_core::model::{Model, ModelInfo};
use halo_core::row_store::RowStore;
use halo_core::store::Store;
use halo_core::token::TokenId;
use halo_core::{Error, ErrorKind};
use halo_engine::branch::BranchPoint;
use halo_engine::chat_options::{ChatOptions, store_chosen_model};
use halo_engine::forget::ForgetBackend;
use halo_engine::recorder::AnswerRecorder;
use halo_engine::rules::ConversationRules;
use halo_engine::session::{SearchIndexing, Session};
use halo_recall::embed::EmbedderHandle;
use halo_recall::rank::SearchMode;
use halo_remote::JsonPoster;
use halo_server::{
    AddressRange, App, AttentionCapture, Backend, ImportResult, ListenOptions, ModelChoices, ModelDetails,
    ModelServerReport, PemFile, ServerLimits, Setting, SettingRange, TlsConfig, TraceExporter,
};
use halo_store::database::Database;
use halo_store::exchange::ImportedConversation;
use halo_worlds::agent_model::AgentModel;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::runner::RunnerOptions;
use halo_worlds::world::WorldModelRef;
use halo_worlds::world_file::WorldFile;
use halo_worlds::world_store;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
pub struct ServeArgs {
    /// Address and port to listen on, overrides server.listen; port 0 picks a free port
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
}

pub fn run(options: &ServeArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    super::forget::run_scheduled_forgetting(env, &settings);
    let listen = parse_listen_address(options.listen.as_deref().unwrap_or(&settings.server_listen.0))?;
    let key = match &settings.server_key {
        AutoOr::Auto => None,
        AutoOr::Value(key) => Some(key.0.clone()),
    };
    let tls = match (&settings.server_cert, &settings.server_cert_key) {
        (AutoOr::Auto, AutoOr::Auto) => None,
        (AutoOr::Value(cert), AutoOr::Value(key)) => {
            Some(TlsConfig::from_pem(&read_pem_file(&cert.0)?, &read_pem_file(&key.0)?)?)
        }
        _ => bail!("server.cert and server.cert_key must be set together"),
    };
    if !listen.ip().is_loopback() {
        if key.is_none() {
            bail!(
                "anyone who can reach {listen} could use the server: set a key first, with HALO_SERVER_KEY or server.key in the \
                 settings file, or listen on 127.0.0.1"
            );
        }
        if tls.is_none() {
            print_notice(&format!(
                "the connection to {listen} is not encrypted, and the key is sent over it: set server.cert and server.cert_key, or \
                 use a TLS proxy"
            ));
        }
    }
    let traces = match &settings.server_otlp {
        AutoOr::Auto => None,
        AutoOr::Value(address) => Some(trace_exporter(&address.0)?),
    };
    let (max_open_conversations, max_connections) =
        fit_to_open_files(settings.server_open.as_usize(), settings.server_connections.as_usize());
    let limits = ServerLimits {
        api_key: key,
        hosts: settings.server_hosts.0.clone(),
        origins: settings.server_origins.0.clone(),
        max_body_bytes: usize::try_from(settings.server_max_body.0).unwrap_or(usize::MAX),
        max_import_bytes: settings.server_max_import.0,
        requests_per_second: u32::try_from(settings.server_rate.0).unwrap_or(u32::MAX),
        max_queued: settings.server_queue.0 as usize,
        idle_timeout: Duration::from_secs(settings.server_idle.as_usize() as u64),
        max_open_conversations,
        max_connections,
        parallel: settings.model_parallel.as_usize(),
        max_connections_per_address: settings.server_connections_per_address.as_usize(),
        trusted_proxies: parse_trusted_proxies(&settings.server_trusted_proxies.0)?,
        ..ServerLimits::default()
    };
    let env = &fetch_missing_models(env, &settings)?;
    let app = App::new(Arc::new(CliBackend::new(env, settings)?), limits, traces);
    let scheme = if tls.is_some() { "https" } else { "http" };
    let ready = Box::new(move |here: SocketAddr| {
        let shown =
            if here.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], here.port())) } else { here };
        print_notice(&format!("listening on {scheme}://{shown} (Ctrl-C stops it)"));
    });
    halo_server::serve(&app, ListenOptions { address: listen, tls, on_ready: ready })?;
    print_notice("stopped; everything is stored");
    Ok(())
}

pub fn run_mcp(env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let app = App::new(Arc::new(CliBackend::new(env, settings)?), ServerLimits::default(), None);
    Ok(halo_server::serve_mcp_stdio(&app)?)
}

/// Open files per conversation: its database with journal and shared memory, its lock, and the store's.
const FILES_PER_CONVERSATION: u64 = 6;

/// Open files for everything else: readers of the store, the model, the KV archive.
const RESERVED_FILES: u64 = 64;

/// Connections that are always possible.
const MIN_CONNECTIONS: u64 = 32;

/// How many conversations and connections may be open at once: as many as requested, if the limit on open files allows
/// it. The limit is raised to its maximum first.
fn fit_to_open_files(conversations: usize, connections: usize) -> (usize, usize) {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        if let Err(why) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!("the limit on open files cannot be raised: {why}");
        }
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let free = files.saturating_sub(RESERVED_FILES);
        let fits = |files: u64| usize::try_from(files).unwrap_or(usize::MAX);
        let conversations =
            conversations.min(fits(free.saturating_sub(MIN_CONNECTIONS) / FILES_PER_CONVERSATION)).max(1);
        let rest = free.saturating_sub(conversations as u64 * FILES_PER_CONVERSATION);
        (conversations, connections.min(fits(rest.max(MIN_CONNECTIONS))))
    }
    #[cfg(not(unix))]
    (conversations, connections)
}

fn parse_trusted_proxies(texts: &[String]) -> Result<Vec<AddressRange>> {
    let parse = |text: &String| {
        let range = text.parse::<AddressRange>();
        range.map_err(|_| {
            let why = "it must be an IP address, or a range such as 10.0.0.0/8";
            anyhow::Error::from(Error::invalid_input(
                "reading server.trusted_proxies",
                format!("'{text}': {why}"),
            ))
        })
    };
    texts.iter().map(parse).collect()
}

fn read_pem_file(path: &str) -> Result<PemFile> {
    let content = read_regular_file(Path::new(path), MAX_PEM_BYTES);
    Ok(PemFile { path: path.into(), content: content.with_context(|| format!("reading {path} for TLS"))? })
}

/// A certificate chain has a few kilobytes.
const MAX_PEM_BYTES: u64 = 1 << 20;

fn trace_exporter(address: &str) -> Result<TraceExporter> {
    let poster =
        JsonPoster::new(address, "/v1/traces").context("server.otlp is not the URL of a collector")?;
    Ok(Box::new(move |trace| poster.post("sending traces", trace).map_err(|why| why.to_string())))
}

pub(super) fn parse_listen_address(text: &str) -> Result<SocketAddr> {
    let address = text.to_socket_addrs().ok().and_then(|mut address| address.next());
    address
        .with_context(|| format!("'{text}' is not an address to listen on: write one such as 127.0.0.1:5001"))
}

struct CliBackend {
    env: Env,
    models: Arc<ModelPool>,
    /// Models that were chosen for conversations without messages; they are stored with the first one.
    unsaved_choices: Mutex<BTreeMap<String, String>>,
    embedder: Option<EmbedderHandle>,
    /// The settings at start: the model was opened with them.
    startup_settings: Settings,
    settings_lock: Mutex<()>,
    /// Keeps `halo doctor --fix` from replacing the file while the server runs.
    _store_in_use: Mutex<Database>,
}

fn backend_error(what: &str) -> impl Fn(anyhow::Error) -> Error + '_ {
    move |error| Error::new(error_kind(&error).unwrap_or(ErrorKind::Internal), what, error_text(&error))
}

impl CliBackend {
    fn new(env: &Env, settings: Settings) -> Result<Self> {
        // A store that cannot be opened is an error at start, and not at the first message.
        let mut store = env.open_store()?;
        store.keep_in_use()?;
        Ok(Self {
            _store_in_use: Mutex::new(store),
            env: env.clone(),
            models: ModelPool::open(env, settings.clone())?,
            unsaved_choices: Mutex::default(),
            embedder: wiring::open_embedder(env, &settings)?,
            startup_settings: settings,
            settings_lock: Mutex::default(),
        })
    }

    /// The current settings; those at start if the settings file is invalid now.
    fn current_settings(&self) -> Settings {
        self.env.load_settings().map_or_else(|_| self.startup_settings.clone(), |loaded| loaded.settings)
    }

    fn connect_model(&self) -> Result<Box<dyn Model + Send>, Error> {
        self.models.connect(self.models.default_model())
    }

    /// The model that a conversation has chosen; none: the one that the program was started with.
    fn chosen_name(&self, store: &mut dyn Store, conversation: &str) -> Result<Option<String>, Error> {
        match ChatOptions::load(store, conversation)?.model {
            None => Ok(self.unsaved_choices.lock().get(conversation).cloned()),
            chosen => Ok(chosen),
        }
    }

    fn connect_chosen(&self, chosen: Option<&str>) -> Result<Box<dyn Model + Send>, Error> {
        match chosen {
            None => self.connect_model(),
            Some(name) => self.models.connect(&self.models.get(name)?),
        }
    }
}

/// Choices of models for conversations without messages that are remembered.
const MAX_UNSAVED_CHOICES: usize = 1000;

/// Why the API cannot change a setting, if it cannot.
fn read_only_reason(key: &SettingKey, origin: &SettingOrigin) -> Option<String> {
    match (key.access, origin) {
        (SettingAccess::ByHand, _) => Some(
            "it decides who can reach the server, or names a file, an address or a model: set it in the settings file, \
             in the environment or on the command line"
                .into(),
        ),
        (SettingAccess::Http, SettingOrigin::Environment(_) | SettingOrigin::CommandLine(_)) => Some(format!(
            "it was set by the {origin} when the program was started, which overrides the settings file"
        )),
        (SettingAccess::Http, _) => None,
    }
}

impl Backend for CliBackend {
    fn model(&self) -> Result<Box<dyn Model + Send>, Error> {
        self.connect_model()
    }

    fn model_info(&self) -> ModelInfo {
        self.models.default_model().info.clone()
    }

    fn model_details(&self) -> ModelDetails {
        self.models.default_model().details.clone()
    }

    fn is_special_token(&self, id: TokenId) -> bool {
        self.models.is_special_token(id)
    }

    fn open_reader(&self) -> Result<Box<dyn Store + Send>, Error> {
        let store = self.env.open_store_read_only().map_err(backend_error("opening the store"))?;
        match store {
            Some(store) => Ok(Box::new(store)),
            None => Ok(Box::new(self.env.open_store().map_err(backend_error("opening the store"))?)),
        }
    }

    fn embedder(&self) -> Option<Box<dyn Embedder + Send>> {
        self.embedder.clone().map(|embedder| Box::new(embedder) as Box<dyn Embedder + Send>)
    }

    fn rules(&self) -> ConversationRules {
        wiring::conversation_rules(&self.current_settings())
    }

    fn open_session(&self, name: &str, progress: &mut dyn FnMut(usize, usize)) -> Result<Session, Error> {
        let mut store = self.env.open_store().map_err(backend_error("opening the store"))?;
        let settings = self.current_settings();
        let embedder = self.embedder().filter(|_| settings.recall_mode != SearchMode::Lexical);
        let chosen = self.chosen_name(&mut store, name)?;
        let model = self.connect_chosen(chosen.as_deref())?;
        let rules = wiring::conversation_rules(&settings);
        let mut session = Session::open(Box::new(store), model, embedder, name, rules, progress)?;
        session.set_unsaved_model(chosen);
        Ok(session)
    }

    fn model_choices(&self) -> Result<ModelChoices, Error> {
        let current = self.model_info().name;
        model_choices::list(&self.env, current).map_err(backend_error("listing the models"))
    }

    fn test_model_server(&self, address: &str) -> Result<ModelServerReport, Error> {
        self.models.check_address(address)?;
        model_choices::test_server(address)
    }

    fn download_model(&self, name: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), Error> {
        model_choices::download(&self.env, name, progress).map_err(backend_error("downloading the model"))
    }

    fn load_model(&self, model: &str) -> Result<(), Error> {
        self.models.get(model).map(drop)
    }

    fn choose_model(&self, conversation: &str, model: Option<&str>) -> Result<(), Error> {
        let mut store = self.env.open_store().map_err(backend_error("opening the store"))?;
        let is_stored = store.find_conversation(conversation)?.is_some();
        let mut unsaved = self.unsaved_choices.lock();
        unsaved.remove(conversation);
        if is_stored {
            return store_chosen_model(Box::new(store), conversation, model);
        }
        if let Some(model) = model {
            // A page that is left before the first message leaves its choice here.
            while unsaved.len() >= MAX_UNSAVED_CHOICES && unsaved.pop_first().is_some() {}
            unsaved.insert(conversation.to_owned(), model.to_owned());
        }
        Ok(())
    }

    fn chosen_model(&self, conversation: &str) -> Result<Option<Box<dyn Model + Send>>, Error> {
        let chosen = self.chosen_name(&mut *self.open_reader()?, conversation)?;
        chosen.map(|name| self.connect_chosen(Some(&name))).transpose()
    }

    fn open_session_read_only(&self, name: &str, indexing: SearchIndexing) -> Result<Session, Error> {
        let settings = self.current_settings();
        let embedder = self.embedder().filter(|_| settings.recall_mode != SearchMode::Lexical);
        let mut store = self.open_reader()?;
        // A conversation can be read while its model is missing, and no model is loaded to read one.
        let chosen = self.chosen_name(&mut *store, name)?.and_then(|chosen| self.models.find(&chosen));
        let model = self.models.connect(chosen.as_ref().unwrap_or(self.models.default_model()))?;
        Session::open_read_only(store, model, embedder, name, wiring::conversation_rules(&settings), indexing)
    }

    fn create_branch(&self, from: &str, to: &str, at: &BranchPoint) -> Result<usize, Error> {
        let mut store = self.env.open_store().map_err(backend_error("opening the store"))?;
        halo_engine::branch::create_branch(&mut store, from, to, at)
    }

    fn export_conversation(&self, name: &str, out: &mut dyn Write) -> Result<(), Error> {
        let mut store = self.env.open_store().map_err(backend_error("opening the store"))?;
        store.export(name, out, &mut |_, _| {})
    }

    fn temporary_file(&self) -> Result<File, Error> {
        // The system's folder for temporary files is often in memory, and a file to import can be larger.
        let created = match self.env.data_dir().filter(|folder| folder.is_dir()) {
            Some(folder) => tempfile::tempfile_in(folder),
            None => tempfile::tempfile(),
        };
        created.map_err(|e| Error::unavailable("creating a temporary file", e.to_string()))
    }

    fn import_conversations(
        &self,
        file_name: &str,
        name: Option<&str>,
        content: &mut dyn BufRead,
    ) -> Result<ImportResult, Error> {
        let mut store = self.env.open_store().map_err(backend_error("opening the store"))?;
        let settings = self.current_settings();
        let report = import_from_reader(&mut store, content, file_name, "auto", name, &settings)?;
        let (worlds, conversations): (Vec<_>, Vec<_>) =
            report.conversations.into_iter().partition(|imported| imported.is_namespace);
        let names = |imported: Vec<ImportedConversation>| imported.into_iter().map(|one| one.name).collect();
        Ok(ImportResult {
            format: report.format,
            conversations: names(conversations),
            worlds: names(worlds),
            losses: report.losses.iter().map(|(kind, count)| (kind.to_owned(), count)).collect(),
        })
    }

    fn capture_recorder(&self, called: &str) -> Result<Box<dyn AnswerRecorder>, Error> {
        let info = self.model_info();
        let failed = |why: String| Error::invalid_input("recording", why);
        if !info.attention {
            return Err(failed(format!(
                "{} does not return attention, so there is nothing to record: use a local model",
                info.name
            )));
        }
        let data_dir = self.env.data_dir();
        let data_dir = data_dir.ok_or_else(|| failed("this system has no data folder".into()))?;
        let folder = data_dir.join("captures").join(called);
        create_private_dir(&folder).map_err(|e| failed(format!("{}: {e}", folder.display())))?;
        let settings = self.current_settings();
        Ok(Box::new(CaptureRecorder::new(&folder, Some(data_dir), &info.name, &settings)))
    }

    fn capture_folder(&self, note: &str) -> PathBuf {
        match self.env.data_dir() {
            Some(data_dir) => locate_capture(note, &data_dir).folder().to_owned(),
            None => PathBuf::from(note),
        }
    }

    fn read_capture(&self, note: &str) -> Result<AttentionCapture, Error> {
        let open = Capture::open(&self.capture_folder(note)).and_then(|mut capture| {
            capture.set_reduction(AttentionReduction::from_settings(&self.startup_settings));
            capture.attention_by_chunk()
        });
        open.map_err(backend_error("reading the capture"))
            .map_err(|why: Error| why.with_kind(ErrorKind::InvalidInput))
    }

    fn open_worlds(&self) -> Result<Box<dyn RowStore + Send>, Error> {
        Ok(Box::new(self.env.open_store().map_err(backend_error("opening the store"))?))
    }

    fn delete_world(&self, world: &str) -> Result<(), Error> {
        let failed = backend_error("deleting the world");
        let mut store = self.env.open_store().map_err(&failed)?;
        let created = store.list_namespaces()?.into_iter().find(|entry| entry.name == world);
        if let Some(entry) = created {
            for key in world_store::world_kv_keys(&mut store, &entry.name, entry.created)? {
                self.models.delete_kv(&key)?;
            }
        }
        rooms::delete_world(&mut store, world, &self.env).map_err(failed)
    }

    fn is_world_model_allowed(&self, at: &str) -> bool {
        self.current_settings().rooms_models.0.iter().any(|entry| entry == at)
    }

    fn agent_models(&self, model_refs: &[WorldModelRef]) -> Result<BTreeMap<String, AgentModel>, Error> {
        let mut open_local = |named: Option<&str>| {
            let model = named.map_or_else(
                || Ok(Arc::clone(self.models.default_model())),
                |name| self.models.get_allowed(name),
            );
            Ok(self.models.connect(&model?)?)
        };
        rooms::open_agent_models(model_refs, &self.env, &self.current_settings(), &mut open_local)
            .map_err(backend_error("opening the agents' models"))
    }

    fn agent_prompts(&self) -> Result<WorldPrompts, Error> {
        let read = rooms::load_prompts(&self.current_settings());
        read.map_err(backend_error("reading the agents' prompts"))
            .map_err(|why| why.with_kind(ErrorKind::InvalidInput))
    }

    fn runner_options(&self) -> RunnerOptions {
        rooms::runner_options(&self.current_settings())
    }

    fn parse_world_file(&self, text: &str) -> Result<WorldFile, Error> {
        toml::from_str(text).map_err(|why| Error::invalid_input("reading the world", why.to_string()))
    }

    fn example_world(&self) -> &str {
        rooms::EXAMPLE_WORLD
    }

    fn forget_backend(&self) -> &dyn ForgetBackend {
        &self.env
    }

    fn retention_policy(&self) -> Option<RetentionPolicy> {
        super::forget::enabled_policy(&self.current_settings())
    }

    fn retention_interval(&self) -> Option<Duration> {
        let minutes = self.current_settings().lethe_interval_minutes.0;
        (minutes > 0.0).then(|| Duration::from_secs_f64(60.0 * minutes))
    }

    fn settings(&self) -> Vec<Setting> {
        let Ok(loaded) = self.env.load_settings() else { return Vec::new() };
        let defaults = Settings::default();
        let text = |settings: &Settings, key: &SettingKey| {
            settings.get(key.name).map(|(text, _)| text).unwrap_or_default()
        };
        let one = |key: &SettingKey| {
            let origin = loaded.origin(key.name);
            let read_only_reason = read_only_reason(key, &origin);
            Setting {
                key: key.name.to_owned(),
                about: key.doc.split_whitespace().collect::<Vec<_>>().join(" "),
                allowed: (key.allowed)(),
                choices: (key.choices)().into_iter().map(str::to_owned).collect(),
                range: (key.range)().map(|NumberRange { min, max, whole }| SettingRange { min, max, whole }),
                default: text(&defaults, key),
                value: text(&loaded.settings, key),
                read_only: read_only_reason.is_some(),
                read_only_reason,
                origin: match origin {
                    SettingOrigin::File(..) => "settings file".into(),
                    other => other.to_string(),
                },
                needs_restart: ["model.", "kv.", "server.", "recall.embedder"]
                    .iter()
                    .any(|start| key.name.starts_with(start)),
            }
        };
        KEYS.iter().map(one).collect()
    }

    fn save_setting(&self, key: &str, value: Option<&str>) -> Result<(), Error> {
        let Some(setting) = KEYS.iter().find(|setting| setting.name == key) else {
            return Err(Error::not_found("setting", format!("there is no setting {key}")));
        };
        let _one_at_a_time = self.settings_lock.lock();
        let loaded = self.env.load_settings().map_err(backend_error("setting"))?;
        if let Some(why) = read_only_reason(setting, &loaded.origin(key)) {
            let kind = match setting.access {
                SettingAccess::ByHand => ErrorKind::Forbidden,
                SettingAccess::Http => ErrorKind::InvalidInput,
            };
            return Err(Error::new(kind, "setting", format!("{key} cannot be changed over the API: {why}")));
        }
        let file = self.env.settings_path();
        let file = file
            .ok_or_else(|| Error::invalid_input("setting", "this system has no place for a settings file"))?;
        // The new value is checked together with all other settings before it is written.
        let new_value = value.map(|value| (key.to_owned(), value.to_owned()));
        let loaded = self
            .env
            .load_settings_with(new_value)
            .map_err(|why| Error::invalid_input("setting", error_text(&why)))?;
        if let Some(why) = loaded.window_error() {
            return Err(Error::invalid_input("setting", why));
        }
        // The next start would fail.
        let trained = self.model_details().trained_context;
        let context =
            wiring::context_length(&loaded.settings).filter(|&context| trained > 0 && context > trained);
        if let Some(context) = context.filter(|_| key == "model.context" && value.is_some()) {
            let why = format!(
                "{context} tokens are more than the {trained} that the model was trained for; set at most {trained}"
            );
            return Err(Error::invalid_input("setting", format!("model.context: {why}")));
        }
        write_setting(&file, key, value).map_err(backend_error("setting"))
    }
}

//! The models of a server: the one that it was started with, and those that conversations have chosen.
//!
//! A local model is loaded when it is needed, in a process of its own first ([`model_probe`](crate::model_probe)). It is
//! unloaded when nobody has used it for a while, and when another one needs its memory. A conversation holds a
//! [`PooledModel`], which loads the model again. So a conversation that is open does not keep a model in memory.

use crate::env::Env;
use crate::error::{error_kind, error_text};
use crate::model_probe::open_probed_model;
use crate::models::catalogue::{ModelKind, is_plain_name};
use crate::models::memory_estimate;
use crate::script_model::ScriptFileModel;
use crate::settings::Settings;
use crate::wiring;
use anyhow::Result;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    CancelHandle, FinishReason, Model, ModelInfo, ModelStep, ModelToken, OutputConstraint, Prompt, Sampling,
    StepFlow, WindowToken,
};
use halo_core::token::TokenId;
use halo_core::{Error, ErrorKind};
use halo_llama::model::{BackgroundJob, Llama};
use halo_llama::system_memory;
use halo_remote::{RemoteModel, has_port, is_listed_address};
use halo_server::{ModelDetails, fits_memory};
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A model that conversations can be connected to.
pub struct PoolEntry {
    /// The environment with the name of this model.
    env: Env,
    pub source: ModelSource,
    pub info: ModelInfo,
    pub details: ModelDetails,
}

/// What connections to a model are made from.
pub enum ModelSource {
    Local(LocalModel),
    /// Each conversation has its own connection.
    Remote,
    Script(ScriptFileModel),
}

/// A model file, loaded or not.
pub struct LocalModel {
    llama: Mutex<Option<Llama>>,
    last_used: Mutex<Instant>,
    /// The memory that it takes: the file and the KV cells.
    bytes: u64,
}

impl LocalModel {
    /// The model, if it is loaded.
    pub fn loaded(&self) -> Option<Llama> {
        *self.last_used.lock() = Instant::now();
        self.llama.lock().clone()
    }

    fn is_loaded(&self) -> bool {
        self.llama.lock().is_some()
    }

    /// Takes the model out, unless somebody uses it.
    fn take_unused(&self) -> Option<Llama> {
        let mut llama = self.llama.lock();
        if llama.as_ref().is_some_and(Llama::is_shared) { None } else { llama.take() }
    }
}

/// How long a request waits while another model is loaded.
const MAX_LOADING_WAIT: Duration = Duration::from_secs(60);

/// The most models that clients have chosen.
const MAX_CHOSEN: usize = 100;

type LoadModel = fn(&Env, &Settings) -> Result<Llama>;

impl PoolEntry {
    /// Connects to a model, or loads it with this function.
    fn open(env: Env, settings: &Settings, load: LoadModel) -> Result<Self> {
        if wiring::uses_remote_model(&env) {
            let info = wiring::open_model(&env, settings)?.info().clone();
            return Ok(Self { env, source: ModelSource::Remote, info, details: ModelDetails::default() });
        }
        if let Some(script) = wiring::open_script(&env, settings)? {
            let info = script.info().clone();
            let source = ModelSource::Script(script);
            return Ok(Self { env, source, info, details: ModelDetails::default() });
        }
        let file = env.model_file()?;
        let llama = load(&env, settings)?;
        let (info, details) = (llama.info().clone(), wiring::model_facts(&llama, &file));
        let bytes = memory_estimate(&llama.weights().header, Some(llama.cell_count().into()));
        let local =
            LocalModel { llama: Mutex::new(Some(llama)), last_used: Mutex::new(Instant::now()), bytes };
        Ok(Self { env, source: ModelSource::Local(local), info, details })
    }

    fn local(&self) -> Option<&LocalModel> {
        match &self.source {
            ModelSource::Local(local) => Some(local),
            ModelSource::Remote | ModelSource::Script(_) => None,
        }
    }

    /// Whether its memory could be freed: it is loaded, and nobody uses it.
    fn is_idle(&self) -> bool {
        self.local().is_some_and(|local| local.llama.lock().as_ref().is_some_and(|llama| !llama.is_shared()))
    }
}

pub struct ModelPool {
    env: Env,
    /// The settings at start: every model is opened with them.
    settings: Settings,
    default: Arc<PoolEntry>,
    /// Chosen models by name. It is locked for moments only.
    chosen: Mutex<Vec<(String, Arc<PoolEntry>)>>,
    /// Held while a model is loaded or unloaded: two requests for a model must not load it twice.
    loading: Mutex<()>,
}

impl ModelPool {
    /// Loads the model that the program was started with.
    pub fn open(env: &Env, settings: Settings) -> Result<Arc<Self>> {
        // There is no server yet that a file which ends llama.cpp could take down, so it is loaded at once.
        let default = Arc::new(PoolEntry::open(env.clone(), &settings, wiring::open_local_model)?);
        let unload_after = Duration::from_secs_f64(60.0 * settings.model_unload_after.0);
        let pool = Arc::new(Self {
            env: env.clone(),
            settings,
            default,
            chosen: Mutex::default(),
            loading: Mutex::default(),
        });
        if !unload_after.is_zero() {
            let weak = Arc::downgrade(&pool);
            std::thread::Builder::new()
                .name("halo-unload".into())
                .spawn(move || unload_idle_models(&weak, unload_after))?;
        }
        Ok(pool)
    }

    pub fn default_model(&self) -> &Arc<PoolEntry> {
        &self.default
    }

    /// The chosen model of that name, if the server has used it before; none: it has not been loaded yet.
    pub fn find(&self, name: &str) -> Option<Arc<PoolEntry>> {
        if self.env.models.name.as_deref() == Some(name) {
            return Some(Arc::clone(&self.default));
        }
        self.chosen.lock().iter().find(|(other, _)| other == name).map(|(_, model)| Arc::clone(model))
    }

    /// The chosen model of that name: loads it, unless it was loaded before. Requests for other models do not wait.
    pub fn get(&self, name: &str) -> Result<Arc<PoolEntry>, Error> {
        match self.find(name) {
            Some(model) => Ok(model),
            None => {
                self.check_choice(name)?;
                self.add(name)
            }
        }
    }

    /// The model of an agent, which the settings or the user of the command line allow.
    pub fn get_allowed(&self, name: &str) -> Result<Arc<PoolEntry>, Error> {
        self.find(name).map_or_else(|| self.add(name), Ok)
    }

    fn add(&self, name: &str) -> Result<Arc<PoolEntry>, Error> {
        let _one_at_a_time = self.wait_for_loading(name)?;
        if let Some(model) = self.find(name) {
            return Ok(model);
        }
        let mut env = self.env.clone();
        env.models.name = Some(name.to_owned());
        env.models.chosen_by_client = !self.is_set_by_hand(name);
        let is_local = !RemoteModel::is_address(name) && crate::script_model::script_file(name).is_none();
        if is_local {
            let file = env.model_file().map_err(|error| load_error(name, &error))?;
            if self.default.env.model_file().is_ok_and(|default| default == file) {
                return Ok(Arc::clone(&self.default));
            }
            let header = halo_llama::gguf::read_header(&file);
            // A file that cannot be read is refused when it is loaded.
            let bytes = header.map_or(0, |header| memory_estimate(&header, self.context_length()));
            self.make_room(name, bytes)?;
        }
        let model = PoolEntry::open(env, &self.settings, open_probed_model)
            .map_err(|error| load_error(name, &error))?;
        let model = Arc::new(model);
        let mut chosen = self.chosen.lock();
        // A server may accept any name of a model. Entries that no conversation is connected to are made again when needed.
        while chosen.len() >= MAX_CHOSEN {
            let unused = |(_, entry): &(String, Arc<PoolEntry>)| {
                Arc::strong_count(entry) == 1 && entry.local().is_none_or(|local| !local.is_loaded())
            };
            match chosen.iter().position(unused) {
                Some(unused) => drop(chosen.remove(unused)),
                None => {
                    let why =
                        format!("{MAX_CHOSEN} models are in use; end conversations with other models first");
                    return Err(Error::new(ErrorKind::Unavailable, format!("loading {name}"), why));
                }
            }
        }
        chosen.push((name.to_owned(), Arc::clone(&model)));
        Ok(model)
    }

    /// Waits while another model is loaded, but not for as long as that may take: every waiting request holds a thread.
    fn wait_for_loading(&self, name: &str) -> Result<MutexGuard<'_, ()>, Error> {
        self.loading.try_lock_for(MAX_LOADING_WAIT).ok_or_else(|| {
            let why = "another model is being loaded; try again when it is there";
            Error::new(ErrorKind::Busy, format!("loading {name}"), why)
        })
    }

    fn context_length(&self) -> Option<u64> {
        wiring::context_length(&self.settings).map(|tokens| tokens as u64)
    }

    /// A connection for one conversation.
    pub fn connect(self: &Arc<Self>, model: &Arc<PoolEntry>) -> Result<Box<dyn Model + Send>, Error> {
        match &model.source {
            ModelSource::Local(_) => Ok(Box::new(PooledModel {
                pool: Arc::clone(self),
                entry: Arc::clone(model),
                background_job: BackgroundJob::default(),
                parents: Vec::new(),
            })),
            ModelSource::Script(script) => Ok(Box::new(script.clone())),
            ModelSource::Remote => wiring::open_model(&model.env, &self.settings).map_err(|error| {
                Error::new(
                    error_kind(&error).unwrap_or(ErrorKind::Internal),
                    "connecting to the model",
                    error_text(&error),
                )
            }),
        }
    }

    /// A local model in memory: loads it if it was unloaded.
    fn acquire(&self, entry: &PoolEntry) -> Result<Llama, Error> {
        let name = &entry.info.name;
        let Some(local) = entry.local() else {
            return Err(Error::internal("using the model", format!("{name} is not a local model")));
        };
        if let Some(llama) = local.loaded() {
            return Ok(llama);
        }
        let _one_at_a_time = self.wait_for_loading(name)?;
        if let Some(llama) = local.loaded() {
            return Ok(llama);
        }
        self.make_room(name, local.bytes)?;
        let llama =
            open_probed_model(&entry.env, &self.settings).map_err(|error| load_error(name, &error))?;
        if *llama.info() != entry.info {
            let why = "the file has changed since the server was started; restart the server";
            return Err(Error::new(ErrorKind::Conflict, format!("loading {name} again"), why));
        }
        *local.llama.lock() = Some(llama.clone());
        Ok(llama)
    }

    pub fn is_special_token(&self, id: TokenId) -> bool {
        let Ok(token) = i32::try_from(id.0) else { return false };
        let llama = self.default.local().and_then(|_| self.acquire(&self.default).ok());
        llama.is_some_and(|llama| llama.weights().is_control(token))
    }

    /// Deletes the KV cells of a conversation or a world from all models in memory: it may have had another model before, which
    /// would write its cells to disk when it is unloaded. Cells on disk are erased with the text.
    pub fn delete_kv(&self, kv_key: &str) -> Result<(), Error> {
        for entry in self.entries() {
            let loaded = entry.local().and_then(|local| local.llama.lock().clone());
            if let Some(mut llama) = loaded {
                llama.delete_kv(kv_key)?;
            }
        }
        Ok(())
    }

    /// The models of the pool, the default one first.
    fn entries(&self) -> Vec<Arc<PoolEntry>> {
        let chosen = self.chosen.lock();
        std::iter::once(&self.default).chain(chosen.iter().map(|(_, model)| model)).map(Arc::clone).collect()
    }

    /// Unloads models that nobody uses, the least recently used first, until a model of so many bytes fits the memory of the
    /// machine and `model.memory`. The caller holds `loading`.
    fn make_room(&self, name: &str, bytes: u64) -> Result<(), Error> {
        loop {
            let entries = self.entries();
            let loaded = entries.iter().filter_map(|entry| entry.local()).filter(|local| local.is_loaded());
            let used: u64 = loaded.map(|local| local.bytes).sum();
            let budget = self.settings.model_memory.as_bytes();
            let within_budget = budget.is_none_or(|budget| used + bytes <= budget);
            if within_budget && fits_memory(bytes, system_memory::available_bytes()) != Some(false) {
                return Ok(());
            }
            let idle = entries.iter().filter(|entry| entry.is_idle()).filter_map(|entry| entry.local());
            let Some(oldest) = idle.min_by_key(|local| *local.last_used.lock()) else {
                let why = match budget.filter(|_| !within_budget) {
                    Some(budget) => format!(
                        "it needs {} MB, and the models in use leave too little of model.memory ({} MB): choose a smaller \
                         model, or raise model.memory",
                        bytes / 1_000_000,
                        budget / 1_000_000
                    ),
                    None => format!(
                        "it needs {} MB, and there is not enough free memory for it: choose a smaller model, or end other \
                         programs",
                        bytes / 1_000_000
                    ),
                };
                return Err(Error::new(ErrorKind::Unavailable, format!("loading {name}"), why));
            };
            drop(oldest.take_unused());
        }
    }

    /// Unloads models that nobody has used for so long.
    fn unload_idle(&self, unload_after: Duration) {
        for entry in self.entries() {
            let Some(local) = entry.local() else { continue };
            if entry.is_idle() && local.last_used.lock().elapsed() >= unload_after {
                // A model that is loaded again must not open the KV archive while it is being written.
                let _one_at_a_time = self.loading.lock();
                if let Some(llama) = local.take_unused() {
                    drop(llama);
                    tracing::info!("{} was unloaded: nobody used it for {unload_after:?}", entry.info.name);
                }
            }
        }
    }

    /// How many models are in memory.
    pub fn loaded_count(&self) -> usize {
        self.entries().iter().filter_map(|entry| entry.local()).filter(|local| local.is_loaded()).count()
    }

    /// Refuses what a client must not choose: a path, a script, an address that no setting allows.
    pub fn check_choice(&self, name: &str) -> Result<(), Error> {
        let operation = "choosing a model";
        if self.env.models.name.as_deref() == Some(name) {
            return Ok(());
        }
        if RemoteModel::is_address(name) {
            return self.check_address(name);
        }
        if !is_plain_name(name) {
            let message = format!("'{name}' is neither the name of a model nor the address of a server");
            return Err(Error::invalid_input(operation, message));
        }
        let failed =
            |error: anyhow::Error| Error::new(ErrorKind::Internal, "listing the models", error_text(&error));
        let library = self.env.model_library().map_err(failed)?;
        let installed = library.installed().map_err(failed)?;
        if installed.iter().any(|model| model.kind == ModelKind::Chat && model.name == name) {
            return Ok(());
        }
        if installed.iter().any(|model| model.name == name) {
            let message = format!("{name} is an embedding model, which cannot chat: choose a chat model");
            return Err(Error::invalid_input(operation, message));
        }
        Err(Error::not_found(operation, library.unknown_model_message(name, &installed)))
    }

    /// Whether the owner of the server named this model: in `rooms.models`, or its server with its port in `model.servers`.
    fn is_set_by_hand(&self, name: &str) -> bool {
        let with_port = |server: &&String| has_port(server);
        let servers: Vec<String> = self.settings.model_servers.0.iter().filter(with_port).cloned().collect();
        self.settings.rooms_models.0.iter().any(|other| other == name)
            || is_listed_address(name, &servers).unwrap_or(false)
    }

    /// Refuses addresses of servers that neither `model.servers` nor `rooms.models` has: this program must not be a way into
    /// networks that its clients cannot reach, nor one to send conversations anywhere.
    pub fn check_address(&self, address: &str) -> Result<(), Error> {
        // A settings file that cannot be read allows what was allowed at the start, not what the defaults allow.
        let settings =
            self.env.load_settings().map_or_else(|_| self.settings.clone(), |loaded| loaded.settings);
        let is_known = self.env.models.name.as_deref() == Some(address)
            || settings.rooms_models.0.iter().any(|other| other == address);
        if is_known || is_listed_address(address, &settings.model_servers.0)? {
            return Ok(());
        }
        let listed = match settings.model_servers.0.is_empty() {
            true => "no model server".to_owned(),
            false => format!("only model servers at {}", settings.model_servers),
        };
        let message = format!(
            "{listed} can be used: add the host to the setting model.servers by hand, such as localhost, 192.168.1.7 or \
             192.168.1.7:5001"
        );
        Err(Error::new(ErrorKind::Forbidden, "using the address", message))
    }
}

fn load_error(name: &str, error: &anyhow::Error) -> Error {
    Error::new(error_kind(error).unwrap_or(ErrorKind::Internal), format!("loading {name}"), error_text(error))
}

/// The thread that unloads models. It ends with the pool.
fn unload_idle_models(pool: &Weak<ModelPool>, unload_after: Duration) {
    let interval = (unload_after / 4).clamp(Duration::from_millis(100), Duration::from_secs(30));
    loop {
        std::thread::sleep(interval);
        let Some(pool) = pool.upgrade() else { return };
        pool.unload_idle(unload_after);
    }
}

/// A conversation's connection to a local model. The model is in memory while a call runs, and may be unloaded between calls.
struct PooledModel {
    pool: Arc<ModelPool>,
    entry: Arc<PoolEntry>,
    /// Its background job, whichever handle to the model runs it.
    background_job: BackgroundJob,
    /// What [`Model::inherit_kv`] was told. A model that was unloaded has forgotten it.
    parents: Vec<(String, String, u64)>,
}

impl PooledModel {
    fn acquire(&self) -> Result<Llama, Error> {
        let mut llama = self.pool.acquire(&self.entry)?.with_background_job(&self.background_job);
        // The archive keeps them in a map: telling it again costs nothing.
        for (conversation, parent, positions) in &self.parents {
            llama.inherit_kv(conversation, parent, *positions);
        }
        Ok(llama)
    }
}

impl Model for PooledModel {
    fn info(&self) -> &ModelInfo {
        &self.entry.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.acquire()?.tokenize(text, special)
    }

    fn count_tokens(&mut self, text: &str) -> Result<usize, Error> {
        self.acquire()?.count_tokens(text)
    }

    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        self.acquire()?.detokenize(ids)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.acquire()?.generate(prompt, sampling, watch, listen)
    }

    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        self.acquire()?.check_constraint(constraint)
    }

    fn prefill(
        &mut self,
        prompt: &Prompt<'_>,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.acquire()?.prefill(prompt, listen)
    }

    fn cancel_handle(&self) -> Option<CancelHandle> {
        let (entry, job) = (Arc::clone(&self.entry), Arc::clone(&self.background_job));
        Some(Arc::new(move || {
            let llama = entry.local().and_then(|local| local.llama.lock().clone());
            let llama = llama.map(|llama| llama.with_background_job(&job));
            if let Some(cancel) = llama.and_then(|llama| llama.cancel_handle()) {
                cancel();
            }
        }))
    }

    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        self.acquire()?.persist_kv(conversation, window)
    }

    fn inherit_kv(&mut self, conversation: &str, parent: &str, positions: u64) {
        self.parents.retain(|(branch, ..)| branch != conversation);
        self.parents.push((conversation.to_owned(), parent.to_owned(), positions));
    }

    fn delete_kv(&mut self, conversation: &str) -> Result<(), Error> {
        self.parents.retain(|(branch, ..)| branch != conversation);
        self.pool.delete_kv(conversation)
    }

    fn verify_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<Option<String>, Error> {
        self.acquire()?.verify_kv(conversation, window)
    }
}

//! The state that all requests share.

use crate::backend::{Backend, ServerLimits};
use crate::chat_dispatcher::ChatDispatcher;
use crate::completion_history::CompletionHistories;
use crate::error::{ApiResult, ErrorResponse};
use crate::events::EventHub;
use crate::forgetting_loop::PressureQueue;
use crate::generation_log::GenerationLog;
use crate::halo::{MAX_IMPORTS, RunningDownloads};
use crate::metrics::Metrics;
use crate::open_worlds::OpenWorlds;
use crate::otlp::TraceExporter;
use crate::response_index::ResponseIndex;
use crate::running_completions::RunningCompletions;
use crate::state_cache::StateCache;
use crate::store_probe::StoreProbe;
use crate::transcript_cache::TranscriptCache;
use axum::http::StatusCode;
use halo_core::Error;
use halo_core::change::Change;
use halo_core::name::is_invisible_control;
use halo_core::store::{ConversationSummary, RecordKind, Store};
use halo_engine::event::Event;
use halo_engine::host::{ConversationHandle, ConversationHost, EventListener, HostLimits};
use halo_engine::scheduler::QueuePlace;
use halo_engine::session::{MESSAGE_ID_KEY, SearchIndexing};
use halo_engine::snapshot::{ConversationSnapshot, ConversationState, SnapshotCell};
use halo_recall::recall::SharedIndex;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use tokio::sync::Semaphore;

/// The state that all requests share.
pub struct App {
    pub(crate) host: ConversationHost,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) events: Arc<EventHub>,
    pub(crate) limits: ServerLimits,
    pub(crate) metrics: Metrics,
    pub(crate) completion_histories: CompletionHistories,
    pub(crate) running_completions: RunningCompletions,
    pub(crate) generation_log: Arc<GenerationLog>,
    pub(crate) state_cache: Arc<StateCache>,
    pub(crate) worlds: OpenWorlds,
    pub(crate) store_probe: StoreProbe,
    pub(crate) import_permits: Arc<Semaphore>,
    pub(crate) dispatcher: ChatDispatcher,
    pub(crate) response_index: ResponseIndex,
    pub(crate) pressure_queue: Arc<PressureQueue>,
    /// When the server started, in seconds since 1970.
    started_at: i64,
    readers: ReaderPool,
    snapshots: Mutex<VecDeque<CachedSnapshot>>,
    /// Conversations that are being loaded, so that requests at the same time load one once.
    loading: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    pub(crate) transcripts: TranscriptCache,
    pub(crate) downloads: RunningDownloads,
    undo_log: Mutex<UndoLog>,
    /// The latest messages that have a client's id: conversation and id.
    message_ids: Mutex<VecDeque<(String, String)>>,
}

/// Passes the events of conversations on, and drops what is cached of those that are closed.
struct HostListener {
    events: Arc<EventHub>,
    state_cache: Arc<StateCache>,
    pressure_queue: Arc<PressureQueue>,
    generation_log: Arc<GenerationLog>,
}

impl EventListener for HostListener {
    fn on_event(&self, conversation: &str, number: u64, event: &Event, snapshot: &SnapshotCell) {
        self.events.on_event(conversation, number, event, snapshot);
        if let Event::Done(summary) = event {
            self.generation_log.record_turn(summary);
            self.pressure_queue.check(conversation, &snapshot.get().state);
        }
    }

    fn on_close(&self, _: &str) {
        self.state_cache.remove_unused();
    }
}

/// A conversation that is not open, as it was loaded last.
struct CachedSnapshot {
    created: i64,
    revision: u64,
    state: Arc<ConversationState>,
    notices: Vec<String>,
    /// Built when the conversation is searched for the first time.
    index: Arc<OnceLock<SharedIndex>>,
}

const MAX_SNAPSHOTS: usize = 16;

/// A read-only view of a conversation.
pub(crate) struct ConversationView {
    pub snapshot: ConversationSnapshot,
    /// Messages for the user about how it was opened.
    pub notices: Vec<String>,
}

/// Stores for reading. Each holds a few open files, so their number is limited; further readers wait.
#[derive(Default)]
struct ReaderPool {
    state: Mutex<ReaderPoolState>,
    released: Condvar,
}

#[derive(Default)]
struct ReaderPoolState {
    idle: Vec<Box<dyn Store + Send>>,
    in_use: usize,
}

const MAX_READERS: usize = 8;

/// The latest manual edits, with the changes that undo them.
#[derive(Default)]
struct UndoLog {
    last_id: u64,
    entries: VecDeque<(u64, String, Change)>,
}

const MAX_UNDO_ENTRIES: usize = 256;

const MAX_MESSAGE_IDS: usize = 1024;

/// The longest name that the store accepts.
pub(crate) const MAX_NAME_BYTES: usize = 200;

/// Checks the name of a new conversation, which a client gives in `field`. Everything that the store would refuse is
/// refused here, before anything is stored.
pub(crate) fn check_conversation_name(field: &str, name: &str) -> ApiResult<()> {
    let problem = if name.trim().is_empty() {
        "is empty".to_owned()
    } else if name.len() > MAX_NAME_BYTES {
        format!("has {} bytes; at most {MAX_NAME_BYTES} are allowed", name.len())
    } else if name.trim() != name {
        "begins or ends with a space".to_owned()
    } else if let Some(c) = name.chars().find(|&c| is_invisible_control(c)) {
        format!("has the invisible control character U+{:04X}", u32::from(c))
    } else if name.starts_with("world:") {
        "begins with 'world:', which is for worlds of rooms".to_owned()
    } else {
        return Ok(());
    };
    Err(ErrorResponse::bad_request(format!("{field}: the name of the conversation {problem}")))
}

impl App {
    /// With an exporter, every turn is traced.
    #[must_use]
    pub fn new(
        backend: Arc<dyn Backend>,
        limits: ServerLimits,
        exporter: Option<TraceExporter>,
    ) -> Arc<Self> {
        let events = Arc::new(EventHub::new(exporter));
        let opener = Arc::clone(&backend);
        let open = Box::new(move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
            opener.open_session(name, progress)
        });
        let host_limits = HostLimits {
            idle_timeout: limits.idle_timeout,
            max_open: limits.max_open_conversations,
            parallel: limits.parallel,
        };
        let state_cache = Arc::new(StateCache::default());
        let pressure_queue = Arc::new(PressureQueue::default());
        let generation_log = Arc::new(GenerationLog::default());
        let listener = HostListener {
            events: Arc::clone(&events),
            state_cache: Arc::clone(&state_cache),
            pressure_queue: Arc::clone(&pressure_queue),
            generation_log: Arc::clone(&generation_log),
        };
        let host = ConversationHost::new(open, Arc::new(listener), host_limits);
        Arc::new(Self {
            host,
            backend,
            events,
            limits,
            metrics: Metrics::default(),
            completion_histories: CompletionHistories::default(),
            running_completions: RunningCompletions::default(),
            generation_log,
            state_cache,
            worlds: OpenWorlds::default(),
            store_probe: StoreProbe::default(),
            import_permits: Arc::new(Semaphore::new(MAX_IMPORTS)),
            dispatcher: ChatDispatcher::default(),
            response_index: ResponseIndex::default(),
            pressure_queue,
            started_at: jiff::Timestamp::now().as_second(),
            readers: ReaderPool::default(),
            snapshots: Mutex::default(),
            loading: Mutex::default(),
            transcripts: TranscriptCache::default(),
            undo_log: Mutex::default(),
            downloads: RunningDownloads::default(),
            message_ids: Mutex::default(),
        })
    }

    /// Opens a conversation that exists.
    pub(crate) fn open_conversation(&self, name: &str) -> ApiResult<Arc<ConversationHandle>> {
        if let Some(handle) = self.host.find_open(name) {
            return Ok(handle);
        }
        if self.with_reader(|store| store.find_conversation(name))?.is_none() {
            return Err(conversation_not_found(name));
        }
        Ok(self.host.conversation(name)?)
    }

    /// A conversation for reading, whether it is open or not. Takes no lease and writes nothing.
    pub(crate) fn view_conversation(&self, name: &str) -> ApiResult<ConversationView> {
        // Events that are published from now on are newer than what is loaded below.
        let last_event = self.host.last_event_number();
        let open = self.host.find_open(name).map(|handle| ConversationView {
            snapshot: handle.snapshot_cell().get(),
            notices: handle.notices().to_vec(),
        });
        if let Some(view) = open {
            let is_busy = view.snapshot.answer.is_some() || view.snapshot.state.timeline.is_empty();
            if is_busy {
                return Ok(view);
            }
            // Another program may have changed the conversation in the store since.
            return match self.with_reader(|store| store.find_conversation(name))? {
                Some(stored) if stored.changes > view.snapshot.state.timeline.revision() => {
                    self.view_stored_conversation(&stored, last_event)
                }
                _ => Ok(view),
            };
        }
        let stored = self.with_reader(|store| store.find_conversation(name))?;
        let stored = stored.ok_or_else(|| conversation_not_found(name))?;
        self.view_stored_conversation(&stored, last_event)
    }

    /// A conversation from the store, or from the cache if it has not changed since.
    fn view_stored_conversation(
        &self,
        stored: &ConversationSummary,
        last_event: u64,
    ) -> ApiResult<ConversationView> {
        let view = |cached: &CachedSnapshot| ConversationView {
            snapshot: ConversationSnapshot { state: Arc::clone(&cached.state), answer: None, last_event },
            notices: cached.notices.clone(),
        };
        let is_current = |cached: &&CachedSnapshot| {
            let key = (cached.state.name.as_str(), cached.created, cached.revision);
            key == (stored.name.as_str(), stored.created, stored.changes)
        };
        let find = || self.snapshots.lock().iter().find(is_current).map(view);
        if let Some(view) = find() {
            return Ok(view);
        }
        self.load_once(&stored.name, || {
            if let Some(view) = find() {
                return Ok(view);
            }
            let mut session = self.backend.open_session_read_only(&stored.name, SearchIndexing::Skip)?;
            let loaded = CachedSnapshot {
                created: stored.created,
                revision: session.timeline().revision(),
                notices: session.take_notices(),
                state: Arc::new(session.state()),
                index: Arc::default(),
            };
            drop(session);
            let view = view(&loaded);
            let mut snapshots = self.snapshots.lock();
            snapshots.retain(|other| other.state.name != stored.name);
            snapshots.push_back(loaded);
            if snapshots.len() > MAX_SNAPSHOTS {
                snapshots.pop_front();
            }
            Ok(view)
        })
    }

    /// Runs `load` while no other request loads the same conversation.
    fn load_once<T>(&self, name: &str, load: impl FnOnce() -> ApiResult<T>) -> ApiResult<T> {
        let lock = Arc::clone(self.loading.lock().entry(name.to_owned()).or_default());
        let result = {
            let _one_at_a_time = lock.lock();
            load()
        };
        let mut loading = self.loading.lock();
        // The map has one, and this function the other.
        if Arc::strong_count(&lock) <= 2 {
            loading.remove(name);
        }
        result
    }

    /// The search index of a conversation. One that is not open is read without it, because building it reads all of the text.
    pub(crate) fn search_index(&self, state: &ConversationState) -> ApiResult<SharedIndex> {
        if let Some(index) = &state.index {
            return Ok(Arc::clone(index));
        }
        let is_same = |cached: &&CachedSnapshot| cached.state.name == state.name;
        let cell = self.snapshots.lock().iter().find(is_same).map(|cached| Arc::clone(&cached.index));
        let cell = cell.unwrap_or_default();
        self.load_once(&state.name, || {
            if let Some(index) = cell.get() {
                return Ok(Arc::clone(index));
            }
            let session = self.backend.open_session_read_only(&state.name, SearchIndexing::Build)?;
            let index = session.state().index;
            let index = index.ok_or_else(|| Error::internal("searching", "the index was not built"))?;
            Ok(Arc::clone(cell.get_or_init(|| index)))
        })
    }

    /// A view of a conversation that has messages. While the first message is queued, the store does not have the conversation.
    pub(crate) fn view_nonempty_conversation(&self, name: &str) -> ApiResult<ConversationView> {
        let view = self.view_conversation(name)?;
        match view.snapshot.state.timeline.is_empty() {
            true => Err(ErrorResponse::not_found(format!("the conversation '{name}' has no messages yet"))),
            false => Ok(view),
        }
    }

    /// Whether no conversation has that name, in the store or open.
    pub(crate) fn is_name_free(&self, name: &str) -> ApiResult<bool> {
        Ok(self.host.find_open(name).is_none()
            && self.with_reader(|store| store.find_conversation(name))?.is_none())
    }

    /// Opens a conversation, or creates it with a name that a client gives in `field`.
    pub(crate) fn open_or_create_conversation(
        &self,
        field: &str,
        name: &str,
    ) -> ApiResult<Arc<ConversationHandle>> {
        if let Some(handle) = self.host.find_open(name) {
            return Ok(handle);
        }
        if check_conversation_name(field, name).is_err() && self.is_name_free(name)? {
            check_conversation_name(field, name)?;
        }
        Ok(self.host.conversation(name)?)
    }

    /// Reads from the store, concurrently with other readers and without waiting for writers.
    pub(crate) fn with_reader<T>(
        &self,
        work: impl FnOnce(&mut dyn Store) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut store = self.readers.acquire(|| self.backend.open_reader())?;
        let result = work(&mut *store);
        // A store that failed is not used again.
        self.readers.release(result.is_ok().then_some(store));
        result
    }

    /// Stores the change that undoes an edit. Returns its id.
    pub(crate) fn record_undo(&self, conversation: &str, undo: Change) -> u64 {
        let mut log = self.undo_log.lock();
        log.last_id += 1;
        let id = log.last_id;
        log.entries.push_back((id, conversation.to_owned(), undo));
        if log.entries.len() > MAX_UNDO_ENTRIES {
            log.entries.pop_front();
        }
        id
    }

    /// The change that undoes the edit with that id.
    pub(crate) fn find_undo(&self, conversation: &str, id: u64) -> Option<Change> {
        let log = self.undo_log.lock();
        let entry = log.entries.iter().find(|(other, name, _)| *other == id && name == conversation);
        entry.map(|(_, _, undo)| undo.clone())
    }

    /// Whether a message with that client's id was accepted already.
    pub(crate) fn is_duplicate_message(&self, conversation: &str, id: &str) -> ApiResult<bool> {
        if id.is_empty() || id.len() > 100 {
            return Err(ErrorResponse::bad_request("the id of a message must have 1 to 100 characters"));
        }
        let is_same =
            |(name, other): &(String, String)| (name.as_str(), other.as_str()) == (conversation, id);
        if self.message_ids.lock().iter().any(is_same) {
            return Ok(true);
        }
        let records = self.with_reader(|store| store.records(conversation, RecordKind::Setting))?;
        Ok(records.iter().any(|record| record.key == MESSAGE_ID_KEY && record.value == id))
    }

    pub(crate) fn record_message_id(&self, conversation: &str, id: &str) {
        let mut ids = self.message_ids.lock();
        ids.push_back((conversation.to_owned(), id.to_owned()));
        if ids.len() > MAX_MESSAGE_IDS {
            ids.pop_front();
        }
    }

    /// The message was refused, so the client may send it again.
    pub(crate) fn release_message_id(&self, conversation: &str, id: &str) {
        self.message_ids.lock().retain(|(name, other)| (name.as_str(), other.as_str()) != (conversation, id));
    }

    /// A place in the queue of the model, for a request that will wait there.
    pub(crate) fn reserve_queue_place(&self) -> ApiResult<QueuePlace> {
        let max = self.limits.max_queued;
        self.host.scheduler().reserve_place(max).ok_or_else(|| {
            let message = format!("{max} requests are queued for the model already; try again later");
            ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// When the model file was changed, or else when the server started, in seconds since 1970.
    pub(crate) fn model_created(&self) -> i64 {
        match self.backend.model_details().modified {
            0 => self.started_at,
            modified => modified,
        }
    }

    /// Drops what is cached under the name of a conversation that was erased or renamed.
    pub(crate) fn drop_cached(&self, name: &str) {
        self.state_cache.remove(name);
        self.response_index.remove_conversation(name);
        self.snapshots.lock().retain(|cached| cached.state.name != name);
        self.undo_log.lock().entries.retain(|(_, conversation, _)| conversation != name);
    }

    /// Drops the state of a conversation that was read with its former model.
    pub(crate) fn drop_snapshot(&self, name: &str) {
        self.state_cache.remove(name);
        self.snapshots.lock().retain(|cached| cached.state.name != name);
    }

    /// Stops every answer, stores it, and closes all conversations.
    pub fn shutdown(&self) {
        // The last connection to a database checkpoints it, and a reading one cannot: the readers are closed first.
        self.readers.clear();
        self.pressure_queue.close();
        self.worlds.close_all();
        self.host.close_all();
        self.events.close();
    }
}

pub(crate) fn conversation_not_found(name: &str) -> ErrorResponse {
    ErrorResponse::not_found(format!("there is no conversation '{name}'; the first message creates it"))
}

impl ReaderPool {
    fn acquire(
        &self,
        open: impl FnOnce() -> Result<Box<dyn Store + Send>, Error>,
    ) -> Result<Box<dyn Store + Send>, Error> {
        let mut state = self.state.lock();
        while state.idle.is_empty() && state.in_use >= MAX_READERS {
            self.released.wait(&mut state);
        }
        state.in_use += 1;
        match state.idle.pop() {
            Some(store) => Ok(store),
            None => {
                drop(state);
                open().inspect_err(|_| self.release(None))
            }
        }
    }

    fn release(&self, store: Option<Box<dyn Store + Send>>) {
        let mut state = self.state.lock();
        state.in_use = state.in_use.saturating_sub(1);
        state.idle.extend(store);
        drop(state);
        self.released.notify_one();
    }

    fn clear(&self) {
        self.state.lock().idle.clear();
    }
}

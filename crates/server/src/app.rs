//! What all requests share.

use crate::attention_cache::AttentionCache;
use crate::backend::{Backend, ServerLimits};
use crate::completion::CompletionHistories;
use crate::error::{ApiResult, ErrorResponse};
use crate::events::EventHub;
use crate::metrics::Metrics;
use crate::openai::ChatDispatcher;
use crate::otlp::TraceExporter;
use crate::state_cache::StateCache;
use crate::worlds::OpenWorlds;
use axum::http::StatusCode;
use halo_core::Error;
use halo_core::change::Change;
use halo_core::store::{RecordKind, Store};
use halo_engine::host::{ConversationHandle, ConversationHost, EventListener, HostLimits};
use halo_engine::recorder::RecorderPurpose;
use halo_engine::session::MESSAGE_ID_KEY;
use halo_engine::snapshot::{ConversationSnapshot, ConversationState};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What all requests share.
pub struct App {
    pub(crate) host: ConversationHost,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) events: Arc<EventHub>,
    pub(crate) limits: ServerLimits,
    pub(crate) metrics: Metrics,
    pub(crate) completion_histories: CompletionHistories,
    pub(crate) attention_cache: AttentionCache,
    pub(crate) state_cache: StateCache,
    pub(crate) worlds: OpenWorlds,
    pub(crate) dispatcher: ChatDispatcher,
    readers: ReaderPool,
    snapshots: Mutex<VecDeque<CachedSnapshot>>,
    undo_log: Mutex<UndoLog>,
    /// Messages that were taken, by conversation and the client's number: the latest.
    message_ids: Mutex<VecDeque<(String, String)>>,
}

/// A conversation that is not open, as it was read last.
struct CachedSnapshot {
    created: i64,
    revision: u64,
    state: Arc<ConversationState>,
    notices: Vec<String>,
}

/// How many are kept.
const MAX_SNAPSHOTS: usize = 16;

/// A conversation as it can be looked at.
pub(crate) struct ConversationView {
    pub snapshot: ConversationSnapshot,
    /// What the user should know of it.
    pub notices: Vec<String>,
}

/// Stores to read from. Each is a few open files, so there are not many, and who comes later waits.
#[derive(Default)]
struct ReaderPool {
    state: Mutex<(Vec<Box<dyn Store + Send>>, usize)>,
    released: Condvar,
}

/// How many there are at most.
const MAX_READERS: usize = 8;

/// What was done by hand and can be taken back: the latest, by number.
#[derive(Default)]
struct UndoLog {
    last_id: u64,
    entries: VecDeque<(u64, String, Change)>,
}

/// How many are kept.
const MAX_UNDO_ENTRIES: usize = 256;

/// How many numbers of messages are remembered.
const MAX_MESSAGE_IDS: usize = 1024;

/// Whether a conversation can be called that.
pub(crate) fn check_conversation_name(name: &str) -> ApiResult<()> {
    let wrong = name.trim().is_empty() || name.chars().count() > 200 || name.chars().any(char::is_control);
    if wrong {
        return Err(ErrorResponse::bad_request(
            "a conversation's name has 1 to 200 characters, none of them invisible",
        ));
    }
    Ok(())
}

impl App {
    /// An app of these parts, whose turns are traced where somebody wants to know.
    #[must_use]
    pub fn new(parts: Arc<dyn Backend>, limits: ServerLimits, traces: Option<TraceExporter>) -> Arc<Self> {
        let hub = Arc::new(EventHub::new(traces));
        let (opener, looks) = (Arc::clone(&parts), AttentionCache::default());
        let watched = looks.clone();
        let open = Box::new(move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
            let mut session = opener.open_session(name, progress)?;
            session.set_recorder(RecorderPurpose::Live, Some(watched.recorder(name)));
            Ok(session)
        });
        let open_limits =
            HostLimits { idle_timeout: limits.idle_timeout, max_open: limits.max_open_conversations };
        let host = ConversationHost::new(open, Arc::clone(&hub) as Arc<dyn EventListener>, open_limits);
        Arc::new(Self {
            host,
            backend: parts,
            events: hub,
            limits,
            metrics: Metrics::default(),
            completion_histories: CompletionHistories::default(),
            attention_cache: looks,
            state_cache: StateCache::default(),
            worlds: OpenWorlds::default(),
            dispatcher: ChatDispatcher::default(),
            readers: ReaderPool::default(),
            snapshots: Mutex::default(),
            undo_log: Mutex::default(),
            message_ids: Mutex::default(),
        })
    }

    /// The conversation of that name, open; it must be there.
    pub(crate) fn open_conversation(&self, name: &str) -> ApiResult<Arc<ConversationHandle>> {
        if let Some(desk) = self.host.find_open(name) {
            return Ok(desk);
        }
        if self.with_reader(|store| store.find_conversation(name))?.is_none() {
            return Err(conversation_not_found(name));
        }
        Ok(self.host.conversation(name)?)
    }

    /// A conversation as it stands, whether it is open or not. Looking claims nothing and writes nothing.
    pub(crate) fn view_conversation(&self, name: &str) -> ApiResult<ConversationView> {
        let open =
            self.host.find_open(name).map(|desk| (desk.snapshot_cell().get(), desk.notices().to_vec()));
        let is_busy = |seen: &ConversationSnapshot| seen.answer.is_some() || seen.state.timeline.is_empty();
        // What is told of it from now on is behind this.
        let events = self.host.last_event_number();
        let known = match open {
            Some((seen, notices)) if is_busy(&seen) => {
                return Ok(ConversationView { snapshot: seen, notices });
            }
            // Another program may have changed it since something was done here.
            Some((seen, notices)) => match self.with_reader(|store| store.find_conversation(name))? {
                Some(known) if known.changes > seen.state.timeline.revision() => known,
                _ => return Ok(ConversationView { snapshot: seen, notices }),
            },
            None => self
                .with_reader(|store| store.find_conversation(name))?
                .ok_or_else(|| conversation_not_found(name))?,
        };
        let looked = |snapshot: &CachedSnapshot| ConversationView {
            snapshot: ConversationSnapshot {
                state: Arc::clone(&snapshot.state),
                answer: None,
                last_event: events,
            },
            notices: snapshot.notices.clone(),
        };
        let mut snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |s: &CachedSnapshot| {
            (s.state.name.as_str(), s.created, s.revision) == (name, known.created, known.changes)
        };
        if let Some(snapshot) = snapshots.iter().find(|snapshot| is_it(snapshot)) {
            return Ok(looked(snapshot));
        }
        drop(snapshots);
        let mut session = self.backend.open_session_read_only(name)?;
        let snapshot = CachedSnapshot {
            created: known.created,
            revision: session.timeline().revision(),
            notices: session.take_notices(),
            state: Arc::new(session.state()),
        };
        drop(session);
        let looked = looked(&snapshot);
        snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        snapshots.retain(|other| other.state.name != name);
        snapshots.push_back(snapshot);
        if snapshots.len() > MAX_SNAPSHOTS {
            snapshots.pop_front();
        }
        Ok(looked)
    }

    /// The same, where something has been said: while its first message waits for the model, the store knows nothing of it.
    pub(crate) fn view_nonempty_conversation(&self, name: &str) -> ApiResult<ConversationView> {
        let looked = self.view_conversation(name)?;
        match looked.snapshot.state.timeline.is_empty() {
            true => Err(ErrorResponse::not_found(format!("nothing has been said in '{name}' yet"))),
            false => Ok(looked),
        }
    }

    /// Whether a conversation can be called that: nobody else is, in the store or open.
    pub(crate) fn is_name_free(&self, name: &str) -> ApiResult<bool> {
        Ok(self.host.find_open(name).is_none()
            && self.with_reader(|store| store.find_conversation(name))?.is_none())
    }

    /// The same, or a new one.
    pub(crate) fn open_or_create_conversation(&self, name: &str) -> ApiResult<Arc<ConversationHandle>> {
        check_conversation_name(name)?;
        Ok(self.host.conversation(name)?)
    }

    /// Reads from the store; any number may at once, and nobody who writes is waited for.
    pub(crate) fn with_reader<T>(
        &self,
        work: impl FnOnce(&mut dyn Store) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut store = self.readers.acquire(|| self.backend.open_reader())?;
        let done = work(&mut *store);
        // One that has failed may fail again.
        self.readers.release(done.is_ok().then_some(store));
        done
    }

    /// Remembers how something is taken back. Returns its number.
    pub(crate) fn record_undo(&self, conversation: &str, undo: Change) -> u64 {
        let mut undoable = self.undo_log.lock().unwrap_or_else(PoisonError::into_inner);
        undoable.last_id += 1;
        let number = undoable.last_id;
        undoable.entries.push_back((number, conversation.to_owned(), undo));
        if undoable.entries.len() > MAX_UNDO_ENTRIES {
            undoable.entries.pop_front();
        }
        number
    }

    /// What takes back what has that number.
    pub(crate) fn find_undo(&self, conversation: &str, number: u64) -> Option<Change> {
        let undoable = self.undo_log.lock().unwrap_or_else(PoisonError::into_inner);
        let found = undoable.entries.iter().find(|(n, name, _)| *n == number && name == conversation);
        found.map(|(_, _, undo)| undo.clone())
    }

    /// Whether a message with that number was taken already.
    pub(crate) fn is_duplicate_message(&self, conversation: &str, id: &str) -> ApiResult<bool> {
        if id.is_empty() || id.len() > 100 {
            return Err(ErrorResponse::bad_request("the id of a message has 1 to 100 characters"));
        }
        let here = |(name, known): &(String, String)| (name.as_str(), known.as_str()) == (conversation, id);
        if self.message_ids.lock().unwrap_or_else(PoisonError::into_inner).iter().any(here) {
            return Ok(true);
        }
        let records = self.with_reader(|store| store.records(conversation, RecordKind::Setting))?;
        Ok(records.iter().any(|record| record.key == MESSAGE_ID_KEY && record.value == id))
    }

    /// A message with that number is on its way.
    pub(crate) fn record_message_id(&self, conversation: &str, id: &str) {
        let mut taken = self.message_ids.lock().unwrap_or_else(PoisonError::into_inner);
        taken.push_back((conversation.to_owned(), id.to_owned()));
        if taken.len() > MAX_MESSAGE_IDS {
            taken.pop_front();
        }
    }

    /// It was refused: it may come again.
    pub(crate) fn release_message_id(&self, conversation: &str, id: &str) {
        let mut taken = self.message_ids.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|(name, known)| (name.as_str(), known.as_str()) != (conversation, id));
    }

    /// Whether one more may wait for the model.
    pub(crate) fn check_queue_capacity(&self) -> ApiResult<()> {
        let waiting = self.host.scheduler().queue_len();
        if waiting >= self.limits.max_queued {
            let why = format!("{waiting} requests wait for the model already: try again later");
            return Err(ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        Ok(())
    }

    /// Ends every answer, stores what was said, and closes all conversations.
    pub fn shutdown(&self) {
        // The last to let go of a database puts it in order, and those who only read cannot.
        self.readers.clear();
        self.worlds.close_all();
        self.host.close_all();
        self.events.close();
    }
}

fn conversation_not_found(name: &str) -> ErrorResponse {
    ErrorResponse::not_found(format!("there is no conversation '{name}': say something in it, and it begins"))
}

impl ReaderPool {
    fn lock(&self) -> MutexGuard<'_, (Vec<Box<dyn Store + Send>>, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquire(
        &self,
        open: impl FnOnce() -> Result<Box<dyn Store + Send>, Error>,
    ) -> Result<Box<dyn Store + Send>, Error> {
        let mut state = self.lock();
        while state.0.is_empty() && state.1 >= MAX_READERS {
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1 += 1;
        match state.0.pop() {
            Some(store) => Ok(store),
            None => {
                drop(state);
                open().inspect_err(|_| self.release(None))
            }
        }
    }

    fn release(&self, store: Option<Box<dyn Store + Send>>) {
        let mut state = self.lock();
        state.1 = state.1.saturating_sub(1);
        state.0.extend(store);
        drop(state);
        self.released.notify_one();
    }

    fn clear(&self) {
        self.lock().0.clear();
    }
}

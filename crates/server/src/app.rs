//! What all requests share.

use crate::answer::{Answer, Refusal};
use crate::events::Hub;
use crate::looks::Looks;
use crate::metrics::Metrics;
use crate::openai::Placing;
use crate::parts::{Limits, Parts};
use crate::raw::Threads;
use crate::shown::Shown;
use crate::traces::Export;
use crate::worlds::Houses;
use axum::http::StatusCode;
use halo_core::change::Change;
use halo_core::seams::{Kind, SeamError, Store};
use halo_engine::board::{Seen, Standing};
use halo_engine::host::{Audience, Desk, Host, HostLimits};
use halo_engine::record::Purpose;
use halo_engine::session::MESSAGE_ID;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What all requests share.
pub struct App {
    pub(crate) host: Host,
    pub(crate) parts: Arc<dyn Parts>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) threads: Threads,
    pub(crate) looks: Looks,
    pub(crate) shown: Shown,
    pub(crate) worlds: Houses,
    pub(crate) placing: Placing,
    readers: Readers,
    snapshots: Mutex<VecDeque<Snapshot>>,
    undoable: Mutex<Undoable>,
    /// Messages that were taken, by conversation and the client's number: the latest.
    taken: Mutex<VecDeque<(String, String)>>,
}

/// A conversation that is not open, as it was read last.
struct Snapshot {
    created: i64,
    changes: u64,
    standing: Arc<Standing>,
    notices: Vec<String>,
}

/// How many are kept.
const SNAPSHOTS: usize = 16;

/// A conversation as it can be looked at.
pub(crate) struct Looked {
    pub seen: Seen,
    /// What the user should know of it.
    pub notices: Vec<String>,
}

/// Stores to read from. Each is a few open files, so there are not many, and who comes later waits.
#[derive(Default)]
struct Readers {
    state: Mutex<(Vec<Box<dyn Store + Send>>, usize)>,
    given_back: Condvar,
}

/// How many there are at most.
const READERS: usize = 8;

/// What was done by hand and can be taken back: the latest, by number.
#[derive(Default)]
struct Undoable {
    next: u64,
    done: VecDeque<(u64, String, Change)>,
}

/// How many are kept.
const UNDOABLE: usize = 256;

/// How many numbers of messages are remembered.
const TAKEN: usize = 1024;

/// Whether a conversation can be called that.
pub(crate) fn check_name(name: &str) -> Answer<()> {
    let wrong = name.trim().is_empty() || name.chars().count() > 200 || name.chars().any(char::is_control);
    if wrong {
        return Err(Refusal::bad("a conversation's name has 1 to 200 characters, none of them invisible"));
    }
    Ok(())
}

impl App {
    /// An app of these parts, whose turns are traced where somebody wants to know.
    #[must_use]
    pub fn new(parts: Arc<dyn Parts>, limits: Limits, traces: Option<Export>) -> Arc<Self> {
        let hub = Arc::new(Hub::new(traces));
        let (opener, looks) = (Arc::clone(&parts), Looks::default());
        let watched = looks.clone();
        let open = Box::new(move |name: &str, progress: &mut dyn FnMut(usize, usize)| {
            let mut session = opener.open(name, progress)?;
            session.record(Purpose::Look, Some(watched.watcher(name)));
            Ok(session)
        });
        let open_limits = HostLimits { idle: limits.idle, open: limits.open };
        let host = Host::new(open, Arc::clone(&hub) as Arc<dyn Audience>, open_limits);
        Arc::new(Self {
            host,
            parts,
            hub,
            limits,
            metrics: Metrics::default(),
            threads: Threads::default(),
            looks,
            shown: Shown::default(),
            worlds: Houses::default(),
            placing: Placing::default(),
            readers: Readers::default(),
            snapshots: Mutex::default(),
            undoable: Mutex::default(),
            taken: Mutex::default(),
        })
    }

    /// The conversation of that name, open; it must be there.
    pub(crate) fn desk(&self, name: &str) -> Answer<Arc<Desk>> {
        if let Some(desk) = self.host.find(name) {
            return Ok(desk);
        }
        if self.read(|store| store.find(name))?.is_none() {
            return Err(no_conversation(name));
        }
        Ok(self.host.desk(name)?)
    }

    /// A conversation as it stands, whether it is open or not. Looking claims nothing and writes nothing.
    pub(crate) fn look(&self, name: &str) -> Answer<Looked> {
        let open = self.host.find(name).map(|desk| (desk.board().look(), desk.notices().to_vec()));
        let is_busy = |seen: &Seen| seen.running.is_some() || seen.standing.timeline.is_empty();
        // What is told of it from now on is behind this.
        let events = self.host.last_event();
        let known = match open {
            Some((seen, notices)) if is_busy(&seen) => return Ok(Looked { seen, notices }),
            // Another program may have changed it since something was done here.
            Some((seen, notices)) => match self.read(|store| store.find(name))? {
                Some(known) if known.changes > seen.standing.timeline.revision() => known,
                _ => return Ok(Looked { seen, notices }),
            },
            None => self.read(|store| store.find(name))?.ok_or_else(|| no_conversation(name))?,
        };
        let looked = |snapshot: &Snapshot| Looked {
            seen: Seen { standing: Arc::clone(&snapshot.standing), running: None, events },
            notices: snapshot.notices.clone(),
        };
        let mut snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |s: &Snapshot| {
            (s.standing.name.as_str(), s.created, s.changes) == (name, known.created, known.changes)
        };
        if let Some(snapshot) = snapshots.iter().find(|snapshot| is_it(snapshot)) {
            return Ok(looked(snapshot));
        }
        drop(snapshots);
        let mut session = self.parts.open_to_read(name)?;
        let snapshot = Snapshot {
            created: known.created,
            changes: session.timeline().revision(),
            notices: session.notices(),
            standing: Arc::new(Standing::of(&session)),
        };
        drop(session);
        let looked = looked(&snapshot);
        snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        snapshots.retain(|other| other.standing.name != name);
        snapshots.push_back(snapshot);
        if snapshots.len() > SNAPSHOTS {
            snapshots.pop_front();
        }
        Ok(looked)
    }

    /// The same, where something has been said: while its first message waits for the model, the store knows nothing of it.
    pub(crate) fn look_at_begun(&self, name: &str) -> Answer<Looked> {
        let looked = self.look(name)?;
        match looked.seen.standing.timeline.is_empty() {
            true => Err(Refusal::missing(format!("nothing has been said in '{name}' yet"))),
            false => Ok(looked),
        }
    }

    /// Whether a conversation can be called that: nobody else is, in the store or open.
    pub(crate) fn is_free(&self, name: &str) -> Answer<bool> {
        Ok(self.host.find(name).is_none() && self.read(|store| store.find(name))?.is_none())
    }

    /// The same, or a new one.
    pub(crate) fn desk_or_new(&self, name: &str) -> Answer<Arc<Desk>> {
        check_name(name)?;
        Ok(self.host.desk(name)?)
    }

    /// Reads from the store; any number may at once, and nobody who writes is waited for.
    pub(crate) fn read<T>(
        &self,
        work: impl FnOnce(&mut dyn Store) -> Result<T, SeamError>,
    ) -> Result<T, SeamError> {
        let mut store = self.readers.take(|| self.parts.store())?;
        let done = work(&mut *store);
        // One that has failed may fail again.
        self.readers.give_back(done.is_ok().then_some(store));
        done
    }

    /// Remembers how something is taken back. Returns its number.
    pub(crate) fn remember(&self, conversation: &str, undo: Change) -> u64 {
        let mut undoable = self.undoable.lock().unwrap_or_else(PoisonError::into_inner);
        undoable.next += 1;
        let number = undoable.next;
        undoable.done.push_back((number, conversation.to_owned(), undo));
        if undoable.done.len() > UNDOABLE {
            undoable.done.pop_front();
        }
        number
    }

    /// What takes back what has that number.
    pub(crate) fn undo(&self, conversation: &str, number: u64) -> Option<Change> {
        let undoable = self.undoable.lock().unwrap_or_else(PoisonError::into_inner);
        let found = undoable.done.iter().find(|(n, name, _)| *n == number && name == conversation);
        found.map(|(_, _, undo)| undo.clone())
    }

    /// Whether a message with that number was taken already.
    pub(crate) fn is_taken(&self, conversation: &str, id: &str) -> Answer<bool> {
        if id.is_empty() || id.len() > 100 {
            return Err(Refusal::bad("the id of a message has 1 to 100 characters"));
        }
        let here = |(name, known): &(String, String)| (name.as_str(), known.as_str()) == (conversation, id);
        if self.taken.lock().unwrap_or_else(PoisonError::into_inner).iter().any(here) {
            return Ok(true);
        }
        let records = self.read(|store| store.records(conversation, Kind::Setting))?;
        Ok(records.iter().any(|record| record.key == MESSAGE_ID && record.value == id))
    }

    /// A message with that number is on its way.
    pub(crate) fn take(&self, conversation: &str, id: &str) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.push_back((conversation.to_owned(), id.to_owned()));
        if taken.len() > TAKEN {
            taken.pop_front();
        }
    }

    /// It was refused: it may come again.
    pub(crate) fn give_back(&self, conversation: &str, id: &str) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|(name, known)| (name.as_str(), known.as_str()) != (conversation, id));
    }

    /// Whether one more may wait for the model.
    pub(crate) fn room_in_line(&self) -> Answer<()> {
        let waiting = self.host.gate().waiting();
        if waiting >= self.limits.waiting {
            let why = format!("{waiting} requests wait for the model already: try again later");
            return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        Ok(())
    }

    /// Ends every answer, stores what was said, and closes all conversations.
    pub fn close(&self) {
        // The last to let go of a database puts it in order, and those who only read cannot.
        self.readers.clear();
        self.worlds.close_all();
        self.host.close_all();
        self.hub.end();
    }
}

fn no_conversation(name: &str) -> Refusal {
    Refusal::missing(format!("there is no conversation '{name}': say something in it, and it begins"))
}

impl Readers {
    fn lock(&self) -> MutexGuard<'_, (Vec<Box<dyn Store + Send>>, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(
        &self,
        open: impl FnOnce() -> Result<Box<dyn Store + Send>, SeamError>,
    ) -> Result<Box<dyn Store + Send>, SeamError> {
        let mut state = self.lock();
        while state.0.is_empty() && state.1 >= READERS {
            state = self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1 += 1;
        match state.0.pop() {
            Some(store) => Ok(store),
            None => {
                drop(state);
                open().inspect_err(|_| self.give_back(None))
            }
        }
    }

    fn give_back(&self, store: Option<Box<dyn Store + Send>>) {
        let mut state = self.lock();
        state.1 = state.1.saturating_sub(1);
        state.0.extend(store);
        drop(state);
        self.given_back.notify_one();
    }

    fn clear(&self) {
        self.lock().0.clear();
    }
}

//! What all requests share.

use crate::answer::{Answer, Refusal};
use crate::events::Hub;
use crate::looks::Looks;
use crate::metrics::Metrics;
use crate::parts::{Limits, Parts};
use crate::raw::Threads;
use crate::shown::Shown;
use crate::traces::Export;
use crate::worlds::Houses;
use axum::http::StatusCode;
use halo_core::change::Change;
use halo_core::seams::{SeamError, Store};
use halo_engine::host::{Audience, Desk, Host};
use halo_engine::record::Purpose;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

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
    readers: Mutex<Vec<Box<dyn Store + Send>>>,
    undoable: Mutex<Undoable>,
}

/// What was done by hand and can be taken back: the latest, by number.
#[derive(Default)]
struct Undoable {
    next: u64,
    done: VecDeque<(u64, String, Change)>,
}

/// How many are kept.
const UNDOABLE: usize = 256;

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
        let host = Host::new(open, Arc::clone(&hub) as Arc<dyn Audience>, limits.idle);
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
            readers: Mutex::default(),
            undoable: Mutex::default(),
        })
    }

    /// The conversation of that name, open; it must be there.
    pub(crate) fn desk(&self, name: &str) -> Answer<Arc<Desk>> {
        if let Some(desk) = self.host.find(name) {
            return Ok(desk);
        }
        let there = self.read(|store| Ok(store.conversations()?.iter().any(|known| known.name == name)))?;
        if !there {
            return Err(Refusal::missing(format!(
                "there is no conversation '{name}': say something in it, and it begins"
            )));
        }
        Ok(self.host.desk(name)?)
    }

    /// The same, where something has been said: while its first message waits for the model, the store knows nothing of it.
    pub(crate) fn begun(&self, name: &str) -> Answer<Arc<Desk>> {
        let desk = self.desk(name)?;
        match desk.board().look().standing.timeline.is_empty() {
            true => Err(Refusal::missing(format!("nothing has been said in '{name}' yet"))),
            false => Ok(desk),
        }
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
        let kept = self.readers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut store = match kept {
            Some(store) => store,
            None => self.parts.store()?,
        };
        let done = work(&mut *store);
        // One that has failed may fail again.
        if done.is_ok() {
            self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(store);
        }
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
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.worlds.close_all();
        self.host.close_all();
        self.hub.end();
    }
}

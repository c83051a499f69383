//! Many conversations and one model. Each open conversation has a thread of its own: a change waits for the answer that is
//! being generated in that conversation, an answer waits for the model, and readers wait for nothing.
//!
//! [`handle`] is what callers hold; [`worker`] is the thread behind it.

pub mod handle;
mod worker;

pub use handle::{
    BoxedTurnCallback, ConversationHandle, EventListener, HostLimits, JobContext, SessionOpener, TurnRequest,
};

use crate::scheduler::ModelScheduler;
use halo_core::Error;
use handle::{HostState, OpenHandleResult};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Opens conversations, keeps them open while they are used, and closes them.
pub struct ConversationHost {
    shared: Arc<HostState>,
}

/// How long [`ConversationHost::close_unused`] waits for jobs that are under way.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long opening a conversation waits for another one to be closed.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

impl ConversationHost {
    /// A host that opens conversations with `open`, and closes those that were idle for a while.
    #[must_use]
    pub fn new(open: Box<SessionOpener>, listener: Arc<dyn EventListener>, limits: HostLimits) -> Self {
        Self { shared: Arc::new(HostState::new(open, listener, limits)) }
    }

    /// The scheduler, for requests to the model without a conversation.
    #[must_use]
    pub fn scheduler(&self) -> &ModelScheduler {
        &self.shared.scheduler
    }

    #[must_use]
    pub fn last_event_number(&self) -> u64 {
        self.shared.last_event_number()
    }

    /// The next number, for an event that belongs to no conversation.
    #[must_use]
    pub fn next_event_number(&self) -> u64 {
        self.shared.next_event_number()
    }

    /// The conversation of that name: opens it, unless it is open.
    pub fn conversation(&self, name: &str) -> Result<Arc<ConversationHandle>, Error> {
        let start = Instant::now();
        loop {
            let Some(entry) = self.reserve_entry(name) else {
                if start.elapsed() > OPEN_TIMEOUT {
                    let message = format!(
                        "{} conversations are open and all of them are busy: try again later",
                        self.shared.limits.max_open
                    );
                    return Err(Error::busy("opening the conversation", message));
                }
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let opened = entry.get_or_init(|| worker::spawn_conversation(&self.shared, name)).clone();
            // While this lock is held, no conversation is closed whose handle was just returned.
            let mut conversations = self.shared.lock();
            if let Ok(handle) = &opened
                && handle.is_open()
            {
                handle.mark_used();
                return opened;
            }
            // Opening failed, or the conversation was closed: the next caller opens it again.
            if conversations.get(name).is_some_and(|other| Arc::ptr_eq(other, &entry)) {
                conversations.remove(name);
            }
            drop(conversations);
            opened?;
        }
    }

    /// An entry for a conversation. The least recently used one is closed for it; none while all are busy.
    fn reserve_entry(&self, name: &str) -> Option<Arc<OnceLock<OpenHandleResult>>> {
        let mut conversations = self.shared.lock();
        if let Some(entry) = conversations.get(name) {
            return Some(Arc::clone(entry));
        }
        if conversations.len() >= self.shared.limits.max_open {
            let unused = (conversations.iter())
                .filter_map(|(name, entry)| {
                    let handle = entry.get()?.as_ref().ok()?;
                    handle.is_unused().then(|| (handle.last_used(), name.clone()))
                })
                .min()?;
            if let Some(Ok(handle)) = conversations.remove(&unused.1).and_then(|entry| entry.get().cloned()) {
                handle.close();
                self.shared.scheduler.preempt_idle();
            }
        }
        Some(Arc::clone(conversations.entry(name.to_owned()).or_default()))
    }

    /// The conversation of that name, if it is open.
    #[must_use]
    pub fn find_open(&self, name: &str) -> Option<Arc<ConversationHandle>> {
        let conversations = self.shared.lock();
        let handle = conversations.get(name)?.get()?.clone().ok()?;
        handle.is_open().then_some(handle)
    }

    #[must_use]
    pub fn open_conversations(&self) -> Vec<(String, Arc<ConversationHandle>)> {
        let conversations = self.shared.lock();
        let opened =
            conversations.iter().filter_map(|(name, entry)| Some((name.clone(), entry.get()?.clone().ok()?)));
        opened.filter(|(_, handle)| handle.is_open()).collect()
    }

    /// Closes a conversation after the jobs that it has. The next caller opens it again.
    pub fn close(&self, name: &str) {
        let entry = self.shared.lock().remove(name);
        if let Some(Ok(handle)) = entry.and_then(|entry| entry.get().cloned()) {
            handle.close();
            // Idle work of the conversation is not waited for.
            self.shared.scheduler.preempt_idle();
        }
    }

    /// Closes a conversation and waits until nothing uses it.
    ///
    /// # Errors
    /// When a message is being answered for longer than a few seconds.
    pub fn close_unused(&self, name: &str) -> Result<(), Error> {
        let busy = || {
            let message = "a message is being answered: wait for the answer, or stop it";
            Error::busy("closing the conversation", message)
        };
        let Some(handle) = self.find_open(name) else { return Ok(()) };
        let start = Instant::now();
        // What follows an answer takes a moment: storing the KV cells, for instance.
        while handle.has_unfinished_jobs() {
            if start.elapsed() > CLOSE_TIMEOUT {
                return Err(busy());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.close(name);
        while !handle.has_worker_exited() {
            if start.elapsed() > OPEN_TIMEOUT {
                return Err(busy());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Stops every answer, stores the tokens so far, and closes all conversations. Jobs that have not begun are dropped.
    pub fn close_all(&self) {
        self.shared.begin_shutdown();
        let names: Vec<String> = self.shared.lock().keys().cloned().collect();
        let handles: Vec<Arc<ConversationHandle>> =
            self.open_conversations().into_iter().map(|(_, handle)| handle).collect();
        handles.iter().for_each(|handle| handle.stop());
        self.shared.scheduler.preempt_idle();
        names.iter().for_each(|name| self.close(name));
        // The worker thread owns the session, and ends when its channel is closed.
        for handle in handles {
            while !handle.has_worker_exited() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

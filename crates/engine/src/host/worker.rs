//! The thread of an open conversation: it runs the jobs, and idle work between them.

use super::handle::{ConversationHandle, HostState, JobContext, OpenHandleResult, SessionJob};
use crate::event::{Event, MemoryAction};
use crate::session::Session;
use halo_core::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long idle work waits for a model that is busy.
const IDLE_RETRY: Duration = Duration::from_millis(500);

/// Vectors that are computed between two looks at the job queue.
const IDLE_EMBED_BATCH: usize = 4;

/// Opens a conversation on a thread of its own. Returns when it is open, or has failed to.
pub(super) fn spawn_conversation(shared: &Arc<HostState>, name: &str) -> OpenHandleResult {
    let (jobs, queue) = channel();
    let (opened, wait) = channel();
    let (shared, name) = (Arc::clone(shared), name.to_owned());
    let work = move || {
        let session = catch_unwind(AssertUnwindSafe(|| (shared.open_session)(&name, &mut |_, _| {})));
        let mut session = match session.unwrap_or_else(|_| Err(panic_error())) {
            Ok(session) => session,
            Err(error) => return drop(opened.send(Err(error))),
        };
        let cell = session.attach_snapshot(shared.last_event_number());
        let notices = session.take_notices();
        let handle = Arc::new(ConversationHandle::new(jobs, cell, notices, Arc::clone(&shared)));
        if opened.send(Ok(Arc::clone(&handle))).is_ok() {
            ConversationWorker { name: &name, shared: &shared, handle: &handle, session }.run(&queue);
            drop(handle);
            shared.announce_close(&name);
        }
    };
    let thread = std::thread::Builder::new().name("halo-session".into()).spawn(work);
    thread.map_err(|error| Error::internal("opening the conversation", error.to_string()))?;
    wait.recv().unwrap_or_else(|_| Err(panic_error()))
}

fn panic_error() -> Error {
    Error::internal(
        "running the conversation",
        "internal error: the conversation's thread panicked, please report it; everything up to here is stored, and the \
         conversation can be opened again",
    )
}

/// The result of a moment of idle work.
enum IdleOutcome {
    /// Something was done, or begun and preempted: there may be more.
    Worked,
    /// Another conversation uses the model.
    ModelBusy,
    /// There is nothing to do, or it failed and is not tried again before the next job.
    NothingToDo,
}

struct ConversationWorker<'a> {
    name: &'a str,
    shared: &'a HostState,
    handle: &'a Arc<ConversationHandle>,
    session: Session,
}

impl ConversationWorker<'_> {
    fn context(&self) -> JobContext<'_> {
        JobContext { name: self.name, shared: self.shared, handle: self.handle }
    }

    /// Runs jobs one after the other, until the conversation is closed.
    fn run(mut self, queue: &Receiver<SessionJob>) {
        let idle_timeout = self.shared.limits.idle_timeout;
        let (mut last_job, mut has_idle_work) = (Instant::now(), true);
        let reflection = self.session.rules().memory.and_then(|rules| rules.reflection);
        let reflect_after = reflection.map(|reflection| reflection.idle_for);
        loop {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                (has_idle_work && self.ensure_lease()).then(|| self.run_idle_work(last_job.elapsed()))
            }));
            let Ok(outcome) = outcome else { return self.handle.close() };
            let wait = match outcome {
                Some(IdleOutcome::Worked) => Duration::ZERO,
                Some(IdleOutcome::ModelBusy) => IDLE_RETRY,
                Some(IdleOutcome::NothingToDo) | None => {
                    has_idle_work = false;
                    let idle = last_job.elapsed();
                    let until_reflection = reflect_after.and_then(|after| after.checked_sub(idle));
                    until_reflection.unwrap_or(idle_timeout).min(idle_timeout.saturating_sub(idle))
                }
            };
            // Nothing happens here for a while: other processes may change the conversation.
            if self.session.holds_lease() && !has_idle_work && !self.handle.has_queued_jobs() {
                self.session.release_lease();
            }
            match queue.recv_timeout(wait) {
                Ok(job) => {
                    if !self.run_job(job) {
                        return;
                    }
                    (last_job, has_idle_work) = (Instant::now(), true);
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) if has_idle_work || last_job.elapsed() < idle_timeout => {
                    has_idle_work |= reflect_after.is_some_and(|after| last_job.elapsed() >= after);
                }
                Err(RecvTimeoutError::Timeout) if self.close_if_unused() => return,
                Err(RecvTimeoutError::Timeout) => last_job = Instant::now(),
            }
        }
    }

    /// Runs one job. Returns whether the worker continues.
    fn run_job(&mut self, job: SessionJob) -> bool {
        self.handle.job_started();
        if self.shared.is_shutting_down() {
            return false;
        }
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.ensure_lease();
            self.handle.cancel.store(false, std::sync::atomic::Ordering::SeqCst);
            let context = JobContext { name: self.name, shared: self.shared, handle: self.handle };
            job(&mut self.session, &context);
        }));
        self.handle.job_finished();
        if result.is_err() {
            // The store is consistent; the session in memory may not be.
            self.context().announce_failure(&panic_error());
            self.handle.close();
        }
        result.is_ok()
    }

    fn ensure_lease(&mut self) -> bool {
        let context = JobContext { name: self.name, shared: self.shared, handle: self.handle };
        self.session.holds_lease() || context.reacquire_lease(&mut self.session)
    }

    /// Closes the conversation unless a caller has just got its handle.
    fn close_if_unused(&self) -> bool {
        let mut conversations = self.shared.lock();
        if !self.handle.is_unused() {
            return false;
        }
        self.handle.close();
        let entry = conversations.get(self.name).and_then(|entry| entry.get());
        if entry.is_some_and(|opened| opened.as_ref().is_ok_and(|other| Arc::ptr_eq(other, self.handle))) {
            conversations.remove(self.name);
        }
        true
    }

    /// Does some idle work: missing vectors, then memories, then a reflection.
    fn run_idle_work(&mut self, idle: Duration) -> IdleOutcome {
        let (shared, handle) = (self.shared, self.handle);
        let is_interrupted = || handle.has_queued_jobs() || shared.is_shutting_down();
        if !is_interrupted() {
            match self.session.embed_pending(IDLE_EMBED_BATCH) {
                // An answer that is being generated needs the processors.
                Ok(true) if shared.scheduler.is_busy() => return IdleOutcome::ModelBusy,
                Ok(true) => return IdleOutcome::Worked,
                Ok(false) => {}
                Err(error) => {
                    let notice = format!("the search index has no new vectors: {error}");
                    self.context().announce(&Event::Notice(notice), |_| {});
                    return IdleOutcome::NothingToDo;
                }
            }
        }
        let Some(rules) = self.session.rules().memory else { return IdleOutcome::NothingToDo };
        let Some(permit) = shared.scheduler.try_acquire_idle(self.session.model().cancel_handle()) else {
            return IdleOutcome::ModelBusy;
        };
        // A job may have been queued before the permit was taken; one that is queued later preempts it.
        let is_preempted = || permit.is_preempted() || is_interrupted();
        let context = JobContext { name: self.name, shared, handle };
        let announce = |event: Event| context.announce(&event, |_| {});
        let session = &mut self.session;
        let worked =
            session.run_idle_memory_work(&is_preempted, &mut |event| announce(event)).and_then(|worked| {
                let reflection_due = rules.reflection.is_some_and(|reflection| {
                    idle >= reflection.idle_for
                        && session.messages_since_reflection() >= reflection.min_messages
                });
                if worked || !reflection_due {
                    return Ok(worked);
                }
                if let Some(id) = session.reflect(&is_preempted)? {
                    announce(Event::MemoryChanged { id, action: MemoryAction::Formed });
                }
                Ok(is_preempted())
            });
        match worked {
            Ok(true) => IdleOutcome::Worked,
            Ok(false) => IdleOutcome::NothingToDo,
            Err(error) => {
                announce(Event::Notice(format!("no memory was formed: {error}")));
                IdleOutcome::NothingToDo
            }
        }
    }
}

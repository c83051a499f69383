//! The handle of an open conversation, the jobs that it takes, and what all conversations of a host share.

use crate::event::{ChangeAction, Event, TurnSummary};
use crate::scheduler::{ModelScheduler, QueuePlace};
use crate::session::Session;
use crate::snapshot::{AnswerProgress, SnapshotCell};
use crate::turn::TurnInput;
use halo_core::model::{Sampling, StepFlow};
use halo_core::token::ChunkId;
use halo_core::{Error, ErrorKind};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Opens a conversation; the second argument is called with the numbers of retokenized and of all messages.
pub type SessionOpener =
    dyn Fn(&str, &mut dyn FnMut(usize, usize)) -> Result<Session, Error> + Send + Sync + 'static;

/// Is notified of every event in every conversation. It must not block.
pub trait EventListener: Send + Sync {
    /// An event. The snapshot contains it already; numbers increase across all conversations.
    fn on_event(&self, conversation: &str, number: u64, event: &Event, snapshot: &SnapshotCell);

    /// A conversation was closed, and its session is dropped.
    fn on_close(&self, conversation: &str) {
        let _ = conversation;
    }
}

/// How long conversations stay open, how many, and how many generate at once.
#[derive(Clone, Copy, Debug)]
pub struct HostLimits {
    /// How long an idle conversation stays open.
    pub idle_timeout: Duration,
    /// How many are open at once; the least recently used one is closed for another.
    pub max_open: usize,
    /// How many requests use the model at once.
    pub parallel: usize,
}

pub(super) type OpenHandleResult = Result<Arc<ConversationHandle>, Error>;

type OpenConversations = BTreeMap<String, Arc<OnceLock<OpenHandleResult>>>;

/// What all conversations of a host share.
pub(super) struct HostState {
    conversations: Mutex<OpenConversations>,
    pub limits: HostLimits,
    pub open_session: Box<SessionOpener>,
    pub scheduler: ModelScheduler,
    listener: Arc<dyn EventListener>,
    shutting_down: AtomicBool,
    last_event: AtomicU64,
    /// How often any conversation was used.
    use_count: AtomicU64,
}

impl HostState {
    pub fn new(
        open_session: Box<SessionOpener>,
        listener: Arc<dyn EventListener>,
        limits: HostLimits,
    ) -> Self {
        Self {
            conversations: Mutex::default(),
            limits: HostLimits { max_open: limits.max_open.max(1), ..limits },
            open_session,
            scheduler: ModelScheduler::new(limits.parallel),
            listener,
            shutting_down: AtomicBool::new(false),
            last_event: AtomicU64::new(0),
            use_count: AtomicU64::new(0),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, OpenConversations> {
        self.conversations.lock()
    }

    pub fn last_event_number(&self) -> u64 {
        self.last_event.load(Ordering::SeqCst)
    }

    pub fn next_event_number(&self) -> u64 {
        self.last_event.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn announce_close(&self, conversation: &str) {
        self.listener.on_close(conversation);
    }

    pub fn begin_shutdown(&self) {
        self.shutting_down.store(true, Ordering::SeqCst);
    }

    pub fn is_shutting_down(&self) -> bool {
        self.shutting_down.load(Ordering::SeqCst)
    }

    fn next_use(&self) -> u64 {
        self.use_count.fetch_add(1, Ordering::SeqCst)
    }
}

/// An open conversation, as callers hold it.
pub struct ConversationHandle {
    jobs: Mutex<Option<Sender<SessionJob>>>,
    pub(super) snapshot_cell: Arc<SnapshotCell>,
    pub(super) cancel: AtomicBool,
    notices: Vec<String>,
    /// Jobs that wait in the channel.
    queued_jobs: AtomicUsize,
    /// Jobs that wait or run.
    unfinished_jobs: AtomicUsize,
    /// When it was last used, counted in uses of any conversation.
    last_used: AtomicU64,
    shared: Arc<HostState>,
}

pub(super) type SessionJob = Box<dyn FnOnce(&mut Session, &JobContext<'_>) + Send>;

/// A message to send, and how it is answered.
pub struct TurnRequest {
    pub input: TurnInput,
    /// The client that asks: clients with many requests wait behind clients with few.
    pub client: String,
    /// Sampling of this answer, where it differs from the settings.
    pub sampling: Option<Sampling>,
    /// The client's id of the message: a message that is sent twice is recognized by it.
    pub message_id: Option<String>,
    /// Its place in the queue of the model, while it waits for the jobs before it.
    pub place: Option<QueuePlace>,
}

/// The client's callback: it is called with each event, and can stop the answer.
pub type BoxedTurnCallback = Box<dyn FnMut(&Event) -> StepFlow + Send>;

fn closed_error() -> Error {
    Error::busy("using the conversation", "it was just closed: send the request again")
}

impl ConversationHandle {
    pub(super) fn new(
        jobs: Sender<SessionJob>,
        snapshot_cell: Arc<SnapshotCell>,
        notices: Vec<String>,
        shared: Arc<HostState>,
    ) -> Self {
        Self {
            jobs: Mutex::new(Some(jobs)),
            snapshot_cell,
            cancel: AtomicBool::new(false),
            notices,
            queued_jobs: AtomicUsize::new(0),
            unfinished_jobs: AtomicUsize::new(0),
            last_used: AtomicU64::new(shared.next_use()),
            shared,
        }
    }

    #[must_use]
    pub fn snapshot_cell(&self) -> &SnapshotCell {
        &self.snapshot_cell
    }

    /// What the user should know about how it was opened.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Queues a job; it runs after those before it.
    pub fn submit(
        &self,
        job: impl FnOnce(&mut Session, &JobContext<'_>) + Send + 'static,
    ) -> Result<(), Error> {
        let jobs = self.jobs.lock();
        let jobs = jobs.as_ref().ok_or_else(closed_error)?;
        self.queued_jobs.fetch_add(1, Ordering::SeqCst);
        self.unfinished_jobs.fetch_add(1, Ordering::SeqCst);
        if jobs.send(Box::new(job)).is_err() {
            self.queued_jobs.fetch_sub(1, Ordering::SeqCst);
            self.unfinished_jobs.fetch_sub(1, Ordering::SeqCst);
            return Err(closed_error());
        }
        self.shared.scheduler.preempt_idle();
        Ok(())
    }

    /// Queues a turn; `callback` is called with its events, and `done` with its result.
    pub fn submit_turn(
        &self,
        request: TurnRequest,
        mut callback: BoxedTurnCallback,
        done: impl FnOnce(Result<TurnSummary, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        self.submit(move |session, context| done(context.run_turn(session, request, &mut *callback)))
    }

    /// Stops the answer that is being generated; its tokens so far stay.
    pub fn stop(&self) {
        self.cancel.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_open(&self) -> bool {
        self.jobs.lock().is_some()
    }

    pub(super) fn has_queued_jobs(&self) -> bool {
        self.queued_jobs.load(Ordering::SeqCst) > 0
    }

    pub(super) fn has_unfinished_jobs(&self) -> bool {
        self.unfinished_jobs.load(Ordering::SeqCst) > 0
    }

    pub(super) fn job_started(&self) {
        self.queued_jobs.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn job_finished(&self) {
        self.unfinished_jobs.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn mark_used(&self) {
        self.last_used.store(self.shared.next_use(), Ordering::SeqCst);
    }

    pub(super) fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::SeqCst)
    }

    /// Whether only the host and the worker hold it, it has no jobs, and its answers are not recorded to disk.
    pub(super) fn is_unused(self: &Arc<Self>) -> bool {
        let recorded = self.snapshot_cell.get().state.recording;
        self.unfinished_jobs.load(Ordering::SeqCst) == 0 && Arc::strong_count(self) <= 2 && !recorded
    }

    /// Whether the worker thread has dropped its session.
    pub(super) fn has_worker_exited(&self) -> bool {
        Arc::strong_count(&self.snapshot_cell) == 1
    }

    pub(super) fn close(&self) {
        *self.jobs.lock() = None;
    }
}

/// What a job has beside its session: events, cancellation, and the scheduler.
pub struct JobContext<'a> {
    pub(super) name: &'a str,
    pub(super) shared: &'a HostState,
    pub(super) handle: &'a ConversationHandle,
}

impl JobContext<'_> {
    /// Announces a change outside of a turn.
    pub fn announce_change(&self, action: ChangeAction, chunks: Vec<ChunkId>) {
        self.announce(&Event::Changed { action, chunks }, |_| {});
    }

    /// Announces an event outside of a turn.
    pub fn announce_event(&self, event: &Event) {
        self.announce(event, |_| {});
    }

    /// Whether the job should stop: a client asked for that, or the program is shutting down.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.is_stop_requested() || self.shared.is_shutting_down()
    }

    fn is_stop_requested(&self) -> bool {
        self.handle.cancel.load(Ordering::SeqCst)
    }

    pub(super) fn announce(&self, event: &Event, update: impl FnOnce(&mut Option<AnswerProgress>)) {
        let cell = &self.handle.snapshot_cell;
        let number = cell.record_event(update, || self.shared.next_event_number());
        self.shared.listener.on_event(self.name, number, event, cell);
    }

    /// Runs work that changes the conversation through another store. The session gives up its lease meanwhile, and is
    /// opened again afterwards.
    pub fn run_without_lease<T>(&self, session: &mut Session, work: impl FnOnce() -> T) -> T {
        session.release_lease();
        let result = work();
        self.reopen(session);
        result
    }

    /// Takes the lease again, and opens the conversation again where another process has changed it meanwhile. Returns
    /// whether the session holds the lease; without it, every change fails with the reason.
    pub(super) fn reacquire_lease(&self, session: &mut Session) -> bool {
        if session.acquire_lease() {
            return session.holds_lease();
        }
        let reopened = self.reopen(session);
        if reopened {
            self.announce_change(ChangeAction::ChangedElsewhere, Vec::new());
        }
        reopened
    }

    /// Replaces a session with one that is opened now; its readers and recorders stay. Returns whether that succeeded.
    fn reopen(&self, session: &mut Session) -> bool {
        match (self.shared.open_session)(self.name, &mut |_, _| {}) {
            Ok(mut opened) => {
                opened.take_over(session, &self.handle.snapshot_cell);
                *session = opened;
                true
            }
            Err(error) => {
                session.deny_lease(error);
                false
            }
        }
    }

    /// Runs a turn when the scheduler permits it; `callback` is called with every event and can stop it.
    pub fn run_turn(
        &self,
        session: &mut Session,
        request: TurnRequest,
        callback: &mut dyn FnMut(&Event) -> StepFlow,
    ) -> Result<TurnSummary, Error> {
        let TurnRequest { input, client, sampling, message_id, place } = request;
        session.set_next_message_id(message_id);
        // From here on the scheduler counts it.
        drop(place);
        self.run_turn_with(session, (client, sampling), callback, |_| Ok(input))
    }

    /// Like [`JobContext::run_turn`], but creates the input once the scheduler permits the turn: a request that is cancelled
    /// while it is queued changes nothing.
    pub fn run_turn_with(
        &self,
        session: &mut Session,
        (client, sampling): (String, Option<Sampling>),
        callback: &mut dyn FnMut(&Event) -> StepFlow,
        input: impl FnOnce(&mut Session) -> Result<TurnInput, Error>,
    ) -> Result<TurnSummary, Error> {
        let mut last_ahead = None;
        let permit = self.shared.scheduler.acquire(&client, &mut |ahead| {
            let event = Event::Queued { ahead };
            if last_ahead.replace(ahead) != Some(ahead) {
                self.announce(&event, |answer| answer.get_or_insert_default().ahead = ahead);
            }
            let flow = callback(&event);
            if self.is_stop_requested() { StepFlow::Stop } else { flow }
        });
        let Some(_permit) = permit else {
            let message = "cancelled before the model was free; nothing was stored";
            let failed = Event::Failed { kind: ErrorKind::Cancelled, message: message.to_owned() };
            self.announce(&failed, |answer| *answer = None);
            return Err(Error::cancelled("waiting for the model", message));
        };
        let default_sampling = session.rules().sampling.clone();
        session.replace_sampling(sampling.unwrap_or_else(|| default_sampling.clone()));
        let now = jiff::Zoned::now().datetime();
        let result = input(session).and_then(|input| {
            session.run_turn(input, now, &mut |event| {
                self.announce(&event, |answer| update_answer_progress(&event, answer));
                let flow = callback(&event);
                if self.is_stop_requested() { StepFlow::Stop } else { flow }
            })
        });
        session.replace_sampling(default_sampling);
        if let Err(error) = &result {
            self.announce_failure(error);
        }
        result
    }

    pub(super) fn announce_failure(&self, error: &Error) {
        let failed = Event::Failed { kind: error.kind, message: error.to_string() };
        self.announce(&failed, |answer| *answer = None);
    }
}

/// Updates the answer in the snapshot with an event.
fn update_answer_progress(event: &Event, answer: &mut Option<AnswerProgress>) {
    match event {
        Event::MessageStored { .. } | Event::Prefilled(_) | Event::Prefilling { .. } => {
            answer.get_or_insert_default().ahead = 0;
        }
        Event::Token { chunk, position, text } => {
            let answer = answer.get_or_insert_default();
            answer.turn = Some(chunk.turn);
            answer.tokens.push((*chunk, *position, text.clone()));
        }
        Event::Done(_) => *answer = None,
        _ => {}
    }
}

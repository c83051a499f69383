//! Forgetting in a server that stays up: a forgetting cycle in every conversation whose context pressure is high after a
//! turn, and scheduled erasures. One thread does both, so that a conversation never waits for another one's cycle.

use crate::app::App;
use halo_agents::forgetting::{
    ActiveMemories, ActiveMemory, ApplyRetention, ForgettingSubject, coordinated_forgetting_cycle,
};
use halo_core::Error;
use halo_engine::agent::poll_ready;
use halo_engine::event::{ChangeAction, Event};
use halo_engine::forget::ForgetService;
use halo_engine::forgetting_cycle::memory_scorer;
use halo_engine::host::{ConversationHandle, JobContext};
use halo_engine::memory::MemoryEdit;
use halo_engine::session::Session;
use halo_engine::snapshot::ConversationState;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

/// The conversations whose context pressure was high after their last turn.
#[derive(Default)]
pub(crate) struct PressureQueue {
    state: Mutex<PressureQueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct PressureQueueState {
    conversations: BTreeSet<String>,
    closed: bool,
}

impl PressureQueue {
    /// Queues a conversation if its pressure is above its threshold.
    pub fn check(&self, conversation: &str, state: &ConversationState) {
        if is_under_pressure(state) {
            self.state.lock().conversations.insert(conversation.to_owned());
            self.changed.notify_all();
        }
    }

    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// The queued conversations, once there are some or the time is over; none once the queue is closed.
    fn wait(&self, timeout: Duration) -> Option<BTreeSet<String>> {
        let mut state = self.state.lock();
        if state.conversations.is_empty() && !state.closed {
            self.changed.wait_for(&mut state, timeout);
        }
        (!state.closed).then(|| std::mem::take(&mut state.conversations))
    }
}

fn is_under_pressure(state: &ConversationState) -> bool {
    state.forgetting.is_some_and(|rules| state.pressure() > rules.threshold)
}

/// The longest wait between two looks at the settings: the interval may have been changed.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Runs until the app is shut down.
pub(crate) fn spawn_forgetting_loop(app: &Arc<App>) {
    let (app, queue) = (Arc::downgrade(app), Arc::clone(&app.pressure_queue));
    let thread = std::thread::Builder::new().name("halo-forgetting".into());
    let spawned = thread.spawn(move || run_forgetting_loop(&app, &queue));
    if let Err(error) = spawned {
        tracing::error!("old text is not erased while the server runs: {error}");
    }
}

fn run_forgetting_loop(app: &Weak<App>, queue: &PressureQueue) {
    let mut last_erasure = Instant::now();
    loop {
        let interval = app.upgrade().map(|app| app.backend.retention_interval());
        let Some(interval) = interval else { return };
        let until_due = interval.map(|interval| interval.saturating_sub(last_erasure.elapsed()));
        let Some(conversations) = queue.wait(until_due.unwrap_or(MAX_WAIT).min(MAX_WAIT)) else { return };
        let Some(app) = app.upgrade() else { return };
        for name in conversations {
            run_cycle(&app, &name);
        }
        if interval.is_some_and(|interval| last_erasure.elapsed() >= interval) {
            last_erasure = Instant::now();
            app.metrics.record_retention(apply_retention(&app));
            for (name, _) in app.host.open_conversations() {
                run_cycle(&app, &name);
            }
        }
    }
}

/// Runs a forgetting cycle in an open conversation, if its pressure is above its threshold.
pub(crate) fn run_cycle(app: &Arc<App>, name: &str) {
    let Some(handle) = app.host.find_open(name) else { return };
    let state = handle.snapshot_cell().get().state;
    let Some(rules) = state.forgetting.filter(|_| is_under_pressure(&state)) else { return };
    let scorer = memory_scorer(&state.timeline, &app.backend.rules());
    let mut subject = HostedConversation { handle: Arc::clone(&handle) };
    let mut lethe = ServerRetention { app };
    let cycle = coordinated_forgetting_cycle(&mut subject, &scorer, &mut lethe, rules.threshold);
    match poll_ready(cycle) {
        Ok(result) if result.has_run() => {
            app.metrics.record_forgetting_cycle(&result);
            let recorded = run_job(&handle, move |session, context| {
                session.record_forgetting_cycle(&result)?;
                context.announce_event(&Event::ForgettingCycle(result));
                Ok(())
            });
            if let Err(error) = recorded {
                tracing::warn!("a forgetting cycle of {} was not recorded: {:?}", state.id, error.kind);
            }
        }
        Ok(_) => {}
        Err(error) => tracing::warn!("a forgetting cycle of {} has failed: {:?}", state.id, error.kind),
    }
}

/// Erases what is due in the conversations of the store. Returns how many chunks were erased. What fails is tried again
/// another time.
fn apply_retention(app: &Arc<App>) -> usize {
    let service = ForgetService::new(app.backend.forget_backend());
    let policy = app.backend.retention_policy();
    let now = jiff::Timestamp::now().as_millisecond();
    let names = service.conversations().unwrap_or_default();
    let mut erased = 0;
    for name in names {
        let due = service.has_due(&name, policy.as_ref(), now);
        if !matches!(due, Ok(true)) {
            continue;
        }
        let result = match app.host.find_open(&name) {
            None => service.apply_retention_to(&name, policy.as_ref(), now),
            Some(handle) => {
                let (app, name) = (Arc::clone(app), name.clone());
                run_job(&handle, move |session, context| {
                    let service = ForgetService::new(app.backend.forget_backend());
                    let kv_key = session.kv_key().to_owned();
                    let report = context.run_without_lease(session, || {
                        service.apply_retention_to(&name, policy.as_ref(), now)
                    })?;
                    session.delete_kv(&kv_key)?;
                    context.announce_change(ChangeAction::Deleted, Vec::new());
                    Ok(report)
                })
            }
        };
        match result {
            Ok(report) => {
                if let Some(error) = &report.error {
                    log_failed_erasure(app, &name, error);
                }
                erased += report.chunks;
                app.drop_cached(&name);
                if !report.new_names.is_empty() {
                    app.host.close(&name);
                }
            }
            Err(error) => log_failed_erasure(app, &name, &error),
        }
    }
    erased
}

/// Errors and names quote conversations; the log has the id and the kind.
fn log_failed_erasure(app: &App, name: &str, error: &Error) {
    let found = app.with_reader(|store| store.find_conversation(name)).ok().flatten();
    let id = found.map_or_else(|| "that is gone".to_owned(), |summary| summary.id);
    tracing::warn!("text that is due in the conversation {id} was not erased: {:?}", error.kind);
}

/// Runs work on the thread of a conversation, and waits for it.
fn run_job<T: Send + 'static>(
    handle: &ConversationHandle,
    work: impl FnOnce(&mut Session, &JobContext<'_>) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = mpsc::channel();
    handle.submit(move |session, context| {
        let _ = done.send(work(session, context));
    })?;
    let closed = || Error::busy("changing the conversation", "it was closed meanwhile");
    result.recv().unwrap_or_else(|_| Err(closed()))
}

/// An open conversation, changed through jobs.
struct HostedConversation {
    handle: Arc<ConversationHandle>,
}

impl ActiveMemories for HostedConversation {
    async fn list_active(&mut self) -> Result<Vec<ActiveMemory>, Error> {
        let state = self.handle.snapshot_cell().get().state;
        let active = state.memories.iter().filter(|memory| !memory.disabled && !memory.pinned);
        Ok(active.map(|memory| ActiveMemory { id: memory.id, text: memory.text.clone() }).collect())
    }

    async fn deactivate(&mut self, id: u64) -> Result<(), Error> {
        run_job(&self.handle, move |session, context| {
            session.edit_memory(id, MemoryEdit::Disable(true))?;
            context.announce_change(ChangeAction::MemoryEdited, Vec::new());
            Ok(())
        })
    }
}

impl ForgettingSubject for HostedConversation {
    fn pressure(&self) -> f64 {
        self.handle.snapshot_cell().get().state.pressure()
    }

    async fn prune_window(&mut self) -> Result<usize, Error> {
        run_job(&self.handle, |session, context| {
            let pruned = session.prune_under_pressure()?;
            let count = pruned.len();
            context.announce_change(ChangeAction::Pruned, pruned);
            Ok(count)
        })
    }
}

/// The retention of the server's store.
struct ServerRetention<'a> {
    app: &'a Arc<App>,
}

impl ApplyRetention for ServerRetention<'_> {
    async fn apply_retention_policy(&mut self) -> Result<usize, Error> {
        let erased = apply_retention(self.app);
        self.app.metrics.record_retention(erased);
        Ok(erased)
    }
}

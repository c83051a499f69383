//! Opens worlds, runs each on a thread of its own while no conversation uses the model, and publishes what changes there.

use crate::app::App;
use crate::wire::{ApiEventKind, ApiHeartbeatUsage, ApiWorldEvent};
use halo_core::Error;
use halo_worlds::runner::{HeartbeatReport, RunnerStep, WorldRunner};
use halo_worlds::world::WorldChanges;
use halo_worlds::world_store::WorldStore;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a world waits after an error.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// How long a world waits after it was preempted by a conversation.
const PREEMPT_DELAY: Duration = Duration::from_millis(100);

/// Returns the world if it is open; else opens it, paused.
pub(crate) fn open_world(app: &Arc<App>, name: &str) -> Result<Arc<WorldRunner>, Error> {
    app.worlds.open(name, || {
        let store = WorldStore::open(app.backend.open_worlds()?, name)?;
        let models = app.backend.agent_models(&store.world.header.models)?;
        let clock = Box::new(|| jiff::Timestamp::now().as_millisecond());
        let prompts = (app.backend.agent_prompts()?, app.backend.runner_options());
        let runner = Arc::new(WorldRunner::new(store, models, prompts, clock));
        runner.set_paused(true);
        let (listening, world) = (Arc::downgrade(app), name.to_owned());
        let thinking_shown = Arc::new(AtomicBool::new(false));
        let shown = Arc::clone(&thinking_shown);
        runner.set_thinking_listener(Box::new(move |agent| {
            shown.store(true, Ordering::SeqCst);
            if let Some(app) = listening.upgrade() {
                let (name, thinking) = (world.clone(), Some(agent.0));
                publish_world_event(&app, ApiWorldEvent { name, thinking, ..ApiWorldEvent::default() });
            }
        }));
        let (listening, world) = (Arc::downgrade(app), name.to_owned());
        runner.set_heartbeat_listener(Box::new(move |report| {
            if let Some(app) = listening.upgrade() {
                publish_world_change(&app, &world, &report.changes, Some(report));
            }
        }));
        let (app, on_thread, name) = (Arc::clone(app), Arc::clone(&runner), name.to_owned());
        let thread = std::thread::Builder::new()
            .name("halo-world".into())
            .spawn(move || run_world(&app, &name, on_thread, &thinking_shown))
            .map_err(|e| Error::internal("starting the thread of a world", e.to_string()))?;
        Ok((runner, thread))
    })
}

fn run_world(app: &App, name: &str, mut runner: Arc<WorldRunner>, thinking_shown: &AtomicBool) {
    while !runner.is_stopping() {
        let step = runner.run_next(Some(app.host.scheduler()));
        for refusal in runner.take_refusals() {
            publish_world_error(app, name, format!("a queued command was refused: {refusal}"));
        }
        match step {
            Ok(RunnerStep::Wait(time)) => {
                match app.worlds.close_idle(name, runner, app.limits.idle_timeout) {
                    Some(open) => runner = open,
                    None => return,
                }
                runner.wait(time);
            }
            Ok(RunnerStep::Skipped) => {
                // An agent that was preempted is shown as thinking: the page loads the world again.
                if thinking_shown.swap(false, Ordering::SeqCst) {
                    publish_world_change(app, name, &WorldChanges::default(), None);
                }
                runner.wait(PREEMPT_DELAY);
            }
            Ok(RunnerStep::Changed(changes)) => publish_world_change(app, name, &changes, None),
            // The listener has published it.
            Ok(RunnerStep::Heartbeat(_)) => {}
            Err(e) => {
                // The name of a world is text of its user, and errors quote it.
                let created = runner.store().created();
                tracing::error!("the world created at {created} has failed: {:?}", e.kind);
                publish_world_error(app, name, e.to_string());
                runner.wait(RETRY_DELAY);
            }
        }
    }
    app.worlds.remove_stopped(name, &runner);
}

pub(crate) fn publish_world_event(app: &App, event: ApiWorldEvent) {
    app.events.publish("", app.host.next_event_number(), ApiEventKind::WorldChanged(event));
}

fn publish_world_error(app: &App, name: &str, error: String) {
    let event = ApiWorldEvent { name: name.to_owned(), error: Some(error), ..ApiWorldEvent::default() };
    publish_world_event(app, event);
}

pub(crate) fn publish_world_change(
    app: &App,
    name: &str,
    changes: &WorldChanges,
    heartbeat: Option<&HeartbeatReport>,
) {
    let mut rooms: Vec<u32> = changes.rooms.iter().map(|room| room.0).collect();
    rooms.extend(changes.messages.values().map(|message| message.room.0));
    rooms.sort_unstable();
    rooms.dedup();
    let generation = heartbeat.and_then(|heartbeat| heartbeat.generation.as_ref());
    if let Some(generation) = generation {
        app.metrics.record_heartbeat(generation);
    }
    let usage = generation.map(|generation| ApiHeartbeatUsage {
        prompt_tokens: generation.prompt_tokens,
        prefilled_tokens: generation.prefill_tokens,
        completion_tokens: generation.answer_tokens,
        pressure: generation.pressure,
        cooled_messages: generation.cooled_messages,
        summarized_messages: generation.summarized_messages,
    });
    let event = ApiWorldEvent {
        name: name.to_owned(),
        rooms,
        agents: changes.agents.iter().map(|agent| agent.0).collect(),
        beat: heartbeat.map(|heartbeat| heartbeat.agent.0),
        usage,
        error: heartbeat
            .and_then(|heartbeat| heartbeat.outcome.as_ref().err().map(|error| error.message.clone())),
        worlds_changed: false,
        thinking: None,
    };
    publish_world_event(app, event);
}

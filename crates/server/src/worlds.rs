//! The worlds that are open: each has a thread of its own on which its hearts beat, while nobody else wants the model.

use crate::app::App;
use crate::halo::wire::{ApiEventKind, ApiHeartbeatUsage, ApiWorldEvent};
use halo_core::Error;
use halo_worlds::runner::{HeartbeatReport, RunnerStep, WorldRunner};
use halo_worlds::world::WorldChanges;
use halo_worlds::world_store::WorldStore;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The worlds that are open.
#[derive(Default)]
pub(crate) struct OpenWorlds {
    slots: Mutex<BTreeMap<String, WorldSlot>>,
}

/// Where a world is while it is open. Who holds it opens or ends that world; others come and go meanwhile.
type WorldSlot = Arc<Mutex<Option<OpenWorld>>>;

struct OpenWorld {
    runner: Arc<WorldRunner>,
    thread: Option<JoinHandle<()>>,
    /// When somebody last wanted something of it.
    last_used: Instant,
}

/// How long to wait after something went wrong.
const RETRY_DELAY: Duration = Duration::from_secs(2);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenWorlds {
    /// Does something at a world's place, with nobody else there.
    fn with_slot<T>(&self, name: &str, act: impl FnOnce(&mut Option<OpenWorld>) -> T) -> T {
        let place = Arc::clone(lock(&self.slots).entry(name.to_owned()).or_default());
        let done = act(&mut lock(&place));
        drop(place);
        self.remove_empty_slot(name);
        done
    }

    /// Nobody keeps a place where nothing is: names come from outside.
    fn remove_empty_slot(&self, name: &str) {
        let mut places = lock(&self.slots);
        if places.get(name).is_some_and(|place| Arc::strong_count(place) == 1 && lock(place).is_none()) {
            places.remove(name);
        }
    }

    /// The world of that name, open; nobody's heart beats until somebody says so.
    pub(crate) fn open(&self, app: &Arc<App>, name: &str) -> Result<Arc<WorldRunner>, Error> {
        self.with_slot(name, |place| {
            if let Some(open) = place {
                open.last_used = Instant::now();
                return Ok(Arc::clone(&open.runner));
            }
            let realm = WorldStore::open(app.backend.open_worlds()?, name)?;
            let minds = app.backend.agent_models(&realm.world.header.models)?;
            let clock = Box::new(|| jiff::Timestamp::now().as_millisecond());
            let house = Arc::new(WorldRunner::new(realm, minds, app.backend.agent_prompts()?, clock));
            house.set_paused(true);
            let (app, runs, called) = (Arc::clone(app), Arc::clone(&house), name.to_owned());
            let thread = std::thread::Builder::new()
                .name("halo-world".into())
                .spawn(move || world_loop(&app, &called, runs))
                .map_err(|e| Error::internal("starting a world", e.to_string()))?;
            *place = Some(OpenWorld {
                runner: Arc::clone(&house),
                thread: Some(thread),
                last_used: Instant::now(),
            });
            Ok(house)
        })
    }

    /// The world of that name, if it is open, to look at; one that is being opened or ended is not waited for.
    pub(crate) fn peek(&self, name: &str) -> Option<Arc<WorldRunner>> {
        let places = lock(&self.slots);
        let open = places.get(name)?.try_lock().ok()?;
        open.as_ref().map(|open| Arc::clone(&open.runner))
    }

    /// The same, for somebody who wants something of it.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<WorldRunner>> {
        let places = lock(&self.slots);
        let mut open = places.get(name)?.try_lock().ok()?;
        let open = open.as_mut()?;
        open.last_used = Instant::now();
        Some(Arc::clone(&open.runner))
    }

    /// Closes a world where time stands still and of which nobody wants anything: another program may have it. Else it is given
    /// back.
    fn close_idle(&self, name: &str, house: Arc<WorldRunner>, idle: Duration) -> Option<Arc<WorldRunner>> {
        let Some(place) = lock(&self.slots).get(name).map(Arc::clone) else { return Some(house) };
        // Whoever is at the place opens or ends it.
        let Ok(mut open) = place.try_lock() else { return Some(house) };
        let unused = |open: &OpenWorld| {
            let (ours, held) = (Arc::ptr_eq(&open.runner, &house), Arc::strong_count(&house) > 2);
            ours && !held && open.last_used.elapsed() >= idle
        };
        if !house.is_idle() || !open.as_ref().is_some_and(unused) {
            return Some(house);
        }
        // Whoever opens it next finds that it is let go of.
        *open = None;
        drop(house);
        drop(open);
        drop(place);
        self.remove_empty_slot(name);
        None
    }

    /// Closes a world and has it ended; nobody opens it meanwhile.
    pub(crate) fn close_then<T>(&self, name: &str, ends: impl FnOnce() -> T) -> T {
        self.with_slot(name, |place| {
            place.take().into_iter().for_each(stop_world);
            ends()
        })
    }

    /// Closes all of them.
    pub(crate) fn close_all(&self) {
        let places = std::mem::take(&mut *lock(&self.slots));
        let all: Vec<OpenWorld> = places.into_values().filter_map(|place| lock(&place).take()).collect();
        all.iter().for_each(|open| open.runner.stop());
        all.into_iter().for_each(stop_world);
    }
}

fn stop_world(mut open: OpenWorld) {
    open.runner.stop();
    if let Some(thread) = open.thread.take() {
        let _ = thread.join();
    }
}

/// The life of an open world.
fn world_loop(app: &App, name: &str, mut house: Arc<WorldRunner>) {
    while !house.is_stopping() {
        let next = house.run_next(Some(app.host.scheduler()));
        for why in house.take_refusals() {
            let failed = Some(format!("what was asked from outside could not be done: {why}"));
            publish_world_event(
                app,
                ApiWorldEvent { name: name.to_owned(), error: failed, ..ApiWorldEvent::default() },
            );
        }
        match next {
            Ok(RunnerStep::Wait(time)) => {
                match app.worlds.close_idle(name, house, app.limits.idle_timeout) {
                    Some(open) => house = open,
                    None => return,
                }
                house.wait(time);
            }
            Ok(RunnerStep::Preempted) => house.wait(Duration::from_millis(100)),
            Ok(RunnerStep::Changed(touched)) => publish_world_change(app, name, &touched, None),
            Ok(RunnerStep::Heartbeat(beat)) => publish_world_change(app, name, &beat.changes, Some(&beat)),
            Err(why) => {
                tracing::error!("the world '{name}': {why}");
                let failed = Some(why.to_string());
                publish_world_event(
                    app,
                    ApiWorldEvent { name: name.to_owned(), error: failed, ..ApiWorldEvent::default() },
                );
                house.wait(RETRY_DELAY);
            }
        }
    }
}

pub(crate) fn publish_world_event(app: &App, happened: ApiWorldEvent) {
    app.events.publish("", app.host.next_event_number(), ApiEventKind::WorldChanged(happened));
}

/// Tells everybody what has changed.
pub(crate) fn publish_world_change(
    app: &App,
    name: &str,
    touched: &WorldChanges,
    beat: Option<&HeartbeatReport>,
) {
    let mut rooms: Vec<u32> = touched.rooms.iter().map(|room| room.0).collect();
    rooms.extend(touched.messages.values().map(|message| message.room.0));
    rooms.sort_unstable();
    rooms.dedup();
    let thought = beat.and_then(|beat| beat.generation.as_ref()).map(|thought| ApiHeartbeatUsage {
        prompt_tokens: thought.prompt_tokens,
        prefilled_tokens: thought.prefill_tokens,
        completion_tokens: thought.answer_tokens,
    });
    let happened = ApiWorldEvent {
        name: name.to_owned(),
        rooms,
        agents: touched.agents.iter().map(|agent| agent.0).collect(),
        beat: beat.map(|beat| beat.agent.0),
        usage: thought,
        error: beat.and_then(|beat| beat.outcome.as_ref().err().map(|error| error.message.clone())),
        worlds_changed: false,
    };
    publish_world_event(app, happened);
}

//! The worlds that are open: each has a thread of its own on which its hearts beat, while nobody else wants the model.

use crate::app::App;
use crate::halo::wire::{Thought, Told, WorldNews};
use halo_agents::world::Touched;
use halo_core::seams::SeamError;
use halo_engine::world::house::{Beat, House, Next};
use halo_engine::world::realm::Realm;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The worlds that are open.
#[derive(Default)]
pub(crate) struct Houses {
    places: Mutex<BTreeMap<String, Place>>,
}

/// Where a world is while it is open. Who holds it opens or ends that world; others come and go meanwhile.
type Place = Arc<Mutex<Option<Open>>>;

struct Open {
    house: Arc<House>,
    thread: Option<JoinHandle<()>>,
    /// When somebody last wanted something of it.
    used: Instant,
}

/// How long to wait after something went wrong.
const AGAIN: Duration = Duration::from_secs(2);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Houses {
    /// Does something at a world's place, with nobody else there.
    fn at<T>(&self, name: &str, act: impl FnOnce(&mut Option<Open>) -> T) -> T {
        let place = Arc::clone(lock(&self.places).entry(name.to_owned()).or_default());
        let done = act(&mut lock(&place));
        drop(place);
        self.tidy(name);
        done
    }

    /// Nobody keeps a place where nothing is: names come from outside.
    fn tidy(&self, name: &str) {
        let mut places = lock(&self.places);
        if places.get(name).is_some_and(|place| Arc::strong_count(place) == 1 && lock(place).is_none()) {
            places.remove(name);
        }
    }

    /// The world of that name, open; nobody's heart beats until somebody says so.
    pub(crate) fn open(&self, app: &Arc<App>, name: &str) -> Result<Arc<House>, SeamError> {
        self.at(name, |place| {
            if let Some(open) = place {
                open.used = Instant::now();
                return Ok(Arc::clone(&open.house));
            }
            let realm = Realm::open(app.parts.worlds()?, name)?;
            let minds = app.parts.minds(&realm.world.head.models)?;
            let clock = Box::new(|| jiff::Timestamp::now().as_millisecond());
            let house = Arc::new(House::new(realm, minds, app.parts.prompts()?, clock));
            house.pause(true);
            let (app, runs, called) = (Arc::clone(app), Arc::clone(&house), name.to_owned());
            let thread = std::thread::Builder::new()
                .name("halo-world".into())
                .spawn(move || run(&app, &called, runs))
                .map_err(|e| SeamError::new("starting a world", e.to_string()))?;
            *place = Some(Open { house: Arc::clone(&house), thread: Some(thread), used: Instant::now() });
            Ok(house)
        })
    }

    /// The world of that name, if it is open, to look at; one that is being opened or ended is not waited for.
    pub(crate) fn look(&self, name: &str) -> Option<Arc<House>> {
        let places = lock(&self.places);
        let open = places.get(name)?.try_lock().ok()?;
        open.as_ref().map(|open| Arc::clone(&open.house))
    }

    /// The same, for somebody who wants something of it.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<House>> {
        let places = lock(&self.places);
        let mut open = places.get(name)?.try_lock().ok()?;
        let open = open.as_mut()?;
        open.used = Instant::now();
        Some(Arc::clone(&open.house))
    }

    /// Closes a world where time stands still and of which nobody wants anything: another program may have it. Else it is given
    /// back.
    fn close_idle(&self, name: &str, house: Arc<House>, idle: Duration) -> Option<Arc<House>> {
        let Some(place) = lock(&self.places).get(name).map(Arc::clone) else { return Some(house) };
        // Whoever is at the place opens or ends it.
        let Ok(mut open) = place.try_lock() else { return Some(house) };
        let unused = |open: &Open| {
            let (ours, held) = (Arc::ptr_eq(&open.house, &house), Arc::strong_count(&house) > 2);
            ours && !held && open.used.elapsed() >= idle
        };
        if !house.is_still() || !open.as_ref().is_some_and(unused) {
            return Some(house);
        }
        // Whoever opens it next finds that it is let go of.
        *open = None;
        drop(house);
        drop(open);
        drop(place);
        self.tidy(name);
        None
    }

    /// Closes a world and has it ended; nobody opens it meanwhile.
    pub(crate) fn end<T>(&self, name: &str, ends: impl FnOnce() -> T) -> T {
        self.at(name, |place| {
            place.take().into_iter().for_each(end);
            ends()
        })
    }

    /// Closes all of them.
    pub(crate) fn close_all(&self) {
        let places = std::mem::take(&mut *lock(&self.places));
        let all: Vec<Open> = places.into_values().filter_map(|place| lock(&place).take()).collect();
        all.iter().for_each(|open| open.house.end());
        all.into_iter().for_each(end);
    }
}

fn end(mut open: Open) {
    open.house.end();
    if let Some(thread) = open.thread.take() {
        let _ = thread.join();
    }
}

/// The life of an open world.
fn run(app: &App, name: &str, mut house: Arc<House>) {
    while !house.is_ending() {
        let next = house.next(Some(app.host.gate()));
        for why in house.take_refused() {
            let failed = Some(format!("what was asked from outside could not be done: {why}"));
            send(app, WorldNews { name: name.to_owned(), failed, ..WorldNews::default() });
        }
        match next {
            Ok(Next::Wait(time)) => {
                match app.worlds.close_idle(name, house, app.limits.idle) {
                    Some(open) => house = open,
                    None => return,
                }
                house.wait(time);
            }
            Ok(Next::Broken) => house.wait(Duration::from_millis(100)),
            Ok(Next::Changed(touched)) => tell(app, name, &touched, None),
            Ok(Next::Beat(beat)) => tell(app, name, &beat.touched, Some(&beat)),
            Err(why) => {
                tracing::error!("the world '{name}': {why}");
                let failed = Some(why.to_string());
                send(app, WorldNews { name: name.to_owned(), failed, ..WorldNews::default() });
                house.wait(AGAIN);
            }
        }
    }
}

/// Tells everybody.
pub(crate) fn send(app: &App, happened: WorldNews) {
    app.hub.send("", app.host.number(), Told::World(happened));
}

/// Tells everybody what has changed.
pub(crate) fn tell(app: &App, name: &str, touched: &Touched, beat: Option<&Beat>) {
    let mut rooms: Vec<u32> = touched.rooms.iter().map(|room| room.0).collect();
    rooms.extend(touched.messages.values().map(|message| message.room.0));
    rooms.sort_unstable();
    rooms.dedup();
    let thought = beat.and_then(|beat| beat.thought.as_ref()).map(|thought| Thought {
        shown: thought.shown,
        read: thought.read,
        answered: thought.answered,
    });
    let happened = WorldNews {
        name: name.to_owned(),
        rooms,
        agents: touched.agents.iter().map(|agent| agent.0).collect(),
        beat: beat.map(|beat| beat.who.0),
        thought,
        failed: beat.and_then(|beat| beat.outcome.as_ref().err().cloned()),
        listed: false,
    };
    send(app, happened);
}

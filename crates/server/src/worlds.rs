//! The worlds that are open: each has a thread of its own on which its hearts beat, while nobody else wants the model.

use crate::app::App;
use crate::halo::wire::Told;
use halo_agents::world::Touched;
use halo_core::seams::SeamError;
use halo_engine::world::house::{Beat, House, Next};
use halo_engine::world::realm::Realm;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

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
        // Nobody keeps a place where nothing is: names come from outside.
        let mut places = lock(&self.places);
        if places.get(name).is_some_and(|place| Arc::strong_count(place) == 1 && lock(place).is_none()) {
            places.remove(name);
        }
        done
    }

    /// The world of that name, open; nobody's heart beats until somebody says so.
    pub(crate) fn open(&self, app: &Arc<App>, name: &str) -> Result<Arc<House>, SeamError> {
        self.at(name, |place| {
            if let Some(open) = place {
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
                .spawn(move || run(&app, &called, &runs))
                .map_err(|e| SeamError::new("starting a world", e.to_string()))?;
            *place = Some(Open { house: Arc::clone(&house), thread: Some(thread) });
            Ok(house)
        })
    }

    /// The world of that name, if it is open; one that is being opened or ended is not waited for.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<House>> {
        let places = lock(&self.places);
        let open = places.get(name)?.try_lock().ok()?;
        open.as_ref().map(|open| Arc::clone(&open.house))
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
fn run(app: &App, name: &str, house: &House) {
    while !house.is_ending() {
        match house.next(Some(app.host.gate())) {
            Ok(Next::Wait(time)) => house.wait(time),
            Ok(Next::Broken) => house.wait(Duration::from_millis(100)),
            Ok(Next::Changed(touched)) => tell(app, name, &touched, None),
            Ok(Next::Beat(beat)) => tell(app, name, &beat.touched, Some(&beat)),
            Err(why) => {
                tracing::error!("the world '{name}': {why}");
                app.hub.send(
                    "",
                    app.host.number(),
                    Told::World {
                        name: name.to_owned(),
                        rooms: Vec::new(),
                        agents: Vec::new(),
                        beat: None,
                        failed: Some(why.to_string()),
                    },
                );
                house.wait(AGAIN);
            }
        }
    }
}

/// Tells everybody what has changed.
pub(crate) fn tell(app: &App, name: &str, touched: &Touched, beat: Option<&Beat>) {
    let mut rooms: Vec<u32> = touched.rooms.iter().map(|room| room.0).collect();
    rooms.extend(touched.messages.values().map(|message| message.room.0));
    rooms.sort_unstable();
    rooms.dedup();
    let agents = touched.agents.iter().map(|agent| agent.0).collect();
    let failed = beat.and_then(|beat| beat.outcome.as_ref().err().cloned());
    let told =
        Told::World { name: name.to_owned(), rooms, agents, beat: beat.map(|beat| beat.who.0), failed };
    app.hub.send("", app.host.number(), told);
}

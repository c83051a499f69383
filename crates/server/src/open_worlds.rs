//! The open worlds, each with the thread that runs it.

use halo_core::Error;
use halo_worlds::runner::WorldRunner;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a world that has stopped is looked up while somebody else uses or closes it, 20 ms apart.
const REMOVE_ATTEMPTS: usize = 50;

#[derive(Default)]
pub(crate) struct OpenWorlds {
    slots: Mutex<BTreeMap<String, WorldSlot>>,
}

/// The slot of one world. Its lock is held while that world is opened or deleted; other worlds are not blocked meanwhile.
type WorldSlot = Arc<Mutex<Option<OpenWorld>>>;

struct OpenWorld {
    runner: Arc<WorldRunner>,
    thread: Option<JoinHandle<()>>,
    last_used: Instant,
}

impl OpenWorlds {
    fn with_slot<T>(&self, name: &str, work: impl FnOnce(&mut Option<OpenWorld>) -> T) -> T {
        let slot = Arc::clone(self.slots.lock().entry(name.to_owned()).or_default());
        let result = work(&mut slot.lock());
        drop(slot);
        self.remove_empty_slot(name);
        result
    }

    /// Names come from requests, so an empty slot is removed: otherwise any client could fill the memory.
    fn remove_empty_slot(&self, name: &str) {
        let mut slots = self.slots.lock();
        if slots.get(name).is_some_and(|slot| Arc::strong_count(slot) == 1 && slot.lock().is_none()) {
            slots.remove(name);
        }
    }

    /// Returns the world if it is open; else opens it with `start`, which also starts its thread.
    pub(crate) fn open(
        &self,
        name: &str,
        start: impl FnOnce() -> Result<(Arc<WorldRunner>, JoinHandle<()>), Error>,
    ) -> Result<Arc<WorldRunner>, Error> {
        self.with_slot(name, |slot| {
            if let Some(open) = slot {
                open.last_used = Instant::now();
                return Ok(Arc::clone(&open.runner));
            }
            let (runner, thread) = start()?;
            let opened =
                OpenWorld { runner: Arc::clone(&runner), thread: Some(thread), last_used: Instant::now() };
            *slot = Some(opened);
            Ok(runner)
        })
    }

    /// An open world, for reading. Does not wait for a world that is being opened or deleted, and does not keep it open.
    pub(crate) fn peek(&self, name: &str) -> Option<Arc<WorldRunner>> {
        let slots = self.slots.lock();
        let open = slots.get(name)?.try_lock()?;
        open.as_ref().map(|open| Arc::clone(&open.runner))
    }

    /// An open world, for changing it: it stays open until it is idle again.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<WorldRunner>> {
        let slots = self.slots.lock();
        let mut open = slots.get(name)?.try_lock()?;
        let open = open.as_mut()?;
        open.last_used = Instant::now();
        Some(Arc::clone(&open.runner))
    }

    /// Closes a world that is paused and unused for the time `idle`, so that another program can open it. Returns the runner if the
    /// world stays open.
    pub(crate) fn close_idle(
        &self,
        name: &str,
        runner: Arc<WorldRunner>,
        idle: Duration,
    ) -> Option<Arc<WorldRunner>> {
        let Some(slot) = self.slots.lock().get(name).map(Arc::clone) else { return Some(runner) };
        // Locked: the world is being opened or deleted.
        let Some(mut open) = slot.try_lock() else { return Some(runner) };
        let is_unused = |open: &OpenWorld| {
            let (same, shared) = (Arc::ptr_eq(&open.runner, &runner), Arc::strong_count(&runner) > 2);
            same && !shared && open.last_used.elapsed() >= idle
        };
        if !runner.is_idle() || !open.as_ref().is_some_and(is_unused) {
            return Some(runner);
        }
        // The runner is dropped while the slot is locked: the next one who opens the world finds its lease released.
        *open = None;
        drop(runner);
        drop(open);
        drop(slot);
        self.remove_empty_slot(name);
        None
    }

    /// Removes a world that has stopped by itself, because its lease was lost: the next one who uses it opens it again. Called
    /// on the thread of the world, for which somebody who closes the world waits.
    pub(crate) fn remove_stopped(&self, name: &str, runner: &Arc<WorldRunner>) {
        for _ in 0..REMOVE_ATTEMPTS {
            let Some(slot) = self.slots.lock().get(name).map(Arc::clone) else { return };
            let Some(mut open) = slot.try_lock() else {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            if open.as_ref().is_some_and(|open| Arc::ptr_eq(&open.runner, runner)) {
                *open = None;
            }
            drop(open);
            drop(slot);
            return self.remove_empty_slot(name);
        }
    }

    /// Closes a world and runs `work` while nobody can open it.
    pub(crate) fn close_then<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        self.with_slot(name, |slot| {
            slot.take().into_iter().for_each(stop_world);
            work()
        })
    }

    pub(crate) fn close_all(&self) {
        let slots = std::mem::take(&mut *self.slots.lock());
        let worlds: Vec<OpenWorld> = slots.into_values().filter_map(|slot| slot.lock().take()).collect();
        // All of them stop before the first is joined.
        worlds.iter().for_each(|open| open.runner.stop());
        worlds.into_iter().for_each(stop_world);
    }
}

fn stop_world(mut open: OpenWorld) {
    open.runner.stop();
    if let Some(thread) = open.thread.take() {
        let _ = thread.join();
    }
}

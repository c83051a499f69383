//! How conversations stand, put into words once for all who ask, for as long as it stays so.

use crate::answer::Answer;
use crate::halo::wire::Stood;
use halo_engine::board::{Seen, Standing};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What was put into words last, by conversation.
#[derive(Default)]
pub(crate) struct Shown(Mutex<BTreeMap<String, Words>>);

struct Words {
    of: Weak<Standing>,
    /// Whether an answer was being given. How it ended is stored before it is over, and after the last that it changes.
    running: bool,
    stood: Arc<Stood>,
}

impl Shown {
    /// How what was seen stands, where it has been put into words.
    pub fn known(&self, seen: &Seen) -> Option<Arc<Stood>> {
        let (standing, running) = (&seen.standing, seen.running.is_some());
        let all = self.lock();
        let words = all.get(&standing.name)?;
        let same = words.running == running && std::ptr::eq(words.of.as_ptr(), Arc::as_ptr(standing));
        same.then(|| Arc::clone(&words.stood))
    }

    /// The same; put into words by `say`, where it has not been.
    pub fn of(&self, seen: &Seen, say: impl FnOnce() -> Answer<Stood>) -> Answer<Arc<Stood>> {
        if let Some(stood) = self.known(seen) {
            return Ok(stood);
        }
        let (standing, running) = (&seen.standing, seen.running.is_some());
        let stood = Arc::new(say()?);
        let mut all = self.lock();
        // Nobody will ask for those that are over.
        all.retain(|_, words| words.of.strong_count() > 0);
        let words = Words { of: Arc::downgrade(standing), running, stood: Arc::clone(&stood) };
        all.insert(standing.name.clone(), words);
        Ok(stood)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Words>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Which chat requests are in flight, by conversation.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct ChatDispatcher {
    /// Requests are dispatched one at a time: of two requests with the same history, the second finds the first in flight.
    dispatch_lock: Mutex<()>,
    in_flight: Arc<Mutex<BTreeMap<String, usize>>>,
}

/// A request in flight in a conversation, until this is dropped.
pub(crate) struct InFlightRequest {
    name: String,
    in_flight: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl ChatDispatcher {
    pub fn lock(&self) -> MutexGuard<'_, ()> {
        self.dispatch_lock.lock()
    }

    pub fn has_in_flight(&self, name: &str) -> bool {
        self.in_flight.lock().contains_key(name)
    }

    pub fn register(&self, name: &str) -> InFlightRequest {
        *self.in_flight.lock().entry(name.to_owned()).or_default() += 1;
        InFlightRequest { name: name.to_owned(), in_flight: Arc::clone(&self.in_flight) }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut all = self.in_flight.lock();
        if let Some(count) = all.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.name);
            }
        }
    }
}

//! Whether the store answers. A store on a server can hang without failing, so it is asked on a thread of its own, one
//! question at a time, and `/health` waits for the answer no longer than a moment.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// How long an answer is used again.
const REUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct StoreProbe(Mutex<ProbeState>);

#[derive(Default)]
struct ProbeState {
    running: bool,
    /// When the store answered or failed last, and which.
    last: Option<(Instant, bool)>,
}

impl StoreProbe {
    pub fn recent_answer(&self) -> Option<bool> {
        self.0.lock().last.filter(|(at, _)| at.elapsed() < REUSE).map(|(_, available)| available)
    }

    /// Whether the caller has to ask the store: nobody does.
    pub fn begin(&self) -> bool {
        !std::mem::replace(&mut self.0.lock().running, true)
    }

    pub fn end(&self, available: bool) {
        *self.0.lock() = ProbeState { running: false, last: Some((Instant::now(), available)) };
    }
}

//! Whether the store answers. A store on a server can hang without failing, so it is asked on a thread of its own, one
//! question at a time, and `/health` waits for the answer no longer than a moment.

use crate::app::App;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer is used again.
const REUSE: Duration = Duration::from_secs(1);

/// How long a caller waits for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct StoreProbe(Mutex<ProbeState>);

#[derive(Default)]
struct ProbeState {
    running: bool,
    /// When the store answered or failed last, and which.
    last: Option<(Instant, bool)>,
}

impl StoreProbe {
    fn recent_answer(&self) -> Option<bool> {
        self.0.lock().last.filter(|(at, _)| at.elapsed() < REUSE).map(|(_, available)| available)
    }

    /// Whether the caller has to ask the store: nobody does.
    fn begin(&self) -> bool {
        !std::mem::replace(&mut self.0.lock().running, true)
    }

    fn end(&self, available: bool) {
        *self.0.lock() = ProbeState { running: false, last: Some((Instant::now(), available)) };
    }
}

/// Whether the store answers now.
pub(crate) async fn is_store_available(app: &Arc<App>) -> bool {
    if let Some(available) = app.store_probe.recent_answer() {
        return available;
    }
    if app.store_probe.begin() {
        let app = Arc::clone(app);
        tokio::task::spawn_blocking(move || {
            // No conversation has this name; the lookup reads the index of names.
            let answer = app.with_reader(|store| store.find_conversation(""));
            if let Err(error) = &answer {
                tracing::warn!("the store is not available: {error}");
            }
            app.store_probe.end(answer.is_ok());
        });
    }
    let asked = Instant::now();
    while asked.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
        if let Some(available) = app.store_probe.recent_answer() {
            return available;
        }
    }
    false
}

//! The completions that wait or run, and those that ended just now. A client watches and aborts its own by its key.

use halo_core::model::TokenLogprobs;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the text of a completion can be read after its end.
const KEPT_AFTER_END: Duration = Duration::from_secs(60);

/// The most completions that have ended and are still kept.
const MAX_ENDED: usize = 16;

/// The completions that wait or run, the oldest first, and those that ended just now.
#[derive(Default)]
pub(crate) struct RunningCompletions {
    current: Mutex<Vec<Arc<CompletionState>>>,
    ended: Mutex<Vec<(Instant, Arc<CompletionState>)>>,
}

struct CompletionState {
    key: Option<String>,
    started: AtomicBool,
    stopped: AtomicBool,
    text: Mutex<String>,
    logprobs: Mutex<Vec<TokenLogprobs>>,
}

/// A completion that waits or runs, until this is dropped.
pub(crate) struct CompletionProgress<'a> {
    all: &'a RunningCompletions,
    state: Arc<CompletionState>,
}

impl RunningCompletions {
    pub fn begin(&self, key: Option<String>) -> CompletionProgress<'_> {
        let state = Arc::new(CompletionState {
            key,
            started: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            text: Mutex::default(),
            logprobs: Mutex::default(),
        });
        self.current.lock().push(Arc::clone(&state));
        CompletionProgress { all: self, state }
    }

    /// Stops the completions with this key, also those that wait; without a key, the one that runs. Returns whether there was one.
    pub fn stop(&self, key: Option<&str>) -> bool {
        let is_meant = |state: &&Arc<CompletionState>| match key {
            Some(key) => state.key.as_deref() == Some(key),
            None => state.started.load(Ordering::SeqCst),
        };
        let current = self.current.lock();
        let mut count = 0;
        for state in current.iter().filter(is_meant) {
            state.stopped.store(true, Ordering::SeqCst);
            count += 1;
        }
        count > 0
    }

    /// The text of the completion with this key that runs or ended just now.
    pub fn text(&self, key: Option<&str>) -> String {
        self.find(key).map(|state| state.text.lock().clone()).unwrap_or_default()
    }

    /// The log-probabilities of the completion with this key that runs or ended just now.
    pub fn logprobs(&self, key: Option<&str>) -> Vec<TokenLogprobs> {
        self.find(key).map(|state| state.logprobs.lock().clone()).unwrap_or_default()
    }

    fn find(&self, key: Option<&str>) -> Option<Arc<CompletionState>> {
        let has_key = |state: &Arc<CompletionState>| state.key.as_deref() == key;
        let is_running =
            |state: &&Arc<CompletionState>| has_key(state) && state.started.load(Ordering::SeqCst);
        if let Some(state) = self.current.lock().iter().find(is_running) {
            return Some(Arc::clone(state));
        }
        let ended = self.ended.lock();
        let latest = ended.iter().rev().find(|(_, state)| has_key(state));
        latest.filter(|(end, _)| end.elapsed() < KEPT_AFTER_END).map(|(_, state)| Arc::clone(state))
    }
}

impl CompletionProgress<'_> {
    /// The model begins with it.
    pub fn start(&self) {
        self.state.started.store(true, Ordering::SeqCst);
    }

    pub fn is_stopped(&self) -> bool {
        self.state.stopped.load(Ordering::SeqCst)
    }

    pub fn push_text(&self, text: &str) {
        self.state.text.lock().push_str(text);
    }

    pub fn push_logprobs(&self, logprobs: &TokenLogprobs) {
        self.state.logprobs.lock().push(logprobs.clone());
    }
}

impl Drop for CompletionProgress<'_> {
    fn drop(&mut self) {
        self.all.current.lock().retain(|state| !Arc::ptr_eq(state, &self.state));
        if self.state.started.load(Ordering::SeqCst) {
            let mut ended = self.all.ended.lock();
            ended.push((Instant::now(), Arc::clone(&self.state)));
            if ended.len() > MAX_ENDED {
                ended.remove(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_watched_and_stopped_by_their_key() {
        let all = RunningCompletions::default();
        let (mine, other) = (all.begin(Some("mine".into())), all.begin(Some("other".into())));
        mine.start();
        mine.push_text("a");
        assert_eq!(
            (all.text(Some("mine")), all.text(Some("other")), all.text(None)),
            ("a".into(), "".into(), "".into())
        );
        assert!(all.stop(Some("other")) && other.is_stopped() && !mine.is_stopped());
        assert!(!all.stop(Some("nobody")));
        assert!(all.stop(None) && mine.is_stopped(), "without a key the running one is stopped");
        drop(mine);
        assert_eq!(all.text(Some("mine")), "a", "the text can be read just after the end");
        drop(other);
        assert!(!all.stop(None));
    }
}

//! The generations that wait or run, and those that ended just now. A client watches and stops its own: those with its key, or those
//! without a key that came from its address.

use crate::client_address::ClientNetwork;
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

/// Whose generation it is, or who asks for one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GenerationOwner {
    /// The key that the client has chosen.
    pub key: Option<String>,
    pub client: ClientNetwork,
}

impl GenerationOwner {
    /// The owner of what a client generates without a key.
    pub fn without_key(client: ClientNetwork) -> Self {
        Self { key: None, client }
    }

    /// Whether a client that asks may watch and stop what this one generates. The address does not matter to one that has the key.
    fn allows(&self, asking: &Self) -> bool {
        self.key == asking.key && (self.key.is_some() || self.client == asking.client)
    }
}

struct CompletionState {
    owner: GenerationOwner,
    /// Whether its text is kept for the client to read.
    is_watched: bool,
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
    pub fn begin(&self, owner: GenerationOwner) -> CompletionProgress<'_> {
        self.add(owner, true)
    }

    /// The answer of a stored chat: it can be stopped, and its text is read in its conversation.
    pub fn begin_chat(&self, client: ClientNetwork) -> CompletionProgress<'_> {
        self.add(GenerationOwner::without_key(client), false)
    }

    fn add(&self, owner: GenerationOwner, is_watched: bool) -> CompletionProgress<'_> {
        let state = Arc::new(CompletionState {
            owner,
            is_watched,
            started: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            text: Mutex::default(),
            logprobs: Mutex::default(),
        });
        self.current.lock().push(Arc::clone(&state));
        CompletionProgress { all: self, state }
    }

    /// Stops what the client generates with its key, also what waits; without a key, what runs. Returns whether there was anything.
    pub fn stop(&self, asking: &GenerationOwner) -> bool {
        let is_meant = |state: &&Arc<CompletionState>| {
            state.owner.allows(asking) && (asking.key.is_some() || state.started.load(Ordering::SeqCst))
        };
        let current = self.current.lock();
        let mut count = 0;
        for state in current.iter().filter(is_meant) {
            state.stopped.store(true, Ordering::SeqCst);
            count += 1;
        }
        count > 0
    }

    /// The text of the client's completion that runs or ended just now.
    pub fn text(&self, asking: &GenerationOwner) -> String {
        self.find(asking).map(|state| state.text.lock().clone()).unwrap_or_default()
    }

    /// The log-probabilities of the client's completion that runs or ended just now.
    pub fn logprobs(&self, asking: &GenerationOwner) -> Vec<TokenLogprobs> {
        self.find(asking).map(|state| state.logprobs.lock().clone()).unwrap_or_default()
    }

    fn find(&self, asking: &GenerationOwner) -> Option<Arc<CompletionState>> {
        let is_own = |state: &Arc<CompletionState>| state.is_watched && state.owner.allows(asking);
        let is_running =
            |state: &&Arc<CompletionState>| is_own(state) && state.started.load(Ordering::SeqCst);
        if let Some(state) = self.current.lock().iter().find(is_running) {
            return Some(Arc::clone(state));
        }
        let ended = self.ended.lock();
        let latest = ended.iter().rev().find(|(_, state)| is_own(state));
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
        if self.state.is_watched && self.state.started.load(Ordering::SeqCst) {
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
    use std::net::{IpAddr, Ipv4Addr};

    fn owner(key: &str, host: u8) -> GenerationOwner {
        let client = ClientNetwork(Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, host))));
        GenerationOwner { key: (!key.is_empty()).then(|| key.to_owned()), client }
    }

    #[test]
    fn completions_are_watched_and_stopped_by_their_key() {
        let all = RunningCompletions::default();
        let (mine, other) = (all.begin(owner("mine", 1)), all.begin(owner("other", 1)));
        mine.start();
        mine.push_text("a");
        let text = |key: &str, host: u8| all.text(&owner(key, host));
        assert_eq!([text("mine", 1), text("mine", 2), text("other", 1), text("", 1)], ["a", "a", "", ""]);
        assert!(all.stop(&owner("other", 2)) && other.is_stopped() && !mine.is_stopped());
        assert!(!all.stop(&owner("nobody", 1)));
        assert!(!all.stop(&owner("", 1)) && !mine.is_stopped(), "without the key nothing of it is stopped");
        assert!(all.stop(&owner("mine", 1)) && mine.is_stopped());
        drop(mine);
        assert_eq!(text("mine", 1), "a", "the text can be read just after the end");
        drop(other);
        assert!(!all.stop(&owner("", 1)));
    }

    #[test]
    fn completions_without_a_key_belong_to_the_address_of_their_client() {
        let all = RunningCompletions::default();
        let (mine, other) = (all.begin(owner("", 1)), all.begin(owner("", 2)));
        mine.start();
        mine.push_text("a");
        assert_eq!([all.text(&owner("", 1)), all.text(&owner("", 2))], ["a", ""]);
        assert!(all.text(&GenerationOwner::default()).is_empty(), "an unknown address is another one");
        assert!(!all.stop(&owner("", 2)), "what waits is not stopped without a key");
        other.start();
        assert!(all.stop(&owner("", 2)) && other.is_stopped() && !mine.is_stopped());
        drop((mine, other));
        assert_eq!([all.text(&owner("", 1)), all.text(&owner("", 2))], ["a", ""]);
    }

    #[test]
    fn chats_are_stopped_and_not_watched() {
        let all = RunningCompletions::default();
        let before = all.begin(owner("", 1));
        before.start();
        before.push_text("a");
        drop(before);
        let chat = all.begin_chat(owner("", 1).client);
        chat.start();
        assert_eq!(all.text(&owner("", 1)), "a");
        assert!(!all.stop(&owner("", 2)) && all.stop(&owner("", 1)) && chat.is_stopped());
        drop(chat);
        assert_eq!(all.text(&owner("", 1)), "a", "a chat leaves no text");
    }
}

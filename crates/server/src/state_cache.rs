//! Rendered snapshots of conversations: each published state is rendered once for all readers.

use crate::error::ApiResult;
use crate::wire::ApiSnapshot;
use halo_engine::snapshot::{ConversationSnapshot, ConversationState};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The latest rendered snapshot of each conversation, of the latest conversations.
#[derive(Default)]
pub(crate) struct StateCache(Mutex<BTreeMap<String, CachedState>>);

/// The most conversations in the cache.
const MAX_STATES: usize = 32;

struct CachedState {
    /// Counts all rendered states; the smallest is the oldest.
    sequence: u64,
    source: Weak<ConversationState>,
    /// The last event; none while an answer was running, which has many. Records of a turn and of a forgetting cycle are stored
    /// after the last state was published and before an event, so the snapshot is rendered again after the event.
    last_event: Option<u64>,
    rendered: Arc<ApiSnapshot>,
}

impl StateCache {
    /// The rendered snapshot, if it is in the cache.
    pub fn get(&self, snapshot: &ConversationSnapshot) -> Option<Arc<ApiSnapshot>> {
        let (state, last_event) = (&snapshot.state, last_event(snapshot));
        let all = self.0.lock();
        let cached = all.get(&state.name)?;
        let same =
            cached.last_event == last_event && std::ptr::eq(cached.source.as_ptr(), Arc::as_ptr(state));
        same.then(|| Arc::clone(&cached.rendered))
    }

    pub fn get_or_render(
        &self,
        snapshot: &ConversationSnapshot,
        render: impl FnOnce() -> ApiResult<ApiSnapshot>,
    ) -> ApiResult<Arc<ApiSnapshot>> {
        if let Some(rendered) = self.get(snapshot) {
            return Ok(rendered);
        }
        let (state, last_event) = (&snapshot.state, last_event(snapshot));
        let rendered = Arc::new(render()?);
        let mut all = self.0.lock();
        all.retain(|_, cached| cached.is_used());
        let sequence = all.values().map(|cached| cached.sequence).max().unwrap_or(0) + 1;
        let source = Arc::downgrade(state);
        all.insert(
            state.name.clone(),
            CachedState { sequence, source, last_event, rendered: Arc::clone(&rendered) },
        );
        if all.len() > MAX_STATES {
            let oldest = all.iter().min_by_key(|(_, cached)| cached.sequence).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
        Ok(rendered)
    }

    /// Drops what is cached of a conversation.
    pub fn remove(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Drops the states of conversations that were closed.
    pub fn remove_unused(&self) {
        self.0.lock().retain(|_, cached| cached.is_used());
    }

    pub fn len(&self) -> usize {
        self.0.lock().len()
    }
}

fn last_event(snapshot: &ConversationSnapshot) -> Option<u64> {
    snapshot.answer.is_none().then_some(snapshot.last_event)
}

impl CachedState {
    /// Whether somebody holds the state: nobody else can request it.
    fn is_used(&self) -> bool {
        self.source.strong_count() > 0
    }
}

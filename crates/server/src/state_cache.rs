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
    /// Whether an answer was running. The finish reason of a turn is stored after its last state was published, so the snapshot
    /// is rendered again when the answer has ended.
    running: bool,
    rendered: Arc<ApiSnapshot>,
}

impl StateCache {
    /// The rendered snapshot, if it is in the cache.
    pub fn get(&self, snapshot: &ConversationSnapshot) -> Option<Arc<ApiSnapshot>> {
        let (state, running) = (&snapshot.state, snapshot.answer.is_some());
        let all = self.0.lock();
        let cached = all.get(&state.name)?;
        let same = cached.running == running && std::ptr::eq(cached.source.as_ptr(), Arc::as_ptr(state));
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
        let (state, running) = (&snapshot.state, snapshot.answer.is_some());
        let rendered = Arc::new(render()?);
        let mut all = self.0.lock();
        all.retain(|_, cached| cached.is_used());
        let sequence = all.values().map(|cached| cached.sequence).max().unwrap_or(0) + 1;
        let source = Arc::downgrade(state);
        all.insert(
            state.name.clone(),
            CachedState { sequence, source, running, rendered: Arc::clone(&rendered) },
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

impl CachedState {
    /// Whether somebody holds the state: nobody else can request it.
    fn is_used(&self) -> bool {
        self.source.strong_count() > 0
    }
}

//! Rendered snapshots of conversations: each published state is rendered once for all readers.

use crate::error::ApiResult;
use crate::wire::ApiSnapshot;
use halo_engine::snapshot::{ConversationSnapshot, ConversationState};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The latest rendered snapshot of each conversation.
#[derive(Default)]
pub(crate) struct StateCache(Mutex<BTreeMap<String, CachedState>>);

struct CachedState {
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
        // A state that nobody holds any more cannot be requested.
        all.retain(|_, cached| cached.source.strong_count() > 0);
        let cached = CachedState { source: Arc::downgrade(state), running, rendered: Arc::clone(&rendered) };
        all.insert(state.name.clone(), cached);
        Ok(rendered)
    }
}

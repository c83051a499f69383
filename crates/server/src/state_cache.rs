//! How conversations stand, put into words once for all who ask, for as long as it stays so.

use crate::error::ApiResult;
use crate::halo::wire::ApiSnapshot;
use halo_engine::snapshot::{ConversationSnapshot, ConversationState};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What was put into words last, by conversation.
#[derive(Default)]
pub(crate) struct StateCache(Mutex<BTreeMap<String, CachedState>>);

struct CachedState {
    source: Weak<ConversationState>,
    /// Whether an answer was being given. How it ended is stored before it is over, and after the last that it changes.
    running: bool,
    rendered: Arc<ApiSnapshot>,
}

impl StateCache {
    /// How what was seen stands, where it has been put into words.
    pub fn get(&self, seen: &ConversationSnapshot) -> Option<Arc<ApiSnapshot>> {
        let (standing, running) = (&seen.state, seen.answer.is_some());
        let all = self.lock();
        let words = all.get(&standing.name)?;
        let same = words.running == running && std::ptr::eq(words.source.as_ptr(), Arc::as_ptr(standing));
        same.then(|| Arc::clone(&words.rendered))
    }

    /// The same; put into words by `say`, where it has not been.
    pub fn get_or_render(
        &self,
        seen: &ConversationSnapshot,
        say: impl FnOnce() -> ApiResult<ApiSnapshot>,
    ) -> ApiResult<Arc<ApiSnapshot>> {
        if let Some(stood) = self.get(seen) {
            return Ok(stood);
        }
        let (standing, running) = (&seen.state, seen.answer.is_some());
        let stood = Arc::new(say()?);
        let mut all = self.lock();
        // Nobody will ask for those that are over.
        all.retain(|_, words| words.source.strong_count() > 0);
        let words = CachedState { source: Arc::downgrade(standing), running, rendered: Arc::clone(&stood) };
        all.insert(standing.name.clone(), words);
        Ok(stood)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, CachedState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

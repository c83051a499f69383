//! In which conversation a response of the Responses API is, for the latest responses. The store knows all of them, but has to look
//! into every conversation.

use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};

/// The most responses that are remembered.
const MAX_RESPONSES: usize = 10_000;

#[derive(Default)]
pub(crate) struct ResponseIndex {
    entries: Mutex<IndexEntries>,
}

#[derive(Default)]
struct IndexEntries {
    /// The name of the conversation by the id of the response. Another program may have renamed or deleted a conversation since.
    conversations: HashMap<String, String>,
    /// The ids, the oldest first.
    order: VecDeque<String>,
}

impl ResponseIndex {
    pub fn conversation(&self, id: &str) -> Option<String> {
        self.entries.lock().conversations.get(id).cloned()
    }

    pub fn insert(&self, id: &str, conversation: &str) {
        let mut entries = self.entries.lock();
        if entries.conversations.insert(id.to_owned(), conversation.to_owned()).is_none() {
            entries.order.push_back(id.to_owned());
        }
        while entries.order.len() > MAX_RESPONSES {
            if let Some(oldest) = entries.order.pop_front() {
                entries.conversations.remove(&oldest);
            }
        }
    }

    /// Drops the responses of a conversation that was erased or renamed.
    pub fn remove_conversation(&self, name: &str) {
        let IndexEntries { conversations, order } = &mut *self.entries.lock();
        conversations.retain(|_, conversation| conversation != name);
        order.retain(|id| conversations.contains_key(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_index_is_bounded() {
        let index = ResponseIndex::default();
        for n in 0..MAX_RESPONSES + 5 {
            index.insert(&format!("resp_{n}"), "main");
        }
        index.insert("resp_7", "renamed");
        assert_eq!(index.conversation("resp_4"), None);
        assert_eq!(index.conversation("resp_5").as_deref(), Some("main"));
        assert_eq!(index.conversation("resp_7").as_deref(), Some("renamed"));
        assert_eq!(index.entries.lock().conversations.len(), MAX_RESPONSES);
        assert_eq!(index.entries.lock().order.len(), MAX_RESPONSES);
        index.remove_conversation("main");
        assert_eq!(index.conversation("resp_5"), None);
        assert_eq!(index.conversation("resp_7").as_deref(), Some("renamed"));
        assert_eq!(index.entries.lock().order, ["resp_7"]);
    }
}

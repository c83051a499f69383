//! A store that fails on demand.

use crate::Error;
use crate::change::Change;
use crate::chunk_body::ChunkBody;
use crate::conversation_copy::TurnCopy;
use crate::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordChange, RecordKind, StagedRecords, Store,
};
use crate::timeline::Timeline;
use crate::token::{ChunkId, TurnId};

/// A store that fails after a given number of calls.
#[derive(Clone, Debug)]
pub struct FailingStore<S> {
    inner: S,
    /// How many more calls succeed.
    pub calls_left: usize,
    /// Whether a failing call writes before it fails, as when the connection breaks before the reply.
    pub fails_after_write: bool,
}

impl<S: Store> FailingStore<S> {
    /// A store that fails after `calls` calls.
    pub fn new(inner: S, calls: usize) -> Self {
        Self { inner, calls_left: calls, fails_after_write: false }
    }

    /// The wrapped store.
    pub fn inner(&mut self) -> &mut S {
        &mut self.inner
    }

    fn call_or_fail<T>(&mut self, work: impl FnOnce(&mut S) -> Result<T, Error>) -> Result<T, Error> {
        let fails = self.calls_left == 0;
        self.calls_left = self.calls_left.saturating_sub(1);
        let failure = || Error::internal("using the store", "the test double fails here");
        if fails && !self.fails_after_write {
            return Err(failure());
        }
        let result = work(&mut self.inner);
        if fails { Err(failure()) } else { result }
    }
}

impl<S: Store> Store for FailingStore<S> {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        self.call_or_fail(Store::list_conversations)
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, Error> {
        self.call_or_fail(|s| s.load(conversation, access))
    }

    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        self.call_or_fail(|s| s.fetch_bodies(conversation, chunks))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.commit(conversation, change, after, durability))
    }

    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        self.call_or_fail(|s| s.chunk_history(conversation, chunk))
    }

    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error> {
        self.call_or_fail(|s| s.load_as_of(conversation, turn))
    }

    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        self.call_or_fail(|s| s.turn_times(conversation))
    }

    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        self.call_or_fail(|s| s.records(conversation, kind))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.put_record(conversation, kind, key, value))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        self.call_or_fail(|s| s.embeddings(conversation, embedder))
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.put_embeddings(conversation, embedder, embeddings))
    }

    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.copy_with_records(from, to, model, convert, records))
    }

    fn replace_by_copy(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.replace_by_copy(conversation, kept_as, model, settings, convert))
    }

    fn stage_records(&mut self, conversation: &str, staged: StagedRecords) {
        self.inner.stage_records(conversation, staged);
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        self.call_or_fail(|s| s.rename(from, to))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        self.call_or_fail(|s| s.message_keys(conversation, last))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error> {
        self.call_or_fail(|s| s.put_message_keys(conversation, keys))
    }

    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error> {
        self.call_or_fail(|s| s.find_messages(lookup, limit))
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        self.call_or_fail(|s| s.transact_all(conversation, timeline, changes))
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error> {
        self.call_or_fail(|s| s.set_model(conversation, model))
    }
}

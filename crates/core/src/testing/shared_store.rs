//! A store that several sessions share, for tests of concurrent use.
// The core is synchronous, but a real store is shared between threads.
#![allow(clippy::disallowed_types)]

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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A store behind a mutex; its clones share it.
pub struct SharedStore<S>(pub Arc<Mutex<S>>);

impl<S> Clone for SharedStore<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S> SharedStore<S> {
    /// Wraps a store.
    pub fn new(store: S) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    fn lock(&self) -> MutexGuard<'_, S> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Store> Store for SharedStore<S> {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        self.lock().list_conversations()
    }
    fn load(&mut self, c: &str, access: Access) -> Result<Timeline, Error> {
        self.lock().load(c, access)
    }
    fn fetch_bodies(&mut self, c: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        self.lock().fetch_bodies(c, chunks)
    }
    fn commit(
        &mut self,
        c: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        self.lock().commit(c, change, after, durability)
    }
    fn chunk_history(&mut self, c: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        self.lock().chunk_history(c, chunk)
    }
    fn load_as_of(&mut self, c: &str, turn: TurnId) -> Result<Timeline, Error> {
        self.lock().load_as_of(c, turn)
    }
    fn turn_times(&mut self, c: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        self.lock().turn_times(c)
    }
    fn records(&mut self, c: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        self.lock().records(c, kind)
    }
    fn put_record(&mut self, c: &str, kind: RecordKind, key: &str, value: Option<&str>) -> Result<(), Error> {
        self.lock().put_record(c, kind, key, value)
    }
    fn embeddings(&mut self, c: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        self.lock().embeddings(c, embedder)
    }
    fn put_embeddings(&mut self, c: &str, embedder: &str, all: &[Embedding]) -> Result<(), Error> {
        self.lock().put_embeddings(c, embedder, all)
    }
    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        self.lock().copy_with_records(from, to, model, convert, records)
    }
    fn replace_by_copy(
        &mut self,
        c: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.lock().replace_by_copy(c, kept_as, model, settings, convert)
    }
    fn stage_records(&mut self, c: &str, staged: StagedRecords) {
        self.lock().stage_records(c, staged);
    }
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        self.lock().rename(from, to)
    }
    fn message_keys(&mut self, c: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        self.lock().message_keys(c, last)
    }
    fn put_message_keys(&mut self, c: &str, keys: &[MessageKey]) -> Result<(), Error> {
        self.lock().put_message_keys(c, keys)
    }
    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error> {
        self.lock().find_messages(lookup, limit)
    }
    fn transact_all(&mut self, c: &str, t: &mut Timeline, changes: &[Change]) -> Result<(), Error> {
        self.lock().transact_all(c, t, changes)
    }
    fn set_model(&mut self, c: &str, model: &str) -> Result<(), Error> {
        self.lock().set_model(c, model)
    }
}

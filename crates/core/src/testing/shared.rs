//! A store that several sessions have, for tests of those.
// The core is synchronous; those whom this stands in for are not.
#![allow(clippy::disallowed_types)]

use crate::body::Body;
use crate::change::Change;
use crate::seams::{
    Access, Durability, Embedding, Entry, Kind, MessageKey, MessageLookup, Record, SeamError, Store, Summary,
};
use crate::timeline::Timeline;
use crate::token::{ChunkId, TurnId};
use crate::told::Told;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A store that several may have, one at a time.
pub struct Shared<S>(pub Arc<Mutex<S>>);

impl<S> Clone for Shared<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S> Shared<S> {
    /// A store to be shared.
    pub fn new(store: S) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    fn lock(&self) -> MutexGuard<'_, S> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Store> Store for Shared<S> {
    fn conversations(&mut self) -> Result<Vec<Summary>, SeamError> {
        self.lock().conversations()
    }
    fn load(&mut self, c: &str, access: Access) -> Result<Timeline, SeamError> {
        self.lock().load(c, access)
    }
    fn fetch(&mut self, c: &str, chunks: &[ChunkId]) -> Result<Vec<Body>, SeamError> {
        self.lock().fetch(c, chunks)
    }
    fn commit(
        &mut self,
        c: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), SeamError> {
        self.lock().commit(c, change, after, durability)
    }
    fn history(&mut self, c: &str, chunk: ChunkId) -> Result<Vec<Entry>, SeamError> {
        self.lock().history(c, chunk)
    }
    fn as_of(&mut self, c: &str, turn: TurnId) -> Result<Timeline, SeamError> {
        self.lock().as_of(c, turn)
    }
    fn times(&mut self, c: &str) -> Result<Vec<(TurnId, i64)>, SeamError> {
        self.lock().times(c)
    }
    fn records(&mut self, c: &str, kind: Kind) -> Result<Vec<Record>, SeamError> {
        self.lock().records(c, kind)
    }
    fn put_record(&mut self, c: &str, kind: Kind, key: &str, value: Option<&str>) -> Result<(), SeamError> {
        self.lock().put_record(c, kind, key, value)
    }
    fn embeddings(&mut self, c: &str, embedder: &str) -> Result<Vec<Embedding>, SeamError> {
        self.lock().embeddings(c, embedder)
    }
    fn put_embeddings(&mut self, c: &str, embedder: &str, all: &[Embedding]) -> Result<(), SeamError> {
        self.lock().put_embeddings(c, embedder, all)
    }
    fn retell(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        tell: &mut dyn FnMut(Told) -> Result<Option<Told>, SeamError>,
    ) -> Result<(), SeamError> {
        self.lock().retell(from, to, model, tell)
    }
    fn rename(&mut self, from: &str, to: &str) -> Result<(), SeamError> {
        self.lock().rename(from, to)
    }
    fn message_keys(&mut self, c: &str, last: usize) -> Result<Vec<MessageKey>, SeamError> {
        self.lock().message_keys(c, last)
    }
    fn put_message_keys(&mut self, c: &str, keys: &[MessageKey]) -> Result<(), SeamError> {
        self.lock().put_message_keys(c, keys)
    }
    fn find_messages(
        &mut self,
        lookup: MessageLookup,
        most: usize,
    ) -> Result<Vec<(String, TurnId)>, SeamError> {
        self.lock().find_messages(lookup, most)
    }
    fn transact_all(&mut self, c: &str, t: &mut Timeline, changes: &[Change]) -> Result<(), SeamError> {
        self.lock().transact_all(c, t, changes)
    }
    fn set_model(&mut self, c: &str, model: &str) -> Result<(), SeamError> {
        self.lock().set_model(c, model)
    }
}

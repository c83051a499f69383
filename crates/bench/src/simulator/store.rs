//! The double of the store as one process has it open: faults at every call, and leases.

use super::disk::{PlantedBug, SimulatedDisk, SimulatedLease};
use halo_core::Error;
use halo_core::change::Change;
use halo_core::chunk_body::ChunkBody;
use halo_core::conversation_copy::TurnCopy;
use halo_core::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordChange, RecordKind, StagedRecords, Store,
};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use std::collections::BTreeMap;

/// The store as one process has it open.
pub(super) struct SimulatedStore {
    disk: SimulatedDisk,
    process: u64,
    /// The epochs of the leases that this store has taken.
    epochs: BTreeMap<String, u64>,
}

impl SimulatedStore {
    pub fn open(disk: &SimulatedDisk, process: u64) -> Self {
        Self { disk: disk.clone(), process, epochs: BTreeMap::new() }
    }

    fn call<T>(
        &mut self,
        conversation: &str,
        work: impl FnOnce(&mut dyn Store) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.disk.lock().call(self.process, conversation, work)
    }

    /// Whether this store may write. A process that has lost its lease is told so, unless that bug is planted.
    fn check_lease(&self, conversation: &str) -> Result<bool, Error> {
        let mut state = self.disk.lock();
        let own = self.epochs.get(conversation);
        let is_owner = state.leases.get(conversation).map(|lease| &lease.epoch) == own && own.is_some();
        if is_owner || state.dead.contains(&self.process) {
            return Ok(true);
        }
        state.stale_writes += 1;
        if state.bug == Some(PlantedBug::IgnoreEpoch) {
            return Ok(false);
        }
        Err(Error::busy("committing", "another process has taken the lease"))
    }

    fn take_lease(&mut self, conversation: &str) -> Result<(), Error> {
        let mut state = self.disk.lock();
        let is_held = state.leases.get(conversation).is_some_and(|lease| {
            !lease.expired && lease.process != self.process && !state.dead.contains(&lease.process)
        });
        if is_held {
            return Err(Error::busy("opening", "another process has the lease"));
        }
        state.next_epoch += 1;
        let lease = SimulatedLease { process: self.process, epoch: state.next_epoch, expired: false };
        state.leases.insert(conversation.to_owned(), lease);
        self.epochs.insert(conversation.to_owned(), lease.epoch);
        Ok(())
    }
}

impl Drop for SimulatedStore {
    fn drop(&mut self) {
        let names: Vec<String> = self.epochs.keys().cloned().collect();
        names.iter().for_each(|name| self.release_lease(name));
    }
}

impl Store for SimulatedStore {
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error> {
        self.call("", |store| store.list_conversations())
    }

    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, Error> {
        if access == Access::Write {
            self.take_lease(conversation)?;
        }
        self.call("", |store| store.load(conversation, access))
    }

    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error> {
        self.call("", |store| store.fetch_bodies(conversation, chunks))
    }

    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error> {
        if !self.check_lease(conversation)? {
            return Ok(());
        }
        let bug = self.disk.lock().bug;
        let durability = if bug == Some(PlantedBug::SkipSync) { Durability::Deferred } else { durability };
        if bug == Some(PlantedBug::AckBeforeCommit) {
            self.call("", |_| Ok(()))?;
            let commit = (conversation.to_owned(), change.clone(), after.clone(), durability);
            self.disk.lock().acknowledged = Some(commit);
            return Ok(());
        }
        self.call(conversation, |store| store.commit(conversation, change, after, durability))?;
        let mut state = self.disk.lock();
        state.late_records = state.late_staged.take();
        Ok(())
    }

    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error> {
        self.call("", |store| store.chunk_history(conversation, chunk))
    }

    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error> {
        self.call("", |store| store.load_as_of(conversation, turn))
    }

    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error> {
        self.call("", |store| store.turn_times(conversation))
    }

    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error> {
        self.call("", |store| store.records(conversation, kind))
    }

    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error> {
        self.call("", |store| store.put_record(conversation, kind, key, value))
    }

    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error> {
        self.call("", |store| store.embeddings(conversation, embedder))
    }

    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error> {
        self.call("", |store| store.put_embeddings(conversation, embedder, embeddings))
    }

    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error> {
        self.call("", |store| store.set_model(conversation, model))
    }

    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error> {
        self.call(to, |store| store.copy_with_records(from, to, model, convert, records))
    }

    fn replace_by_copy(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.call(conversation, |store| {
            store.replace_by_copy(conversation, kept_as, model, settings, convert)
        })
    }

    fn stage_records(&mut self, conversation: &str, staged: StagedRecords) {
        let mut state = self.disk.lock();
        if state.dead.contains(&self.process) {
            return;
        }
        if state.bug == Some(PlantedBug::RecordsAfterCommit) && !staged.is_empty() {
            state.late_staged = Some((conversation.to_owned(), staged));
            return;
        }
        state.stage_records(conversation, staged);
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error> {
        self.call(to, |store| store.rename(from, to))
    }

    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error> {
        self.call("", |store| store.message_keys(conversation, last))
    }

    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error> {
        self.call("", |store| store.put_message_keys(conversation, keys))
    }

    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error> {
        self.call("", |store| store.find_messages(lookup, limit))
    }

    fn release_lease(&mut self, conversation: &str) {
        let Some(epoch) = self.epochs.remove(conversation) else { return };
        let mut state = self.disk.lock();
        if state.leases.get(conversation).is_some_and(|lease| lease.epoch == epoch) {
            state.leases.remove(conversation);
        }
    }

    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error> {
        if !self.check_lease(conversation)? {
            return Ok(());
        }
        self.call(conversation, |store| store.transact_all(conversation, timeline, changes))
    }
}

//! The double of the store: commits, records and leases of an in-memory store, with faults at every call.

use halo_core::Error;
use halo_core::change::Change;
use halo_core::chunk_body::ChunkBody;
use halo_core::conversation_copy::TurnCopy;
use halo_core::store::{
    Access, ConversationSummary, Durability, Embedding, LogEntry, MessageKey, MessageLookup, Record,
    RecordKind, StagedRecords, Store,
};
use halo_core::testing::doubles::InMemoryStore;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A promise that the doubles break, to see that the simulator notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// A commit that must be synced is not.
    SkipSync,
    /// A write of a process that has lost its lease is accepted, and has no effect.
    IgnoreEpoch,
    /// A commit returns before it is done, so that the engine announces what is not stored.
    AckBeforeCommit,
    /// Records that belong to a message are written after it and not with it.
    RecordsAfterCommit,
}

/// How a call of the store fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreFault {
    /// It fails without an effect: a timeout before the request, a full disk.
    Before,
    /// It has its effect, and the reply is lost.
    After,
    CrashBefore,
    CrashAfter,
}

#[derive(Clone, Copy, Debug)]
struct SimulatedLease {
    process: u64,
    epoch: u64,
    expired: bool,
}

/// The disk that all processes share. Clones are the same disk.
#[derive(Clone)]
pub(super) struct SimulatedDisk(Arc<Mutex<DiskState>>);

struct DiskState {
    store: InMemoryStore,
    leases: BTreeMap<String, SimulatedLease>,
    next_epoch: u64,
    dead: BTreeSet<u64>,
    rng: fastrand::Rng,
    /// Faults in a thousand calls.
    fault_rate: u32,
    bug: Option<PlantedBug>,
    /// A commit that was acknowledged and is not done, with the planted bug.
    acknowledged: Option<(String, Change, Timeline, Durability)>,
    /// Records that are written by the call after the next commit, with the planted bug.
    late_records: Option<(String, StagedRecords)>,
    late_staged: Option<(String, StagedRecords)>,
    /// The number of tokens that each conversation has in the store.
    stored_tokens: BTreeMap<String, u64>,
    faults: u64,
    stale_writes: u64,
}

impl SimulatedDisk {
    pub fn new(seed: u64, bug: Option<PlantedBug>) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            store: InMemoryStore::default(),
            leases: BTreeMap::new(),
            next_epoch: 0,
            dead: BTreeSet::new(),
            rng: fastrand::Rng::with_seed(seed),
            fault_rate: 0,
            bug,
            acknowledged: None,
            late_records: None,
            late_staged: None,
            stored_tokens: BTreeMap::new(),
            faults: 0,
            stale_writes: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock()
    }

    /// A store for a process.
    pub fn open(&self, process: u64) -> SimulatedStore {
        SimulatedStore { disk: self.clone(), process, epochs: BTreeMap::new() }
    }

    /// The stored state, without faults.
    pub fn inspect<T>(&self, read: impl FnOnce(&mut InMemoryStore) -> T) -> T {
        read(&mut self.lock().store)
    }

    pub fn set_fault_rate(&self, per_thousand: u32) {
        self.lock().fault_rate = per_thousand;
    }

    pub fn is_dead(&self, process: u64) -> bool {
        self.lock().dead.contains(&process)
    }

    pub fn kill(&self, process: u64) {
        self.lock().dead.insert(process);
    }

    /// All processes die, and what was not synced is lost.
    pub fn cut_power(&self, processes: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        state.dead.extend(processes);
        (state.acknowledged, state.late_records, state.late_staged) = (None, None, None);
        state.store.simulate_crash();
        state.recount();
    }

    /// The owner of a conversation is paused for longer than its lease: another process may take it.
    pub fn expire_lease(&self, conversation: &str) {
        if let Some(lease) = self.lock().leases.get_mut(conversation) {
            lease.expired = true;
        }
    }

    /// How many tokens of a conversation are stored.
    pub fn stored_tokens(&self, conversation: &str) -> u64 {
        self.lock().stored_tokens.get(conversation).copied().unwrap_or(0)
    }

    /// Faults and stale writes so far.
    pub fn fault_counts(&self) -> (u64, u64) {
        let state = self.lock();
        (state.faults, state.stale_writes)
    }
}

impl DiskState {
    fn recount(&mut self) {
        let summaries = self.store.list_conversations().unwrap_or_default();
        self.stored_tokens = summaries.into_iter().map(|summary| (summary.name, summary.tokens)).collect();
    }

    fn roll_fault(&mut self) -> Option<StoreFault> {
        if self.rng.u32(..1000) >= self.fault_rate {
            return None;
        }
        self.faults += 1;
        let faults = [StoreFault::Before, StoreFault::After, StoreFault::CrashBefore, StoreFault::CrashAfter];
        Some(faults[self.rng.usize(..faults.len())])
    }

    /// Does what the planted bugs have put off.
    fn catch_up(&mut self) {
        if let Some((conversation, change, after, durability)) = self.acknowledged.take() {
            let len = after.len() as u64;
            if self.store.commit(&conversation, &change, &after, durability).is_ok() {
                self.stored_tokens.insert(conversation, len);
            }
        }
        if let Some((conversation, staged)) = self.late_records.take() {
            for (kind, key, value) in staged.records {
                let _ = self.store.put_record(&conversation, kind, &key, Some(&value));
            }
            if let Some(model) = staged.model {
                let _ = self.store.set_model(&conversation, &model);
            }
        }
    }
}

fn lost_connection() -> Error {
    Error::unavailable("using the store", "the connection is lost")
}

/// The store as one process has it open.
pub(super) struct SimulatedStore {
    disk: SimulatedDisk,
    process: u64,
    /// The epochs of the leases that this store has taken.
    epochs: BTreeMap<String, u64>,
}

impl SimulatedStore {
    fn call<T>(
        &mut self,
        conversation: &str,
        work: impl FnOnce(&mut InMemoryStore) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = self.disk.lock();
        if state.dead.contains(&self.process) {
            return Err(lost_connection());
        }
        state.catch_up();
        let fault = state.roll_fault();
        if fault == Some(StoreFault::CrashBefore) {
            state.dead.insert(self.process);
        }
        if matches!(fault, Some(StoreFault::Before | StoreFault::CrashBefore)) {
            return Err(lost_connection());
        }
        let result = work(&mut state.store);
        if result.is_ok() && !conversation.is_empty() {
            let summary = state.store.find_conversation(conversation)?;
            let tokens = summary.map_or(0, |summary| summary.tokens);
            state.stored_tokens.insert(conversation.to_owned(), tokens);
        }
        if fault == Some(StoreFault::CrashAfter) {
            state.dead.insert(self.process);
        }
        if fault.is_some() { Err(lost_connection()) } else { result }
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
        self.call("", Store::list_conversations)
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

    fn copy_conversation(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.call(to, |store| store.copy_conversation(from, to, model, convert))
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
        state.store.stage_records(conversation, staged);
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

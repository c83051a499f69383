//! The disk that all processes of a simulation share: a store in memory, or SQLite on a disk that loses and tears writes.

use crate::faulty_vfs::{self, FaultyVolume};
use crate::random_changes::BenchRng;
use halo_core::Error;
use halo_core::change::Change;
use halo_core::store::{Durability, StagedRecords, Store};
use halo_core::testing::doubles::InMemoryStore;
use halo_core::timeline::Timeline;
use halo_store::database::Database;
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
    /// The engine announces a message before it is stored.
    AnnounceBeforeCommit,
}

/// What a simulation stores in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedStoreKind {
    Memory,
    /// The store of the program. A write can be torn, and the disk be full, in the middle of a commit.
    Sqlite,
}

enum StoreBacking {
    Memory(InMemoryStore),
    Sqlite(SqliteBacking),
}

struct SqliteBacking {
    volume: FaultyVolume,
    /// None after a crash: the next call opens it again.
    database: Option<Database>,
}

impl StoreBacking {
    fn open(&mut self) -> Result<&mut dyn Store, Error> {
        match self {
            Self::Memory(store) => Ok(store),
            Self::Sqlite(SqliteBacking { volume, database }) => {
                if database.is_none() {
                    let path = volume.database_path();
                    *database = Some(Database::open_with_vfs(&path, faulty_vfs::VFS_NAME)?);
                }
                let missing = || Error::internal("opening the store", "there is none");
                Ok(database.as_mut().ok_or_else(missing)?)
            }
        }
    }

    /// A program that has the store open is killed.
    fn kill_program(&mut self) {
        if let Self::Sqlite(sqlite) = self {
            sqlite.volume.kill_program();
            sqlite.database = None;
        }
    }

    fn lose_power(&mut self, seed: u64) {
        match self {
            Self::Memory(store) => store.simulate_crash(),
            Self::Sqlite(sqlite) => {
                sqlite.volume.lose_power(&mut BenchRng(seed));
                sqlite.database = None;
            }
        }
    }

    fn set_writes_left(&self, writes: Option<u64>) {
        if let Self::Sqlite(sqlite) = self {
            sqlite.volume.set_writes_left(writes);
        }
    }
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
pub(super) struct SimulatedLease {
    pub process: u64,
    pub epoch: u64,
    pub expired: bool,
}

/// The disk that all processes share. Clones are the same disk.
#[derive(Clone)]
pub(super) struct SimulatedDisk(Arc<Mutex<DiskState>>);

pub(super) struct DiskState {
    backing: StoreBacking,
    pub leases: BTreeMap<String, SimulatedLease>,
    pub next_epoch: u64,
    pub dead: BTreeSet<u64>,
    rng: fastrand::Rng,
    /// Faults in a thousand calls.
    fault_rate: u32,
    pub bug: Option<PlantedBug>,
    /// A commit that was acknowledged and is not done, with the planted bug.
    pub acknowledged: Option<(String, Change, Timeline, Durability)>,
    /// Records that are written by the call after the next commit, with the planted bug.
    pub late_records: Option<(String, StagedRecords)>,
    pub late_staged: Option<(String, StagedRecords)>,
    /// The number of tokens that each conversation has in the store.
    stored_tokens: BTreeMap<String, u64>,
    faults: u64,
    pub stale_writes: u64,
}

impl SimulatedDisk {
    pub fn new(seed: u64, kind: SimulatedStoreKind, bug: Option<PlantedBug>) -> Self {
        let backing = match kind {
            SimulatedStoreKind::Memory => StoreBacking::Memory(InMemoryStore::default()),
            SimulatedStoreKind::Sqlite => {
                StoreBacking::Sqlite(SqliteBacking { volume: FaultyVolume::new(), database: None })
            }
        };
        Self(Arc::new(Mutex::new(DiskState {
            backing,
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

    pub fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock()
    }

    /// The stored state, without faults.
    pub fn inspect<T>(&self, read: impl FnOnce(&mut dyn Store) -> Result<T, String>) -> Result<T, String> {
        let mut state = self.lock();
        let store = state.backing.open().map_err(|error| format!("the store does not open: {error}"))?;
        read(store)
    }

    /// Does something without faults of the store.
    pub fn without_faults<T>(&self, work: impl FnOnce() -> T) -> T {
        let rate = std::mem::take(&mut self.lock().fault_rate);
        let result = work();
        self.lock().fault_rate = rate;
        result
    }

    pub fn set_fault_rate(&self, per_thousand: u32) {
        self.lock().fault_rate = per_thousand;
    }

    pub fn is_dead(&self, process: u64) -> bool {
        self.lock().dead.contains(&process)
    }

    pub fn kill(&self, process: u64) {
        self.lock().kill(process);
    }

    /// All processes die, and what was not synced is lost.
    pub fn cut_power(&self, processes: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        state.dead.extend(processes);
        (state.acknowledged, state.late_records, state.late_staged) = (None, None, None);
        let seed = state.rng.u64(..);
        state.backing.lose_power(seed);
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
        let summaries = self.backing.open().and_then(|store| store.list_conversations()).unwrap_or_default();
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

    fn kill(&mut self, process: u64) {
        self.dead.insert(process);
        self.backing.kill_program();
    }

    pub fn stage_records(&mut self, conversation: &str, staged: StagedRecords) {
        if let Ok(store) = self.backing.open() {
            store.stage_records(conversation, staged);
        }
    }

    /// One call of the store by a process, with a fault or without.
    pub fn call<T>(
        &mut self,
        process: u64,
        conversation: &str,
        work: impl FnOnce(&mut dyn Store) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.dead.contains(&process) {
            return Err(lost_connection());
        }
        self.catch_up();
        let fault = self.roll_fault();
        let is_crash = matches!(fault, Some(StoreFault::CrashBefore | StoreFault::CrashAfter));
        // On a real disk, a crash or a full disk comes between two of the writes of one call.
        let is_in_the_middle =
            fault.is_some() && matches!(self.backing, StoreBacking::Sqlite(_)) && self.rng.bool();
        if is_in_the_middle {
            self.backing.open()?;
            let writes = self.rng.u64(..24);
            self.backing.set_writes_left(Some(writes));
        } else if matches!(fault, Some(StoreFault::Before | StoreFault::CrashBefore)) {
            if is_crash {
                self.kill(process);
            }
            return Err(lost_connection());
        }
        let store = self.backing.open()?;
        let result = work(store);
        self.backing.set_writes_left(None);
        if is_crash {
            self.kill(process);
        }
        if (result.is_ok() || is_crash) && !conversation.is_empty() {
            let summary = self.backing.open()?.find_conversation(conversation)?;
            let tokens = summary.map_or(0, |summary| summary.tokens);
            self.stored_tokens.insert(conversation.to_owned(), tokens);
        }
        match fault {
            // The disk had room for it, or was full.
            Some(_) if is_in_the_middle && !is_crash => result,
            Some(_) => Err(lost_connection()),
            None => result,
        }
    }

    /// Does what the planted bugs have put off.
    fn catch_up(&mut self) {
        let Ok(store) = self.backing.open() else { return };
        if let Some((conversation, change, after, durability)) = self.acknowledged.take() {
            let len = after.len() as u64;
            if store.commit(&conversation, &change, &after, durability).is_ok() {
                self.stored_tokens.insert(conversation, len);
            }
        }
        if let Some((conversation, staged)) = self.late_records.take() {
            for (kind, key, value) in staged.records {
                let _ = store.put_record(&conversation, kind, &key, Some(&value));
            }
            if let Some(model) = staged.model {
                let _ = store.set_model(&conversation, &model);
            }
        }
    }
}

pub(super) fn lost_connection() -> Error {
    Error::unavailable("using the store", "the connection is lost")
}

//! A connection to a database, the same for SQLite and PostgreSQL: opening, transactions and leases. What is done on it
//! is in the files that implement [`Database`] for one task each.

use crate::names;
use crate::open_conversation::OpenConversation;
use crate::postgres::Postgres;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlErrorKind};
use crate::sqlite::{OpenMode, Sqlite};
use halo_core::Error;
use halo_core::store::{Durability, LogEntry, StagedRecords};
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

pub use crate::location::StoreLocation;

/// A store of conversations in a database.
pub struct Database {
    pub(crate) sql: Box<dyn SqlConnection + Send>,
    location: StoreLocation,
    pub(crate) open_conversations: BTreeMap<String, OpenConversation>,
    /// What the next commit of a conversation writes beside its change.
    pub(crate) staged: BTreeMap<String, StagedRecords>,
    disk_full_handler: Option<DiskFullHandler>,
}

/// How often a transaction is tried when the connection to the server is lost, or when it cannot be ordered with another one.
/// Each attempt waits for a server that restarts.
const MAX_WRITE_ATTEMPTS: usize = 3;

/// A transaction that failed.
struct FailedTransaction<T> {
    error: SqlError,
    /// What it did, if it failed in its commit.
    unanswered: Option<T>,
}

/// Frees space on the disk of the store, and returns whether there is more now.
pub type DiskFullHandler = Arc<dyn Fn() -> bool + Send + Sync>;

impl Database {
    /// Opens a store for reading and writing, and creates it if it does not exist.
    pub fn open(location: &StoreLocation) -> Result<Self, Error> {
        Self::open_with_mode(location, OpenMode::Write)
    }

    /// Opens a store for reading. The file may be write-protected.
    pub fn open_read_only(location: &StoreLocation) -> Result<Self, Error> {
        Self::open_with_mode(location, OpenMode::Read)
    }

    fn open_with_mode(location: &StoreLocation, mode: OpenMode) -> Result<Self, Error> {
        let opened = match location {
            StoreLocation::Sqlite(path) => open_sqlite(path, mode).map(boxed),
            StoreLocation::Postgres(server) => Postgres::connect(server, mode == OpenMode::Write).map(boxed),
        };
        let sql = opened.map_err(|e| e.with_context(format!("opening the store {location}")))?;
        Ok(Self::new(sql, location.clone()))
    }

    /// Opens a file through the SQLite VFS of that name: for tests that simulate failing disks.
    pub fn open_with_vfs(path: &Path, vfs: &str) -> Result<Self, Error> {
        let sql = Sqlite::open(path, OpenMode::Write, Some(vfs))
            .map_err(|e| e.with_context("opening the store"))?;
        let location = StoreLocation::Sqlite(path.to_owned());
        Ok(Self::new(boxed(sql), location))
    }

    fn new(sql: Box<dyn SqlConnection + Send>, location: StoreLocation) -> Self {
        Self {
            sql,
            location,
            open_conversations: BTreeMap::new(),
            staged: BTreeMap::new(),
            disk_full_handler: None,
        }
    }

    #[must_use]
    pub fn location(&self) -> &StoreLocation {
        &self.location
    }

    /// Keeps repairs from replacing the database while this store is open, even if no conversation is.
    pub fn keep_in_use(&mut self) -> Result<(), Error> {
        self.sql.keep_in_use().map_err(|e| e.with_context("opening the store"))
    }

    pub fn size_on_disk(&mut self) -> Result<u64, Error> {
        self.sql.size_on_disk().map_err(|e| e.with_context("measuring the store"))
    }

    /// When the disk is full, a write asks for space and is tried again.
    pub fn set_disk_full_handler(&mut self, handler: DiskFullHandler) {
        self.disk_full_handler = Some(handler);
    }

    /// Whether a write that failed for want of space is worth another attempt.
    pub(crate) fn freed_space_after(&self, error: &SqlError) -> bool {
        error.kind == SqlErrorKind::DiskFull && self.disk_full_handler.as_ref().is_some_and(|free| free())
    }

    /// Runs `work` in one transaction that writes the conversations and worlds of these names, under their leases: those that
    /// this store holds or, for this transaction, others that are free.
    ///
    /// It has an effect exactly once. A connection that is lost before the transaction is committed loses nothing: it runs
    /// again. If the connection is lost during the commit, the lease shows whether it was committed. When the disk is full and
    /// space can be freed, it runs again, too.
    pub(crate) fn write<T>(
        &mut self,
        names: &[&str],
        durability: Durability,
        mut work: impl FnMut(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.with_leases(names, |store, leases| {
            let mut attempts = 0;
            loop {
                let failed = match store.transaction(Some(durability), leases, &mut work) {
                    Ok(value) => return Ok(value),
                    Err(failed) => failed,
                };
                attempts += 1;
                let tries_again = attempts < MAX_WRITE_ATTEMPTS;
                match failed.error.kind {
                    SqlErrorKind::Unavailable if store.sql.reconnects() && tries_again => {
                        if let Some(value) = failed.unanswered {
                            // The cause is reported, not that the server is still gone.
                            if store.sql.was_committed().map_err(|_| failed.error)? {
                                return Ok(value);
                            }
                        }
                    }
                    SqlErrorKind::Serialization if tries_again => {}
                    _ if store.freed_space_after(&failed.error) => attempts = 0,
                    _ => return Err(failed.error),
                }
            }
        })
    }

    /// Runs `work` in one transaction under the leases of these names, once: it cannot be repeated.
    pub(crate) fn write_once<T>(
        &mut self,
        names: &[&str],
        work: impl FnOnce(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.with_leases(names, |store, leases| {
            store.transaction(Some(Durability::Immediate), leases, work).map_err(|failed| failed.error)
        })
    }

    fn with_leases<T>(
        &mut self,
        names: &[&str],
        work: impl FnOnce(&mut Self, &[u64]) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        // In the same order everywhere, so that two processes never wait for each other.
        let keys: BTreeSet<u64> = names.iter().map(|name| lease_key(name)).collect();
        let keys: Vec<u64> = keys.into_iter().collect();
        let mut taken = Vec::new();
        let ensured = keys.iter().try_for_each(|&key| {
            taken.extend(self.sql.ensure_lease(key)?.then_some(key));
            Ok(())
        });
        let result = ensured.and_then(|()| work(self, &keys));
        taken.into_iter().for_each(|key| self.sql.release_lease(key));
        result
    }

    /// Runs `work` in one transaction without a lease; `writes` says how durable its writes are, `None` that it only reads.
    pub(crate) fn in_transaction<T>(
        &mut self,
        writes: Option<Durability>,
        work: impl FnOnce(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.transaction(writes, &[], work).map_err(|failed| failed.error)
    }

    fn transaction<T>(
        &mut self,
        writes: Option<Durability>,
        leases: &[u64],
        work: impl FnOnce(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, FailedTransaction<T>> {
        let failed = |error| FailedTransaction { error, unanswered: None };
        self.sql.begin(writes, leases).map_err(failed)?;
        let failed = match work(&mut *self.sql) {
            Err(error) => failed(error),
            Ok(value) => match self.sql.commit() {
                Ok(()) => return Ok(value),
                // What was read is right, whatever becomes of the connection.
                Err(_) if writes.is_none() => {
                    self.sql.rollback();
                    return Ok(value);
                }
                Err(error) => FailedTransaction { error, unanswered: Some(value) },
            },
        };
        self.sql.rollback();
        Err(failed)
    }

    /// Takes the lease of a conversation or world until it is released.
    pub(crate) fn take_lease(&mut self, name: &str) -> Result<(), SqlError> {
        self.sql.take_lease(lease_key(name))
    }

    pub(crate) fn is_leased_elsewhere(&mut self, name: &str) -> Result<bool, SqlError> {
        self.sql.is_leased_elsewhere(lease_key(name))
    }

    pub(crate) fn holder_elsewhere(&mut self, name: &str) -> Result<Option<u32>, SqlError> {
        let key = lease_key(name);
        if self.sql.is_leased_elsewhere(key)? { self.sql.lease_holder(key).map(Some) } else { Ok(None) }
    }

    pub(crate) fn drop_lease(&mut self, name: &str) {
        self.sql.release_lease(lease_key(name));
    }

    /// Drops the in-memory state of a conversation whose rows something else has rewritten.
    pub(crate) fn drop_open_state(&mut self, conversation: &str) {
        self.open_conversations.remove(conversation);
    }

    /// The last log entry that names each chunk: the reason for its current state.
    pub fn last_mentions(&mut self, conversation: &str) -> Result<BTreeMap<ChunkId, LogEntry>, Error> {
        let mentions = self
            .conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::last_mentions(sql, id)));
        mentions.map_err(|e| e.with_context(format!("reading the history of '{conversation}'")))
    }

    /// The timeline that the log alone leads to, whatever other tables hold.
    pub fn replay_log(&mut self, conversation: &str) -> Result<Timeline, Error> {
        let timeline = self
            .conversation_id(conversation)
            .and_then(|id| self.in_transaction(None, |sql| rows::replay_log(sql, id)));
        timeline.map_err(|e| e.with_context(format!("replaying the log of '{conversation}'")))
    }

    /// The id of a conversation that exists.
    pub(crate) fn conversation_id(&mut self, conversation: &str) -> Result<i64, SqlError> {
        rows::find_conversation_id(&mut *self.sql, conversation)?
            .ok_or_else(|| rows::no_such_conversation(conversation))
    }
}

/// The id of a conversation, which is created if it does not exist.
pub(crate) fn find_or_create_id(sql: &mut dyn SqlConnection, conversation: &str) -> Result<i64, SqlError> {
    names::check_conversation_name(conversation)?;
    match rows::find_conversation_id(sql, conversation)? {
        Some(id) => Ok(id),
        None => rows::create_conversation(sql, conversation, rows::now_ms()),
    }
}

fn boxed(connection: impl SqlConnection + Send + 'static) -> Box<dyn SqlConnection + Send> {
    Box::new(connection)
}

/// A reader of an older schema migrates it first. Where that is not possible, the reader gets the error of its own attempt.
fn open_sqlite(path: &Path, mode: OpenMode) -> Result<Sqlite, SqlError> {
    match Sqlite::open(path, mode, None) {
        Err(error) if error.kind == SqlErrorKind::OlderSchema => {
            drop(Sqlite::open(path, OpenMode::Write, None).map_err(|_| error)?);
            Sqlite::open(path, mode, None)
        }
        opened => opened,
    }
}

/// The key of the lease of a conversation or world: two names with the same one only exclude each other.
fn lease_key(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

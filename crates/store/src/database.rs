//! A connection to a database, the same for SQLite and PostgreSQL: opening, transactions and locks. What is done on it
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
use std::collections::BTreeMap;
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

    /// Runs `work` in one transaction that writes. When the disk is full and space can be freed, it runs again.
    pub(crate) fn write<T>(
        &mut self,
        durability: Durability,
        mut work: impl FnMut(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        loop {
            match self.in_transaction(Some(durability), &mut work) {
                Err(error) if self.freed_space_after(&error) => {}
                result => return result,
            }
        }
    }

    /// Runs `work` in one transaction; `writes` says how durable its writes are, `None` that it only reads.
    pub(crate) fn in_transaction<T>(
        &mut self,
        writes: Option<Durability>,
        work: impl FnOnce(&mut dyn SqlConnection) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.sql.begin(writes)?;
        let result = work(&mut *self.sql).and_then(|value| self.sql.commit().map(|()| value));
        if result.is_err() {
            self.sql.rollback();
        }
        result
    }

    pub(crate) fn lock_conversation(&mut self, conversation: &str) -> Result<(), SqlError> {
        self.sql.lock(lock_key(conversation))
    }

    pub(crate) fn is_locked_elsewhere(&mut self, conversation: &str) -> Result<bool, SqlError> {
        self.sql.is_locked_elsewhere(lock_key(conversation))
    }

    pub(crate) fn lock_holder(&mut self, conversation: &str) -> Result<Option<u32>, SqlError> {
        let key = lock_key(conversation);
        if self.sql.is_locked_elsewhere(key)? { self.sql.lock_holder(key).map(Some) } else { Ok(None) }
    }

    pub(crate) fn unlock_conversation(&mut self, conversation: &str) {
        self.sql.unlock(lock_key(conversation));
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

    /// The id of a conversation, which is created if it does not exist.
    pub(crate) fn find_or_create_id(&mut self, conversation: &str) -> Result<i64, SqlError> {
        names::check_conversation_name(conversation)?;
        match rows::find_conversation_id(&mut *self.sql, conversation)? {
            Some(id) => Ok(id),
            None => self.in_transaction(Some(Durability::Immediate), |sql| {
                rows::create_conversation(sql, conversation, rows::now_ms())
            }),
        }
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

fn lock_key(conversation: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(conversation.as_bytes())
}

//! SQLite in a file with a write-ahead log (WAL). Readers never wait; a durable commit is one sync.
//!
//! Beside the database is a folder with a lock file for each conversation that is being written: two programs may share
//! a database, but not a conversation. The system releases the lock of a process that has ended, so nobody waits for a lease
//! to expire. Each write checks the epoch of the lease as well: some network file systems lose locks.

use crate::file_swap::finish_interrupted_replacement;
use crate::files::{
    create_private, io_error, lock_file_path, open_lock_file, remove_database_files, unused_sibling_path,
};
use crate::schema::{self, NEWEST_VERSION, SQLITE_MIGRATIONS};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use halo_core::store::Durability;
use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, ErrorCode, OpenFlags, params_from_iter};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// "halo" in the header of the file marks it as a database of this program.
const APPLICATION_ID: i64 = 0x6861_6c6f;
/// How long to wait for a lock: the program that has it may be about to exit.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a write waits for another one. A long import must not make a user's message fail.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Sqlite {
    connection: Connection,
    path: PathBuf,
    /// Whether commits are synced now; unknown before the first one.
    synchronous_full: Option<bool>,
    leases: BTreeMap<u64, FileLease>,
    /// Epochs that the transaction that runs has raised; valid if it is committed.
    raised: Vec<(u64, i64)>,
    /// Whether other programs can open the file, so that conversations need locks.
    shared: bool,
    /// Held while any conversation is leased, so that a repair cannot replace the file.
    in_use_lock: Option<File>,
    /// Whether that lock is held without a conversation, too.
    keeps_in_use_lock: bool,
}

/// A lease that this connection has.
struct FileLease {
    /// Locked while it is held; none where no other program can open the database.
    lock_file: Option<File>,
    epoch: LeaseEpoch,
}

#[derive(Clone, Copy)]
enum LeaseEpoch {
    /// The first write raises it, in its own transaction: opening a conversation writes nothing.
    Unwritten,
    Known(i64),
    /// Another process has raised it.
    Lost,
}

/// What a database is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenMode {
    /// Reading and writing; a missing file is created.
    Write,
    Read,
}

impl Sqlite {
    /// Opens a file and migrates it to the newest schema.
    pub(crate) fn open(path: &Path, mode: OpenMode, vfs: Option<&str>) -> Result<Self, SqlError> {
        let shared = vfs.is_none();
        if shared {
            finish_interrupted_replacement(path)?;
        }
        if mode == OpenMode::Write && shared {
            create_private(path)?;
        }
        let flags = match mode {
            OpenMode::Write => OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE,
            OpenMode::Read => OpenFlags::SQLITE_OPEN_READ_ONLY,
        } | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        if path.is_dir() {
            return Err(SqlError::invalid_input(format!(
                "{} is a folder: give the path of a file",
                path.display()
            )));
        }
        let opened = match vfs {
            None if mode == OpenMode::Read && is_immutable(path) => open_immutable(path, flags),
            None => Connection::open_with_flags(path, flags),
            Some(vfs) => Connection::open_with_flags_and_vfs(path, flags, vfs),
        };
        let connection = opened.map_err(|e| classify_error(&e, path))?;
        let mut sqlite = Self {
            connection,
            path: path.to_owned(),
            synchronous_full: None,
            leases: BTreeMap::new(),
            raised: Vec::new(),
            shared,
            in_use_lock: None,
            keeps_in_use_lock: false,
        };
        sqlite.connection.busy_timeout(BUSY_TIMEOUT).map_err(|e| classify_error(&e, path))?;
        sqlite.connection.set_prepared_statement_cache_capacity(64);
        if !shared {
            // A VFS need not implement shared memory; with exclusive locking, WAL does without it.
            sqlite.set_pragma("locking_mode", "EXCLUSIVE")?;
        }
        sqlite.migrate(mode)?;
        Ok(sqlite)
    }

    fn migrate(&mut self, mode: OpenMode) -> Result<(), SqlError> {
        // Another program may be creating the schema: one transaction reads a consistent state.
        self.begin(None, &[])?;
        let header = (|| {
            let version = self.query_integer("PRAGMA user_version")?;
            let application = self.query_integer("PRAGMA application_id")?;
            Ok((version, application, self.query_integer("SELECT count(*) FROM sqlite_schema")?))
        })();
        self.rollback();
        let (version, application, tables) = header?;
        let path = self.path.display();
        if version > NEWEST_VERSION {
            let why = format!(
                "{path} was written by a newer Halo (schema version {version}, this program supports \
                 {NEWEST_VERSION}); the file was not changed: use the newer Halo, or another store"
            );
            return Err(SqlError::new(SqlErrorKind::NewerSchema, why));
        }
        if (version == 0) != (tables == 0) || (tables > 0 && application != APPLICATION_ID) {
            let why = format!("{path} is a database of another program; the file was not changed");
            return Err(SqlError::invalid_input(why));
        }
        if mode == OpenMode::Read {
            let why = format!(
                "{path} is empty or has an older schema, and cannot be migrated without write access"
            );
            return match version {
                0 => Err(SqlError::new(SqlErrorKind::ReadOnly, why)),
                _ if version < NEWEST_VERSION => Err(SqlError::new(SqlErrorKind::OlderSchema, why)),
                _ => Ok(()),
            };
        }
        self.configure()?;
        if version == NEWEST_VERSION {
            return Ok(());
        }
        self.begin(Some(Durability::Immediate), &[])?;
        match self.run_migrations() {
            Ok(()) => self.commit(),
            Err(error) => {
                self.rollback();
                Err(error)
            }
        }
    }

    fn configure(&mut self) -> Result<(), SqlError> {
        let started = Instant::now();
        while let Err(error) = self.set_pragma("journal_mode", "WAL") {
            if error.kind != SqlErrorKind::Busy || started.elapsed() > LOCK_TIMEOUT {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.set_pragma("temp_store", "MEMORY")?;
        self.set_pragma("cache_size", "-16384")?;
        // Saving brightness changes pages all over the file, the same ones each time: rare checkpoints write each of
        // them once.
        self.set_pragma("wal_autocheckpoint", "4096")
    }

    fn run_migrations(&mut self) -> Result<(), SqlError> {
        // Another program may have migrated the file before this transaction began.
        let version = self.query_integer("PRAGMA user_version")?;
        for sql in SQLITE_MIGRATIONS.iter().skip(version as usize) {
            self.connection.execute_batch(sql).map_err(|e| classify_error(&e, &self.path))?;
        }
        schema::fill_new_columns(self, version)?;
        self.set_pragma("application_id", &APPLICATION_ID.to_string())?;
        self.set_pragma("user_version", &NEWEST_VERSION.to_string())
    }

    fn take_in_use_lock(&mut self) -> Result<(), SqlError> {
        if self.in_use_lock.is_none() {
            let file = open_lock_file(&self.path, "in-use")?;
            let why = "the store is being repaired: wait until the repair is done";
            file.try_lock_shared().map_err(|_| SqlError::new(SqlErrorKind::Busy, why))?;
            self.in_use_lock = Some(file);
        }
        Ok(())
    }

    fn stored_epoch(&mut self, key: u64) -> Result<Option<i64>, SqlError> {
        let (key, mut epoch) = (SqlValue::Int(key.cast_signed()), None);
        self.query("SELECT epoch FROM lease WHERE key = $1", &[key], &mut |row| {
            epoch = Some(row.int(0)?);
            Ok(())
        })?;
        Ok(epoch)
    }

    /// Checks that the epochs of the leases are still those that this connection has taken, within a transaction that writes.
    fn check_epochs(&mut self, keys: &[u64]) -> Result<(), SqlError> {
        for &key in keys {
            match self.leases.get(&key).map(|lease| lease.epoch) {
                // Another connection of this process has it: `ensure_lease` has checked that.
                None => {}
                Some(LeaseEpoch::Lost) => return Err(SqlError::lease_lost()),
                Some(LeaseEpoch::Known(epoch)) => {
                    if self.stored_epoch(key)? != Some(epoch) {
                        self.leases.entry(key).and_modify(|lease| lease.epoch = LeaseEpoch::Lost);
                        return Err(SqlError::lease_lost());
                    }
                }
                Some(LeaseEpoch::Unwritten) => {
                    let raise = "INSERT INTO lease (key, owner, epoch, until, written) VALUES ($1, $2, 1, 0, 0) \
                                 ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, epoch = lease.epoch + 1 \
                                 RETURNING epoch";
                    let owner = format!("process {}", std::process::id());
                    let arguments = [SqlValue::Int(key.cast_signed()), SqlValue::Text(&owner)];
                    let mut raised = None;
                    self.query(raise, &arguments, &mut |row| {
                        raised = Some(row.int(0)?);
                        Ok(())
                    })?;
                    self.raised.extend(raised.map(|epoch| (key, epoch)));
                }
            }
        }
        Ok(())
    }

    fn query_integer(&self, sql: &str) -> Result<i64, SqlError> {
        self.connection.query_row(sql, [], |row| row.get(0)).map_err(|e| classify_error(&e, &self.path))
    }

    fn set_pragma(&self, name: &str, value: &str) -> Result<(), SqlError> {
        match self.connection.pragma_update_and_check(None, name, value, |_| Ok(())) {
            // Most pragmas return no row.
            Ok(()) | Err(rusqlite::Error::QueryReturnedNoRows) => Ok(()),
            Err(error) => Err(classify_error(&error, &self.path)),
        }
    }
}

impl SqlConnection for Sqlite {
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError> {
        let executed =
            self.connection.prepare_cached(sql).and_then(|mut s| s.execute(params_from_iter(args)));
        executed.map(|rows| rows as u64).map_err(|e| classify_error(&e, &self.path))
    }

    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError> {
        let executed = self.connection.prepare_cached(sql).and_then(|mut statement| {
            rows.iter().try_for_each(|row| statement.execute(params_from_iter(row)).map(drop))
        });
        executed.map_err(|e| classify_error(&e, &self.path))
    }

    fn query(
        &mut self,
        sql: &'static str,
        args: &[SqlValue<'_>],
        each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        let fail = |e: &rusqlite::Error| classify_error(e, &self.path);
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| fail(&e))?;
        let columns = statement.column_count();
        let mut rows = statement.query(params_from_iter(args)).map_err(|e| fail(&e))?;
        while let Some(row) = rows.next().map_err(|e| fail(&e))? {
            let cell = |i| match row.get_ref(i) {
                Ok(ValueRef::Integer(n)) => Ok(SqlValue::Int(n)),
                Ok(ValueRef::Text(text)) => match str::from_utf8(text) {
                    Ok(text) => Ok(SqlValue::Text(text)),
                    Err(_) => Err(SqlError::damaged("stored text is not UTF-8")),
                },
                Ok(ValueRef::Blob(blob)) => Ok(SqlValue::Blob(blob)),
                Ok(_) => Err(SqlError::damaged("a stored value has a type that this program never writes")),
                Err(error) => Err(fail(&error)),
            };
            let cells: Vec<_> = (0..columns).map(cell).collect::<Result<_, _>>()?;
            each(SqlRow(&cells))?;
        }
        Ok(())
    }

    fn begin(&mut self, writes: Option<Durability>, leases: &[u64]) -> Result<(), SqlError> {
        let sql = match writes {
            None => "BEGIN",
            Some(durability) => {
                let sync = durability == Durability::Immediate;
                if self.synchronous_full != Some(sync) {
                    self.set_pragma("synchronous", if sync { "FULL" } else { "NORMAL" })?;
                    self.synchronous_full = Some(sync);
                }
                "BEGIN IMMEDIATE"
            }
        };
        self.execute(sql, &[])?;
        // Nobody else writes until this transaction ends.
        self.check_epochs(leases).inspect_err(|_| self.rollback())
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        self.execute("COMMIT", &[])?;
        for (key, epoch) in self.raised.drain(..) {
            self.leases.entry(key).and_modify(|lease| lease.epoch = LeaseEpoch::Known(epoch));
        }
        Ok(())
    }

    fn rollback(&mut self) {
        self.raised.clear();
        // After some errors SQLite has rolled back already, and this statement fails.
        let _ = self.execute("ROLLBACK", &[]);
    }

    fn reconnects(&self) -> bool {
        false
    }

    fn was_committed(&mut self) -> Result<bool, SqlError> {
        // There is no connection that can be lost.
        Ok(false)
    }

    fn take_lease(&mut self, key: u64) -> Result<(), SqlError> {
        let is_held = match self.leases.get(&key).map(|lease| lease.epoch) {
            None | Some(LeaseEpoch::Lost) => false,
            Some(LeaseEpoch::Unwritten) => true,
            Some(LeaseEpoch::Known(epoch)) => self.stored_epoch(key)? == Some(epoch),
        };
        match is_held {
            true => return Ok(()),
            false if !self.shared => {
                self.leases.insert(key, FileLease { lock_file: None, epoch: LeaseEpoch::Unwritten });
                return Ok(());
            }
            // The lock of a lease that was lost keeps nobody out: it is taken from the start.
            false => {}
        }
        self.take_in_use_lock()?;
        let mut file = open_lock_file(&self.path, &lock_file_name(key))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(TryLockError::WouldBlock) => return Err(locked_by_another(&mut file)),
                Err(TryLockError::Error(error)) => return Err(io_error(&error, &self.path)),
            }
        }
        // The process id is only shown in the error of another program: a failure to write it does no harm.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = write!(file, "{}", std::process::id());
        self.leases.insert(key, FileLease { lock_file: Some(file), epoch: LeaseEpoch::Unwritten });
        Ok(())
    }

    fn ensure_lease(&mut self, key: u64) -> Result<bool, SqlError> {
        // A lease that is free need not be taken: the transaction keeps all others out.
        if self.leases.contains_key(&key) || !lock_file_path(&self.path, &lock_file_name(key)).exists() {
            return Ok(false);
        }
        let started = Instant::now();
        while self.is_leased_elsewhere(key)? {
            let process = self.lease_holder(key)?;
            if process == std::process::id() {
                return Ok(false);
            }
            if started.elapsed() > LOCK_TIMEOUT {
                return Err(SqlError::leased(&format!(" (process {process})")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(false)
    }

    fn is_leased_elsewhere(&mut self, key: u64) -> Result<bool, SqlError> {
        if !self.shared || self.leases.contains_key(&key) {
            return Ok(false);
        }
        // The shared lock is released with the file, at once: a program that wants the lock meanwhile tries again.
        match open_lock_file(&self.path, &lock_file_name(key))?.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(io_error(&error, &self.path)),
        }
    }

    fn lease_holder(&mut self, key: u64) -> Result<u32, SqlError> {
        Ok(read_process_id(&mut open_lock_file(&self.path, &lock_file_name(key))?).unwrap_or(0))
    }

    fn has_current_schema(&mut self) -> Result<bool, SqlError> {
        // VACUUM changes the order of tables and ANALYZE adds some, but none of this schema may be missing.
        let schema = |connection: &Connection| -> rusqlite::Result<BTreeSet<(String, Option<String>)>> {
            let mut select = connection
                .prepare("SELECT type || ' ' || name || ' ' || tbl_name, sql FROM sqlite_schema")?;
            let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        let expected = Connection::open_in_memory().and_then(|empty| {
            SQLITE_MIGRATIONS.iter().try_for_each(|sql| empty.execute_batch(sql))?;
            schema(&empty)
        });
        let expected = expected.map_err(|e| classify_error(&e, &self.path))?;
        match schema(&self.connection) {
            Ok(stored) => Ok(expected.is_subset(&stored)),
            Err(rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::Utf8Error(..)) => Ok(false),
            Err(error) => match classify_error(&error, &self.path) {
                error if error.kind == SqlErrorKind::Damaged => Ok(false),
                error => Err(error),
            },
        }
    }

    fn integrity_check(&mut self) -> Result<Vec<String>, SqlError> {
        let mut problems = Vec::new();
        self.query("PRAGMA integrity_check(20)", &[], &mut |row| {
            problems.extend(Some(row.text(0)?.to_owned()).filter(|line| line != "ok"));
            Ok(())
        })?;
        Ok(problems)
    }

    fn backup(&mut self) -> Result<String, SqlError> {
        let copy = unused_sibling_path(&self.path, "backup");
        create_private(&copy)?;
        // An incomplete copy must not be mistaken for a backup.
        let copied = self
            .connection
            .backup("main", &copy, None::<fn(_)>)
            .inspect_err(|_| remove_database_files(&copy));
        copied.map_err(|e| classify_error(&e, &copy)).map(|()| copy.display().to_string())
    }

    fn keep_in_use(&mut self) -> Result<(), SqlError> {
        self.keeps_in_use_lock = true;
        if self.shared { self.take_in_use_lock() } else { Ok(()) }
    }

    fn release_all_leases(&mut self) {
        (self.in_use_lock, self.keeps_in_use_lock) = (None, false);
        self.leases.clear();
    }

    fn release_lease(&mut self, key: u64) {
        self.leases.remove(&key);
        if self.leases.values().all(|lease| lease.lock_file.is_none()) && !self.keeps_in_use_lock {
            self.in_use_lock = None;
        }
    }

    fn set_secure_delete(&mut self, on: bool) -> Result<(), SqlError> {
        self.connection.pragma_update(None, "secure_delete", on).map_err(|e| classify_error(&e, &self.path))
    }

    fn vacuum(&mut self) -> Result<(), SqlError> {
        // The write-ahead log still contains deleted data. VACUUM fills it again, so it is emptied before and after.
        let empty_wal = |sqlite: &mut Self| match sqlite.query_integer("PRAGMA wal_checkpoint(TRUNCATE)")? {
            0 => Ok(()),
            _ => Err(SqlError::new(
                SqlErrorKind::Busy,
                "another program is reading, so deleted data is still in the file: try again when it is done",
            )),
        };
        empty_wal(self)?;
        self.connection.execute_batch("VACUUM").map_err(|e| classify_error(&e, &self.path))?;
        empty_wal(self)
    }

    fn close(&mut self) {
        self.release_all_leases();
        // A connection cannot be closed through a reference; an empty database in memory replaces it.
        if let Ok(empty) = Connection::open_in_memory() {
            self.connection = empty;
        }
    }

    fn size_on_disk(&mut self) -> Result<u64, SqlError> {
        let mut wal = OsString::from(&self.path);
        wal.push("-wal");
        let size = |path: &Path| fs::metadata(path).map_or(0, |m| m.len());
        Ok(size(&self.path) + size(Path::new(&wal)))
    }
}

impl ToSql for SqlValue<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            SqlValue::Int(n) => ValueRef::Integer(*n),
            SqlValue::Text(text) => ValueRef::Text(text.as_bytes()),
            SqlValue::Blob(blob) => ValueRef::Blob(blob),
        }))
    }
}

/// Whether no program can be writing: the folder is write-protected and has no write-ahead log.
fn is_immutable(path: &Path) -> bool {
    let mut wal = OsString::from(path);
    wal.push("-wal");
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let probe = tempfile::Builder::new().prefix(".halo-").tempfile_in(folder);
    use std::io::ErrorKind as Kind;
    let write_protected =
        probe.is_err_and(|e| matches!(e.kind(), Kind::PermissionDenied | Kind::ReadOnlyFilesystem));
    write_protected && fs::metadata(wal).map_or(true, |metadata| metadata.len() == 0)
}

/// Opens a file that does not change, without the lock files that a write-protected folder cannot have.
fn open_immutable(path: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'.' | b'-' | b'_' => uri.push(char::from(*byte)),
            _ if byte.is_ascii_alphanumeric() => uri.push(char::from(*byte)),
            _ => uri.push_str(&format!("%{byte:02x}")),
        }
    }
    uri.push_str("?immutable=1");
    Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI)
}

fn lock_file_name(key: u64) -> String {
    format!("{key:016x}")
}

/// The process that has written its number into a lock file.
fn read_process_id(lock_file: &mut File) -> Option<u32> {
    let mut pid = String::new();
    lock_file.read_to_string(&mut pid).ok()?;
    pid.trim().parse().ok()
}

fn locked_by_another(lock_file: &mut File) -> SqlError {
    SqlError::leased(&read_process_id(lock_file).map_or(String::new(), |pid| format!(" (process {pid})")))
}

/// The kind of an SQLite error, and what to do about it.
fn classify_error(error: &rusqlite::Error, path: &Path) -> SqlError {
    let path = path.display();
    let code = error.sqlite_error_code();
    let (kind, why) = match code {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (SqlErrorKind::Busy, format!("another program is writing to {path}; try again when it is done"))
        }
        Some(ErrorCode::DiskFull) => (SqlErrorKind::DiskFull, format!("the disk of {path} is full")),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => (
            SqlErrorKind::ReadOnly,
            format!("{path} may be read but not written: check who owns it and its folder"),
        ),
        Some(ErrorCode::DatabaseCorrupt) => (SqlErrorKind::Damaged, format!("{path} is damaged ({error})")),
        Some(ErrorCode::NotADatabase) => {
            (SqlErrorKind::Damaged, format!("{path} is not a database, or its first page is damaged"))
        }
        Some(ErrorCode::CannotOpen) => (
            SqlErrorKind::Unavailable,
            format!("{path} cannot be opened: does its folder exist, and may you read it?"),
        ),
        Some(ErrorCode::SystemIoFailure) => {
            (SqlErrorKind::Unavailable, format!("reading or writing {path} failed ({error})"))
        }
        _ => (SqlErrorKind::Other, format!("{path}: {error}")),
    };
    SqlError::new(kind, why)
}

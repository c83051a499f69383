//! SQLite in a file, written ahead (WAL). Readers never wait; a commit that is to be safe is one sync.
//!
//! Beside the file lies a folder of locks, one file for each conversation that is being written: two programs
//! may share a database, not a conversation.

use crate::files::{create_private, io_error, open_lock_file, remove_database_files, unused_sibling_path};
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

const MIGRATIONS: [&str; 3] = [
    include_str!("../schema/sqlite-1.sql"),
    include_str!("../schema/sqlite-2.sql"),
    include_str!("../schema/sqlite-3.sql"),
];
/// "halo" in the file's header says whose file it is.
const APPLICATION_ID: i64 = 0x6861_6c6f;
/// How long a command waits for another that is about to end.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a write waits for another, such as a long import: the user's words are worth waiting for.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Sqlite {
    connection: Connection,
    path: PathBuf,
    /// Whether commits are synced now.
    synchronous_full: Option<bool>,
    locks: BTreeMap<u64, File>,
    /// Whether it is a file that others can see.
    shared: bool,
    /// Held while anything is claimed, so that nobody puts another file in the place of this one.
    in_use_lock: Option<File>,
}

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenMode {
    /// To read and write; it is made where there is none.
    Write,
    Read,
}

impl Sqlite {
    /// Opens a file, and brings it to this version's schema.
    pub(crate) fn open(path: &Path, mode: OpenMode, vfs: Option<&str>) -> Result<Self, SqlError> {
        let real = vfs.is_none();
        if mode == OpenMode::Write && real {
            create_private(path)?;
        }
        let flags = match mode {
            OpenMode::Write => OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE,
            OpenMode::Read => OpenFlags::SQLITE_OPEN_READ_ONLY,
        } | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        if path.is_dir() {
            return Err(SqlError::invalid_input(format!(
                "{} is a folder: name a file in it",
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
            locks: BTreeMap::new(),
            shared: real,
            in_use_lock: None,
        };
        sqlite.connection.busy_timeout(BUSY_TIMEOUT).map_err(|e| classify_error(&e, path))?;
        sqlite.connection.set_prepared_statement_cache_capacity(64);
        if !real {
            // Without shared memory, which such a layer need not have.
            sqlite.set_pragma("locking_mode", "EXCLUSIVE")?;
        }
        sqlite.migrate(mode)?;
        Ok(sqlite)
    }

    fn migrate(&mut self, mode: OpenMode) -> Result<(), SqlError> {
        // Somebody else may be making it just now: one look at all of it.
        self.begin(None)?;
        let looked = (|| {
            let version = self.query_integer("PRAGMA user_version")?;
            let application = self.query_integer("PRAGMA application_id")?;
            Ok((version, application, self.query_integer("SELECT count(*) FROM sqlite_schema")?))
        })();
        self.rollback();
        let (version, application, tables) = looked?;
        let newest = MIGRATIONS.len() as i64;
        let path = self.path.display();
        if version > newest {
            let why = format!(
                "{path} was written by a newer Halo (its schema is {version}, this program knows {newest}); it \
                 was left untouched: use that Halo, or another --data folder"
            );
            return Err(SqlError::new(SqlErrorKind::NewerSchema, why));
        }
        if (version == 0) != (tables == 0) || (tables > 0 && application != APPLICATION_ID) {
            let why = format!("{path} is a database, but not one of Halo's; it was left untouched");
            return Err(SqlError::invalid_input(why));
        }
        if mode == OpenMode::Read {
            let old = format!("{path} is empty, or older than this program, and cannot be written to");
            return if version < newest { Err(SqlError::new(SqlErrorKind::ReadOnly, old)) } else { Ok(()) };
        }
        let asked = Instant::now();
        while let Err(error) = self.set_pragma("journal_mode", "WAL") {
            if error.kind != SqlErrorKind::Busy || asked.elapsed() > LOCK_TIMEOUT {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.set_pragma("temp_store", "MEMORY")?;
        self.set_pragma("cache_size", "-16384")?;
        // Saving brightness touches pages all over the file, the same ones each time: moving them over only now and
        // then pays.
        self.set_pragma("wal_autocheckpoint", "4096")?;
        if version == newest {
            return Ok(());
        }
        self.begin(Some(Durability::Immediate))?;
        // Somebody else may have been faster.
        let version = self.query_integer("PRAGMA user_version")?;
        let done = MIGRATIONS.iter().skip(version as usize).try_for_each(|sql| {
            self.connection.execute_batch(sql).map_err(|e| classify_error(&e, &self.path))
        });
        let done = done.and_then(|()| self.set_pragma("application_id", &APPLICATION_ID.to_string()));
        match done.and_then(|()| self.set_pragma("user_version", &newest.to_string())) {
            Ok(()) => self.commit(),
            Err(error) => {
                self.rollback();
                Err(error)
            }
        }
    }

    fn query_integer(&self, sql: &str) -> Result<i64, SqlError> {
        self.connection.query_row(sql, [], |row| row.get(0)).map_err(|e| classify_error(&e, &self.path))
    }

    fn set_pragma(&self, name: &str, value: &str) -> Result<(), SqlError> {
        let done = self.connection.pragma_update_and_check(None, name, value, |_| Ok(()));
        match done {
            // Most give no answer.
            Ok(()) | Err(rusqlite::Error::QueryReturnedNoRows) => Ok(()),
            Err(error) => Err(classify_error(&error, &self.path)),
        }
    }
}

impl SqlConnection for Sqlite {
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError> {
        let done = self.connection.prepare_cached(sql).and_then(|mut s| s.execute(params_from_iter(args)));
        done.map(|rows| rows as u64).map_err(|e| classify_error(&e, &self.path))
    }

    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError> {
        let done = self.connection.prepare_cached(sql).and_then(|mut statement| {
            rows.iter().try_for_each(|row| statement.execute(params_from_iter(row)).map(drop))
        });
        done.map_err(|e| classify_error(&e, &self.path))
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
                    Err(_) => Err(SqlError::damaged("text in the database is not UTF-8")),
                },
                Ok(ValueRef::Blob(blob)) => Ok(SqlValue::Blob(blob)),
                Ok(_) => Err(SqlError::damaged("a value in the database has a type that is never written")),
                Err(error) => Err(fail(&error)),
            };
            let cells: Vec<_> = (0..columns).map(cell).collect::<Result<_, _>>()?;
            each(SqlRow(&cells))?;
        }
        Ok(())
    }

    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError> {
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
        self.execute(sql, &[]).map(drop)
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        self.execute("COMMIT", &[]).map(drop)
    }

    fn rollback(&mut self) {
        // Some errors have rolled back by themselves; then there is nothing left to do.
        let _ = self.execute("ROLLBACK", &[]);
    }

    fn lock(&mut self, key: u64) -> Result<(), SqlError> {
        if !self.shared || self.locks.contains_key(&key) {
            return Ok(());
        }
        if self.in_use_lock.is_none() {
            let file = open_lock_file(&self.path, "in-use")?;
            let held = file.try_lock_shared();
            held.map_err(|_| {
                SqlError::new(SqlErrorKind::Busy, "it is being mended just now: wait until that is done")
            })?;
            self.in_use_lock = Some(file);
        }
        let mut file = open_lock_file(&self.path, &format!("{key:016x}"))?;
        let asked = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if asked.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(TryLockError::WouldBlock) => {
                    let mut who = String::new();
                    let _ = file.read_to_string(&mut who);
                    let who =
                        who.trim().parse::<u32>().map_or(String::new(), |pid| format!(" (process {pid})"));
                    let why =
                        format!("another Halo{who} is using it: close that one, or wait until it is done");
                    return Err(SqlError::new(SqlErrorKind::Busy, why));
                }
                Err(TryLockError::Error(error)) => return Err(io_error(&error, &self.path)),
            }
        }
        // Only for the message above: nothing depends on it.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = write!(file, "{}", std::process::id());
        self.locks.insert(key, file);
        Ok(())
    }

    fn is_locked_elsewhere(&mut self, key: u64) -> Result<bool, SqlError> {
        if !self.shared || self.locks.contains_key(&key) {
            return Ok(false);
        }
        // Let go of at once, with the file: whoever claims it meanwhile tries again.
        match open_lock_file(&self.path, &format!("{key:016x}"))?.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(io_error(&error, &self.path)),
        }
    }

    fn has_current_schema(&mut self) -> Result<bool, SqlError> {
        // Order and place of tables may change (VACUUM), and others may have been added (ANALYZE); none may be missing.
        let schema = |connection: &Connection| -> rusqlite::Result<BTreeSet<(String, Option<String>)>> {
            let mut select = connection
                .prepare("SELECT type || ' ' || name || ' ' || tbl_name, sql FROM sqlite_schema")?;
            let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        let made = Connection::open_in_memory().and_then(|made| {
            MIGRATIONS.iter().try_for_each(|sql| made.execute_batch(sql))?;
            schema(&made)
        });
        let made = made.map_err(|e| classify_error(&e, &self.path))?;
        match schema(&self.connection) {
            Ok(own) => Ok(made.is_subset(&own)),
            Err(rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::Utf8Error(..)) => Ok(false),
            Err(error) => match classify_error(&error, &self.path) {
                error if error.kind == SqlErrorKind::Damaged => Ok(false),
                error => Err(error),
            },
        }
    }

    fn integrity_check(&mut self) -> Result<Vec<String>, SqlError> {
        let mut found = Vec::new();
        self.query("PRAGMA integrity_check(20)", &[], &mut |row| {
            found.extend(Some(row.text(0)?.to_owned()).filter(|line| line != "ok"));
            Ok(())
        })?;
        Ok(found)
    }

    fn backup(&mut self) -> Result<String, SqlError> {
        let to = unused_sibling_path(&self.path, "backup");
        create_private(&to)?;
        // What is half there is no copy.
        let copied =
            self.connection.backup("main", &to, None::<fn(_)>).inspect_err(|_| remove_database_files(&to));
        copied.map_err(|e| classify_error(&e, &to)).map(|()| to.display().to_string())
    }

    fn unlock_all(&mut self) {
        self.in_use_lock = None;
        self.locks.clear();
    }

    fn unlock(&mut self, key: u64) {
        self.locks.remove(&key);
        if self.locks.is_empty() {
            self.in_use_lock = None;
        }
    }

    fn set_secure_delete(&mut self, on: bool) -> Result<(), SqlError> {
        self.connection.pragma_update(None, "secure_delete", on).map_err(|e| classify_error(&e, &self.path))
    }

    fn vacuum(&mut self) -> Result<(), SqlError> {
        // What was written before is still in the log of the file; it is emptied twice, because the second writes anew.
        let emptied = |sqlite: &mut Self| match sqlite.query_integer("PRAGMA wal_checkpoint(TRUNCATE)")? {
            0 => Ok(()),
            _ => Err(SqlError::new(
                SqlErrorKind::Busy,
                "somebody else is reading, so what was deleted is still in the file: try again",
            )),
        };
        emptied(self)?;
        self.connection.execute_batch("VACUUM").map_err(|e| classify_error(&e, &self.path))?;
        emptied(self)
    }

    fn close(&mut self) {
        self.unlock_all();
        // An empty database in memory takes its place.
        if let Ok(nothing) = Connection::open_in_memory() {
            self.connection = nothing;
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

/// Whether nobody can be writing: the folder cannot be written to, and no write-ahead log lies there.
fn is_immutable(path: &Path) -> bool {
    let mut wal = OsString::from(path);
    wal.push("-wal");
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let probe = tempfile::Builder::new().prefix(".halo-").tempfile_in(folder);
    use std::io::ErrorKind as Kind;
    let sealed = probe.is_err_and(|e| matches!(e.kind(), Kind::PermissionDenied | Kind::ReadOnlyFilesystem));
    sealed && fs::metadata(wal).map_or(true, |about| about.len() == 0)
}

/// Opens a file that does not change: without the locks that such a folder cannot hold.
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

/// What SQLite's error means to a person.
fn classify_error(error: &rusqlite::Error, path: &Path) -> SqlError {
    let path = path.display();
    let code = error.sqlite_error_code();
    let (trouble, why) = match code {
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
    SqlError::new(trouble, why)
}

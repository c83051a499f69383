//! Database files and the files beside them: locks and copies.

use crate::sql::{SqlError, SqlErrorKind};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a repair waits for other programs to close the store.
const EXCLUSIVE_LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Creates the file if it does not exist, readable by its owner only.
pub(crate) fn create_private(path: &Path) -> Result<(), SqlError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(io_error(&error, path)),
    }
}

pub(crate) fn io_error(error: &std::io::Error, path: &Path) -> SqlError {
    use std::io::ErrorKind as Kind;
    let kind = match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => SqlErrorKind::ReadOnly,
        Kind::StorageFull | Kind::QuotaExceeded => SqlErrorKind::DiskFull,
        _ => SqlErrorKind::Unavailable,
    };
    SqlError::new(kind, format!("{}: {error}", path.display()))
}

/// Opens a lock file of a database, in the folder beside it.
pub(crate) fn open_lock_file(path: &Path, name: &str) -> Result<File, SqlError> {
    let mut folder = OsString::from(path);
    folder.push("-locks");
    let folder = PathBuf::from(folder);
    let opened = fs::create_dir_all(&folder).and_then(|()| {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(folder.join(name))
    });
    opened.map_err(|e| io_error(&e, &folder))
}

/// Keeps other programs from locking conversations of a database file while it is replaced.
pub(crate) fn lock_exclusive(path: &Path) -> Result<File, SqlError> {
    let file = open_lock_file(path, "in-use")?;
    let started = Instant::now();
    while file.try_lock().is_err() {
        if started.elapsed() > EXCLUSIVE_LOCK_TIMEOUT {
            let why = "another Halo is using the store: close that one before the repair";
            return Err(SqlError::new(SqlErrorKind::Busy, why));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(file)
}

/// Deletes a database file, its write-ahead log and its locks.
pub(crate) fn remove_database_files(path: &Path) {
    for end in ["", "-wal", "-shm", "-journal"] {
        let _ = fs::remove_file(format!("{}{end}", path.display()));
    }
    let locks = format!("{}-locks", path.display());
    let _ = fs::remove_dir_all(locks);
}

/// An unused path beside a file: its own name with `what` and a number.
pub(crate) fn unused_sibling_path(path: &Path, what: &str) -> PathBuf {
    let named = |n: u32| PathBuf::from(format!("{}.{what}-{n}", path.display()));
    (1..).map(named).find(|p| !p.exists()).unwrap_or_else(|| named(0))
}

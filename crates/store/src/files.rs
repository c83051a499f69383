//! Database files and what lies beside them: locks, copies, and who may read them.

use crate::sql::{SqlError, SqlErrorKind};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

/// Makes the file if there is none, for its owner's eyes alone.
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
    let trouble = match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => SqlErrorKind::ReadOnly,
        Kind::StorageFull | Kind::QuotaExceeded => SqlErrorKind::DiskFull,
        _ => SqlErrorKind::Unavailable,
    };
    SqlError::new(trouble, format!("{}: {error}", path.display()))
}

/// One of the locks of a database: files in a folder beside it.
pub(crate) fn open_lock_file(path: &Path, name: &str) -> Result<File, SqlError> {
    let mut folder = OsString::from(path);
    folder.push("-locks");
    let folder = PathBuf::from(folder);
    let opened = fs::create_dir_all(&folder).and_then(|()| {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(folder.join(name))
    });
    opened.map_err(|e| io_error(&e, &folder))
}

/// Keeps everybody from claiming anything of a file while another takes its place.
pub(crate) fn lock_exclusive(path: &Path) -> Result<File, SqlError> {
    let file = open_lock_file(path, "in-use")?;
    let why = "another Halo is using the store: close it first, so that it can be mended";
    file.try_lock().map_err(|_| SqlError::new(SqlErrorKind::Busy, why))?;
    Ok(file)
}

/// Takes a database file and all that lies with it away.
pub(crate) fn remove_database_files(path: &Path) {
    for end in ["", "-wal", "-shm", "-journal"] {
        let _ = fs::remove_file(format!("{}{end}", path.display()));
    }
    let locks = format!("{}-locks", path.display());
    let _ = fs::remove_dir_all(locks);
}

/// A name beside a file that nothing has yet.
pub(crate) fn unused_sibling_path(path: &Path, what: &str) -> PathBuf {
    let named = |n: u32| PathBuf::from(format!("{}.{what}-{n}", path.display()));
    (1..).map(named).find(|p| !p.exists()).unwrap_or_else(|| named(0))
}

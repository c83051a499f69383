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

/// Where a lock file of a database is: in the folder beside it.
pub(crate) fn lock_file_path(path: &Path, name: &str) -> PathBuf {
    let mut folder = OsString::from(path);
    folder.push("-locks");
    PathBuf::from(folder).join(name)
}

/// Opens a lock file of a database.
pub(crate) fn open_lock_file(path: &Path, name: &str) -> Result<File, SqlError> {
    let file_path = lock_file_path(path, name);
    let folder = file_path.parent().unwrap_or(path);
    create_private_folder(folder).map_err(|e| io_error(&e, folder))?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(&file_path).map_err(|e| io_error(&e, &file_path))?;
    make_private(&file);
    Ok(file)
}

fn create_private_folder(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Takes the permissions of all others from a lock file of an earlier version: another user who can open it can lock it,
/// and so keep its owner out.
#[cfg(unix)]
fn make_private(file: &File) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(permissions) = file.metadata().map(|metadata| metadata.permissions()) else { return };
    if permissions.mode() & 0o077 != 0 {
        // It fails if the file belongs to somebody else, who may lock it anyway.
        let _ = file.set_permissions(fs::Permissions::from_mode(0o600));
    }
}

#[cfg(not(unix))]
fn make_private(_: &File) {}

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

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn lock_files_are_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = folder.path().join("halo.db");
        let mode = |path: &Path| fs::metadata(path).expect("the file is there").permissions().mode() & 0o777;
        let (locks, file) = (folder.path().join("halo.db-locks"), folder.path().join("halo.db-locks/in-use"));
        drop(open_lock_file(&database, "in-use").expect("it opens"));
        assert_eq!((mode(&locks), mode(&file)), (0o700, 0o600));
        // An earlier version created it for everybody.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("it is ours");
        drop(open_lock_file(&database, "in-use").expect("it opens"));
        assert_eq!(mode(&file), 0o600);
        fs::remove_file(&file).expect("it is removed");
        fs::create_dir(&file).expect("a folder is in its place");
        let error = open_lock_file(&database, "in-use").expect_err("a folder is no lock file");
        assert!(error.to_string().contains(&file.display().to_string()), "{error}");
    }
}

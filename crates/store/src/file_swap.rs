//! Replaces a database file by a repaired one. A database is several files, and no rename moves them together, so a marker
//! file beside the database says what is to be done before anything is. If the program is killed halfway, the next program
//! that opens the database finishes the replacement.

use crate::files::{io_error, lock_exclusive, unused_sibling_path};
use crate::sql::SqlError;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The end of the marker's name.
const MARKER: &str = "-replacing";

/// The files beside a database that belong to it and not to one that replaces it.
const JOURNALS: [&str; 2] = ["-wal", "-shm"];

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", path.display()))
}

/// Puts `new_path` in place of the database, and returns where the old one is kept. The caller holds the exclusive lock.
pub(crate) fn replace_database(path: &Path, new_path: &Path) -> Result<PathBuf, SqlError> {
    let old_path = unused_sibling_path(path, "damaged");
    let replaced =
        write_marker(path, new_path, &old_path).and_then(|()| finish_replacement(path, new_path, &old_path));
    replaced
        .map_err(|e| SqlError::unavailable(format!("the new file cannot replace {}: {e}", path.display())))?;
    Ok(old_path)
}

/// Puts `new_path` in place of the database file with one rename: the journals stay, and belong to the new file. Returns
/// where the old file is kept. The caller holds the exclusive lock.
pub(crate) fn replace_file_only(path: &Path, new_path: &Path) -> Result<PathBuf, SqlError> {
    let old_path = unused_sibling_path(path, "damaged");
    let replace = || -> io::Result<()> {
        File::open(new_path)?.sync_all()?;
        keep_as(path, &old_path)?;
        sync_folder(path)?;
        fs::rename(new_path, path)?;
        sync_folder(path)
    };
    replace()
        .map_err(|e| SqlError::unavailable(format!("the new file cannot replace {}: {e}", path.display())))?;
    Ok(old_path)
}

/// Finishes a replacement that was interrupted, if there is one.
pub(crate) fn finish_interrupted_replacement(path: &Path) -> Result<(), SqlError> {
    let marker = with_suffix(path, MARKER);
    if !marker.exists() {
        return Ok(());
    }
    // The program that replaces the file may still run.
    let _lock = lock_exclusive(path)?;
    let content = match fs::read_to_string(&marker) {
        Ok(content) => content,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error(&error, &marker)),
    };
    // Names and not paths: the folder may have been moved since.
    let sibling = |name: &str| path.with_file_name(name);
    let mut names = content.lines();
    let (Some(new_name), Some(old_name), Some("end")) = (names.next(), names.next(), names.next()) else {
        // The marker was not written whole, so nothing was replaced.
        return fs::remove_file(&marker).map_err(|e| io_error(&e, &marker));
    };
    let finished = finish_replacement(path, &sibling(new_name), &sibling(old_name));
    finished.map_err(|e| {
        let why = format!("the interrupted repair of {} cannot be finished: {e}", path.display());
        SqlError::unavailable(why)
    })
}

fn write_marker(path: &Path, new_path: &Path, old_path: &Path) -> io::Result<()> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut marker = File::create(with_suffix(path, MARKER))?;
    write!(marker, "{}\n{}\nend\n", name(new_path), name(old_path))?;
    marker.sync_all()?;
    File::open(new_path)?.sync_all()?;
    sync_folder(path)
}

/// Every step may be done already.
fn finish_replacement(path: &Path, new_path: &Path, old_path: &Path) -> io::Result<()> {
    // Once the new file has its place, the journals beside it are its own.
    if new_path.exists() {
        keep_as(path, old_path)?;
        for suffix in JOURNALS {
            keep_as(&with_suffix(path, suffix), &with_suffix(old_path, suffix))?;
        }
        sync_folder(path)?;
        for suffix in JOURNALS {
            remove_if_present(&with_suffix(path, suffix))?;
        }
        fs::rename(new_path, path)?;
        sync_folder(path)?;
    }
    remove_if_present(&with_suffix(path, MARKER))?;
    sync_folder(path)
}

/// Gives a file a second name, or copies it where the file system has no links.
fn keep_as(file: &Path, other_name: &Path) -> io::Result<()> {
    if !file.exists() || other_name.exists() {
        return Ok(());
    }
    if fs::hard_link(file, other_name).is_ok() {
        return Ok(());
    }
    // A copy that is cut short must not be taken for the file.
    let partial = with_suffix(other_name, ".partial");
    fs::copy(file, &partial)?;
    File::open(&partial)?.sync_all()?;
    fs::rename(&partial, other_name)
}

fn remove_if_present(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes renames in a folder durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Windows has no such call, and needs none.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every state in which a kill can leave the files leads to the new database, with the old one kept whole.
    #[test]
    fn repair_replacement_is_finished_from_every_state() {
        for state in 0..7 {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let file = |name: &str| folder.path().join(name);
            for (name, text) in
                [("halo.db", "old"), ("halo.db-wal", "old wal"), ("halo.db.repaired-1", "new")]
            {
                fs::write(file(name), text).expect("the file is written");
            }
            let (path, new, old) = (file("halo.db"), file("halo.db.repaired-1"), file("halo.db.damaged-1"));
            write_marker(&path, &new, &old).expect("the marker is written");
            let link =
                |from: &str, to: &str| fs::hard_link(file(from), file(to)).expect("the file is linked");
            if state >= 1 {
                link("halo.db", "halo.db.damaged-1");
            }
            if state >= 2 {
                link("halo.db-wal", "halo.db.damaged-1-wal");
            }
            if state >= 3 {
                fs::remove_file(file("halo.db-wal")).expect("the journal is removed");
            }
            if state >= 4 {
                fs::rename(&new, &path).expect("the file is renamed");
            }
            if state == 5 {
                // A second program that finishes finds nothing left to do but the marker.
                finish_replacement(&path, &new, &old).expect("the replacement is finished");
                write_marker_only(&path, &new, &old);
            }
            if state == 6 {
                fs::remove_file(file("halo.db-replacing")).expect("the marker is removed");
            }
            finish_interrupted_replacement(&path).unwrap_or_else(|error| panic!("state {state}: {error}"));
            let read = |name: &str| fs::read_to_string(file(name)).ok();
            assert_eq!(read("halo.db").as_deref(), Some("new"), "state {state}");
            assert_eq!(read("halo.db.damaged-1").as_deref(), Some("old"), "state {state}");
            assert_eq!(read("halo.db.damaged-1-wal").as_deref(), Some("old wal"), "state {state}");
            for gone in ["halo.db-wal", "halo.db.repaired-1", "halo.db-replacing"] {
                assert_eq!(read(gone), None, "state {state}: {gone}");
            }
        }
    }

    fn write_marker_only(path: &Path, new_path: &Path, old_path: &Path) {
        fs::write(new_path, "").expect("the file is written");
        write_marker(path, new_path, old_path).expect("the marker is written");
        fs::remove_file(new_path).expect("the file is removed");
    }

    /// A marker that was cut short was never acted on: the database stays as it is.
    #[test]
    fn repair_marker_that_is_cut_short_is_removed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("halo.db");
        for content in ["", "halo.db.rep", "halo.db.repaired-1\nhalo.db.damaged-1\nen"] {
            fs::write(&path, "old").expect("the file is written");
            fs::write(folder.path().join("halo.db-replacing"), content).expect("the file is written");
            fs::write(folder.path().join("halo.db.repaired-1"), "new").expect("the file is written");
            finish_interrupted_replacement(&path).expect("the marker is removed");
            assert_eq!(fs::read_to_string(&path).expect("the file is read"), "old");
            assert!(!folder.path().join("halo.db-replacing").exists());
        }
    }
}

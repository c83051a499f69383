//! Files of the data folder that a kill or a full disk must not leave half written: a new content is written beside the file,
//! synced, and renamed over it.

use halo_core::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a file beside `path`, synced; only its owner can read it. Returns its path. What an earlier attempt has left there is
/// overwritten.
pub(super) fn write_beside(path: &Path, content: &[u8]) -> Result<PathBuf, Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    let part = PathBuf::from(name);
    let write = || -> io::Result<()> {
        let mut file = owner_only(OpenOptions::new().write(true).create(true).truncate(true)).open(&part)?;
        file.write_all(content)?;
        file.sync_all()
    };
    match write() {
        Ok(()) => Ok(part),
        Err(error) => {
            let _ = fs::remove_file(&part);
            Err(file_error("writing", &part, error))
        }
    }
}

/// Replaces the content of a file, or creates it: after a crash it has the old content or the new.
pub(super) fn replace_file(path: &Path, content: &[u8]) -> Result<(), Error> {
    let part = write_beside(path, content)?;
    fs::rename(&part, path).map_err(|error| file_error("replacing", path, error))?;
    sync_folder(path)
}

/// Syncs the folder of a file, so that a rename in it survives a power cut.
pub(super) fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Only Unix can open a folder.
    if cfg!(unix) {
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| file_error("syncing", folder, error))?;
    }
    Ok(())
}

pub(super) fn file_error(operation: &str, path: &Path, error: io::Error) -> Error {
    Error::unavailable(format!("{operation} {}", path.display()), error.to_string()).with_source(error)
}

pub(super) fn owner_only(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options
}

/// Creates the data folder, which only its owner can read: with a store on a server it may not exist yet.
pub(super) fn create_private_dir(folder: &Path) -> Result<(), Error> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).map_err(|error| file_error("creating", folder, error))
}

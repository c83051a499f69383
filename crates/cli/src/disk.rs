//! Disk space, and errors of the file system with advice.

use anyhow::anyhow;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Free bytes on the disk of a file.
#[cfg(unix)]
pub fn free_space(path: &Path) -> Option<u64> {
    let stats = rustix::fs::statvfs(path.parent()?).ok()?;
    Some(stats.f_bavail * stats.f_frsize)
}

#[cfg(not(unix))]
pub fn free_space(_path: &Path) -> Option<u64> {
    None
}

/// Size of a file, or of a folder and everything in it.
pub fn disk_usage(path: &Path) -> u64 {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            let files = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
            files.map(|file| disk_usage(&file.path())).sum()
        }
        Ok(metadata) if metadata.is_symlink() => fs::metadata(path).map_or(0, |metadata| metadata.len()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    }
}

/// An error with advice for the user, by its kind.
pub fn io_error_with_advice(error: std::io::Error, what: &str, path: &Path) -> anyhow::Error {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "the disk is full: free some space and run the command again; finished downloads are kept"
        }
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
            "it is not writable: change its permissions, or name another folder with --data"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "there is a file where a folder should be: move the file, or name another folder with --data"
        }
        _ => return anyhow::Error::new(error).context(format!("cannot {what} {}", path.display())),
    };
    anyhow!("cannot {what} {}: {advice}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_errors_include_advice() {
        for (kind, says) in [
            (ErrorKind::StorageFull, "the disk is full: free some space"),
            (ErrorKind::ReadOnlyFilesystem, "name another folder with --data"),
        ] {
            assert!(io_error_with_advice(kind.into(), "write", Path::new("x")).to_string().contains(says));
        }
    }
}

//! What there is on a disk, and what went wrong there.

use anyhow::anyhow;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Bytes left on the disk that a file lies on.
#[cfg(unix)]
pub fn free_space(path: &Path) -> Option<u64> {
    let about = rustix::fs::statvfs(path.parent()?).ok()?;
    Some(about.f_bavail * about.f_frsize)
}

#[cfg(not(unix))]
pub fn free_space(_path: &Path) -> Option<u64> {
    None
}

/// Bytes in a file, or in a folder and all below.
pub fn disk_usage(path: &Path) -> u64 {
    match fs::symlink_metadata(path) {
        Ok(about) if about.is_dir() => {
            let files = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
            files.map(|file| disk_usage(&file.path())).sum()
        }
        Ok(about) if about.is_symlink() => fs::metadata(path).map_or(0, |about| about.len()),
        Ok(about) => about.len(),
        Err(_) => 0,
    }
}

/// What could not be done, why, and what to do about it.
pub fn io_error_with_advice(error: std::io::Error, what: &str, path: &Path) -> anyhow::Error {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "the disk is full: free some space and say this again; what was fetched is kept"
        }
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
            "it may not be written to: change that, or name another folder with --data"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "there is a file where a folder should be: move it away, or name another folder with --data"
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

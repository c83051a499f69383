//! The disk of the archive, which it shares with the store. The archive can be computed again and the store cannot, so the
//! archive leaves a part of the disk free, and gives way when the store needs it.

use super::folder::list_dir;
use std::fs;
use std::path::Path;

/// The bytes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskSpace {
    pub free: u64,
    pub total: u64,
}

impl DiskSpace {
    /// What the archive leaves free: 5 % of the disk, at least 64 MiB and at most 2 GiB.
    pub fn reserve(self) -> u64 {
        (self.total / 20).clamp(64 << 20, 2 << 30)
    }
}

/// The disk of a folder; none where it cannot be measured.
pub(super) fn disk_space(folder: &Path) -> Option<DiskSpace> {
    #[cfg(unix)]
    {
        let stats = rustix::fs::statvfs(folder).ok()?;
        Some(DiskSpace { free: stats.f_bavail * stats.f_frsize, total: stats.f_blocks * stats.f_frsize })
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

/// Deletes the least recently used files of an archive folder, of all models, until they have had `bytes` bytes. Returns how
/// many bytes were freed. An archive that is open takes the files for lost, and computes their cells again.
pub fn free_disk_space(folder: &Path, bytes: u64) -> u64 {
    let conversations = list_dir(folder).into_iter().flat_map(|model| list_dir(&model));
    let files = conversations.flat_map(|conversation| list_dir(&conversation));
    let mut files: Vec<_> = files
        .filter_map(|path| {
            let metadata = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
            Some((metadata.modified().ok(), path, metadata.len()))
        })
        .collect();
    files.sort();
    let mut freed = 0;
    for (_, path, len) in files {
        if freed >= bytes {
            break;
        }
        if fs::remove_file(&path).is_ok() {
            freed += len;
        }
    }
    freed
}

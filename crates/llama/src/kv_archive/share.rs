//! The archives that this process has open in one folder, one per loaded model. They share the limits.
//!
//! Each may use what the others leave, and at least its equal part: an archive that fills the folder gives way at its next use
//! when another one is opened.

use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

struct OpenArchive {
    id: u64,
    folder: PathBuf,
    model_fingerprint: u128,
    ram_used: u64,
    disk_used: u64,
}

static OPEN: Mutex<Vec<OpenArchive>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// An archive's place among those of its folder. It gives it up when it is dropped.
pub(super) struct ArchiveShare {
    id: u64,
}

/// What one archive may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShareView {
    pub ram: u64,
    pub disk: u64,
    /// The models of the other archives that are open.
    pub others: Vec<u128>,
}

impl ArchiveShare {
    /// An archive without a folder shares nothing.
    pub fn join(folder: Option<&Path>, model_fingerprint: u128) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        if let Some(folder) = folder {
            let folder = folder.to_owned();
            OPEN.lock().push(OpenArchive { id, folder, model_fingerprint, ram_used: 0, disk_used: 0 });
        }
        Self { id }
    }

    /// States what this archive uses; returns its part of the limits.
    pub fn update(&self, (ram_used, disk_used): (u64, u64), (ram, disk): (u64, u64)) -> ShareView {
        let mut open = OPEN.lock();
        let Some(own) = open.iter_mut().find(|archive| archive.id == self.id) else {
            return ShareView { ram, disk, others: Vec::new() };
        };
        (own.ram_used, own.disk_used) = (ram_used, disk_used);
        let (folder, model_fingerprint) = (own.folder.clone(), own.model_fingerprint);
        let others: Vec<&OpenArchive> =
            open.iter().filter(|other| other.folder == folder && other.id != self.id).collect();
        let part = |limit: u64, used: u64| limit.saturating_sub(used).max(limit / (others.len() as u64 + 1));
        let fingerprints = others.iter().map(|other| other.model_fingerprint);
        ShareView {
            ram: part(ram, others.iter().map(|other| other.ram_used).sum()),
            disk: part(disk, others.iter().map(|other| other.disk_used).sum()),
            others: fingerprints.filter(|other| *other != model_fingerprint).collect(),
        }
    }
}

impl Drop for ArchiveShare {
    fn drop(&mut self) {
        OPEN.lock().retain(|archive| archive.id != self.id);
    }
}

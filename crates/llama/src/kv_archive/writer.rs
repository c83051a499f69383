//! The thread that writes entries to disk, so that pruning does not wait for it.

use super::disk_space::DiskSpace;
use super::entry::{KvArchiveEntry, KvEntryDiskState};
use super::file;
use parking_lot::{Condvar, Mutex};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Failed writes are logged at most this often: a full disk would fail all of them.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

pub(super) enum KvArchiveJob {
    Write { path: PathBuf, entry: Arc<KvArchiveEntry>, model_fingerprint: u128, disk: Arc<KvEntryDiskState> },
    Remove(PathBuf),
    Flush(SyncSender<()>),
}

/// A handle to the thread. Dropping it waits until all queued jobs are done.
pub(super) struct KvArchiveWriter {
    jobs: Option<Sender<KvArchiveJob>>,
    queue: Arc<QueuedBytes>,
    thread: Option<JoinHandle<()>>,
}

/// Bytes of cells that wait to be written.
#[derive(Default)]
struct QueuedBytes {
    bytes: Mutex<u64>,
    lowered: Condvar,
}

impl KvArchiveWriter {
    /// [`send`](Self::send) blocks while more bytes than this wait to be written: they are RAM beyond the limit.
    pub(super) const MAX_QUEUED_BYTES: u64 = 128 << 20;

    pub(super) fn spawn(disk_space: fn(&Path) -> Option<DiskSpace>) -> std::io::Result<Self> {
        let (jobs, receiver) = channel();
        let queue = Arc::new(QueuedBytes::default());
        let thread_queue = Arc::clone(&queue);
        let run = move || run_jobs(receiver, &thread_queue, disk_space);
        let thread = std::thread::Builder::new().name("halo-kv".into()).spawn(run)?;
        Ok(Self { jobs: Some(jobs), queue, thread: Some(thread) })
    }

    pub(super) fn send(&self, job: KvArchiveJob) {
        if let KvArchiveJob::Write { entry, .. } = &job {
            let mut bytes = self.queue.bytes.lock();
            while *bytes > Self::MAX_QUEUED_BYTES {
                self.queue.lowered.wait(&mut bytes);
            }
            *bytes += entry.cells.len() as u64;
        }
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }
}

fn run_jobs(jobs: Receiver<KvArchiveJob>, queue: &QueuedBytes, disk_space: fn(&Path) -> Option<DiskSpace>) {
    let mut last_warning = None;
    for job in jobs {
        match job {
            KvArchiveJob::Write { path, entry, model_fingerprint, disk } => {
                let bytes = entry.cells.len() as u64;
                if !disk.is_not_stored() && !has_space_for(&path, bytes, disk_space) {
                    disk.set_not_stored();
                }
                if !disk.is_not_stored()
                    && let Err(error) = write_unless_cancelled(&path, &entry, model_fingerprint, &disk)
                {
                    disk.set_not_stored();
                    warn_write_failed(&mut last_warning, &path, &error);
                }
                drop(entry);
                *queue.bytes.lock() -= bytes;
                queue.lowered.notify_all();
            }
            KvArchiveJob::Remove(path) => {
                let _ = fs::remove_file(&path);
                // Fails unless the folder of the conversation is empty now.
                let _ = path.parent().map(fs::remove_dir);
            }
            KvArchiveJob::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}

/// Whether the reserve stays free when an entry is written. Its folder may not exist yet.
fn has_space_for(path: &Path, bytes: u64, disk_space: fn(&Path) -> Option<DiskSpace>) -> bool {
    let space = path.ancestors().skip(1).find(|folder| folder.exists()).and_then(disk_space);
    space.is_none_or(|space| space.free >= space.reserve() + bytes)
}

/// Writes an entry, and removes the file again if the entry was evicted or deleted meanwhile.
fn write_unless_cancelled(
    path: &Path,
    entry: &KvArchiveEntry,
    model_fingerprint: u128,
    disk: &KvEntryDiskState,
) -> std::io::Result<()> {
    file::write_entry(path, entry, model_fingerprint)?;
    if !disk.finish_write() {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

fn warn_write_failed(last_warning: &mut Option<Instant>, path: &Path, error: &std::io::Error) {
    if last_warning.is_none_or(|last| last.elapsed() > WARNING_INTERVAL) {
        *last_warning = Some(Instant::now());
        let path = path.display();
        tracing::warn!("cannot write KV cells to {path}: {error}; they are recomputed when they are needed");
    }
}

impl Drop for KvArchiveWriter {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! The thread that writes pieces, so that nobody waits for a disk.

use super::{Disk, NOT_WRITTEN, Piece, REFUSED, WRITTEN, file};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, SyncSender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

/// What is to be done.
pub(super) enum Work {
    Write(PathBuf, Arc<Piece>, u128, Arc<Disk>),
    Remove(PathBuf),
    Tell(SyncSender<()>),
}

/// The thread, and the way to it.
pub(super) struct Writer {
    work: Option<Sender<Work>>,
    /// Bytes that wait to be written.
    waiting: Arc<(Mutex<u64>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Bytes that may wait: beyond that, whoever saves waits too.
    pub(super) const MOST: u64 = 128 << 20;

    pub(super) fn start() -> std::io::Result<Self> {
        let (work, todo) = channel::<Work>();
        let waiting = Arc::new((Mutex::new(0), Condvar::new()));
        let done = Arc::clone(&waiting);
        let run = move || {
            let mut told: Option<SystemTime> = None;
            for work in todo {
                match work {
                    Work::Write(path, piece, mark, disk) => {
                        let bytes = piece.cells.len() as u64;
                        if !disk.is(REFUSED)
                            && let Err(error) = write_unless_refused(&path, &piece, mark, &disk)
                        {
                            disk.state.store(REFUSED, Ordering::Release);
                            complain(&mut told, &path, &error);
                        }
                        drop(piece);
                        *done.0.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
                        done.1.notify_all();
                    }
                    Work::Remove(path) => {
                        let _ = fs::remove_file(&path);
                        // The folder goes with its last file.
                        let _ = path.parent().map(fs::remove_dir);
                    }
                    Work::Tell(done) => {
                        let _ = done.send(());
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("halo-kv".into()).spawn(run)?;
        Ok(Self { work: Some(work), waiting, thread: Some(thread) })
    }

    pub(super) fn send(&self, work: Work) {
        if let Work::Write(_, piece, ..) = &work {
            let (bytes, free) = (&self.waiting.0, &self.waiting.1);
            let mut waiting = bytes.lock().unwrap_or_else(PoisonError::into_inner);
            while *waiting > Self::MOST {
                waiting = free.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            *waiting += piece.cells.len() as u64;
        }
        if let Some(queue) = &self.work {
            let _ = queue.send(work);
        }
    }
}

/// Writes a piece; if it was let go of meanwhile, the file goes again.
fn write_unless_refused(path: &Path, piece: &Piece, mark: u128, disk: &Disk) -> std::io::Result<()> {
    file::write(path, piece, mark)?;
    let (before, after) = (Ordering::AcqRel, Ordering::Acquire);
    if disk.state.compare_exchange(NOT_WRITTEN, WRITTEN, before, after).is_err() {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// Says that something could not be written; once a minute is enough.
fn complain(told: &mut Option<SystemTime>, path: &Path, error: &std::io::Error) {
    let now = SystemTime::now();
    let long = Duration::from_secs(60);
    if told.is_none_or(|t| now.duration_since(t).is_ok_and(|d| d > long)) {
        *told = Some(now);
        let path = path.display();
        tracing::warn!(
            "the cells of dead chunks cannot be written to {path}: {error}; they will be computed again when they are needed"
        );
    }
}

impl Drop for Writer {
    /// What was to be written is, before this returns.
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

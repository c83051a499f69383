//! Cancels a running computation from another thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Cancels one job and no other. Jobs have numbers because the thread that cancels cannot know whether its job is
/// queued, running or finished: a plain flag would cancel the next job instead.
#[derive(Debug, Default)]
pub struct JobCanceller {
    running_job: AtomicU64,
    cancelled_job: AtomicU64,
    uninterruptible: AtomicBool,
}

impl JobCanceller {
    /// Marks a job as running; 0 means none. Job numbers are never reused.
    pub fn begin_job(&self, job: u64) {
        self.running_job.store(job, Ordering::SeqCst);
    }

    pub fn cancel(&self, job: u64) {
        self.cancelled_job.store(job, Ordering::SeqCst);
    }

    /// Runs work that ignores cancellation, such as a K-shift, which must not stop halfway.
    pub(crate) fn run_uninterruptible<T>(&self, work: impl FnOnce() -> T) -> T {
        self.uninterruptible.store(true, Ordering::SeqCst);
        let result = work();
        self.uninterruptible.store(false, Ordering::SeqCst);
        result
    }

    /// Whether the running job is cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        if self.uninterruptible.load(Ordering::SeqCst) {
            return false;
        }
        let job = self.running_job.load(Ordering::SeqCst);
        job != 0 && job == self.cancelled_job.load(Ordering::SeqCst)
    }
}

//! Cancels jobs from other threads.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Cancels single jobs. Jobs have numbers because the thread that cancels cannot know whether its job is queued, running
/// or finished: a plain flag would cancel the next job instead.
///
/// A batch may belong to several jobs. It is aborted only when all of them are cancelled: otherwise a cancelled job
/// leaves after the batch, and no other job notices.
#[derive(Debug, Default)]
pub struct JobCanceller {
    jobs: Mutex<Jobs>,
    /// Whether all jobs of the running batch are cancelled. Read by llama.cpp between the nodes of the graph.
    batch_cancelled: AtomicBool,
    uninterruptible: AtomicBool,
}

#[derive(Debug, Default)]
struct Jobs {
    /// Whether each job that is queued or running is cancelled.
    cancelled: BTreeMap<u64, bool>,
    /// The jobs of the running batch.
    batch: Vec<u64>,
}

impl Jobs {
    fn is_batch_cancelled(&self) -> bool {
        !self.batch.is_empty() && self.batch.iter().all(|job| self.cancelled.get(job) == Some(&true))
    }
}

impl JobCanceller {
    /// Registers a job, which can be cancelled from now on. Job numbers are never reused.
    pub fn add_job(&self, job: u64) {
        self.jobs.lock().cancelled.insert(job, false);
    }

    /// Unregisters a finished job.
    pub fn remove_job(&self, job: u64) {
        self.jobs.lock().cancelled.remove(&job);
    }

    /// Sets the jobs that the next batches belong to.
    pub fn set_batch_jobs(&self, batch: Vec<u64>) {
        let mut jobs = self.jobs.lock();
        jobs.batch = batch;
        self.batch_cancelled.store(jobs.is_batch_cancelled(), Ordering::SeqCst);
    }

    /// Cancels a job, unless it is finished.
    pub fn cancel(&self, job: u64) {
        let mut jobs = self.jobs.lock();
        if let Some(cancelled) = jobs.cancelled.get_mut(&job) {
            *cancelled = true;
            self.batch_cancelled.store(jobs.is_batch_cancelled(), Ordering::SeqCst);
        }
    }

    #[must_use]
    pub fn is_job_cancelled(&self, job: u64) -> bool {
        self.jobs.lock().cancelled.get(&job) == Some(&true)
    }

    /// Runs work that ignores cancellation, such as a K-shift, which must not stop halfway.
    pub(crate) fn run_uninterruptible<T>(&self, work: impl FnOnce() -> T) -> T {
        self.uninterruptible.store(true, Ordering::SeqCst);
        let result = work();
        self.uninterruptible.store(false, Ordering::SeqCst);
        result
    }

    /// Whether the running batch is to be aborted.
    #[must_use]
    pub fn is_batch_cancelled(&self) -> bool {
        self.batch_cancelled.load(Ordering::SeqCst) && !self.uninterruptible.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canceller_aborts_a_batch_when_all_of_its_jobs_are_cancelled() {
        let canceller = JobCanceller::default();
        [1, 2, 3].iter().for_each(|&job| canceller.add_job(job));
        canceller.set_batch_jobs(vec![1, 2]);
        canceller.cancel(1);
        assert!(canceller.is_job_cancelled(1) && !canceller.is_batch_cancelled());
        canceller.cancel(2);
        assert!(canceller.is_batch_cancelled());
        canceller.run_uninterruptible(|| assert!(!canceller.is_batch_cancelled()));
        canceller.set_batch_jobs(vec![3]);
        assert!(!canceller.is_batch_cancelled());
        canceller.set_batch_jobs(Vec::new());
        assert!(!canceller.is_batch_cancelled(), "work of no job is not cancelled");
        canceller.remove_job(1);
        canceller.cancel(1);
        assert!(!canceller.is_job_cancelled(1), "a finished job is not cancelled");
    }
}

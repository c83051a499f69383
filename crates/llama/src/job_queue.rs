//! The jobs of the thread that owns the context.

use crate::generate::GenerateRequest;
use halo_core::Error;
use halo_core::model::{
    AttentionRow, CacheStats, FinishReason, ModelStep, ModelToken, TokenLogprobs, WindowToken,
};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

pub(crate) enum LlamaJob {
    Generate { job_id: u64, request: Box<GenerateRequest>, steps: SyncSender<LlamaStep> },
    Persist { conversation: String, window: Vec<WindowToken>, done: SyncSender<Result<(), Error>> },
    CheckWindow { conversation: String, window: Vec<WindowToken>, done: SyncSender<Option<String>> },
    Forget { conversation: String, done: SyncSender<()> },
    LinkBranch { conversation: String, parent: String, positions: u64 },
    Flush { done: SyncSender<()> },
}

/// A [`ModelStep`] that is sent from the thread to the caller.
pub(crate) enum LlamaStep {
    Prefill { done: usize, total: usize },
    PromptAttention(OwnedAttentionRow),
    PrefillDone(CacheStats),
    Logprobs(TokenLogprobs),
    Token(ModelToken, Option<OwnedAttentionRow>),
    End(Result<FinishReason, Error>),
}

impl LlamaStep {
    /// None for a step that a local model does not have.
    pub(crate) fn new(step: ModelStep<'_>) -> Option<Self> {
        Some(match step {
            // A local model has a window of tokens, which is pruned and never cooled.
            ModelStep::Cooled(_) => return None,
            ModelStep::Prefill { done, total } => Self::Prefill { done, total },
            ModelStep::PromptAttention(row) => Self::PromptAttention(OwnedAttentionRow::new(&row)),
            ModelStep::PrefillDone(stats) => Self::PrefillDone(stats),
            ModelStep::Logprobs(logprobs) => Self::Logprobs(logprobs.clone()),
            ModelStep::Token(token, row) => {
                Self::Token(token.clone(), row.as_ref().map(OwnedAttentionRow::new))
            }
        })
    }
}

pub(crate) struct OwnedAttentionRow {
    mean: Vec<f32>,
    max: Vec<f32>,
    per_head: Vec<f32>,
    probability: Option<f32>,
}

impl OwnedAttentionRow {
    fn new(row: &AttentionRow<'_>) -> Self {
        let AttentionRow { mean, max, per_head, probability } = *row;
        Self { mean: mean.to_vec(), max: max.to_vec(), per_head: per_head.to_vec(), probability }
    }

    pub(crate) fn as_row(&self) -> AttentionRow<'_> {
        let Self { mean, max, per_head, probability } = self;
        AttentionRow { mean, max, per_head, probability: *probability }
    }
}

/// A queue of jobs. The thread also waits here for listeners that are slower than the model.
#[derive(Default)]
pub(crate) struct JobQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<LlamaJob>,
    closed: bool,
    /// Whether a listener took a step since the thread looked.
    step_taken: bool,
}

/// What the thread finds in the queue.
pub(crate) enum QueuePoll {
    Job(LlamaJob),
    /// There is no job, and none comes any more.
    Closed,
    Empty,
}

impl JobQueue {
    /// False if the queue is closed: the job is dropped.
    pub(crate) fn push(&self, job: LlamaJob) -> bool {
        let mut state = self.state.lock();
        if !state.closed {
            state.jobs.push_back(job);
            self.changed.notify_all();
        }
        !state.closed
    }

    /// Lets the thread end when its jobs are done.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Tells the thread that a listener took a step, so that its next one can be sent.
    pub(crate) fn note_step_taken(&self) {
        let mut state = self.state.lock();
        if !state.step_taken {
            state.step_taken = true;
            self.changed.notify_all();
        }
    }

    /// Closes the queue and drops its jobs, whose callers get an error.
    fn abandon(&self) {
        self.close();
        let jobs = std::mem::take(&mut self.state.lock().jobs);
        drop(jobs);
    }

    pub(crate) fn poll(&self) -> QueuePoll {
        let mut state = self.state.lock();
        match state.jobs.pop_front() {
            Some(job) => QueuePoll::Job(job),
            None if state.closed => QueuePoll::Closed,
            None => QueuePoll::Empty,
        }
    }

    /// Waits for a job, the end of the queue, or a listener that took a step.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while state.jobs.is_empty() && !state.closed && !state.step_taken {
            self.changed.wait(&mut state);
        }
        state.step_taken = false;
    }

    /// Waits for a listener that took a step, or for a job.
    pub(crate) fn wait_for_listener(&self) {
        let mut state = self.state.lock();
        while state.jobs.is_empty() && !state.step_taken {
            self.changed.wait(&mut state);
        }
        state.step_taken = false;
    }
}

/// Abandons the queue when the thread that serves it ends, however it ends.
pub(crate) struct AbandonOnDrop(pub(crate) Arc<JobQueue>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

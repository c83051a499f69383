//! The loop of the thread that owns the context: many answers in one batch.
//!
//! One tick is one `llama_decode`: the next token of every running answer, and a slice of one window that is prefilled, so
//! that no answer stalls while another window is read. An answer that is alone gets the same batches as if there were no
//! others, so its tokens are the same to the last bit.

use crate::ffi::{JobCanceller, LlamaError};
use crate::generate::{GenerateRequest, Generation, GenerationFlow};
use crate::job_queue::{JobQueue, LlamaJob, LlamaStep, QueuePoll};
use crate::kv_cache::{DecodedLane, KvCache, KvCacheError, LaneBatch, TableChecks};
use halo_core::model::{FinishReason, ModelStep, StepFlow};
use halo_core::{Error, ErrorKind};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

/// How long a slice of a prefill may hold up running answers.
const SLICE_TIME: Duration = Duration::from_millis(150);

/// The shortest slice: a shorter one wastes the pass over the weights.
const MIN_SLICE: usize = 16;

/// How long the cells of a window that was only prefilled are kept while other answers start: its own is about to.
const ANSWER_FOLLOWS: Duration = Duration::from_secs(2);

/// A shorter beginning is prefilled again rather than waited for.
const AWAITED_BEGINNING: usize = 64;

/// After so many panics in a row the thread ends: what it has cannot be trusted.
const MAX_PANICS: usize = 10;

/// An answer in the batch.
struct RunningJob {
    id: u64,
    generation: Generation,
    outbox: Outbox,
    /// When it last had a slice of prefill, in ticks.
    last_slice: u64,
    end: Option<Result<FinishReason, Error>>,
}

/// Steps on their way to a listener. A listener that is slower than the model makes its own answer wait, and no other.
struct Outbox {
    steps: VecDeque<LlamaStep>,
    sender: SyncSender<LlamaStep>,
    /// The caller is gone.
    closed: bool,
}

impl Outbox {
    fn new(sender: SyncSender<LlamaStep>) -> Self {
        Self { steps: VecDeque::new(), sender, closed: false }
    }

    fn push(&mut self, step: LlamaStep) {
        self.steps.push_back(step);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(step) = self.steps.pop_front() {
            match self.sender.try_send(step) {
                Ok(()) => {}
                Err(TrySendError::Full(step)) => return self.steps.push_front(step),
                Err(TrySendError::Disconnected(_)) => {
                    self.closed = true;
                    self.steps.clear();
                }
            }
        }
    }

    /// Takes a step of a generation, and says whether it goes on.
    fn listen(&mut self, step: ModelStep<'_>, id: u64, canceller: &JobCanceller) -> StepFlow {
        LlamaStep::new(step).into_iter().for_each(|step| self.push(step));
        if self.closed || canceller.is_job_cancelled(id) { StepFlow::Stop } else { StepFlow::Continue }
    }
}

/// An answer that waits for a lane or for cells.
struct WaitingJob {
    id: u64,
    request: Box<GenerateRequest>,
    outbox: Outbox,
    /// It has waited for a common beginning.
    awaited: bool,
}

/// The running answers and those that wait for a lane or for cells.
pub(crate) struct BatchLoop {
    cache: KvCache,
    canceller: Arc<JobCanceller>,
    running: Vec<RunningJob>,
    waiting: VecDeque<WaitingJob>,
    /// The last steps of answers that left the batch.
    ending: Vec<Outbox>,
    /// The measured time of one prefilled token; zero until the first slice.
    prefill_time: Duration,
    ticks: u64,
    /// Whether conversations without a running answer keep their cells when another one starts. Without flash attention
    /// every token is compared with all used cells, so on a CPU it is faster to restore them when they are needed again.
    keep_idle_lanes: bool,
}

impl BatchLoop {
    pub(crate) fn new(mut cache: KvCache, keep_idle_lanes: bool) -> Self {
        let canceller = Arc::clone(cache.context().canceller());
        Self {
            cache,
            canceller,
            running: Vec::new(),
            waiting: VecDeque::new(),
            ending: Vec::new(),
            prefill_time: Duration::ZERO,
            ticks: 0,
            keep_idle_lanes,
        }
    }

    /// Runs jobs until the queue is closed, then saves the cached KV cells.
    pub(crate) fn run(mut self, queue: &JobQueue) {
        let mut panics = 0;
        while panics < MAX_PANICS {
            let mut closed = false;
            let ticked = self.catch_panic(|this| {
                closed = this.take_jobs(queue);
                // First: answers that ended still have their lanes.
                this.send_steps();
                this.start_waiting();
                Ok(this.tick())
            });
            match ticked {
                Ok(true) => {
                    panics = 0;
                    continue;
                }
                Ok(false) => panics = 0,
                Err(_) => {
                    panics += 1;
                    continue;
                }
            }
            let done = self.running.is_empty() && self.waiting.is_empty() && self.ending.is_empty();
            match closed {
                true if done => break,
                true => queue.wait_for_listener(),
                false => queue.wait(),
            }
        }
        if panics < MAX_PANICS {
            self.cache.save_and_clear();
        }
        let TableChecks { always, compared, wrong } = self.cache.table_checks();
        if always {
            tracing::warn!("kv.check: {compared} tables of cells were compared, {wrong} were wrong");
        }
    }

    /// Takes all queued jobs. True if the queue is closed.
    fn take_jobs(&mut self, queue: &JobQueue) -> bool {
        loop {
            match queue.poll() {
                QueuePoll::Job(job) => self.take_job(job),
                QueuePoll::Closed => return true,
                QueuePoll::Empty => return false,
            }
        }
    }

    fn take_job(&mut self, job: LlamaJob) {
        match job {
            LlamaJob::Generate { job_id, request, steps } => {
                self.waiting.push_back(WaitingJob {
                    id: job_id,
                    request,
                    outbox: Outbox::new(steps),
                    awaited: false,
                });
            }
            LlamaJob::Persist { conversation, window, done } => {
                let persisted = self.catch_panic(|this| {
                    this.cache.persist(&conversation, &window).map(|_| ()).map_err(cache_error)
                });
                let _ = done.send(persisted);
            }
            LlamaJob::CheckWindow { conversation, window, done } => {
                let _ = done.send(self.cache.find_mismatch(&conversation, &window));
            }
            LlamaJob::Forget { conversation, done } => {
                for job in &mut self.running {
                    if job.generation.conversation() == conversation && job.end.is_none() {
                        job.end = Some(Ok(FinishReason::Cancelled));
                    }
                }
                self.cache.forget(&conversation);
                let _ = done.send(());
            }
            LlamaJob::LinkBranch { conversation, parent, positions } => {
                self.cache.archive().link_branch(&conversation, &parent, positions);
            }
            LlamaJob::Flush { done } => {
                self.cache.archive().flush();
                let _ = done.send(());
            }
        }
    }

    /// Starts waiting answers in their order, as far as there are lanes and cells for them.
    fn start_waiting(&mut self) {
        let mut n = 0;
        // An answer that ended, as all do after a panic, has its lane until its end is sent.
        while n < self.waiting.len() && self.running.iter().all(|job| job.end.is_none()) {
            let job = &self.waiting[n];
            if self.canceller.is_job_cancelled(job.id) {
                if let Some(job) = self.waiting.remove(n) {
                    self.end(job.id, job.outbox, Ok(FinishReason::Cancelled));
                }
                continue;
            }
            if self.cache.is_reserved(&job.request.conversation) {
                n += 1;
                continue;
            }
            if self.awaits_beginning(n) {
                self.waiting[n].awaited = true;
                n += 1;
                continue;
            }
            if !self.fits(&self.waiting[n].request) {
                return;
            }
            if let Some(job) = self.waiting.remove(n) {
                self.start(job);
            }
        }
    }

    /// Whether a long beginning of the window of a waiting answer is being prefilled for another one: then it is shared when
    /// it is complete.
    fn awaits_beginning(&mut self, waiting: usize) -> bool {
        let request = &self.waiting[waiting].request;
        let is_prefilling = |job: &&RunningJob| {
            job.end.is_none() && job.outbox.steps.is_empty() && job.generation.is_prefilling()
        };
        let mut prefilling = self.running.iter().filter(is_prefilling);
        let awaits = !request.ephemeral
            && prefilling.any(|job| {
                let (common, cached) = job.generation.common_beginning(&request.window);
                common >= AWAITED_BEGINNING && !cached
            });
        awaits && self.cache.can_share_beginning(&request.conversation, &request.window)
    }

    /// Whether there is a lane, and cells for the window and the longest answer. Without running answers there always is.
    fn fits(&self, request: &GenerateRequest) -> bool {
        let lanes = self.running.len() < self.cache.lane_count();
        let longest = request.window.len().saturating_add(request.sampling.max_tokens);
        let cells = longest.min(self.cache.window_limit()) + self.cache.reserved_cells();
        self.running.is_empty() || (lanes && cells <= self.cache.capacity())
    }

    fn start(&mut self, job: WaitingJob) {
        let WaitingJob { id, request, mut outbox, awaited } = job;
        self.cache.set_held_lanes_shared(awaited || !self.running.is_empty());
        self.canceller.set_batch_jobs(vec![id]);
        let started = self.catch_panic(|this| {
            if !this.keep_idle_lanes {
                this.cache.evict_idle_lanes(&request.conversation);
            }
            let canceller = Arc::clone(&this.canceller);
            let mut listener = |step: ModelStep<'_>| outbox.listen(step, id, &canceller);
            Generation::start(&mut this.cache, *request, &mut listener).map_err(cache_error)
        });
        self.canceller.set_batch_jobs(Vec::new());
        match started {
            Ok(Some(generation)) => {
                self.running.push(RunningJob { id, generation, outbox, last_slice: 0, end: None });
            }
            Ok(None) => self.end(id, outbox, Ok(FinishReason::Cancelled)),
            Err(error) => {
                self.cache.drop_idle_fork();
                self.end(id, outbox, finish_of_error(error));
            }
        }
    }

    /// Sends the end of an answer after its last steps.
    fn end(&mut self, id: u64, mut outbox: Outbox, end: Result<FinishReason, Error>) {
        self.canceller.remove_job(id);
        outbox.push(LlamaStep::End(end));
        self.ending.push(outbox);
    }

    /// Sends steps to listeners that are ready, and removes answers that ended or were cancelled from the batch. Their cells
    /// stay in the lane.
    fn send_steps(&mut self) {
        let mut n = 0;
        while n < self.running.len() {
            let job = &mut self.running[n];
            job.outbox.flush();
            let cancelled = job.outbox.closed || self.canceller.is_job_cancelled(job.id);
            if job.end.is_none() && !cancelled {
                n += 1;
                continue;
            }
            let job = self.running.remove(n);
            self.cache.select_lane(job.generation.lane());
            self.cache.release_lane();
            if job.generation.is_prefill_only() {
                self.cache.hold_lane(ANSWER_FOLLOWS);
            }
            self.end(job.id, job.outbox, job.end.unwrap_or(Ok(FinishReason::Cancelled)));
        }
        self.ending.retain_mut(|outbox| {
            outbox.flush();
            !outbox.steps.is_empty()
        });
    }

    /// Decodes one batch. False if no answer can go on: there is none, or their listeners are busy.
    fn tick(&mut self) -> bool {
        let ready = |job: &RunningJob| job.end.is_none() && job.outbox.steps.is_empty();
        let ready: Vec<usize> = (0..self.running.len()).filter(|&n| ready(&self.running[n])).collect();
        let (prefills, singles): (Vec<usize>, Vec<usize>) =
            ready.into_iter().partition(|&n| self.running[n].generation.is_prefilling());
        let slice = prefills.into_iter().min_by_key(|&n| (self.running[n].last_slice, self.running[n].id));
        if singles.is_empty() && slice.is_none() {
            return false;
        }
        self.ticks += 1;
        let batch = self.cache.context().params().batch as usize;
        let max_slice = if singles.is_empty() { batch } else { self.slice_len(batch - singles.len()) };
        let slice_group: Vec<usize> =
            slice.into_iter().inspect(|&n| self.running[n].last_slice = self.ticks).collect();
        if self.cache.has_recurrent_state() {
            // A batch of a hybrid model has the same number of tokens of each sequence.
            self.decode_group(&singles, max_slice);
            self.decode_group(&slice_group, max_slice);
        } else {
            self.decode_group(&[singles, slice_group].concat(), max_slice);
        }
        true
    }

    /// The length of a slice that holds up running answers for a short time only.
    fn slice_len(&self, max: usize) -> usize {
        let measured = self.prefill_time.as_nanos();
        let fitting = SLICE_TIME.as_nanos().checked_div(measured).map_or(MIN_SLICE, |len| len as usize);
        fitting.clamp(MIN_SLICE, max.max(MIN_SLICE)).min(max.max(1))
    }

    /// Decodes one batch for some of the running answers, and passes the results on.
    fn decode_group(&mut self, group: &[usize], max_slice: usize) {
        if group.is_empty() {
            return;
        }
        for &n in group {
            self.running[n].generation.save_state(&mut self.cache);
        }
        self.canceller.set_batch_jobs(group.iter().map(|&n| self.running[n].id).collect());
        let lens: Vec<usize> =
            group.iter().map(|&n| self.running[n].generation.next_tokens(max_slice).0.len()).collect();
        let started = Instant::now();
        let decoded = self.catch_panic(|this| {
            let batches: Vec<LaneBatch<'_>> = group
                .iter()
                .map(|&n| {
                    let generation = &this.running[n].generation;
                    let (tokens, config) = generation.next_tokens(max_slice);
                    LaneBatch { lane: generation.lane(), tokens, config }
                })
                .collect();
            loop {
                match this.cache.decode_lanes(&batches) {
                    Err(KvCacheError::Llama(LlamaError::CacheFull)) if this.cache.evict_oldest_lane() => {}
                    Err(KvCacheError::Llama(LlamaError::CacheFull)) => return Ok(None),
                    decoded => return decoded.map(Some).map_err(cache_error),
                }
            }
        });
        self.canceller.set_batch_jobs(Vec::new());
        match decoded {
            Ok(Some(decoded)) => {
                self.measure_prefill(started.elapsed(), &lens);
                for ((&n, len), decoded) in group.iter().zip(lens).zip(decoded) {
                    self.advance(n, len, &decoded);
                }
            }
            Ok(None) => self.decode_in_parts(group, &lens, max_slice),
            Err(error) => {
                for &n in group {
                    let job = &mut self.running[n];
                    let cancelled = self.canceller.is_job_cancelled(job.id);
                    if job.end.is_none() && (cancelled || error.kind != ErrorKind::Cancelled) {
                        job.end =
                            Some(if cancelled { Ok(FinishReason::Cancelled) } else { Err(error.clone()) });
                    }
                }
            }
        }
    }

    /// Retries a batch that found no free cells in smaller ones. An answer that finds no cell for its next token ends.
    fn decode_in_parts(&mut self, group: &[usize], lens: &[usize], max_slice: usize) {
        match (group, lens) {
            ([n], [1]) => {
                tracing::warn!("an answer ends early, because the KV cache has no free cells");
                self.running[*n].end = Some(Ok(FinishReason::Length));
            }
            ([_], [len, ..]) => self.decode_group(group, max_slice.min(len / 2).max(1)),
            _ => group.iter().for_each(|&n| self.decode_group(&[n], max_slice)),
        }
    }

    fn measure_prefill(&mut self, elapsed: Duration, lens: &[usize]) {
        let tokens: usize = lens.iter().sum();
        if lens.iter().any(|&len| len >= MIN_SLICE) {
            let per_token = elapsed / tokens as u32;
            let known = self.prefill_time;
            self.prefill_time = if known.is_zero() { per_token } else { (known + per_token) / 2 };
        }
    }

    fn advance(&mut self, n: usize, len: usize, decoded: &DecodedLane) {
        #[cfg(debug_assertions)]
        planted::panic_if_planted(self.running[n].generation.conversation());
        let Self { cache, running, canceller, .. } = self;
        let RunningJob { id, generation, outbox, end, .. } = &mut running[n];
        let mut listener = |step: ModelStep<'_>| outbox.listen(step, *id, canceller);
        match generation.advance(cache.context(), len, decoded, &mut listener) {
            Ok(GenerationFlow::Continue) => {}
            Ok(GenerationFlow::Finished(reason)) => *end = Some(Ok(reason)),
            Err(error) => *end = Some(Err(cache_error(error))),
        }
    }

    /// Turns a panic into an error, so that the thread lives on. The KV cache is discarded, because its table may be wrong, and
    /// with it all running answers.
    fn catch_panic<T>(&mut self, job: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        catch_unwind(AssertUnwindSafe(|| job(self))).unwrap_or_else(|_| {
            let why = "internal error (a bug): the job panicked; the KV cache was discarded, and the next prompt is prefilled again";
            let error = || Error::internal("running the model", why);
            self.cache.discard_cells();
            self.running.iter_mut().for_each(|job| job.end = Some(Err(error())));
            Err(error())
        })
    }
}

fn cache_error(error: KvCacheError) -> Error {
    Error::new(error.kind(), "running the model", error.to_string()).with_source(error)
}

/// A cancelled job is no failure.
fn finish_of_error(error: Error) -> Result<FinishReason, Error> {
    if error.kind == ErrorKind::Cancelled { Ok(FinishReason::Cancelled) } else { Err(error) }
}

/// A panic that a test plants on the thread of a model. Not in release builds.
#[cfg(debug_assertions)]
pub mod planted {
    use parking_lot::Mutex;

    static CONVERSATION: Mutex<Option<String>> = Mutex::new(None);

    /// The next token of this conversation panics.
    pub fn plant_panic(conversation: &str) {
        *CONVERSATION.lock() = Some(conversation.to_owned());
    }

    pub(super) fn panic_if_planted(conversation: &str) {
        let planted = CONVERSATION.lock().take_if(|planted| planted == conversation);
        assert!(planted.is_none(), "a test planted this panic");
    }
}

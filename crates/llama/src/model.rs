//! [`Llama`] implements `halo_core`'s [`Model`] trait.
//!
//! One thread owns the context with its KV cache and runs one job after the other; clones of [`Llama`] send it jobs over
//! a channel. Tokenizing needs only the weights, which are shared, so it never waits for a job.

use crate::ffi::{ContextParams, JobCanceller, LlamaContext, LlamaError, ModelWeights};
use crate::generate::{GenerateRequest, generate};
use crate::grammar::{GrammarCompiler, GrammarMatcher};
use crate::kv_archive::{KvArchive, KvArchiveLimits};
use crate::kv_cache::{KvCache, KvCacheError, KvCacheMode, SEQUENCE_COUNT};
use crate::template_runner::TemplateRunner;
use crate::token_text::{self, MarkerNames};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    AttentionRow, CacheStats, CancelHandle, ChatTemplate, FinishReason, Model, ModelInfo, ModelStep,
    ModelToken, OutputConstraint, Prompt, Sampling, StepFlow, TokenLogprobs, WindowToken,
};
use halo_core::token::TokenId;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use xxhash_rust::xxh3::Xxh3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaOptions {
    /// Cells of the KV cache. None: what the model was trained for, up to 8,192.
    pub context: Option<u32>,
    /// The most tokens of one prefill batch.
    pub batch: u32,
    pub threads: u32,
    /// Layers that are offloaded, if the program was built for a GPU.
    pub gpu_layers: u32,
    pub kv_mode: KvCacheMode,
    pub kv_archive: KvArchiveLimits,
    /// Where the chat template of the file is rendered.
    pub template_runner: TemplateRunner,
}

impl Default for LlamaOptions {
    fn default() -> Self {
        Self {
            context: None,
            batch: 256,
            threads: 1,
            gpu_layers: 0,
            kv_mode: KvCacheMode::EditCells,
            kv_archive: KvArchiveLimits::disabled(),
            template_runner: TemplateRunner::InProcess,
        }
    }
}

const DEFAULT_MAX_CONTEXT: u32 = 8192;

/// A local model. Clones share one context.
#[derive(Clone)]
pub struct Llama {
    worker: Arc<LlamaThread>,
    weights: Arc<ModelWeights>,
    info: ModelInfo,
    markers: Arc<MarkerNames>,
    /// The reason why KV cells cannot be edited, if there is one.
    kv_edit_unsupported: Option<&'static str>,
}

/// A handle to the thread that owns the context.
struct LlamaThread {
    /// None once the thread is being shut down.
    jobs: Mutex<Option<Sender<LlamaJob>>>,
    canceller: Arc<JobCanceller>,
    next_job: AtomicU64,
    /// The latest background job, which [`Model::cancel_handle`] cancels; 0 before the first.
    idle_job: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
    compiler: SharedCompiler,
}

/// The compiler of constraints. It is created on first use, because most conversations need none.
type SharedCompiler = Arc<Mutex<Option<GrammarCompiler>>>;

/// The parser of JSON schemas recurses.
const COMPILER_STACK_BYTES: usize = 64 << 20;

enum LlamaJob {
    Generate { job_id: u64, request: Box<GenerateRequest>, steps: SyncSender<LlamaStep> },
    Persist { conversation: String, window: Vec<WindowToken>, done: SyncSender<Result<(), Error>> },
    CheckWindow { conversation: String, window: Vec<WindowToken>, done: SyncSender<Option<String>> },
    Forget { conversation: String, done: SyncSender<()> },
    LinkBranch { conversation: String, parent: String, positions: u64 },
    Flush { done: SyncSender<()> },
}

/// A [`ModelStep`] that is sent from the thread to the caller.
enum LlamaStep {
    Prefill { done: usize, total: usize },
    PromptAttention(OwnedAttentionRow),
    PrefillDone(CacheStats),
    Logprobs(TokenLogprobs),
    Token(ModelToken, Option<OwnedAttentionRow>),
    End(Result<FinishReason, Error>),
}

struct OwnedAttentionRow {
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

    fn as_row(&self) -> AttentionRow<'_> {
        let Self { mean, max, per_head, probability } = self;
        AttentionRow { mean, max, per_head, probability: *probability }
    }
}

impl Llama {
    /// Loads a GGUF file and starts the thread that runs it.
    pub fn open(path: &Path, options: &LlamaOptions) -> Result<Self, Error> {
        let load_error = |error: LlamaError| {
            Error::new(error.kind(), "loading the model", error.to_string()).with_source(error)
        };
        let weights = ModelWeights::load(path, options.gpu_layers.cast_signed()).map_err(load_error)?;
        let weights = Arc::new(weights);
        let tokens = options.context.unwrap_or_else(|| weights.trained_context().min(DEFAULT_MAX_CONTEXT));
        let params = ContextParams {
            tokens,
            batch: options.batch.clamp(1, tokens.max(1)),
            threads: options.threads.max(1).cast_signed(),
            sequences: SEQUENCE_COUNT,
        };
        let context = LlamaContext::new(&weights, params).map_err(load_error)?;
        let name = path.file_stem().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let kv_edit_unsupported = weights.kv_edit_unsupported();
        let mode = options.kv_mode;
        if let Some(why) = kv_edit_unsupported.filter(|_| mode == KvCacheMode::EditCells) {
            tracing::warn!(
                "{name}: after every prune the rest of the window is prefilled again, because {why}"
            );
        }
        let limits = if mode == KvCacheMode::EditCells && kv_edit_unsupported.is_none() {
            options.kv_archive.clone()
        } else {
            KvArchiveLimits::disabled()
        };
        let fingerprint = model_fingerprint(path, &weights).map_err(|error| {
            Error::unavailable("loading the model", format!("{}: {error}", path.display())).with_source(error)
        })?;
        let template = load_chat_template(&weights, &options.template_runner)?;
        let info = ModelInfo { name, context: tokens as usize, attention: true, template };
        let worker = LlamaThread::spawn(context, limits, fingerprint, mode)?;
        let markers = Arc::new(MarkerNames::of_template(&weights, &info.template));
        Ok(Self { worker: Arc::new(worker), weights, info, markers, kv_edit_unsupported })
    }

    /// The reason why KV cells of this model cannot be edited, if there is one: then everything after a change of the
    /// window is prefilled again.
    #[must_use]
    pub fn kv_edit_unsupported(&self) -> Option<&'static str> {
        self.kv_edit_unsupported
    }

    #[must_use]
    pub fn weights(&self) -> &Arc<ModelWeights> {
        &self.weights
    }

    /// Waits until all saved KV cells are on disk.
    pub fn flush(&self) -> Result<(), Error> {
        let (done, result) = sync_channel(1);
        self.worker.send(LlamaJob::Flush { done })?;
        result.recv().map_err(|_| thread_ended_error())
    }
}

fn thread_ended_error() -> Error {
    Error::internal("running the model", "the thread of the model has ended; restart the program")
}

impl LlamaThread {
    fn spawn(
        context: LlamaContext,
        limits: KvArchiveLimits,
        fingerprint: u128,
        mode: KvCacheMode,
    ) -> Result<Self, Error> {
        let canceller = Arc::clone(context.canceller());
        let (jobs, receiver) = channel();
        let compiler = SharedCompiler::default();
        let shared_compiler = Arc::clone(&compiler);
        let run = move || {
            let cache = KvCache::new(context, KvArchive::open(limits, fingerprint), mode);
            run_jobs(cache, &receiver, &shared_compiler);
        };
        let builder = std::thread::Builder::new().name("halo-model".into());
        let thread = builder.stack_size(COMPILER_STACK_BYTES).spawn(run);
        let thread = thread.map_err(|error| {
            Error::internal("starting the thread of the model", error.to_string()).with_source(error)
        })?;
        Ok(Self {
            jobs: Mutex::new(Some(jobs)),
            canceller,
            next_job: AtomicU64::new(1),
            idle_job: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
            compiler,
        })
    }

    fn send(&self, job: LlamaJob) -> Result<(), Error> {
        let jobs = self.jobs.lock();
        jobs.as_ref().ok_or_else(thread_ended_error)?.send(job).map_err(|_| thread_ended_error())
    }
}

impl Drop for LlamaThread {
    /// Waits for the thread, which saves the cached KV cells before it ends.
    fn drop(&mut self) {
        *self.jobs.lock() = None;
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Llama {
    /// Runs a job on the thread and calls `listener` for each step. A `background` job can be cancelled by anyone who has
    /// the [`Model::cancel_handle`].
    fn run_generate_job(
        &self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        attention: &AttentionRequest,
        background: bool,
        listener: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let request = Box::new(GenerateRequest {
            conversation: prompt.conversation.to_owned(),
            window: prompt.window.to_vec(),
            next_position: prompt.next_position,
            ephemeral: prompt.ephemeral,
            sampling: sampling.clone(),
            attention: attention.clone(),
        });
        let job_id = self.worker.next_job.fetch_add(1, Ordering::SeqCst);
        if background {
            self.worker.idle_job.store(job_id, Ordering::SeqCst);
        }
        // The channel holds one step, so a slow listener slows generation down instead of filling memory.
        let (steps, received) = sync_channel(1);
        self.worker.send(LlamaJob::Generate { job_id, request, steps })?;
        let mut stopped = false;
        loop {
            let flow = match received.recv().map_err(|_| thread_ended_error())? {
                LlamaStep::End(Ok(_)) if stopped => return Ok(FinishReason::Cancelled),
                LlamaStep::End(end) => return end,
                // Steps that were on their way when the listener stopped are dropped.
                _ if stopped => StepFlow::Stop,
                LlamaStep::Prefill { done, total } => listener(ModelStep::Prefill { done, total }),
                LlamaStep::PromptAttention(row) => listener(ModelStep::PromptAttention(row.as_row())),
                LlamaStep::PrefillDone(stats) => listener(ModelStep::PrefillDone(stats)),
                LlamaStep::Logprobs(logprobs) => listener(ModelStep::Logprobs(&logprobs)),
                LlamaStep::Token(token, row) => {
                    listener(ModelStep::Token(&token, row.as_ref().map(OwnedAttentionRow::as_row)))
                }
            };
            if flow == StepFlow::Stop {
                stopped = true;
                self.worker.canceller.cancel(job_id);
            }
        }
    }
}

impl Model for Llama {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn delete_kv(&mut self, conversation: &str) -> Result<(), Error> {
        let (done, result) = sync_channel(1);
        self.worker.send(LlamaJob::Forget { conversation: conversation.to_owned(), done })?;
        result.recv().map_err(|_| thread_ended_error())
    }

    fn inherit_kv(&mut self, conversation: &str, parent: &str, positions: u64) {
        let (conversation, parent) = (conversation.to_owned(), parent.to_owned());
        // If the thread has ended, the next job returns the error.
        let _ = self.worker.send(LlamaJob::LinkBranch { conversation, parent, positions });
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        if special {
            return Ok(token_text::tokenize_with_text(&self.weights, text, true));
        }
        Ok(self.markers.tokenize_content(&self.weights, text))
    }

    fn count_tokens(&mut self, text: &str) -> Result<usize, Error> {
        Ok(self.markers.count_content_tokens(&self.weights, text))
    }

    fn detokenize(&mut self, ids: &[TokenId]) -> Result<String, Error> {
        let vocab_size = self.weights.vocab_size();
        let mut decoder = token_text::Utf8Decoder::default();
        let mut text = String::new();
        for id in ids {
            let token = id.0.cast_signed();
            if token < 0 || token as usize >= vocab_size {
                return Err(Error::invalid_input(
                    "detokenizing",
                    format!("token {} is not in the vocabulary of {vocab_size} tokens", id.0),
                ));
            }
            text.push_str(&decoder.push(&self.weights.token_bytes(token, true)));
        }
        Ok(text + &decoder.finish())
    }

    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        let compile = || compile_constraint(&self.weights, constraint, &self.worker.compiler).map(drop);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
            let thread = thread.spawn_scoped(scope, compile);
            let thread = thread.map_err(|e| Error::internal(COMPILING, e.to_string()).with_source(e))?;
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::invalid_input(COMPILING, "the schema cannot be compiled")))
        })
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        attention: &AttentionRequest,
        listener: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.run_generate_job(prompt, sampling, attention, prompt.ephemeral, listener)
    }

    fn prefill(
        &mut self,
        prompt: &Prompt<'_>,
        listener: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let no_answer = Sampling { max_tokens: 0, ..Sampling::default() };
        self.run_generate_job(prompt, &no_answer, &AttentionRequest::none(), true, listener)
    }

    fn cancel_handle(&self) -> Option<CancelHandle> {
        let worker = Arc::clone(&self.worker);
        Some(Arc::new(move || {
            let job = worker.idle_job.load(Ordering::SeqCst);
            if job != 0 {
                worker.canceller.cancel(job);
            }
        }))
    }

    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        let (done, result) = sync_channel(1);
        let job = LlamaJob::Persist { conversation: conversation.to_owned(), window: window.to_vec(), done };
        self.worker.send(job)?;
        result.recv().map_err(|_| thread_ended_error())?
    }

    fn verify_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<Option<String>, Error> {
        let (done, result) = sync_channel(1);
        let job =
            LlamaJob::CheckWindow { conversation: conversation.to_owned(), window: window.to_vec(), done };
        self.worker.send(job)?;
        result.recv().map_err(|_| thread_ended_error())
    }
}

/// Runs jobs until all handles are dropped, then saves the cached KV cells.
fn run_jobs(mut cache: KvCache, jobs: &Receiver<LlamaJob>, compiler: &SharedCompiler) {
    for job in jobs {
        match job {
            LlamaJob::Generate { job_id, request, steps } => {
                cache.context().canceller().begin_job(job_id);
                let end =
                    catch_panic(&mut cache, |cache| generate_for_job(cache, &request, compiler, &steps));
                cache.context().canceller().begin_job(0);
                let _ = steps.send(LlamaStep::End(end));
            }
            LlamaJob::Persist { conversation, window, done } => {
                let persisted = catch_panic(&mut cache, |cache| {
                    cache.persist(&conversation, &window).map(|_| ()).map_err(cache_error)
                });
                let _ = done.send(persisted);
            }
            LlamaJob::CheckWindow { conversation, window, done } => {
                let _ = done.send(cache.find_mismatch(&conversation, &window));
            }
            LlamaJob::Forget { conversation, done } => {
                cache.forget(&conversation);
                let _ = done.send(());
            }
            LlamaJob::LinkBranch { conversation, parent, positions } => {
                cache.archive().link_branch(&conversation, &parent, positions);
            }
            LlamaJob::Flush { done } => {
                cache.archive().flush();
                let _ = done.send(());
            }
        }
    }
    cache.save_and_clear();
}

/// Turns a panic in one job into an error, so that the thread lives on. The KV cache is discarded, because its table may
/// be wrong.
fn catch_panic<T>(
    cache: &mut KvCache,
    job: impl FnOnce(&mut KvCache) -> Result<T, Error>,
) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(cache))).unwrap_or_else(|_| {
        cache.discard_cells();
        let why = "internal error (a bug): the job panicked; the KV cache was discarded, and the next prompt is prefilled again";
        Err(Error::internal("running the model", why))
    })
}

fn cache_error(error: KvCacheError) -> Error {
    Error::new(error.kind(), "running the model", error.to_string()).with_source(error)
}

fn generate_for_job(
    cache: &mut KvCache,
    request: &GenerateRequest,
    compiler: &SharedCompiler,
    steps: &SyncSender<LlamaStep>,
) -> Result<FinishReason, Error> {
    let grammar = match &request.sampling.constraint {
        None => None,
        Some(constraint) => compile_constraint(cache.context().weights(), constraint, compiler)?,
    };
    let canceller = Arc::clone(cache.context().canceller());
    let mut listener = |step: ModelStep<'_>| {
        let step = match step {
            ModelStep::Prefill { done, total } => LlamaStep::Prefill { done, total },
            ModelStep::PromptAttention(row) => LlamaStep::PromptAttention(OwnedAttentionRow::new(&row)),
            ModelStep::PrefillDone(stats) => LlamaStep::PrefillDone(stats),
            ModelStep::Logprobs(logprobs) => LlamaStep::Logprobs(logprobs.clone()),
            ModelStep::Token(token, row) => {
                LlamaStep::Token(token.clone(), row.as_ref().map(OwnedAttentionRow::new))
            }
        };
        // Sending fails when the caller is gone.
        if steps.send(step).is_err() || canceller.is_cancelled() {
            StepFlow::Stop
        } else {
            StepFlow::Continue
        }
    };
    generate(cache, request, grammar, &mut listener).map_err(cache_error)
}

/// The operation in errors of constraints.
const COMPILING: &str = "compiling the output constraint";

fn compile_constraint(
    weights: &ModelWeights,
    constraint: &OutputConstraint,
    compiler: &SharedCompiler,
) -> Result<Option<GrammarMatcher>, Error> {
    let mut compiler = compiler.lock();
    if compiler.is_none() {
        let created = GrammarCompiler::new(weights);
        *compiler = Some(created.map_err(|why| Error::internal(COMPILING, why))?);
    }
    let compiler = compiler.as_ref().expect("created above");
    let control_token = |name: &str| match weights.tokenize(name, true).as_slice() {
        [token] if weights.is_control(*token) => Some(*token),
        _ => None,
    };
    let compiled = compiler.compile(constraint, &control_token);
    compiled.map_err(|why| Error::invalid_input(COMPILING, why))
}

/// The chat template of the file; where it has none that can be used, ChatML if the vocabulary has its tokens, else plain
/// text.
fn load_chat_template(weights: &ModelWeights, runner: &TemplateRunner) -> Result<ChatTemplate, Error> {
    let text = |token| String::from_utf8_lossy(&weights.token_bytes(token, true)).into_owned();
    let bos = weights.bos_token().map(text).unwrap_or_default();
    let vocab_size = weights.vocab_size() as i32;
    let end_tokens: Vec<String> =
        (0..vocab_size).filter(|&t| weights.is_end_of_generation(t)).map(text).collect();
    let inferred = match weights.chat_template() {
        None => Err("the file has none".to_owned()),
        Some(source) => runner.infer(&source, &bos, &end_tokens)?,
    };
    Ok(match inferred {
        // The model wants the BOS token, whether or not the template writes it.
        Ok(template) if template.start.is_empty() => ChatTemplate { start: bos, ..template },
        Ok(template) => template,
        Err(why) => {
            tracing::warn!("the chat template of the model cannot be used: {why}");
            let is_chatml = weights.tokenize("<|im_start|>", true).len() == 1;
            let fallback = if is_chatml { ChatTemplate::chatml() } else { ChatTemplate::plain() };
            ChatTemplate { start: bos, ..fallback }
        }
    })
}

/// Identifies the model and the format of its KV cells: saved cells are restored only for the same fingerprint. It is a
/// hash over samples of the file, because hashing gigabytes would take minutes.
fn model_fingerprint(path: &Path, weights: &ModelWeights) -> std::io::Result<u128> {
    use std::io::{Read, Seek, SeekFrom};
    const SAMPLES: u64 = 64;
    const SAMPLE_BYTES: u64 = 1 << 16;
    let mut file = std::fs::File::open(path)?;
    let size = weights.header.file_bytes;
    let mut hash = Xxh3::new();
    hash.update(&size.to_le_bytes());
    // The state format depends on the version of llama.cpp and on how the context is created.
    hash.update(b"llama-cpp-sys-2 0.1.160, f16, no flash attention");
    for n in 0..SAMPLES {
        file.seek(SeekFrom::Start(size.saturating_sub(SAMPLE_BYTES) / SAMPLES * n))?;
        let mut bytes = Vec::new();
        (&mut file).take(SAMPLE_BYTES).read_to_end(&mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hash.digest128())
}

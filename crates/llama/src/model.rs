//! [`Llama`] implements `halo_core`'s [`Model`] trait.
//!
//! One thread owns the context with its KV cache and generates several answers in one batch
//! ([`batch_loop`](crate::batch_loop)); clones of [`Llama`] send it jobs. Tokenizing needs only the weights, which are shared, so it never waits for a job.

use crate::batch_loop::BatchLoop;
use crate::ffi::{AttentionSource, JobCanceller, KvKeyType, ModelWeights};
use crate::fingerprint::model_fingerprint;
use crate::generate::{GenerateRequest, sampler_for_window};
use crate::gpu_layers::{GpuLayers, GpuPlacement};
use crate::grammar::{GrammarCompiler, GrammarMatcher};
use crate::job_queue::{AbandonOnDrop, JobQueue, LlamaJob, LlamaStep, OwnedAttentionRow};
use crate::kv_archive::{KvArchive, KvArchiveLimits};
use crate::kv_cache::{KvCache, KvCacheMode};
use crate::open_context::{OpenContext, open_context};
use crate::self_test::find_kv_edit_failure;
use crate::template_runner::TemplateRunner;
use crate::token_text::{self, MarkerNames};
use crate::tool_template::with_tools_of;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    CancelHandle, ChatTemplate, FinishReason, KvEditing, Model, ModelInfo, ModelStep, ModelToken,
    OutputConstraint, Prompt, Sampling, StepFlow, WindowToken,
};
use halo_core::token::TokenId;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaOptions {
    /// The most tokens of one window with its answer. None: what the model was trained for, up to 8,192.
    pub context: Option<u32>,
    /// The most answers that are generated at the same time. A model whose cells cannot be edited generates one.
    pub parallel: u32,
    /// The most tokens of one prefill batch.
    pub batch: u32,
    pub threads: u32,
    /// Layers that are offloaded, where there is a GPU that this program was built for.
    pub gpu_layers: GpuLayers,
    pub kv_mode: KvCacheMode,
    pub kv_key_type: KvKeyType,
    /// Where attention rows come from. None: the queries where layers are on a GPU, else the softmax.
    pub attention: Option<AttentionSource>,
    pub kv_archive: KvArchiveLimits,
    /// Compare the table of cells with llama.cpp's cells after each batch.
    pub check_cells: bool,
    /// The folder that stores which models passed the test of KV cell editing. Without it each process tests again.
    pub self_tests: Option<PathBuf>,
    /// Where the chat template of the file is rendered.
    pub template_runner: TemplateRunner,
}

impl Default for LlamaOptions {
    fn default() -> Self {
        Self {
            context: None,
            parallel: 1,
            batch: 256,
            threads: 1,
            gpu_layers: GpuLayers::Count(0),
            kv_mode: KvCacheMode::EditCells,
            kv_key_type: KvKeyType::F16,
            attention: None,
            kv_archive: KvArchiveLimits::disabled(),
            check_cells: false,
            self_tests: None,
            template_runner: TemplateRunner::InProcess,
        }
    }
}

impl LlamaOptions {
    /// Where attention rows probably come from. On a GPU the softmax costs most of the speed, because it needs flash attention
    /// off and one copy per head; on a CPU it costs nothing, and flash attention wins nothing. With layers on a GPU both are
    /// measured when the model is loaded ([`source_speed`](crate::source_speed)).
    #[must_use]
    pub fn attention_source(&self) -> AttentionSource {
        let usual = || if self.allows_gpu() { AttentionSource::Queries } else { AttentionSource::Softmax };
        self.attention.unwrap_or_else(usual)
    }

    /// Whether layers may be on a GPU: there is one, and the options allow it.
    #[must_use]
    pub fn allows_gpu(&self) -> bool {
        self.gpu_layers.allows_gpu() && ModelWeights::gpu_is_usable()
    }
}

/// Steps that wait for a listener before its answer waits for it.
const STEPS_IN_FLIGHT: usize = 4;

/// A local model. Clones share one context, and generate at the same time.
pub struct Llama {
    worker: Arc<LlamaThread>,
    /// The latest background job of this handle, which [`Model::cancel_handle`] cancels; 0 before the first.
    background_job: Arc<AtomicU64>,
    weights: Arc<ModelWeights>,
    info: ModelInfo,
    markers: Arc<MarkerNames>,
    /// The reason why KV cells cannot be edited, if there is one.
    kv_edit_unsupported: Option<&'static str>,
    gpu_placement: Option<GpuPlacement>,
}

impl Clone for Llama {
    fn clone(&self) -> Self {
        Self {
            worker: Arc::clone(&self.worker),
            background_job: Arc::default(),
            weights: Arc::clone(&self.weights),
            info: self.info.clone(),
            markers: Arc::clone(&self.markers),
            kv_edit_unsupported: self.kv_edit_unsupported,
            gpu_placement: self.gpu_placement,
        }
    }
}

/// A handle to the thread that owns the context.
struct LlamaThread {
    jobs: Arc<JobQueue>,
    canceller: Arc<JobCanceller>,
    thread: Mutex<Option<JoinHandle<()>>>,
    compiler: SharedCompiler,
    /// The cells of the context, of all conversations together.
    cells: u32,
}

/// The compiler of constraints. It is created on first use, because most conversations need none.
type SharedCompiler = Arc<Mutex<Option<GrammarCompiler>>>;

/// The parser of JSON schemas recurses.
const COMPILER_STACK_BYTES: usize = 64 << 20;
const MODEL_STACK_BYTES: usize = 16 << 20;

/// Numbers of jobs are unique in the process: a caller that cancels a job of a model that was unloaded since must not meet
/// another caller's job.
static NEXT_JOB: AtomicU64 = AtomicU64::new(1);

/// The latest background job of a handle, for callers that use several handles as one.
pub type BackgroundJob = Arc<AtomicU64>;

impl Llama {
    /// The handle with this record of its background job, which [`Model::cancel_handle`] cancels.
    #[must_use]
    pub fn with_background_job(mut self, job: &BackgroundJob) -> Self {
        self.background_job = Arc::clone(job);
        self
    }

    /// Whether there is another handle to this model.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.worker) > 1
    }

    /// Loads a GGUF file and starts the thread that runs it.
    ///
    /// The file is loaded and tested on a thread that ends. OpenMP keeps threads for each thread that has decoded; where they
    /// are more than the cores, all of them sleep between two graphs instead of spinning, and a token takes longer.
    pub fn open(path: &Path, options: &LlamaOptions) -> Result<Self, Error> {
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("halo-load".into()).stack_size(MODEL_STACK_BYTES);
            let thread = builder.spawn_scoped(scope, || Self::load(path, options));
            let thread = thread.map_err(|error| thread_error(&error))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn load(path: &Path, options: &LlamaOptions) -> Result<Self, Error> {
        let opened = open_context(path, options).map_err(|error| {
            Error::new(error.kind(), "loading the model", error.to_string()).with_source(error)
        })?;
        let OpenContext { weights, mut context, window: tokens, gpu_layers, gpu_placement } = opened;
        // The context may read attention from another source than was asked for.
        let params = context.params();
        let name = path.file_stem().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let fingerprint =
            model_fingerprint(path, &weights, params.key_type, params.attention).map_err(|error| {
                Error::unavailable("loading the model", format!("{}: {error}", path.display()))
                    .with_source(error)
            })?;
        let mode = options.kv_mode;
        let mut kv_edit_unsupported = weights.kv_edit_unsupported();
        if kv_edit_unsupported.is_none() && !context.can_edit() {
            kv_edit_unsupported = Some("llama.cpp cannot shift its KV cells, and does not say why");
        }
        if mode == KvCacheMode::EditCells {
            if kv_edit_unsupported.is_none() {
                let folder = options.self_tests.as_deref();
                kv_edit_unsupported = find_kv_edit_failure(&mut context, folder, fingerprint);
            }
            if let Some(why) = kv_edit_unsupported {
                context.disable_kv_edits();
                tracing::warn!(
                    "{name}: after every prune the rest of the window is prefilled again, because {why}"
                );
            }
        }
        let limits = if mode == KvCacheMode::EditCells && kv_edit_unsupported.is_none() {
            options.kv_archive.clone()
        } else {
            KvArchiveLimits::disabled()
        };
        let template = load_chat_template(&weights, &options.template_runner)?;
        let kv_editing = match kv_edit_unsupported {
            _ if mode == KvCacheMode::Recompute => {
                KvEditing::Recompute { reason: "kv.mode is reread".into() }
            }
            Some(reason) => KvEditing::Recompute { reason: reason.into() },
            None => KvEditing::Cells,
        };
        let attention = weights.header.attention_unsupported().is_none();
        let info = ModelInfo { name, context: tokens as usize, attention, kv_editing, template };
        // A GPU compares a token with the cells of other conversations in no time.
        let keep_idle_lanes = gpu_layers > 0;
        let check_cells = options.check_cells;
        let worker = LlamaThread::spawn(Arc::clone(context.canceller()), params.tokens, move || {
            let cache = KvCache::new(context, KvArchive::open(limits, fingerprint), mode);
            let cache = cache.with_window_limit(tokens as usize).with_table_checks(check_cells);
            BatchLoop::new(cache, keep_idle_lanes)
        })?;
        let markers = Arc::new(MarkerNames::of_template(&weights, &info.template));
        Ok(Self {
            worker: Arc::new(worker),
            background_job: Arc::default(),
            weights,
            info,
            markers,
            kv_edit_unsupported,
            gpu_placement,
        })
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

    /// Where the layers are, if a GPU has some of them.
    #[must_use]
    pub fn gpu_placement(&self) -> Option<GpuPlacement> {
        self.gpu_placement
    }

    /// The cells of the KV cache, which all conversations share.
    #[must_use]
    pub fn cell_count(&self) -> u32 {
        self.worker.cells
    }

    /// Waits until all saved KV cells are on disk.
    pub fn flush(&self) -> Result<(), Error> {
        let (done, result) = sync_channel(1);
        self.worker.send(LlamaJob::Flush { done })?;
        result.recv().map_err(|_| thread_ended_error())
    }
}

fn thread_error(error: &std::io::Error) -> Error {
    Error::internal("starting the thread of the model", error.to_string())
}

fn thread_ended_error() -> Error {
    Error::internal("running the model", "the thread of the model has ended; restart the program")
}

impl LlamaThread {
    /// Starts a thread that runs the loop that `open` makes there.
    fn spawn(
        canceller: Arc<JobCanceller>,
        cells: u32,
        open: impl FnOnce() -> BatchLoop + Send + 'static,
    ) -> Result<Self, Error> {
        let jobs = Arc::new(JobQueue::default());
        let queue = Arc::clone(&jobs);
        let run = move || {
            let _abandon = AbandonOnDrop(Arc::clone(&queue));
            open().run(&queue);
        };
        let builder = std::thread::Builder::new().name("halo-model".into());
        let thread = builder.stack_size(MODEL_STACK_BYTES).spawn(run);
        let thread = thread.map_err(|error| thread_error(&error))?;
        let compiler = SharedCompiler::default();
        Ok(Self { jobs, canceller, thread: Mutex::new(Some(thread)), compiler, cells })
    }

    fn send(&self, job: LlamaJob) -> Result<(), Error> {
        if self.jobs.push(job) { Ok(()) } else { Err(thread_ended_error()) }
    }
}

impl Drop for LlamaThread {
    /// Waits for the thread, which saves the cached KV cells before it ends.
    fn drop(&mut self) {
        self.jobs.close();
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
        let grammar = sampling.constraint.as_ref().map_or(Ok(None), |constraint| self.compile(constraint))?;
        let answer_budget = sampling.max_tokens.min(self.info.context);
        let request = Box::new(GenerateRequest {
            conversation: prompt.conversation.to_owned(),
            window: prompt.window.to_vec(),
            next_position: prompt.next_position,
            ephemeral: prompt.ephemeral,
            sampling: sampling.clone(),
            attention: attention.clone(),
            sampler: sampler_for_window(&self.weights, prompt.window, sampling, answer_budget),
            grammar,
        });
        let job_id = NEXT_JOB.fetch_add(1, Ordering::SeqCst);
        self.worker.canceller.add_job(job_id);
        if background {
            self.background_job.store(job_id, Ordering::SeqCst);
        }
        // The channel holds a few steps, so a slow listener slows its answer down instead of filling memory.
        let (steps, received) = sync_channel(STEPS_IN_FLIGHT);
        self.worker.send(LlamaJob::Generate { job_id, request, steps })?;
        let mut stopped = None;
        loop {
            let step = received.recv().map_err(|_| thread_ended_error())?;
            self.worker.jobs.note_step_taken();
            let flow = match step {
                LlamaStep::End(end) => return end.map(|finish| stopped.unwrap_or(finish)),
                // Steps that were on their way when the listener stopped are dropped.
                _ if stopped.is_some() => continue,
                LlamaStep::Prefill { done, total } => listener(ModelStep::Prefill { done, total }),
                LlamaStep::PromptAttention(row) => listener(ModelStep::PromptAttention(row.as_row())),
                LlamaStep::PrefillDone(stats) => listener(ModelStep::PrefillDone(stats)),
                LlamaStep::Logprobs(logprobs) => listener(ModelStep::Logprobs(&logprobs)),
                LlamaStep::Token(token, row) => {
                    listener(ModelStep::Token(&token, row.as_ref().map(OwnedAttentionRow::as_row)))
                }
            };
            if let Some(reason) = flow.finish_reason() {
                stopped = Some(reason);
                self.worker.canceller.cancel(job_id);
            }
        }
    }
}

impl Llama {
    /// Compiles a constraint on a thread with enough stack.
    fn compile(&self, constraint: &OutputConstraint) -> Result<Option<GrammarMatcher>, Error> {
        let compile = || compile_constraint(&self.weights, constraint, &self.worker.compiler);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
            let thread = thread.spawn_scoped(scope, compile);
            let thread = thread.map_err(|e| Error::internal(COMPILING, e.to_string()).with_source(e))?;
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::invalid_input(COMPILING, "the schema cannot be compiled")))
        })
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
        self.compile(constraint).map(drop)
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
        let (canceller, job) = (Arc::clone(&self.worker.canceller), Arc::clone(&self.background_job));
        Some(Arc::new(move || canceller.cancel(job.load(Ordering::SeqCst))))
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
    let template = match inferred {
        // The model wants the BOS token, whether or not the template writes it.
        Ok(template) if template.start.is_empty() => ChatTemplate { start: bos.clone(), ..template },
        Ok(template) => template,
        Err(why) => {
            tracing::warn!("the chat template of the model cannot be used: {why}");
            let is_chatml = weights.tokenize("<|im_start|>", true).len() == 1;
            let fallback = if is_chatml { ChatTemplate::chatml() } else { ChatTemplate::plain() };
            ChatTemplate { start: bos.clone(), ..fallback }
        }
    };
    let Some(source) = weights.tool_chat_template() else { return Ok(template) };
    Ok(match runner.infer(&source, &bos, &end_tokens)? {
        Ok(for_tools) => with_tools_of(template, for_tools),
        Err(why) => {
            tracing::debug!("the chat template for functions cannot be used: {why}");
            template
        }
    })
}

//! The local model behind the seam. One thread owns the model's memory; everything else talks to it by messages, so that
//! any number of callers may ask at once, each in its turn, and cutting text into tokens never waits.

use crate::ffi::{Context, Halt, LlamaError, Shape, Weights};
use crate::graveyard::{Graveyard, Room};
use crate::mirror::{Mirror, MirrorError, Mode, SEQUENCES};
use crate::schema::Forms;
use crate::speak::{Ask, speak};
use crate::{template, text};
use halo_core::attention::Watch;
use halo_core::seams::{
    Breaker, Finish, Flow, Look, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Seen,
    Template, Upkeep,
};
use halo_core::token::TokenId;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use xxhash_rust::xxh3::Xxh3;

/// How a model is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tokens that it holds; none: as many as it was trained for, up to 8,192.
    pub context: Option<u32>,
    /// Tokens that are read at once.
    pub batch: u32,
    /// Threads.
    pub threads: u32,
    /// Layers that go to a graphics card, if the program was built for one.
    pub gpu_layers: u32,
    /// What happens when the window changes.
    pub mode: Mode,
    /// What is kept of what has left.
    pub room: Room,
}

impl Default for Options {
    fn default() -> Self {
        Self { context: None, batch: 256, threads: 1, gpu_layers: 0, mode: Mode::Keep, room: Room::none() }
    }
}

/// The most tokens that are held unless more are asked for.
const USUAL_CONTEXT: u32 = 8192;

/// A local model. Clones talk to the same one.
#[derive(Clone)]
pub struct Llama {
    thread: Arc<Engine>,
    weights: Arc<Weights>,
    info: ModelInfo,
    /// Why cells cannot be kept, if they cannot.
    reread: Option<&'static str>,
}

/// The thread that owns the model's memory, and the way to it.
struct Engine {
    jobs: Mutex<Option<Sender<Job>>>,
    halt: Arc<Halt>,
    next: AtomicU64,
    /// The job that is done while nobody waits for it, and may be ended by anybody; 0: none.
    idle: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Job {
    Speak { number: u64, ask: Box<Ask>, steps: SyncSender<Step> },
    Settle { conversation: String, window: Vec<Seen>, done: SyncSender<Result<(), SeamError>> },
    Compare { conversation: String, window: Vec<Seen>, done: SyncSender<Option<String>> },
    Forget { conversation: String, done: SyncSender<()> },
    Inherit { conversation: String, parent: String, positions: u64 },
    Flush { done: SyncSender<()> },
}

/// A step on its way to the listener.
enum Step {
    Reading(usize, usize),
    Prompt(Owned),
    Ready(Upkeep),
    Token(Piece, Option<Owned>),
    End(Result<Finish, SeamError>),
}

struct Owned {
    mean: Vec<f32>,
    max: Vec<f32>,
    full: Vec<f32>,
}

impl Owned {
    fn new(look: &Look<'_>) -> Self {
        Self { mean: look.mean.to_vec(), max: look.max.to_vec(), full: look.full.to_vec() }
    }

    fn look(&self) -> Look<'_> {
        Look { mean: &self.mean, max: &self.max, full: &self.full }
    }
}

impl Llama {
    /// Loads a model.
    ///
    /// # Errors
    /// When the file is no model, or there is no room for what is asked.
    pub fn open(path: &Path, options: &Options) -> Result<Self, SeamError> {
        let failed = |why: LlamaError| SeamError::new("loading the model", why.to_string());
        let weights = Arc::new(Weights::load(path, options.gpu_layers.cast_signed()).map_err(failed)?);
        let trained = weights.trained_context();
        let tokens = options.context.unwrap_or_else(|| trained.min(USUAL_CONTEXT));
        let shape = Shape {
            tokens,
            batch: options.batch.clamp(1, tokens.max(1)),
            threads: options.threads.max(1).cast_signed(),
            sequences: SEQUENCES,
        };
        let context = Context::new(&weights, shape).map_err(failed)?;
        let reread = weights.no_surgery();
        let name = path.file_stem().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        if let Some(why) = reread.filter(|_| options.mode == Mode::Keep) {
            tracing::warn!("{name}: what leaves the window is read again when it returns, because {why}");
        }
        let info =
            ModelInfo { name, context: tokens as usize, attention: true, template: template_of(&weights) };
        let room =
            if options.mode == Mode::Keep && reread.is_none() { options.room.clone() } else { Room::none() };
        let mark = mark(path, &weights).map_err(|e| SeamError::new("loading the model", e.to_string()))?;
        let halt = Arc::clone(context.halt());
        let (jobs, todo) = channel();
        let mode = options.mode;
        let work = move || run(Mirror::new(context, Graveyard::open(room, mark), mode), &todo);
        // Schemas are read by going down into them.
        let thread = std::thread::Builder::new().name("halo-model".into()).stack_size(64 << 20).spawn(work);
        let thread = thread.map_err(|e| SeamError::new("starting the model's thread", e.to_string()))?;
        let thread = Arc::new(Engine {
            jobs: Mutex::new(Some(jobs)),
            halt,
            next: AtomicU64::new(1),
            idle: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        });
        Ok(Self { thread, weights, info, reread })
    }

    /// Why the cells of this model cannot be kept, if they cannot: then everything behind a change is read again.
    #[must_use]
    pub fn rereads(&self) -> Option<&'static str> {
        self.reread
    }

    /// The model itself: its vocabulary can be asked at any time.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Waits until what is to be kept on disk is there.
    ///
    /// # Errors
    /// When the model's thread is gone.
    pub fn flush(&self) -> Result<(), SeamError> {
        let (done, wait) = sync_channel(1);
        self.thread.send(Job::Flush { done })?;
        wait.recv().map_err(|_| gone())
    }
}

fn gone() -> SeamError {
    SeamError::new("asking the model", "its thread has ended; start the program again")
}

impl Engine {
    fn send(&self, job: Job) -> Result<(), SeamError> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())
    }
}

impl Drop for Engine {
    /// What is kept is written before the program ends.
    fn drop(&mut self) {
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl Llama {
    /// Asks the thread, and tells `listen` of each step. Where it is `idle`, anybody may end it.
    fn ask(
        &self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        idle: bool,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let ask = Box::new(Ask {
            conversation: prompt.conversation.to_owned(),
            window: prompt.window.to_vec(),
            next: prompt.next,
            aside: prompt.aside,
            sampling: sampling.clone(),
            watch: watch.clone(),
        });
        let number = self.thread.next.fetch_add(1, Ordering::SeqCst);
        if idle {
            self.thread.idle.store(number, Ordering::SeqCst);
        }
        // A step in hand and one under way: whoever listens slowly slows the model down, and nothing piles up.
        let (steps, heard) = sync_channel(1);
        self.thread.send(Job::Speak { number, ask, steps })?;
        let mut stopped = false;
        loop {
            let flow = match heard.recv().map_err(|_| gone())? {
                Step::End(Ok(_)) if stopped => return Ok(Finish::Aborted),
                Step::End(end) => return end,
                // What was said after the listener had heard enough was never said.
                _ if stopped => Flow::Stop,
                Step::Reading(done, of) => listen(ModelStep::Reading { done, of }),
                Step::Prompt(look) => listen(ModelStep::Prompt(look.look())),
                Step::Ready(upkeep) => listen(ModelStep::Ready(upkeep)),
                Step::Token(piece, look) => listen(ModelStep::Token(&piece, look.as_ref().map(Owned::look))),
            };
            if flow == Flow::Stop {
                stopped = true;
                self.thread.halt.halt(number);
            }
        }
    }
}

impl Model for Llama {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forget(&mut self, conversation: &str) -> Result<(), SeamError> {
        let (done, wait) = sync_channel(1);
        self.thread.send(Job::Forget { conversation: conversation.to_owned(), done })?;
        wait.recv().map_err(|_| gone())
    }

    fn inherit(&mut self, conversation: &str, parent: &str, positions: u64) {
        let (conversation, parent) = (conversation.to_owned(), parent.to_owned());
        // Where the thread is gone, the next answer says so.
        let _ = self.thread.send(Job::Inherit { conversation, parent, positions });
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        Ok(text::pieces(&self.weights, text, special))
    }

    fn count(&mut self, text: &str) -> Result<usize, SeamError> {
        Ok(self.weights.tokenize(text, false).len())
    }

    fn text(&mut self, ids: &[TokenId]) -> Result<String, SeamError> {
        let known = self.weights.vocabulary();
        let mut letters = text::Letters::default();
        let mut said = String::new();
        for id in ids {
            let token = id.0.cast_signed();
            if token < 0 || token as usize >= known {
                return Err(SeamError::new(
                    "reading tokens",
                    format!("{} is no token of this model: it has {known}", id.0),
                ));
            }
            said.push_str(&letters.push(&self.weights.bytes(token, true)));
        }
        Ok(said + &letters.end())
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        self.ask(prompt, sampling, watch, prompt.aside, listen)
    }

    fn read_in(
        &mut self,
        prompt: &Prompt<'_>,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let nothing = Sampling { max_tokens: 0, ..Sampling::default() };
        self.ask(prompt, &nothing, &Watch::nothing(), true, listen)
    }

    fn breaker(&self) -> Option<Breaker> {
        let thread = Arc::clone(&self.thread);
        Some(Arc::new(move || {
            let job = thread.idle.load(Ordering::SeqCst);
            if job != 0 {
                thread.halt.halt(job);
            }
        }))
    }

    fn settle(&mut self, conversation: &str, window: &[Seen]) -> Result<(), SeamError> {
        let (done, wait) = sync_channel(1);
        let job = Job::Settle { conversation: conversation.to_owned(), window: window.to_vec(), done };
        self.thread.send(job)?;
        wait.recv().map_err(|_| gone())?
    }

    fn disagreement(&mut self, conversation: &str, window: &[Seen]) -> Result<Option<String>, SeamError> {
        let (done, wait) = sync_channel(1);
        let job = Job::Compare { conversation: conversation.to_owned(), window: window.to_vec(), done };
        self.thread.send(job)?;
        wait.recv().map_err(|_| gone())
    }
}

/// The thread: one job after the other, until nobody is left to send one.
fn run(mut mirror: Mirror, jobs: &Receiver<Job>) {
    let mut forms: Option<Forms> = None;
    for job in jobs {
        match job {
            Job::Speak { number, ask, steps } => {
                mirror.context().halt().begin(number);
                let end = survive(&mut mirror, |mirror| answer(mirror, &ask, &mut forms, &steps));
                mirror.context().halt().begin(0);
                let _ = steps.send(Step::End(end));
            }
            Job::Settle { conversation, window, done } => {
                let settle = |mirror: &mut Mirror| mirror.settle(&conversation, &window).map(|_| ());
                let settled = survive(&mut mirror, |mirror| settle(mirror).map_err(|why| failed(&why)));
                let _ = done.send(settled);
            }
            Job::Compare { conversation, window, done } => {
                let _ = done.send(mirror.disagreement(&conversation, &window));
            }
            Job::Forget { conversation, done } => {
                mirror.forget(&conversation);
                let _ = done.send(());
            }
            Job::Inherit { conversation, parent, positions } => {
                mirror.graveyard().inherit(&conversation, &parent, positions);
            }
            Job::Flush { done } => {
                mirror.graveyard().flush();
                let _ = done.send(());
            }
        }
    }
    // What is in memory is saved, so that the next start need not read it again.
    mirror.clear();
}

/// A mistake of this program in one job is no reason to answer no other: its memory is thrown away, and that is all.
fn survive<T>(
    mirror: &mut Mirror,
    job: impl FnOnce(&mut Mirror) -> Result<T, SeamError>,
) -> Result<T, SeamError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(mirror))).unwrap_or_else(|_| {
        mirror.abandon();
        let why =
            "a mistake in this program; its memory was thrown away, and what is asked next is read again";
        Err(SeamError::new("running the model", why))
    })
}

fn failed(why: &MirrorError) -> SeamError {
    SeamError::new("running the model", why.to_string())
}

fn answer(
    mirror: &mut Mirror,
    ask: &Ask,
    forms: &mut Option<Forms>,
    steps: &SyncSender<Step>,
) -> Result<Finish, SeamError> {
    let form = match &ask.sampling.form {
        None => None,
        Some(wanted) => {
            let wrong = |why: String| SeamError::new("keeping to the schema", why);
            if forms.is_none() {
                *forms = Some(Forms::new(mirror.context().weights()).map_err(wrong)?);
            }
            forms.as_ref().map(|forms| forms.form(wanted)).transpose().map_err(wrong)?
        }
    };
    let halt = Arc::clone(mirror.context().halt());
    let mut tell = |step: ModelStep<'_>| {
        let step = match step {
            ModelStep::Reading { done, of } => Step::Reading(done, of),
            ModelStep::Prompt(look) => Step::Prompt(Owned::new(&look)),
            ModelStep::Ready(upkeep) => Step::Ready(upkeep),
            ModelStep::Token(piece, look) => Step::Token(piece.clone(), look.as_ref().map(Owned::new)),
        };
        // Nobody listens any more, or somebody has heard enough.
        if steps.send(step).is_err() || halt.is_halted() { Flow::Stop } else { Flow::Continue }
    };
    speak(mirror, ask, form, &mut tell).map_err(|why| failed(&why))
}

/// How messages are written for a model: as its file says, or as most models know it, or plainly.
fn template_of(weights: &Weights) -> Template {
    let text = |token| String::from_utf8_lossy(&weights.bytes(token, true)).into_owned();
    let first = weights.first().map(text).unwrap_or_default();
    let size = weights.vocabulary() as i32;
    let ends: Vec<String> = (0..size).filter(|&t| weights.ends(t)).map(text).collect();
    let learned = match weights.template() {
        None => Err("it has none".to_owned()),
        Some(source) => template::learn(&source, &first, &ends),
    };
    match learned {
        // What every text begins with is part of it, whether or not the template says so.
        Ok(template) => Template {
            start: if template.start.is_empty() { first } else { template.start.clone() },
            ..template
        },
        Err(why) => {
            tracing::warn!("the model's template for messages cannot be used: {why}");
            let chatml = weights.tokenize("<|im_start|>", true).len() == 1;
            if chatml {
                Template { start: first, ..Template::chatml() }
            } else {
                Template { start: first, ..Template::plain() }
            }
        }
    }
}

/// What saved cells belong to: the file, as far as reading it would not take minutes, and how it is run.
fn mark(path: &Path, weights: &Weights) -> std::io::Result<u128> {
    use std::io::{Read, Seek, SeekFrom};
    /// How many places are looked at, and how much at each.
    const PLACES: u64 = 64;
    const BYTES: u64 = 1 << 16;
    let mut file = std::fs::File::open(path)?;
    let size = weights.header.size;
    let mut sum = Xxh3::new();
    sum.update(&size.to_le_bytes());
    // The layout of the cells, as this version of llama.cpp writes them.
    sum.update(b"llama-cpp-sys-2 0.1.160, f16, no flash attention");
    for place in 0..PLACES {
        file.seek(SeekFrom::Start(size.saturating_sub(BYTES) / PLACES * place))?;
        let mut bytes = Vec::new();
        (&mut file).take(BYTES).read_to_end(&mut bytes)?;
        sum.update(&bytes);
    }
    Ok(sum.digest128())
}

//! The thread that owns the model. It loads it when it is first needed, and again when that has failed. What somebody
//! waits for comes first: of other work it does one batch at a time, and looks up in between.

use super::batch::{self, Batch};
use halo_core::seams::{EmbedderInfo, SeamError};
use std::collections::VecDeque;
use std::iter::Enumerate;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError};

/// Texts whose tokens are counted at once, to put those of the same length together: a few milliseconds' work.
const WINDOW: usize = 512;

/// A model as the thread knows it.
pub(super) trait Encode {
    /// What is known of it.
    fn info(&self) -> &EmbedderInfo;

    /// Whether several texts can be run at once without one changing another's vector.
    fn together(&self) -> bool;

    /// The tokens of a text, as many as are read.
    fn tokenize(&self, text: &str) -> Vec<i32>;

    /// One vector for each text; all have the same number of tokens.
    fn encode(&self, texts: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, SeamError>;
}

/// What the thread is asked for.
pub(super) enum Job {
    Info { done: SyncSender<Result<EmbedderInfo, SeamError>> },
    Embed { texts: Vec<String>, done: SyncSender<Result<Vec<Vec<f32>>, SeamError>> },
    Behind(Behind),
}

/// Texts that nobody waits for.
pub(super) struct Behind {
    rest: Enumerate<std::vec::IntoIter<String>>,
    batches: VecDeque<Batch>,
    told: Sender<Told>,
    stop: Arc<AtomicBool>,
}

/// A vector with the number of its text, or why there are no more.
pub(super) type Told = Result<(usize, Vec<f32>), SeamError>;

/// What loads the model.
pub(super) type Load = Box<dyn FnMut() -> Result<Box<dyn Encode>, SeamError> + Send>;

/// The thread: until nobody is left to ask.
pub(super) fn run(jobs: &Receiver<Job>, load: Load) {
    let mut model = Lazy { load, model: None };
    let mut waiting: VecDeque<Behind> = VecDeque::new();
    loop {
        let job = match waiting.front() {
            None => jobs.recv().map_err(|_| TryRecvError::Disconnected),
            Some(_) => jobs.try_recv(),
        };
        match job {
            Ok(Job::Info { done }) => {
                let _ = done.send(model.with(|model| Ok(model.info().clone())));
            }
            Ok(Job::Embed { texts, done }) => {
                let _ = done.send(model.with(|model| embed(model, &texts)));
            }
            Ok(Job::Behind(job)) => waiting.push_back(job),
            Err(TryRecvError::Empty) => {
                let Some(mut job) = waiting.pop_front() else { continue };
                match model.with(|model| job.step(model)) {
                    Ok(true) => waiting.push_front(job),
                    Ok(false) => {}
                    Err(why) => drop(job.told.send(Err(why))),
                }
            }
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

/// One vector for each text, in order.
pub(super) fn embed(model: &dyn Encode, texts: &[impl AsRef<str>]) -> Result<Vec<Vec<f32>>, SeamError> {
    let mut vectors = vec![Vec::new(); texts.len()];
    let tokens = texts.iter().map(|text| model.tokenize(text.as_ref()));
    for batch in batch::cut(tokens.enumerate(), model.together()) {
        for (number, vector) in batch.numbers.into_iter().zip(model.encode(&batch.texts)?) {
            vectors[number] = vector;
        }
    }
    Ok(vectors)
}

impl Behind {
    pub(super) fn new(texts: Vec<String>, told: Sender<Told>, stop: Arc<AtomicBool>) -> Self {
        Self { rest: texts.into_iter().enumerate(), batches: VecDeque::new(), told, stop }
    }

    /// Runs one batch. Whether there is more to do.
    fn step(&mut self, model: &dyn Encode) -> Result<bool, SeamError> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if self.batches.is_empty() {
            let window = self.rest.by_ref().take(WINDOW);
            let tokens = window.map(|(number, text)| (number, model.tokenize(&text)));
            self.batches = batch::cut(tokens, model.together());
        }
        let Some(batch) = self.batches.pop_front() else { return Ok(false) };
        for (number, vector) in batch.numbers.into_iter().zip(model.encode(&batch.texts)?) {
            if self.told.send(Ok((number, vector))).is_err() {
                return Ok(false);
            }
        }
        Ok(!self.batches.is_empty() || self.rest.len() > 0)
    }
}

/// A model that is loaded when it is needed.
struct Lazy {
    load: Load,
    model: Option<Box<dyn Encode>>,
}

impl Lazy {
    /// Asks the model for something. A mistake of this program in one job is no reason to answer no other: the model is
    /// thrown away, and that is all.
    fn with<T>(&mut self, ask: impl FnOnce(&dyn Encode) -> Result<T, SeamError>) -> Result<T, SeamError> {
        let answer = catch_unwind(AssertUnwindSafe(|| {
            let model = match self.model.take() {
                Some(model) => model,
                None => (self.load)()?,
            };
            ask(&**self.model.insert(model))
        }));
        answer.unwrap_or_else(|_| {
            self.model = None;
            let why = "a mistake in this program; the model is loaded again when something is asked next";
            Err(SeamError::new("running the embedder", why))
        })
    }
}

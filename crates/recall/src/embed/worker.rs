//! The thread that owns the encoder. It loads the encoder on first use. Between two batches of background work it runs
//! all requests that arrived meanwhile.

use super::batch::{self, EmbedBatch};
use super::pieces::PieceAverager;
use halo_core::Error;
use halo_core::embedder::EmbedderInfo;
use std::collections::VecDeque;
use std::iter::Enumerate;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError};

/// Background texts that are tokenized together to find those of equal length: a few milliseconds of work.
const BATCHING_WINDOW: usize = 512;

/// What the thread needs of an encoder; tests have a fake one.
pub(super) trait SentenceEncoder {
    fn info(&self) -> &EmbedderInfo;

    /// Whether the vector of a text is the same alone and in a batch.
    fn can_batch(&self) -> bool;

    /// The tokens of a text, in pieces that the encoder can read. There is at least one.
    fn tokenize(&self, text: &str) -> Vec<Vec<i32>>;

    /// The number of tokens of a whole text.
    fn count_tokens(&self, text: &str) -> usize;

    /// One vector per piece. All pieces have the same number of tokens.
    fn encode(&self, pieces: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, Error>;
}

pub(super) enum EmbedderRequest {
    Info { reply: SyncSender<Result<EmbedderInfo, Error>> },
    CountTokens { texts: Vec<String>, reply: SyncSender<Result<Vec<usize>, Error>> },
    Embed { texts: Vec<String>, reply: SyncSender<Result<Vec<Vec<f32>>, Error>> },
    Background(BackgroundEmbed),
}

/// Texts that are embedded while no request waits.
pub(super) struct BackgroundEmbed {
    remaining: Enumerate<std::vec::IntoIter<String>>,
    batches: VecDeque<EmbedBatch>,
    averager: PieceAverager,
    results: Sender<EmbedResult>,
    stop: Arc<AtomicBool>,
}

/// A vector with the index of its text, or the error that ended the work.
pub(super) type EmbedResult = Result<(usize, Vec<f32>), Error>;

pub(super) type LoadEncoder = Box<dyn FnMut() -> Result<Box<dyn SentenceEncoder>, Error> + Send>;

/// Runs until all handles are dropped.
pub(super) fn run_worker(jobs: &Receiver<EmbedderRequest>, load: LoadEncoder) {
    let mut encoder = LazyEncoder { load, model: None };
    let mut background: VecDeque<BackgroundEmbed> = VecDeque::new();
    loop {
        let job = match background.front() {
            None => jobs.recv().map_err(|_| TryRecvError::Disconnected),
            Some(_) => jobs.try_recv(),
        };
        match job {
            Ok(EmbedderRequest::Info { reply }) => {
                let _ = reply.send(encoder.with_model(|model| Ok(model.info().clone())));
            }
            Ok(EmbedderRequest::CountTokens { texts, reply }) => {
                let count = |model: &dyn SentenceEncoder| {
                    Ok(texts.iter().map(|text| model.count_tokens(text)).collect())
                };
                let _ = reply.send(encoder.with_model(count));
            }
            Ok(EmbedderRequest::Embed { texts, reply }) => {
                let _ = reply.send(encoder.with_model(|model| embed_texts(model, &texts)));
            }
            Ok(EmbedderRequest::Background(job)) => background.push_back(job),
            Err(TryRecvError::Empty) => {
                let Some(mut job) = background.pop_front() else { continue };
                match encoder.with_model(|model| job.run_batch(model)) {
                    Ok(true) => background.push_front(job),
                    Ok(false) => {}
                    Err(error) => drop(job.results.send(Err(error))),
                }
            }
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

/// One vector per text, in the order of the texts.
pub(super) fn embed_texts(
    model: &dyn SentenceEncoder,
    texts: &[impl AsRef<str>],
) -> Result<Vec<Vec<f32>>, Error> {
    let mut vectors = vec![Vec::new(); texts.len()];
    let mut averager = PieceAverager::default();
    let tokens = tokenize_texts(model, texts.iter().enumerate(), &mut averager);
    for batch in batch::make_batches(tokens.into_iter(), model.can_batch()) {
        for (index, vector) in batch.indices.into_iter().zip(model.encode(&batch.tokens)?) {
            if let Some(vector) = averager.add(index, vector) {
                vectors[index] = vector;
            }
        }
    }
    Ok(vectors)
}

/// The pieces of texts, each with the index of its text.
fn tokenize_texts(
    model: &dyn SentenceEncoder,
    texts: impl Iterator<Item = (usize, impl AsRef<str>)>,
    averager: &mut PieceAverager,
) -> Vec<(usize, Vec<i32>)> {
    let mut tokenized = Vec::new();
    for (index, text) in texts {
        let pieces = model.tokenize(text.as_ref());
        averager.begin(index, pieces.len());
        tokenized.extend(pieces.into_iter().map(|piece| (index, piece)));
    }
    tokenized
}

impl BackgroundEmbed {
    pub(super) fn new(texts: Vec<String>, results: Sender<EmbedResult>, stop: Arc<AtomicBool>) -> Self {
        let (remaining, averager) = (texts.into_iter().enumerate(), PieceAverager::default());
        Self { remaining, batches: VecDeque::new(), averager, results, stop }
    }

    /// Runs one batch; returns whether there is more to do.
    fn run_batch(&mut self, model: &dyn SentenceEncoder) -> Result<bool, Error> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if self.batches.is_empty() {
            let window = self.remaining.by_ref().take(BATCHING_WINDOW);
            let tokens = tokenize_texts(model, window, &mut self.averager);
            self.batches = batch::make_batches(tokens.into_iter(), model.can_batch());
        }
        let Some(batch) = self.batches.pop_front() else { return Ok(false) };
        for (index, vector) in batch.indices.into_iter().zip(model.encode(&batch.tokens)?) {
            let Some(vector) = self.averager.add(index, vector) else { continue };
            if self.results.send(Ok((index, vector))).is_err() {
                return Ok(false);
            }
        }
        Ok(!self.batches.is_empty() || self.remaining.len() > 0)
    }
}

/// An encoder that is loaded on first use.
struct LazyEncoder {
    load: LoadEncoder,
    model: Option<Box<dyn SentenceEncoder>>,
}

impl LazyEncoder {
    /// Runs a job. A panic in it becomes an error, so that the thread lives on; the model is dropped and loaded again.
    fn with_model<T>(
        &mut self,
        job: impl FnOnce(&dyn SentenceEncoder) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let result = catch_unwind(AssertUnwindSafe(|| {
            let model = match self.model.take() {
                Some(model) => model,
                None => (self.load)()?,
            };
            job(&**self.model.insert(model))
        }));
        result.unwrap_or_else(|_| {
            self.model = None;
            let why =
                "internal error (a bug): the job panicked; the embedder is loaded again on the next request";
            Err(Error::internal("running the embedder", why))
        })
    }
}

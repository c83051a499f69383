//! Embeddings: texts as vectors of length 1 that are close where the texts mean the same.
//!
//! [`OnnxEncoder`] is a loaded sentence encoder. [`EmbedderHandle`] runs one on a thread of its own: it loads the model
//! on first use, and runs queries before background work.

mod batch;
mod encoder;
mod onnx;
mod pieces;
mod tokenizer;
mod worker;

pub use encoder::OnnxEncoder;
pub use tokenizer::MAX_TOKENS;

use halo_core::Error;
use halo_core::embedder::{Embedder, EmbedderInfo};
use halo_core::model::StepFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use worker::{BackgroundEmbed, EmbedderRequest, LoadEncoder};

/// An encoder on its own thread. Clones share it.
///
/// The model is loaded on the first request. If that fails, the request fails, and the next one tries again.
#[derive(Clone)]
pub struct EmbedderHandle {
    thread: Arc<EmbedderThread>,
}

struct EmbedderThread {
    jobs: Option<Sender<EmbedderRequest>>,
    handle: Option<JoinHandle<()>>,
}

impl EmbedderHandle {
    /// Starts the thread. The folder is not read before the first request; `threads` are those of the encoder.
    pub fn new(folder: PathBuf, threads: u32) -> Result<Self, Error> {
        Self::start(Box::new(move || Ok(Box::new(OnnxEncoder::open(&folder, threads)?))))
    }

    fn start(load: LoadEncoder) -> Result<Self, Error> {
        let (jobs, receiver) = channel();
        let run = move || worker::run_worker(&receiver, load);
        let handle = std::thread::Builder::new().name("halo-embedder".into()).spawn(run);
        let handle = handle.map_err(|error| {
            Error::internal("starting the thread of the embedder", error.to_string()).with_source(error)
        })?;
        Ok(Self { thread: Arc::new(EmbedderThread { jobs: Some(jobs), handle: Some(handle) }) })
    }

    fn send(&self, job: EmbedderRequest) -> Result<(), Error> {
        self.thread.jobs.as_ref().ok_or_else(thread_ended_error)?.send(job).map_err(|_| thread_ended_error())
    }
}

fn thread_ended_error() -> Error {
    Error::internal("running the embedder", "the thread of the embedder has ended; restart the program")
}

impl Drop for EmbedderThread {
    /// Waits for the thread, which finishes its current batch.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

impl Embedder for EmbedderHandle {
    fn info(&mut self) -> Result<EmbedderInfo, Error> {
        let (reply, received) = sync_channel(1);
        self.send(EmbedderRequest::Info { reply })?;
        received.recv().map_err(|_| thread_ended_error())?
    }

    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, Error> {
        let (reply, received) = sync_channel(1);
        let texts = texts.iter().map(|&text| text.to_owned()).collect();
        self.send(EmbedderRequest::CountTokens { texts, reply })?;
        received.recv().map_err(|_| thread_ended_error())?
    }

    /// Runs before all [background](Embedder::embed_in_background) work; it waits for one batch of it at most.
    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let (reply, received) = sync_channel(1);
        self.send(EmbedderRequest::Embed {
            texts: texts.iter().map(|&text| text.to_owned()).collect(),
            reply,
        })?;
        received.recv().map_err(|_| thread_ended_error())?
    }

    fn embed_in_background(
        &mut self,
        texts: Vec<String>,
        listener: &mut dyn FnMut(usize, Vec<f32>) -> StepFlow,
    ) -> Result<(), Error> {
        let mut remaining = texts.len();
        let stop = Arc::new(AtomicBool::new(false));
        let (results, received) = channel();
        self.send(EmbedderRequest::Background(BackgroundEmbed::new(texts, results, Arc::clone(&stop))))?;
        for result in received {
            let (index, vector) = result?;
            remaining -= 1;
            if listener(index, vector) == StepFlow::Stop {
                stop.store(true, Ordering::Relaxed);
                return Ok(());
            }
        }
        if remaining == 0 { Ok(()) } else { Err(thread_ended_error()) }
    }
}

#[cfg(test)]
mod tests;

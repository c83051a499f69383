//! Turns texts into vectors of length 1 that lie near each other where the texts mean the same.
//!
//! [`Encoder`] is a model that is loaded; [`Embeddings`] a handle to one that is loaded when it is first needed, on a
//! thread of its own, and answers whoever waits before it goes on with what can wait.

mod batch;
mod encoder;
mod onnx;
mod tokenizer;
mod worker;

pub use encoder::Encoder;
pub use tokenizer::MAX_TOKENS;

use halo_core::seams::{Embedder, EmbedderInfo, Flow, SeamError};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use worker::{Behind, Job, Load};

/// A model that is loaded when it is first asked for something. Clones talk to the same one.
///
/// Where it cannot be loaded, whoever asks is told why, and the next time it is tried again.
#[derive(Clone)]
pub struct Embeddings {
    thread: Arc<Thread>,
}

/// The thread that owns the model, and the way to it.
struct Thread {
    jobs: Option<Sender<Job>>,
    handle: Option<JoinHandle<()>>,
}

impl Embeddings {
    /// A handle to the model in a folder, to be run on so many threads. The folder is not looked at yet.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(folder: PathBuf, threads: u32) -> Result<Self, SeamError> {
        Self::start(Box::new(move || Ok(Box::new(Encoder::open(&folder, threads)?))))
    }

    fn start(load: Load) -> Result<Self, SeamError> {
        let (jobs, todo) = channel();
        let work = move || worker::run(&todo, load);
        let handle = std::thread::Builder::new().name("halo-embedder".into()).spawn(work);
        let handle = handle.map_err(|e| SeamError::new("starting the embedder's thread", e.to_string()))?;
        Ok(Self { thread: Arc::new(Thread { jobs: Some(jobs), handle: Some(handle) }) })
    }

    fn send(&self, job: Job) -> Result<(), SeamError> {
        self.thread.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())
    }
}

fn gone() -> SeamError {
    SeamError::new("asking the embedder", "its thread has ended; start the program again")
}

impl Drop for Thread {
    /// Nothing runs on when nobody is left to hear of it.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

impl Embedder for Embeddings {
    fn info(&mut self) -> Result<EmbedderInfo, SeamError> {
        let (done, wait) = sync_channel(1);
        self.send(Job::Info { done })?;
        wait.recv().map_err(|_| gone())?
    }

    /// Comes before all that is embedded [behind](Embedder::embed_behind): it waits for one batch of that at most.
    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError> {
        let (done, wait) = sync_channel(1);
        self.send(Job::Embed { texts: texts.iter().map(|&text| text.to_owned()).collect(), done })?;
        wait.recv().map_err(|_| gone())?
    }

    fn embed_behind(
        &mut self,
        texts: Vec<String>,
        listen: &mut dyn FnMut(usize, Vec<f32>) -> Flow,
    ) -> Result<(), SeamError> {
        let mut left = texts.len();
        let stop = Arc::new(AtomicBool::new(false));
        let (told, heard) = channel();
        self.send(Job::Behind(Behind::new(texts, told, Arc::clone(&stop))))?;
        for vector in heard {
            let (number, vector) = vector?;
            left -= 1;
            if listen(number, vector) == Flow::Stop {
                stop.store(true, Ordering::Relaxed);
                return Ok(());
            }
        }
        if left == 0 { Ok(()) } else { Err(gone()) }
    }
}

#[cfg(test)]
mod tests;

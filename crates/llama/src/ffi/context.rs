//! A model's memory and calculator: what is read into it, taken out of it and put back.

use super::{LlamaError, Node, Pos, Quiet, Seq, Token, Weights, clear_error, last_error};
use crate::attention::Tap;
use crate::memory;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a context is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Cells, and the largest position.
    pub tokens: u32,
    /// Tokens that are read at once.
    pub batch: u32,
    /// Threads.
    pub threads: i32,
    /// Sequences: the conversation, and some to spare.
    pub sequences: u32,
}

/// Stops one job and no other: who stops a job cannot know whether it runs, waits or has ended.
#[derive(Debug, Default)]
pub struct Halt {
    running: AtomicU64,
    halted: AtomicU64,
    deaf: AtomicBool,
}

impl Halt {
    /// A job begins. Their numbers are not 0 and never come twice.
    pub fn begin(&self, job: u64) {
        self.running.store(job, Ordering::SeqCst);
    }

    /// A job is to end.
    pub fn halt(&self, job: u64) {
        self.halted.store(job, Ordering::SeqCst);
    }

    /// Does something that nobody can stop.
    pub(crate) fn deaf<T>(&self, work: impl FnOnce() -> T) -> T {
        self.deaf.store(true, Ordering::SeqCst);
        let done = work();
        self.deaf.store(false, Ordering::SeqCst);
        done
    }

    /// Whether the job that runs is to end.
    #[must_use]
    pub fn is_halted(&self) -> bool {
        if self.deaf.load(Ordering::SeqCst) {
            return false;
        }
        let job = self.running.load(Ordering::SeqCst);
        job != 0 && job == self.halted.load(Ordering::SeqCst)
    }
}

/// The smallest memory that is of any use.
const LEAST: u32 = 64;

/// More threads than these only wait for each other.
const MOST_THREADS: i32 = 256;

/// A model's memory and calculator.
pub struct Context {
    context: NonNull<sys::llama_context>,
    /// What looks at the graph while it is computed. llama.cpp holds a pointer to it.
    tap: NonNull<Tap>,
    /// What stops a computation. llama.cpp holds a pointer to it.
    halt: Arc<Halt>,
    weights: Arc<Weights>,
    shape: Shape,
    /// Whether cells can be moved; it is asked at every step.
    movable: bool,
}

// SAFETY: a context may be used from any thread, by one at a time; it is not `Sync`, so it is.
unsafe impl Send for Context {}

/// A token that is read: what, where, for whom, and whether what follows it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The token.
    pub token: Token,
    /// Its position.
    pub position: Pos,
    /// Whether the model's guess at the next token is wanted.
    pub logits: bool,
}

impl Context {
    /// Makes the memory of a model.
    ///
    /// # Errors
    /// When it is larger than the model's, or than there is room for.
    pub fn new(weights: &Arc<Weights>, shape: Shape) -> Result<Self, LlamaError> {
        let most = weights.trained_context();
        if shape.tokens > most {
            return Err(LlamaError::TooLong { asked: shape.tokens, most });
        }
        if shape.tokens < LEAST || shape.batch == 0 || shape.sequences == 0 {
            return Err(LlamaError::TooShort { asked: shape.tokens, least: LEAST });
        }
        let batch = shape.batch.clamp(shape.sequences.max(32), shape.tokens);
        let shape = Shape { batch, threads: shape.threads.clamp(1, MOST_THREADS), ..shape };
        let (tokens, batch) = (u64::from(shape.tokens), u64::from(shape.batch));
        // The cells, and the largest table that is computed with them.
        let need = weights.cell_bytes() * tokens + batch * tokens * weights.heads() * 4;
        memory::enough(need, memory::available())?;
        let halt = Arc::new(Halt::default());
        let tap = NonNull::from(Box::leak(Box::new(Tap::new(weights.layers()))));
        // SAFETY: defaults but for numbers, and a callback whose data lives until this context is dropped.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = shape.tokens;
            params.n_batch = shape.batch;
            params.n_ubatch = shape.batch;
            params.n_seq_max = shape.sequences;
            params.n_threads = shape.threads;
            params.n_threads_batch = shape.threads;
            params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_DISABLED;
            params.kv_unified = true;
            params.no_perf = true;
            params.cb_eval = Some(look);
            params.cb_eval_user_data = tap.as_ptr().cast();
            params.abort_callback = Some(stopped);
            params.abort_callback_data = Arc::as_ptr(&halt).cast_mut().cast();
            sys::llama_init_from_model(weights.model.as_ptr(), params)
        };
        let Some(context) = NonNull::new(context) else {
            // SAFETY: it was leaked above, and nobody else knows of it.
            drop(unsafe { Box::from_raw(tap.as_ptr()) });
            return Err(LlamaError::Context(shape.tokens));
        };
        // SAFETY: the memory lives as long as the context.
        let shifts = unsafe { sys::llama_memory_can_shift(sys::llama_get_memory(context.as_ptr())) };
        let movable = shifts && weights.no_surgery().is_none();
        Ok(Self { context, tap, halt, weights: Arc::clone(weights), shape, movable })
    }

    /// The model.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// What it was made as.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What stops it, from any thread.
    #[must_use]
    pub fn halt(&self) -> &Arc<Halt> {
        &self.halt
    }

    /// What has been seen of the graph.
    pub fn tap(&mut self) -> &mut Tap {
        // SAFETY: llama.cpp touches it only within `decode`, which borrows this context as a whole.
        unsafe { self.tap.as_mut() }
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context lives.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    /// Reads tokens into a sequence. No more than a batch at once.
    ///
    /// # Errors
    /// When there is no room, or llama.cpp refuses.
    pub fn decode(&mut self, seq: Seq, items: &[Item]) -> Result<(), LlamaError> {
        if items.is_empty() || items.len() > self.shape.batch as usize {
            return Err(LlamaError::Decode(format!("{} tokens are none or too many at once", items.len())));
        }
        let vocabulary = self.weights.vocabulary();
        if let Some(bad) = items.iter().find(|i| usize::try_from(i.token).map_or(true, |t| t >= vocabulary)) {
            return Err(LlamaError::Decode(format!("token {} is not in its vocabulary", bad.token)));
        }
        let mut tokens: Vec<Token> = items.iter().map(|i| i.token).collect();
        let mut positions: Vec<Pos> = items.iter().map(|i| i.position).collect();
        let mut counts = vec![1i32; items.len()];
        let mut own = [seq.0];
        let mut sequences = vec![own.as_mut_ptr(); items.len()];
        let mut logits: Vec<i8> = items.iter().map(|i| i8::from(i.logits)).collect();
        let batch = sys::llama_batch {
            n_tokens: items.len() as i32,
            token: tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: counts.as_mut_ptr(),
            seq_id: sequences.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        clear_error();
        // SAFETY: every array of the batch is as long as it says and lives beyond the call.
        let code = unsafe { sys::llama_decode(self.context.as_ptr(), batch) };
        match code {
            0 => Ok(()),
            1 => Err(LlamaError::Decode("its memory is full".into())),
            2 => Err(LlamaError::Stopped),
            _ => Err(LlamaError::Decode(last_error())),
        }
    }

    /// The model's guess at what follows the last token that asked for it.
    #[must_use]
    pub fn guess(&self) -> &[f32] {
        // SAFETY: llama.cpp gives nothing, or as many numbers as the vocabulary has, which stay until the next batch; what
        // is counted from the end is the last.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), -1);
            if logits.is_null() { &[] } else { std::slice::from_raw_parts(logits, self.weights.vocabulary()) }
        }
    }

    /// The same for one of the tokens of the last batch, by its number in it; empty where it did not ask.
    #[must_use]
    pub fn guess_at(&self, token: usize) -> &[f32] {
        let Ok(token) = i32::try_from(token) else { return &[] };
        // SAFETY: as above; for a number that is none of the batch's, or of a token that did not ask, it gives nothing.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), token);
            if logits.is_null() { &[] } else { std::slice::from_raw_parts(logits, self.weights.vocabulary()) }
        }
    }

    /// Takes cells out of a sequence: those from `start` up to `end`.
    #[must_use]
    pub fn remove(&mut self, seq: Seq, start: Pos, end: Pos) -> bool {
        // SAFETY: the memory lives as long as the context; any range is allowed.
        unsafe { sys::llama_memory_seq_rm(self.memory(), seq.0, start, end) }
    }

    /// Lets a second sequence see cells of a first.
    pub fn share(&mut self, from: Seq, to: Seq, start: Pos, end: Pos) {
        // SAFETY: as above; both are sequences of this context.
        unsafe { sys::llama_memory_seq_cp(self.memory(), from.0, to.0, start, end) };
    }

    /// Moves cells to other positions; only where [`Context::can_move`].
    pub fn shift(&mut self, seq: Seq, start: Pos, end: Pos, by: Pos) {
        if self.can_move() {
            // SAFETY: as above; the kinds of models for which this would abort are ruled out.
            unsafe { sys::llama_memory_seq_add(self.memory(), seq.0, start, end, by) };
        }
    }

    /// Whether cells can be moved.
    #[must_use]
    pub fn can_move(&self) -> bool {
        self.movable
    }

    /// The last position of a sequence; none where it is empty.
    #[must_use]
    pub fn last(&self, seq: Seq) -> Option<Pos> {
        // SAFETY: the memory lives.
        let last = unsafe { sys::llama_memory_seq_pos_max(self.memory(), seq.0) };
        (last >= 0).then_some(last)
    }

    /// The positions of a sequence's cells, in the order of the cells; there must be `len` of them.
    ///
    /// They stand at the head of what [`Context::save`] would write. llama.cpp has no other way to tell, so it is given
    /// room for the head alone: it fills that, complains that there is no more, and has moved no key or value.
    #[must_use]
    pub fn positions(&mut self, seq: Seq, len: usize) -> Option<Vec<Pos>> {
        // A mark, the sequence, the number of streams, the number of cells; then of each cell its position, the number
        // of its sequences and the sequence.
        const HEAD: usize = 16;
        const CELL: usize = 12;
        let mut bytes = vec![0u8; HEAD + len * CELL];
        let quiet = Quiet::begin();
        // SAFETY: llama.cpp writes no more than the buffer holds.
        unsafe {
            sys::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), bytes.len(), seq.0)
        };
        drop(quiet);
        let word = |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        if word(8) != Some(1) || word(12)? as usize != len {
            return None;
        }
        let one = |n: usize| (word(HEAD + n * CELL + 4)? == 1).then(|| word(HEAD + n * CELL)).flatten();
        (0..len).map(|n| one(n).map(u32::cast_signed)).collect()
    }

    /// All cells of a sequence, as bytes.
    #[must_use]
    pub fn save(&mut self, seq: Seq) -> Vec<u8> {
        // SAFETY: the buffer is as long as llama.cpp says that it must be.
        unsafe {
            let size = sys::llama_state_seq_get_size(self.context.as_ptr(), seq.0);
            let mut bytes = vec![0u8; size];
            let written =
                sys::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), size, seq.0);
            bytes.truncate(written);
            bytes
        }
    }

    /// Puts saved cells into a sequence, in the place of what was there.
    ///
    /// # Errors
    /// When they do not fit this context. They must be what [`Context::save`] gave: the caller has checked their sum.
    pub fn restore(&mut self, seq: Seq, bytes: &[u8]) -> Result<(), LlamaError> {
        // SAFETY: llama.cpp reads no more than it is given, and throws what does not fit back at us as a zero.
        let read = unsafe {
            sys::llama_state_seq_set_data(self.context.as_ptr(), bytes.as_ptr(), bytes.len(), seq.0)
        };
        if read == bytes.len() {
            Ok(())
        } else {
            Err(LlamaError::State("they are of another model or context"))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once; the tap after the context that points to it.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            drop(Box::from_raw(self.tap.as_ptr()));
        }
    }
}

/// Asked now and then within a computation whether it is to be given up.
unsafe extern "C" fn stopped(data: *mut c_void) -> bool {
    // SAFETY: the pointer that `new` gave, to what lives as long as the context.
    unsafe { &*data.cast::<Halt>() }.is_halted()
}

/// Called for every node of the graph: asked first whether it is wanted, then, if it is, shown it.
unsafe extern "C" fn look(node: *mut sys::ggml_tensor, ask: bool, data: *mut c_void) -> bool {
    // SAFETY: llama.cpp hands over a node that lives through the call, and the pointer that `new` gave it, which is a
    // tap that nobody else touches meanwhile: `decode` borrows the context as a whole.
    let (node, tap) = unsafe { (&*node, &mut *data.cast::<Tap>()) };
    if ask {
        return tap.wants(&Node(node));
    }
    tap.see(&Node(node));
    // Anything else would end the computation here.
    true
}

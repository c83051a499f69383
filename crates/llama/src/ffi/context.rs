//! A `llama_context`: its KV cache, decoding, and the sequence operations on the cells.
//!
//! Flash attention is off, because it computes no softmax that [`AttentionTap`] could read. The KV cache is unified:
//! all sequences share one set of cells.
//!
//! A model with sliding-window attention has two caches: one for its global layers, one for its sliding layers. Both have
//! the same size here (`swa_full`). llama.cpp still reuses cells of the sliding layers that no later token attends to, if
//! one sequence alone holds them; when the end of the window is cut off, these cells are needed again. So all cells also
//! belong to a pinning sequence. The two caches then always hold the same tokens in the same cells.

use super::canceller::JobCanceller;
use super::error::LlamaError;
use super::log::{ErrorLogSuppressor, clear_error, last_error};
use super::node::GraphNode;
use super::types::{LlamaPos, LlamaToken, SeqId};
use super::weights::ModelWeights;
use crate::attention::AttentionTap;
use crate::system_memory;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextParams {
    /// Cells of the KV cache (`n_ctx`).
    pub tokens: u32,
    /// The most tokens of one batch (`n_batch` and `n_ubatch`).
    pub batch: u32,
    pub threads: i32,
    /// The most sequences (`n_seq_max`).
    pub sequences: u32,
}

/// Tokens below which a context holds no useful prompt.
const MIN_CONTEXT: u32 = 64;

/// llama.cpp gets slower with more threads than this.
const MAX_THREADS: i32 = 256;

/// A `llama_context` with its KV cache.
pub struct LlamaContext {
    context: NonNull<sys::llama_context>,
    /// Reads attention from the compute graph. llama.cpp holds a pointer to it, so it is freed after the context.
    tap: NonNull<AttentionTap>,
    /// Asked by llama.cpp's abort callback, which holds a pointer to it.
    canceller: Arc<JobCanceller>,
    weights: Arc<ModelWeights>,
    params: ContextParams,
    /// Cached, because it is asked at every step.
    can_shift: bool,
    /// The sequence that holds the cells of all others, for a model with sliding-window attention.
    pin: Option<SeqId>,
}

// SAFETY: llama.cpp allows a context on any thread, one thread at a time; `LlamaContext` is not `Sync`.
unsafe impl Send for LlamaContext {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchToken {
    pub token: LlamaToken,
    pub position: LlamaPos,
    /// Whether the logits of the token that follows are computed.
    pub logits: bool,
}

impl LlamaContext {
    /// Creates a context, if enough memory is free for it.
    pub fn new(weights: &Arc<ModelWeights>, params: ContextParams) -> Result<Self, LlamaError> {
        let params = check_params(weights, params)?;
        let pin = weights.sliding_window().map(|_| SeqId(params.sequences.cast_signed()));
        let canceller = Arc::new(JobCanceller::default());
        let tap = NonNull::from(Box::leak(Box::new(AttentionTap::new(weights.layer_count()))));
        // SAFETY: the parameters are llama.cpp's defaults except for plain values and two callbacks, whose data lives
        // until this context is dropped.
        let context = unsafe {
            let ContextParams { tokens, batch, threads, sequences } = params;
            let mut params = sys::llama_context_default_params();
            params.n_ctx = tokens;
            params.n_batch = batch;
            params.n_ubatch = batch;
            params.n_seq_max = sequences + u32::from(pin.is_some());
            params.swa_full = true;
            params.n_threads = threads;
            params.n_threads_batch = threads;
            params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_DISABLED;
            params.kv_unified = true;
            params.no_perf = true;
            params.cb_eval = Some(eval_callback);
            params.cb_eval_user_data = tap.as_ptr().cast();
            params.abort_callback = Some(abort_callback);
            params.abort_callback_data = Arc::as_ptr(&canceller).cast_mut().cast();
            sys::llama_init_from_model(weights.model.as_ptr(), params)
        };
        let Some(context) = NonNull::new(context) else {
            // SAFETY: the box was leaked above, and there is no context that points to it.
            drop(unsafe { Box::from_raw(tap.as_ptr()) });
            return Err(LlamaError::ContextCreation(params.tokens));
        };
        // SAFETY: the context was just created; its memory lives as long.
        let shiftable = unsafe { sys::llama_memory_can_shift(sys::llama_get_memory(context.as_ptr())) };
        let can_shift = shiftable && weights.kv_edit_unsupported().is_none();
        let mut context =
            Self { context, tap, canceller, weights: Arc::clone(weights), params, can_shift, pin };
        if let Some(window) = weights.sliding_window().filter(|_| can_shift) {
            context.find_sliding_layers(window)?;
        }
        Ok(context)
    }

    /// Finds the layers with a sliding window, which llama.cpp does not tell: a token is decoded farther behind another
    /// than the window is long, and the tap counts the cells that each layer lets it attend to.
    fn find_sliding_layers(&mut self, window: LlamaPos) -> Result<(), LlamaError> {
        let seq = SeqId(0);
        let token = |position| BatchToken { token: 0, position, logits: false };
        self.decode(seq, &[token(0), token(1)])?;
        self.seq_add(seq, 1, 2, window);
        self.tap().begin_mask_probe();
        let decoded = self.decode(seq, &[token(window + 2)]);
        self.tap().end_mask_probe();
        let _ = self.seq_rm(seq, -1, -1);
        decoded
    }

    #[must_use]
    pub fn weights(&self) -> &Arc<ModelWeights> {
        &self.weights
    }

    #[must_use]
    pub fn params(&self) -> ContextParams {
        self.params
    }

    /// Cancels a running [`decode`](Self::decode) from any thread.
    #[must_use]
    pub fn canceller(&self) -> &Arc<JobCanceller> {
        &self.canceller
    }

    /// Configures what attention the next batch records, and returns what the last one recorded.
    pub fn tap(&mut self) -> &mut AttentionTap {
        // SAFETY: llama.cpp uses the tap only within `decode`, which borrows the whole context mutably.
        unsafe { self.tap.as_mut() }
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context is alive.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    /// Decodes one batch of tokens into new cells of a sequence.
    pub fn decode(&mut self, seq: SeqId, items: &[BatchToken]) -> Result<(), LlamaError> {
        if items.is_empty() || items.len() > self.params.batch as usize {
            let (len, max) = (items.len(), self.params.batch);
            return Err(LlamaError::Decode(format!("a batch has 1 to {max} tokens, not {len}")));
        }
        let vocab_size = self.weights.vocab_size();
        if let Some(bad) = items.iter().find(|i| usize::try_from(i.token).map_or(true, |t| t >= vocab_size)) {
            return Err(LlamaError::Decode(format!("token {} is not in the vocabulary", bad.token)));
        }
        let mut tokens: Vec<LlamaToken> = items.iter().map(|i| i.token).collect();
        let mut positions: Vec<LlamaPos> = items.iter().map(|i| i.position).collect();
        let mut seq_counts = vec![1i32; items.len()];
        let mut seq_ids = [seq.0];
        let mut seq_id_lists = vec![seq_ids.as_mut_ptr(); items.len()];
        let mut logits: Vec<i8> = items.iter().map(|i| i8::from(i.logits)).collect();
        let batch = sys::llama_batch {
            n_tokens: items.len() as i32,
            token: tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: seq_counts.as_mut_ptr(),
            seq_id: seq_id_lists.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        clear_error();
        // SAFETY: every array of the batch has `n_tokens` elements and outlives the call.
        let code = unsafe { sys::llama_decode(self.context.as_ptr(), batch) };
        match code {
            0 => {
                self.pin_cells(seq, items[0].position, items[items.len() - 1].position + 1);
                Ok(())
            }
            1 => Err(LlamaError::Decode("the KV cache has no free cells".into())),
            2 => Err(LlamaError::Cancelled),
            _ => Err(LlamaError::Decode(last_error())),
        }
    }

    /// The logits of the last token that was decoded with [`BatchToken::logits`].
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        // SAFETY: llama.cpp returns null or as many floats as the vocabulary has tokens, valid until the next batch,
        // which needs `&mut self`; the index -1 is the last output.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), -1);
            if logits.is_null() { &[] } else { std::slice::from_raw_parts(logits, self.weights.vocab_size()) }
        }
    }

    /// The logits of one token of the last batch; empty if it was decoded without [`BatchToken::logits`].
    #[must_use]
    pub fn logits_at(&self, token: usize) -> &[f32] {
        let Ok(token) = i32::try_from(token) else { return &[] };
        // SAFETY: llama.cpp returns null for an index without output, else as many floats as the vocabulary has tokens,
        // valid until the next batch, which needs `&mut self`.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), token);
            if logits.is_null() { &[] } else { std::slice::from_raw_parts(logits, self.weights.vocab_size()) }
        }
    }

    /// Removes the cells with positions from `start` up to `end` from a sequence; a cell without sequence is free.
    /// False for a recurrent model, whose state cannot be removed in parts.
    #[must_use]
    pub fn seq_rm(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) -> bool {
        // SAFETY: the memory lives as long as the context; llama.cpp accepts any range.
        let removed = unsafe { sys::llama_memory_seq_rm(self.memory(), seq.0, start, end) };
        if removed && let Some(pin) = self.pin {
            // SAFETY: the pinning sequence is one of this context; llama.cpp accepts any range.
            unsafe { sys::llama_memory_seq_rm(self.memory(), pin.0, start, end) };
            // Other sequences may have cells at the same positions.
            let others = (0..self.params.sequences.cast_signed()).map(SeqId).filter(|other| *other != seq);
            others.for_each(|other| self.pin_cells(other, start, end));
        }
        removed
    }

    /// Adds cells of a sequence to the pinning sequence, if there is one.
    fn pin_cells(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) {
        if let Some(pin) = self.pin {
            self.seq_cp(seq, pin, start, end);
        }
    }

    /// Adds the cells of one sequence to another. No key or value is copied: the sequences share the cells.
    pub fn seq_cp(&mut self, from: SeqId, to: SeqId, start: LlamaPos, end: LlamaPos) {
        // SAFETY: the memory lives as long as the context; both are sequences of this context.
        unsafe { sys::llama_memory_seq_cp(self.memory(), from.0, to.0, start, end) };
    }

    /// Shifts the positions of cells; llama.cpp rotates their keys (K-shift) in the next [`decode`](Self::decode). Does
    /// nothing unless [`can_shift`](Self::can_shift).
    pub fn seq_add(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos, by: LlamaPos) {
        if self.can_shift() {
            // SAFETY: the memory lives as long as the context; models for which this aborts cannot shift.
            unsafe { sys::llama_memory_seq_add(self.memory(), seq.0, start, end, by) };
        }
    }

    /// Whether positions of cells can be shifted.
    #[must_use]
    pub fn can_shift(&self) -> bool {
        self.can_shift
    }

    /// The last position of a sequence, unless it is empty.
    #[must_use]
    pub fn seq_pos_max(&self, seq: SeqId) -> Option<LlamaPos> {
        // SAFETY: the memory lives as long as the context.
        let last = unsafe { sys::llama_memory_seq_pos_max(self.memory(), seq.0) };
        (last >= 0).then_some(last)
    }

    /// The positions of a sequence's cells in cell order. None unless there are exactly `len` cells.
    ///
    /// llama.cpp has no function for this. The positions stand in the header of a saved state, so
    /// [`save_state`](Self::save_state)'s function is called with a buffer for the header alone: it fills the header, logs
    /// that the buffer is too small, and copies no key or value.
    #[must_use]
    pub fn cell_positions(&mut self, seq: SeqId, len: usize) -> Option<Vec<LlamaPos>> {
        // Magic number, sequence, number of streams, number of cells; then for each cell its position, the number of
        // its sequences, and the sequence.
        const STATE_HEADER_BYTES: usize = 16;
        const STATE_CELL_BYTES: usize = 12;
        let mut bytes = vec![0u8; STATE_HEADER_BYTES + len * STATE_CELL_BYTES];
        let suppressor = ErrorLogSuppressor::begin();
        // SAFETY: llama.cpp writes at most as many bytes as the length says.
        unsafe {
            sys::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), bytes.len(), seq.0)
        };
        drop(suppressor);
        let word = |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        if word(8) != Some(1) || word(12)? as usize != len {
            return None;
        }
        let cell_position = |n: usize| {
            let start = STATE_HEADER_BYTES + n * STATE_CELL_BYTES;
            let seq_count = word(start + 4)?;
            if seq_count == 1 { word(start).map(u32::cast_signed) } else { None }
        };
        (0..len).map(cell_position).collect()
    }

    /// The cells of a sequence with keys, values and positions, in llama.cpp's own format.
    #[must_use]
    pub fn save_state(&mut self, seq: SeqId) -> Vec<u8> {
        // SAFETY: the buffer has the size that llama.cpp asks for.
        unsafe {
            let size = sys::llama_state_seq_get_size(self.context.as_ptr(), seq.0);
            let mut bytes = vec![0u8; size];
            let written =
                sys::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), size, seq.0);
            bytes.truncate(written);
            bytes
        }
    }

    /// Replaces the cells of a sequence by saved ones.
    pub fn restore_state(&mut self, seq: SeqId, bytes: &[u8]) -> Result<(), LlamaError> {
        if self.pin.is_some() {
            // llama.cpp removes the cells of this sequence, but not their pins.
            let _ = self.seq_rm(seq, -1, -1);
        }
        // SAFETY: llama.cpp reads at most as many bytes as the length says, and returns 0 for a state that it refuses.
        let read = unsafe {
            sys::llama_state_seq_set_data(self.context.as_ptr(), bytes.as_ptr(), bytes.len(), seq.0)
        };
        if read == bytes.len() {
            self.pin_cells(seq, -1, -1);
            Ok(())
        } else {
            Err(LlamaError::StateRestore("they belong to another model or context"))
        }
    }
}

/// Limits the parameters to what llama.cpp accepts, and checks that the memory for them is free.
fn check_params(weights: &ModelWeights, params: ContextParams) -> Result<ContextParams, LlamaError> {
    let max = weights.trained_context();
    if params.tokens > max {
        return Err(LlamaError::ContextTooLarge { requested: params.tokens, max });
    }
    if params.tokens < MIN_CONTEXT || params.batch == 0 || params.sequences == 0 {
        return Err(LlamaError::ContextTooSmall { requested: params.tokens, min: MIN_CONTEXT });
    }
    let batch = params.batch.clamp(params.sequences.max(32), params.tokens);
    let params = ContextParams { batch, threads: params.threads.clamp(1, MAX_THREADS), ..params };
    let (tokens, batch) = (u64::from(params.tokens), u64::from(params.batch));
    // The KV cache, and the attention scores of a batch, which are the largest intermediate tensor.
    let need = weights.cell_bytes() * tokens + batch * tokens * weights.head_count() * 4;
    system_memory::check_available(need, system_memory::available_bytes())?;
    Ok(params)
}

impl Drop for LlamaContext {
    fn drop(&mut self) {
        // SAFETY: both were created by `new` and are freed once, the tap after the context that points to it.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            drop(Box::from_raw(self.tap.as_ptr()));
        }
    }
}

/// llama.cpp calls this between nodes of the graph; true aborts the computation.
unsafe extern "C" fn abort_callback(data: *mut c_void) -> bool {
    // SAFETY: `new` passed a pointer to a `JobCanceller` that the context keeps alive by reference count.
    unsafe { &*data.cast::<JobCanceller>() }.is_cancelled()
}

/// llama.cpp calls this for every node of the graph: with `ask` before it is computed, to learn whether its data is
/// needed, and then, if it is, after it was computed.
unsafe extern "C" fn eval_callback(node: *mut sys::ggml_tensor, ask: bool, data: *mut c_void) -> bool {
    // SAFETY: llama.cpp passes a live node and the pointer to the tap that `new` gave it; nothing else uses the tap
    // meanwhile, because `decode` borrows the whole context mutably.
    let (node, tap) = unsafe { (&*node, &mut *data.cast::<AttentionTap>()) };
    if ask {
        return tap.wants_node(&GraphNode(node));
    }
    tap.observe(&GraphNode(node));
    // False would end the computation here.
    true
}

//! A `llama_context`: its KV cache, decoding, and the sequence operations on the cells.
//!
//! Flash attention is off or on with the [`AttentionSource`], because it computes no softmax that [`AttentionTap`] could read.
//! The KV cache is unified: all sequences share one set of cells.
//!
//! A model with sliding-window attention has two caches: one for its global layers, one for its sliding layers. Both have
//! the same size here (`swa_full`). llama.cpp still reuses cells of the sliding layers that no later token attends to, if
//! one sequence alone holds them; when the end of the window is cut off, these cells are needed again. So all cells also
//! belong to a pinning sequence. The two caches then always hold the same tokens in the same cells.
//!
//! A hybrid model has recurrent layers beside its attention layers. The functions on cells leave the recurrent state of a
//! sequence alone, except for [`LlamaContext::seq_rm`] of everything; see [`recurrent`](super::recurrent).

use super::canceller::JobCanceller;
use super::device::StagingMemory;
use super::error::LlamaError;
use super::log::{ErrorLogSuppressor, WarningLogSuppressor, clear_error, first_error};
use super::node::GraphNode;
use super::query_capture::QueryCapture;
use super::recurrent::RecurrentSequences;
use super::types::{AttentionSource, KvKeyType, LlamaPos, LlamaToken, QueriesFailure, SeqId};
use super::weights::ModelWeights;
use crate::attention::{AttentionTap, ReducedAttention, TapConfig, TapRows};
use crate::system_memory;
use halo_core::attention::LayerReduction;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
    /// The type of the keys (`type_k`).
    pub key_type: KvKeyType,
    /// Where attention rows come from, and with it whether flash attention is on.
    pub attention: AttentionSource,
}

/// Tokens below which a context holds no useful prompt.
const MIN_CONTEXT: u32 = 64;

/// Bytes at the start of a saved state: magic number, sequence, number of streams, number of cells.
pub(super) const STATE_HEADER_BYTES: usize = 16;
/// Then bytes for each cell: its position, the number of its sequences, and the sequence.
pub(super) const STATE_CELL_BYTES: usize = 12;
/// With M-RoPE, between the number of sequences and the sequence: the other two parts of the position, and the token.
const STATE_MULTI_ROPE_BYTES: usize = 12;

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
    /// Whether cells are removed and restored one by one. Cached, because it is asked at every step.
    can_edit: bool,
    /// Whether llama.cpp can shift positions.
    can_shift: bool,
    /// The sequence that holds the cells of all others, for a model with sliding-window attention.
    pin: Option<SeqId>,
    /// For a hybrid model: its recurrent states.
    pub(super) recurrent: Option<RecurrentSequences>,
    /// Why attention comes from the softmax, although the queries were asked for.
    queries_failure: Option<QueriesFailure>,
    /// Where saved cells pass through on their way from and to a GPU.
    staging: StagingMemory,
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

/// The tokens of one sequence in a batch, at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct BatchPart<'a> {
    pub seq: SeqId,
    pub tokens: &'a [BatchToken],
}

impl LlamaContext {
    /// Creates a context, if enough memory is free for it. Where attention from queries does not work with this model on
    /// this device, it comes from the softmax instead: see [`queries_failure`](Self::queries_failure).
    pub fn new(weights: &Arc<ModelWeights>, params: ContextParams) -> Result<Self, LlamaError> {
        Self::new_with_check(weights, params, Self::check_queries)
    }

    /// [`new`](Self::new) with another check of the attention from queries, for tests of what follows a failure.
    pub fn new_with_check(
        weights: &Arc<ModelWeights>,
        params: ContextParams,
        check: impl FnOnce(&mut Self) -> Result<(), QueriesFailure>,
    ) -> Result<Self, LlamaError> {
        let mut context = Self::open(weights, params)?;
        // A model without readable attention has no rows from either source.
        if params.attention != AttentionSource::Queries || weights.header.attention_unsupported().is_some() {
            return Ok(context);
        }
        let Err(failure) = check(&mut context) else { return Ok(context) };
        // The memory is needed again.
        drop(context);
        tracing::warn!(
            "attention is read from the softmax, with flash attention off, because the check of model.attention = queries \
             found that {failure}; set model.attention = softmax to load without the check"
        );
        let softmax = ContextParams { attention: AttentionSource::Softmax, ..params };
        let mut context = Self::open(weights, softmax)?;
        context.queries_failure = Some(failure);
        Ok(context)
    }

    fn open(weights: &Arc<ModelWeights>, params: ContextParams) -> Result<Self, LlamaError> {
        let params = check_params(weights, params)?;
        let extra_seq = SeqId(params.sequences.cast_signed());
        let pin = weights.sliding_window().filter(|_| !weights.is_hybrid()).map(|_| extra_seq);
        let editable = weights.kv_edit_unsupported().is_none();
        let multi_rope = weights.has_multi_rope();
        let recurrent = (weights.is_hybrid() && editable).then(|| {
            let no_state = multi_rope.then(|| SeqId(params.sequences.cast_signed() + 1));
            RecurrentSequences::new(extra_seq, no_state)
        });
        let canceller = Arc::new(JobCanceller::default());
        let tap = NonNull::from(Box::leak(Box::new(new_tap(weights, params))));
        // SAFETY: the parameters are llama.cpp's defaults except for plain values and two callbacks, whose data lives
        // until this context is dropped.
        let context = unsafe {
            let ContextParams { tokens, batch, threads, sequences, key_type, attention } = params;
            let mut params = sys::llama_context_default_params();
            params.n_ctx = tokens;
            params.n_batch = batch;
            params.n_ubatch = batch;
            let no_state = recurrent.as_ref().is_some_and(|recurrent| recurrent.no_state.is_some());
            params.n_seq_max =
                sequences + u32::from(pin.is_some() || recurrent.is_some()) + u32::from(no_state);
            params.swa_full = true;
            params.n_threads = threads;
            params.n_threads_batch = threads;
            params.flash_attn_type = match attention {
                AttentionSource::Softmax => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
                AttentionSource::Queries | AttentionSource::Nowhere => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            };
            params.kv_unified = true;
            params.type_k = match key_type {
                KvKeyType::F16 => sys::GGML_TYPE_F16,
                KvKeyType::Q8_0 => sys::GGML_TYPE_Q8_0,
                KvKeyType::Q4_0 => sys::GGML_TYPE_Q4_0,
            };
            params.no_perf = true;
            if attention != AttentionSource::Nowhere {
                params.cb_eval = Some(eval_callback);
                params.cb_eval_user_data = tap.as_ptr().cast();
            }
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
        // What cannot be shifted for another reason is of a kind that this program does not know.
        let can_edit = editable && (shiftable || multi_rope);
        let can_shift = editable && shiftable;
        let weights = Arc::clone(weights);
        let window = weights.sliding_window();
        let mut context = Self {
            context,
            tap,
            canceller,
            weights,
            params,
            can_edit,
            can_shift,
            pin,
            recurrent,
            queries_failure: None,
            staging: StagingMemory::default(),
        };
        if can_edit && (context.pin.is_some() || context.recurrent.is_some()) {
            context.find_global_layers(window.unwrap_or(0))?;
        }
        Ok(context)
    }

    /// Finds the layers that attend to all tokens, which llama.cpp does not tell: a token is decoded farther behind another
    /// than the sliding window is long, and the tap counts the cells that each layer lets it attend to.
    fn find_global_layers(&mut self, window: LlamaPos) -> Result<(), LlamaError> {
        let seq = SeqId(0);
        let token = |position| BatchToken { token: 0, position, logits: false };
        self.decode(seq, &[token(0), token(1)])?;
        // With M-RoPE llama.cpp accepts gaps between positions.
        if window > 0 && self.can_shift {
            self.seq_add(seq, 1, 2, window)?;
        }
        self.tap().begin_layer_probe();
        let decoded = self.decode(seq, &[token(window + 2)]);
        self.tap().end_layer_probe();
        let _ = self.seq_rm(seq, -1, -1);
        let rotates_keys = self.tap().rotates_keys();
        self.recurrent.iter_mut().for_each(|recurrent| recurrent.rotates_keys = rotates_keys);
        decoded
    }

    /// Checks that rows come from the queries: of a prefill, whose queries are copied, and of a single token, whose queries
    /// are kept in place. Not every backend has flash attention for every size of heads; where it has not, the node is computed
    /// on another device, and its operands are copies. The context must be empty, and is empty afterwards.
    fn check_queries(&mut self) -> Result<(), QueriesFailure> {
        let seq = SeqId(0);
        let longest = self.tap().queries().in_place_tokens() + 1;
        let len = longest.min(self.params.batch as usize).min(self.params.tokens as usize - 1);
        let vocab_size = self.weights.vocab_size();
        let token = |n: usize| BatchToken {
            token: ((n * 7919 + 13) % vocab_size) as LlamaToken,
            position: n as LlamaPos,
            logits: false,
        };
        let items: Vec<BatchToken> = (0..=len).map(token).collect();
        let mut check = |batch: &[BatchToken], tokens: usize| {
            self.tap().configure(TapConfig {
                rows: TapRows::Last,
                layers: LayerReduction::Mean,
                cells: true,
                visible_cells: true,
                ..TapConfig::off()
            });
            self.decode(seq, batch).map_err(|_| QueriesFailure::Decode)?;
            let can_edit = self.can_edit;
            let tap = self.tap();
            if !tap.kept_all_layers() {
                return Err(QueriesFailure::Layers);
            }
            // Where cells cannot be edited they are not looked for either.
            let cells_known = tap.visible_cells(0).len() == tokens && tap.batch_cells().len() == batch.len();
            if can_edit && !cells_known {
                return Err(QueriesFailure::Cells);
            }
            let has_sinks = tap.queries().has_sinks();
            let row = tap.take_rows(0).pop().ok_or(QueriesFailure::NoRow)?;
            check_row(&row, can_edit.then(|| tap.visible_cells(0)), has_sinks)
        };
        let checked = check(&items[..len], len).and_then(|()| check(&items[len..], len + 1));
        self.tap().configure(TapConfig::off());
        let _ = self.seq_rm(seq, -1, -1);
        checked
    }

    /// Why attention comes from the softmax, although the queries were asked for: what the check at load found.
    #[must_use]
    pub fn queries_failure(&self) -> Option<QueriesFailure> {
        self.queries_failure
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

    pub(super) fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context is alive.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::llama_context {
        self.context.as_ptr()
    }

    /// Decodes one batch of tokens into new cells of a sequence. A hybrid model's recurrent state of the sequence is lost
    /// if it fails.
    pub fn decode(&mut self, seq: SeqId, tokens: &[BatchToken]) -> Result<(), LlamaError> {
        self.decode_parts(&[BatchPart { seq, tokens }])
    }

    /// Decodes one batch with tokens of several sequences; each sequence has one part. The recurrent states of a hybrid
    /// model require that all parts have the same length.
    pub fn decode_parts(&mut self, parts: &[BatchPart<'_>]) -> Result<(), LlamaError> {
        let items = || parts.iter().flat_map(|part| part.tokens.iter().map(move |item| (part.seq, item)));
        let len = items().count();
        if len == 0 || len > self.params.batch as usize {
            let max = self.params.batch;
            return Err(LlamaError::Decode(format!("a batch has 1 to {max} tokens, not {len}")));
        }
        let vocab_size = self.weights.vocab_size();
        let is_known = |token: LlamaToken| usize::try_from(token).is_ok_and(|token| token < vocab_size);
        if let Some((_, bad)) = items().find(|(_, item)| !is_known(item.token)) {
            return Err(LlamaError::Decode(format!("token {} is not in the vocabulary", bad.token)));
        }
        let mut tokens: Vec<LlamaToken> = items().map(|(_, item)| item.token).collect();
        let mut positions: Vec<LlamaPos> = items().map(|(_, item)| item.position).collect();
        let mut seq_counts = vec![1i32; len];
        let mut seq_ids: Vec<sys::llama_seq_id> = items().map(|(seq, _)| seq.0).collect();
        let mut seq_id_lists: Vec<*mut sys::llama_seq_id> =
            seq_ids.iter_mut().map(std::ptr::from_mut).collect();
        let mut logits: Vec<i8> = items().map(|(_, item)| i8::from(item.logits)).collect();
        let batch = sys::llama_batch {
            n_tokens: len as i32,
            token: tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: seq_counts.as_mut_ptr(),
            seq_id: seq_id_lists.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        let parts = parts.iter().filter_map(|part| {
            let (first, last) = (part.tokens.first()?, part.tokens.last()?);
            Some((part.seq, first.position, last.position + 1))
        });
        for (seq, start, _) in parts.clone() {
            self.align_recurrent(seq, start)?;
        }
        clear_error();
        // The position of a state is not set with M-RoPE; llama.cpp warns of it and computes the same.
        let has_loose_states = self.recurrent.as_ref().is_some_and(|recurrent| recurrent.no_state.is_some());
        let suppressor = has_loose_states.then(WarningLogSuppressor::begin);
        // SAFETY: every array of the batch has `n_tokens` elements and outlives the call.
        let code = unsafe { sys::llama_decode(self.context.as_ptr(), batch) };
        drop(suppressor);
        for (seq, start, end) in parts {
            match code {
                0 => self.pin_cells(seq, start, end),
                // llama.cpp found no free cells and changed nothing.
                1 => {}
                _ => self.drop_failed_batch(seq, start),
            }
        }
        match code {
            0 => self.compute_attention(len),
            1 => Err(LlamaError::CacheFull),
            2 => Err(LlamaError::Cancelled),
            _ => Err(LlamaError::Decode(first_error())),
        }
    }

    /// Computes the attention rows of the last batch from the queries that the tap kept, if it kept any. Without them the
    /// batch is still good: the rows are missing then, which the engine reports.
    fn compute_attention(&mut self, tokens: usize) -> Result<(), LlamaError> {
        if self.params.attention == AttentionSource::Queries {
            // SAFETY: the context is alive. Afterwards the device has computed the queries and written the keys.
            unsafe { sys::llama_synchronize(self.context.as_ptr()) };
            if let Err(error) = self.tap().finish_batch(tokens) {
                tracing::error!("attention rows are missing: {error}");
            }
        }
        Ok(())
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

    /// Removes the cells with positions from `start` up to `end` from a sequence; a cell without sequence is free. With two
    /// negative numbers everything is removed, also the recurrent state of a hybrid model. False for a recurrent model,
    /// whose state cannot be removed in parts.
    #[must_use]
    pub fn seq_rm(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) -> bool {
        self.forget_alignment();
        if self.recurrent.is_some() && (start >= 0 || end >= 0) {
            return self.remove_attention_cells(seq, start.max(0), end);
        }
        let removed = self.seq_rm_all_layers(seq, start, end);
        if removed && let Some(pin) = self.pin {
            self.seq_rm_all_layers(pin, start, end);
            // Other sequences may have cells at the same positions.
            let others = (0..self.params.sequences.cast_signed()).map(SeqId).filter(|other| *other != seq);
            others.for_each(|other| self.pin_cells(other, start, end));
        }
        removed
    }

    /// Removes cells of attention layers and the state of recurrent layers; false if the state is in the range, but not
    /// all of it.
    pub(super) fn seq_rm_all_layers(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) -> bool {
        // SAFETY: the memory lives as long as the context; it is a sequence of this context, and llama.cpp accepts any
        // range.
        unsafe { sys::llama_memory_seq_rm(self.memory(), seq.0, start, end) }
    }

    /// Adds cells of a sequence to the pinning sequence, if there is one.
    fn pin_cells(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) {
        if let Some(pin) = self.pin {
            self.seq_cp(seq, pin, start, end);
        }
    }

    /// Adds the cells of one sequence to another. No key or value is copied: the sequences share the cells.
    pub fn seq_cp(&mut self, from: SeqId, to: SeqId, start: LlamaPos, end: LlamaPos) {
        if self.recurrent.is_some() {
            self.copy_attention_cells(from, to, start, end);
        } else {
            self.seq_cp_all_layers(from, to, start, end);
        }
    }

    /// Adds the cells of one sequence to another, and replaces its recurrent state.
    pub(super) fn seq_cp_all_layers(&mut self, from: SeqId, to: SeqId, start: LlamaPos, end: LlamaPos) {
        // SAFETY: the memory lives as long as the context; both are sequences of this context.
        unsafe { sys::llama_memory_seq_cp(self.memory(), from.0, to.0, start, end) };
    }

    /// Shifts the positions of cells; llama.cpp rotates their keys (K-shift) in the next [`decode`](Self::decode). It fails
    /// unless [`can_shift`](Self::can_shift). If it fails, the cells are removed.
    pub fn seq_add(
        &mut self,
        seq: SeqId,
        start: LlamaPos,
        end: LlamaPos,
        by: LlamaPos,
    ) -> Result<(), LlamaError> {
        if self.shift_moves_cells() {
            return self.shift_unrotated_cells(seq, start, end, by);
        }
        if !self.can_shift() {
            let _ = self.seq_rm(seq, start, end);
            return Err(LlamaError::StateRestore("llama.cpp cannot shift their positions"));
        }
        self.forget_alignment();
        // SAFETY: the memory lives as long as the context; models for which this aborts cannot shift.
        unsafe { sys::llama_memory_seq_add(self.memory(), seq.0, start, end, by) };
        Ok(())
    }

    /// Whether positions of cells can be shifted.
    #[must_use]
    pub fn can_shift(&self) -> bool {
        self.can_shift
    }

    /// Whether cells can be removed and restored one by one.
    #[must_use]
    pub fn can_edit(&self) -> bool {
        self.can_edit
    }

    /// Treats the model as one whose cells cannot be edited. The context must be empty.
    pub fn disable_kv_edits(&mut self) {
        self.can_edit = false;
        self.can_shift = false;
        self.recurrent = None;
    }

    /// The positions of a sequence's cells in cell order. None unless there are exactly `len` cells.
    ///
    /// llama.cpp has no function for this. The positions stand in the header of a saved state, so
    /// [`save_state`](Self::save_state)'s function is called with a buffer for the header alone: it fills the header, logs
    /// that the buffer is too small, and copies no key or value.
    #[must_use]
    pub fn cell_positions(&mut self, seq: SeqId, len: usize) -> Option<Vec<LlamaPos>> {
        let extra_bytes = if self.weights.has_multi_rope() { STATE_MULTI_ROPE_BYTES } else { 0 };
        let cell_bytes = STATE_CELL_BYTES + extra_bytes;
        let mut bytes = vec![0u8; STATE_HEADER_BYTES + len * cell_bytes];
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
            let start = STATE_HEADER_BYTES + n * cell_bytes;
            let seq_count = word(start + 4)?;
            if seq_count == 1 { word(start).map(u32::cast_signed) } else { None }
        };
        (0..len).map(cell_position).collect()
    }

    /// The cells of a sequence with keys, values and positions, in llama.cpp's own format.
    #[must_use]
    pub fn save_state(&mut self, seq: SeqId) -> Vec<u8> {
        // SAFETY: the context is alive, and it is one of its sequences.
        let size = unsafe { sys::llama_state_seq_get_size(self.context.as_ptr(), seq.0) };
        let mut bytes = Vec::new();
        let save = |room: &mut [u8]| {
            // SAFETY: the buffer has the size that llama.cpp asks for; it is filled when the function returns.
            unsafe {
                sys::llama_state_seq_get_data(self.context.as_ptr(), room.as_mut_ptr(), room.len(), seq.0)
            }
        };
        let staged = if self.weights.is_offloaded() { self.staging.reserve(size) } else { None };
        if let Some(staged) = staged {
            let written = save(staged);
            bytes.extend_from_slice(&staged[..written.min(size)]);
        } else {
            bytes.resize(size, 0);
            let written = save(&mut bytes);
            bytes.truncate(written);
        }
        bytes
    }

    /// Replaces the cells of a sequence by saved ones.
    pub fn restore_state(&mut self, seq: SeqId, bytes: &[u8]) -> Result<(), LlamaError> {
        if self.pin.is_some() {
            // llama.cpp removes the cells of this sequence, but not their pins.
            let _ = self.seq_rm(seq, -1, -1);
        }
        let mut source = bytes;
        if self.weights.is_offloaded()
            && let Some(staged) = self.staging.reserve(bytes.len())
        {
            staged.copy_from_slice(bytes);
            source = staged;
        }
        // SAFETY: llama.cpp reads at most as many bytes as the length says, and returns 0 for a state that it refuses.
        let read = unsafe {
            sys::llama_state_seq_set_data(self.context.as_ptr(), source.as_ptr(), source.len(), seq.0)
        };
        if read == bytes.len() {
            self.pin_cells(seq, -1, -1);
            Ok(())
        } else {
            Err(LlamaError::StateRestore("they belong to another model or context"))
        }
    }
}

/// Checks a row by cell; `visible` are the cells that its token attends to, in ascending order, where they are known.
fn check_row(row: &ReducedAttention, visible: Option<&[u32]>, has_sinks: bool) -> Result<(), QueriesFailure> {
    if row.mean.iter().any(|a| !a.is_finite()) {
        return Err(QueriesFailure::NotFinite);
    }
    let sum: f32 = row.mean.iter().sum();
    // What goes to attention sinks is missing.
    let least = if has_sinks { 1e-3 } else { 1.0 - 1e-3 };
    if !(least..=1.0 + 1e-3).contains(&sum) {
        return Err(QueriesFailure::Sum);
    }
    let is_foreign = |visible: &[u32]| {
        let seen = |cell: usize| u32::try_from(cell).is_ok_and(|cell| visible.binary_search(&cell).is_ok());
        row.mean.iter().enumerate().any(|(cell, &a)| a != 0.0 && !seen(cell))
    };
    if visible.is_some_and(is_foreign) { Err(QueriesFailure::ForeignCell) } else { Ok(()) }
}

fn new_tap(weights: &ModelWeights, params: ContextParams) -> AttentionTap {
    let layers = weights.layer_count();
    let sequences = params.sequences as usize;
    AttentionTap::new(layers, QueryCapture::new(layers, params.threads, sequences))
}

/// Limits the parameters to what llama.cpp accepts, and checks that the memory for them is free.
fn check_params(weights: &ModelWeights, params: ContextParams) -> Result<ContextParams, LlamaError> {
    // The cells are shared by the windows of several conversations, each of which fits the model.
    let lanes = (params.sequences.saturating_sub(1) / 2).max(1);
    let max = weights.trained_context().saturating_mul(lanes);
    if params.tokens > max {
        return Err(LlamaError::ContextTooLarge { requested: params.tokens, max });
    }
    if params.tokens < MIN_CONTEXT || params.batch == 0 || params.sequences == 0 {
        return Err(LlamaError::ContextTooSmall { requested: params.tokens, min: MIN_CONTEXT });
    }
    let head_size = weights.key_head_size();
    if !head_size.is_multiple_of(params.key_type.block_size()) {
        return Err(LlamaError::KeyType { head_size, key_type: params.key_type });
    }
    let batch = params.batch.max(params.sequences.max(32)).min(params.tokens);
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
    unsafe { &*data.cast::<JobCanceller>() }.is_batch_cancelled()
}

/// llama.cpp calls this for every node of the graph: with `ask` before it is computed, to learn whether its data is
/// needed, and then, if it is, after it was computed.
unsafe extern "C" fn eval_callback(node: *mut sys::ggml_tensor, ask: bool, data: *mut c_void) -> bool {
    // SAFETY: llama.cpp passes a live node and the pointer to the tap that `new` gave it; nothing else uses the tap
    // meanwhile, because `decode` borrows the whole context mutably.
    let (raw, tap) = unsafe { (node, &mut *data.cast::<AttentionTap>()) };
    // SAFETY: nothing else has a reference to the node while llama.cpp waits for this function.
    let node = unsafe { &*raw };
    // A panic must not unwind into llama.cpp: the row is missing then, which the engine reports.
    let observed = catch_unwind(AssertUnwindSafe(|| {
        if ask {
            tap.queries().note_node(raw);
            return tap.wants_node(&GraphNode(node));
        }
        tap.observe(&GraphNode(node));
        // False would end the computation here.
        true
    }));
    observed.unwrap_or(!ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_is_refused_with_its_reason() {
        let check = |mean: &[f32], has_sinks| {
            let row = ReducedAttention { mean: mean.to_vec(), max: Vec::new() };
            check_row(&row, Some(&[0, 2]), has_sinks)
        };
        assert_eq!(check(&[0.25, 0.0, 0.75, 0.0], false), Ok(()));
        assert_eq!(check(&[0.25, 0.0, f32::NAN, 0.0], false), Err(QueriesFailure::NotFinite));
        assert_eq!(check(&[0.25, 0.0, f32::INFINITY, 0.0], false), Err(QueriesFailure::NotFinite));
        assert_eq!(check(&[0.25, 0.0, 0.748, 0.0], false), Err(QueriesFailure::Sum));
        assert_eq!(check(&[0.25, 0.0, 0.752, 0.0], true), Err(QueriesFailure::Sum));
        assert_eq!(check(&[0.25, 0.0, 0.1, 0.0], true), Ok(()));
        assert_eq!(check(&[0.0; 4], true), Err(QueriesFailure::Sum));
        assert_eq!(check(&[0.25, 0.5, 0.25, 0.0], false), Err(QueriesFailure::ForeignCell));
    }
}

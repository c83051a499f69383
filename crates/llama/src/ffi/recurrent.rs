//! The recurrent states of a hybrid model: attention layers with KV cells, and recurrent layers with one state per sequence.
//!
//! llama.cpp's functions on sequences act on both kinds of layers at once. It refuses to remove the end of a sequence,
//! because a recurrent state cannot be taken back, and a copy of single cells replaces the whole state of the target. The
//! functions here act on one kind alone. They need one more sequence, the parking sequence, which never has cells: a copy
//! of no cells (positions 0 up to 0) still copies the state. No state is moved in memory: sequences share it until one of
//! them decodes.
//!
//! llama.cpp keeps a position with the state, and decodes only the position that follows it. Halo knows which tokens a
//! state has read, so this position is set right before a decode, and may have any value otherwise.
//!
//! With M-RoPE (Qwen 3.5) llama.cpp shifts no position, not even that of a state, but decodes any position behind the last
//! cell. So the position of the state is never set. A sequence without cells and state is the source of "no state" while the
//! parking sequence holds the state.

use super::context::{LlamaContext, STATE_CELL_BYTES, STATE_HEADER_BYTES};
use super::error::LlamaError;
use super::types::{LlamaPos, SeqId};
use llama_cpp_sys_2 as sys;

/// What a context keeps for the recurrent states of a hybrid model.
pub(super) struct RecurrentSequences {
    /// The parking sequence. It never has cells, and no state between operations.
    parking: SeqId,
    /// With M-RoPE: a sequence that never has cells or a state.
    pub(super) no_state: Option<SeqId>,
    /// The sequences whose state is known to have the position of their last token; with M-RoPE, those known to have a state.
    aligned: Vec<SeqId>,
    /// Whether keys depend on positions (RoPE). Some hybrids (Granite 4 H) leave the order of tokens to their recurrent
    /// layers.
    pub(super) rotates_keys: bool,
}

impl RecurrentSequences {
    pub(super) fn new(parking: SeqId, no_state: Option<SeqId>) -> Self {
        Self { parking, no_state, aligned: Vec::new(), rotates_keys: true }
    }
}

/// `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`, a macro of llama.h: for a hybrid model the state of its recurrent layers alone.
const RECURRENT_ONLY: sys::llama_state_seq_flags = 1;

impl LlamaContext {
    /// Whether sequences have a recurrent state beside their cells.
    #[must_use]
    pub fn has_recurrent_states(&self) -> bool {
        self.recurrent.is_some()
    }

    fn parking_seq(&self) -> Option<SeqId> {
        self.recurrent.as_ref().map(|recurrent| recurrent.parking)
    }

    fn no_state_seq(&self) -> Option<SeqId> {
        self.recurrent.as_ref().and_then(|recurrent| recurrent.no_state)
    }

    /// Replaces the recurrent state of a sequence by that of another, or by none if the other has none.
    pub fn copy_recurrent(&mut self, from: SeqId, to: SeqId) {
        if self.recurrent.is_some() {
            self.forget_alignment();
            self.seq_cp_all_layers(from, to, 0, 0);
        }
    }

    /// Removes the recurrent state of a sequence: the next token that it decodes is the first one that it reads.
    pub fn clear_recurrent(&mut self, seq: SeqId) {
        if let Some(parking) = self.parking_seq() {
            self.copy_recurrent(parking, seq);
        }
    }

    /// The recurrent state of a sequence, in llama.cpp's own format.
    #[must_use]
    pub fn save_recurrent(&mut self, seq: SeqId) -> Vec<u8> {
        if self.recurrent.is_none() {
            return Vec::new();
        }
        // SAFETY: the buffer has the size that llama.cpp asks for.
        unsafe {
            let size = sys::llama_state_seq_get_size_ext(self.as_ptr(), seq.0, RECURRENT_ONLY);
            let mut bytes = vec![0u8; size];
            let (buffer, flags) = (bytes.as_mut_ptr(), RECURRENT_ONLY);
            let written = sys::llama_state_seq_get_data_ext(self.as_ptr(), buffer, size, seq.0, flags);
            bytes.truncate(written);
            bytes
        }
    }

    /// Replaces the recurrent state of a sequence by a saved one. If it fails, the sequence has no state.
    pub fn restore_recurrent(&mut self, seq: SeqId, bytes: &[u8]) -> Result<(), LlamaError> {
        self.forget_alignment();
        // SAFETY: llama.cpp reads at most as many bytes as the length says, and returns 0 for a state that it refuses.
        let read = unsafe {
            sys::llama_state_seq_set_data_ext(
                self.as_ptr(),
                bytes.as_ptr(),
                bytes.len(),
                seq.0,
                RECURRENT_ONLY,
            )
        };
        if read == bytes.len() {
            return Ok(());
        }
        self.clear_recurrent(seq);
        Err(LlamaError::StateRestore("the recurrent state belongs to another model"))
    }

    /// Adds the cells of one sequence to another, which keeps its recurrent state.
    pub(super) fn copy_attention_cells(&mut self, from: SeqId, to: SeqId, start: LlamaPos, end: LlamaPos) {
        let Some(parking) = self.parking_seq() else { return };
        self.forget_alignment();
        self.seq_cp_all_layers(to, parking, 0, 0);
        self.seq_cp_all_layers(from, to, start, end);
        self.seq_cp_all_layers(parking, to, 0, 0);
        self.seq_rm_all_layers(parking, -1, -1);
    }

    /// Removes cells of a sequence, which keeps its recurrent state.
    pub(super) fn remove_attention_cells(&mut self, seq: SeqId, start: LlamaPos, end: LlamaPos) -> bool {
        let Some(parking) = self.parking_seq() else { return false };
        if let Some(no_state) = self.no_state_seq() {
            self.seq_cp_all_layers(seq, parking, 0, 0);
            self.seq_cp_all_layers(no_state, seq, 0, 0);
            let removed = self.seq_rm_all_layers(seq, start, end);
            self.seq_cp_all_layers(parking, seq, 0, 0);
            self.seq_rm_all_layers(parking, -1, -1);
            return removed;
        }
        if start > 0 {
            // llama.cpp leaves a state alone whose position is outside the range.
            self.set_recurrent_position(seq, 0);
            return self.seq_rm_all_layers(seq, start, end);
        }
        if end >= 0 {
            self.set_recurrent_position(seq, end);
            return self.seq_rm_all_layers(seq, start, end);
        }
        self.seq_cp_all_layers(seq, parking, 0, 0);
        let removed = self.seq_rm_all_layers(seq, -1, -1);
        self.seq_cp_all_layers(parking, seq, 0, 0);
        self.seq_rm_all_layers(parking, -1, -1);
        removed
    }

    /// Whether [`seq_add`](Self::seq_add) puts the tokens into other cells.
    #[must_use]
    pub fn shift_moves_cells(&self) -> bool {
        self.recurrent.as_ref().is_some_and(|recurrent| !recurrent.rotates_keys)
    }

    /// Shifts the positions of cells of a model that does not rotate keys. llama.cpp would compute a K-shift that no layer
    /// takes part in, and aborts the process. So the cells are saved and restored with other positions.
    pub(super) fn shift_unrotated_cells(
        &mut self,
        seq: SeqId,
        start: LlamaPos,
        end: LlamaPos,
        by: LlamaPos,
    ) -> Result<(), LlamaError> {
        let Some(parking) = self.parking_seq() else { return Ok(()) };
        self.forget_alignment();
        self.seq_cp_all_layers(seq, parking, start, end);
        let mut bytes = self.save_state(parking);
        self.seq_rm_all_layers(parking, -1, -1);
        self.remove_attention_cells(seq, start.max(0), end);
        let header_bytes = STATE_HEADER_BYTES.min(bytes.len());
        let (header, cells) = bytes.split_at_mut(header_bytes);
        let count = header.last_chunk::<4>().map_or(0, |count| u32::from_le_bytes(*count) as usize);
        for cell in cells.chunks_exact_mut(STATE_CELL_BYTES).take(count) {
            if let Some(position) = cell.first_chunk_mut::<4>() {
                *position = (LlamaPos::from_le_bytes(*position) + by).to_le_bytes();
            }
        }
        self.restore_state(parking, &bytes)?;
        // The saved state has the recurrent state of the sequence too.
        self.seq_cp_all_layers(parking, seq, -1, -1);
        self.seq_rm_all_layers(parking, -1, -1);
        Ok(())
    }

    /// Gives the recurrent state of a sequence a position. False if it has none.
    fn set_recurrent_position(&mut self, seq: SeqId, position: LlamaPos) -> bool {
        let Some(parking) = self.parking_seq() else { return false };
        self.forget_alignment();
        self.seq_cp_all_layers(seq, parking, 0, 0);
        // SAFETY: the memory lives as long as the context. The parking sequence has no cells, so the position is that of
        // the state, and nothing but the state is shifted.
        let current = unsafe {
            let current = sys::llama_memory_seq_pos_min(self.memory(), parking.0);
            if current >= 0 && current != position {
                sys::llama_memory_seq_add(self.memory(), parking.0, current, current + 1, position - current);
            }
            current
        };
        self.seq_rm_all_layers(parking, -1, -1);
        current >= 0
    }

    fn has_recurrent_state(&mut self, seq: SeqId) -> bool {
        let Some(parking) = self.parking_seq() else { return false };
        self.seq_cp_all_layers(seq, parking, 0, 0);
        // SAFETY: the memory lives as long as the context. The parking sequence has no cells, so the position is that of
        // the state.
        let position = unsafe { sys::llama_memory_seq_pos_min(self.memory(), parking.0) };
        self.seq_rm_all_layers(parking, -1, -1);
        position >= 0
    }

    /// Prepares the recurrent state of a sequence for a decode at a position.
    pub(super) fn align_recurrent(&mut self, seq: SeqId, position: LlamaPos) -> Result<(), LlamaError> {
        let is_aligned = |recurrent: &RecurrentSequences| recurrent.aligned.contains(&seq);
        if self.recurrent.as_ref().is_none_or(is_aligned) {
            return Ok(());
        }
        let has_state = match self.no_state_seq() {
            Some(_) => self.has_recurrent_state(seq),
            None => self.set_recurrent_position(seq, (position - 1).max(0)),
        };
        if !has_state && position > 0 {
            return Err(LlamaError::Decode("the recurrent state of the sequence is missing".into()));
        }
        self.recurrent.iter_mut().for_each(|recurrent| recurrent.aligned.push(seq));
        Ok(())
    }

    /// States that were aligned may not be any more: sequences share them.
    pub(super) fn forget_alignment(&mut self) {
        self.recurrent.iter_mut().for_each(|recurrent| recurrent.aligned.clear());
    }

    /// Removes what a failed decode left: llama.cpp does not remove the cells of a batch that the recurrent layers have
    /// read, and the state is that of no token.
    pub(super) fn drop_failed_batch(&mut self, seq: SeqId, start: LlamaPos) {
        if self.recurrent.is_some() {
            self.clear_recurrent(seq);
            self.seq_rm_all_layers(seq, start, -1);
        }
    }
}

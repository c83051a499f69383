//! The state of the KV cache, decoding, and switching of conversations.

use super::error::KvCacheError;
use super::window::KeyedWindow;
use crate::attention::{ReducedAttention, TapConfig, TapRows};
use crate::cells::{CellEntry, SequenceTable};
use crate::ffi::{BatchToken, LlamaContext, LlamaPos, LlamaToken, SeqId};
use crate::kv_archive::KvArchive;
use crate::token_key::{TokenKey, token_keys};
use halo_core::model::WindowToken;

/// The sequence of the conversation.
pub(super) const MAIN_SEQ: SeqId = SeqId(0);
/// The sequence through which cells are saved and restored. Empty between operations.
pub(super) const SCRATCH_SEQ: SeqId = SeqId(1);
/// The sequence of a fork, and of recomputed tokens.
pub(super) const FORK_SEQ: SeqId = SeqId(2);

/// The sequences that the context of a [`KvCache`] must have.
pub const SEQUENCE_COUNT: u32 = 3;

/// What the cache does when the middle of the window changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum KvCacheMode {
    /// Removes and restores single cells.
    #[strum(serialize = "keep")]
    EditCells,
    /// Drops all cells from the first difference on and prefills the rest, as llama.cpp's server does.
    #[strum(serialize = "reread")]
    Recompute,
}

/// The KV cache of one context, synced with the window of one conversation at a time.
pub struct KvCache {
    pub(super) context: LlamaContext,
    pub(super) archive: KvArchive,
    pub(super) mode: KvCacheMode,
    pub(super) conversation: Option<String>,
    /// The tokens of [`MAIN_SEQ`].
    pub(super) main: SequenceTable,
    /// The tokens of [`FORK_SEQ`], while there is a fork.
    pub(super) fork: Option<SequenceTable>,
    /// All positions are below this.
    pub(super) position_limit: LlamaPos,
    /// Positions were shifted, but the keys are not rotated yet: llama.cpp does it in the next decode. Cells that are
    /// saved before would have keys that contradict their positions.
    pub(super) k_shift_pending: bool,
}

impl KvCache {
    /// An empty cache. A model whose cells cannot be edited gets [`KvCacheMode::Recompute`] in any case.
    #[must_use]
    pub fn new(context: LlamaContext, archive: KvArchive, mode: KvCacheMode) -> Self {
        let mode = if context.can_shift() { mode } else { KvCacheMode::Recompute };
        let position_limit = LlamaPos::try_from(context.weights().trained_context()).unwrap_or(LlamaPos::MAX);
        Self {
            context,
            archive,
            mode,
            conversation: None,
            main: SequenceTable::new(MAIN_SEQ),
            fork: None,
            position_limit,
            k_shift_pending: false,
        }
    }

    /// Lowers the position limit below what the model was trained for, so that compaction comes earlier.
    #[must_use]
    pub fn with_position_limit(mut self, limit: LlamaPos) -> Self {
        self.position_limit = limit.min(self.position_limit);
        self
    }

    #[must_use]
    pub fn mode(&self) -> KvCacheMode {
        self.mode
    }

    pub fn context(&mut self) -> &mut LlamaContext {
        &mut self.context
    }

    pub fn archive(&mut self) -> &mut KvArchive {
        &mut self.archive
    }

    /// The tokens of the fork, if there is one, else of the conversation.
    #[must_use]
    pub fn sequence(&self) -> &SequenceTable {
        self.fork.as_ref().unwrap_or(&self.main)
    }

    /// The number of cells.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.context.params().tokens as usize
    }

    /// Checks a window and computes the keys of its tokens.
    pub(super) fn keyed_window<'a>(
        &self,
        window: &'a [WindowToken],
    ) -> Result<KeyedWindow<'a>, KvCacheError> {
        if window.is_empty() {
            return Err(KvCacheError::EmptyWindow);
        }
        if window.len() > self.capacity() {
            return Err(KvCacheError::WindowTooLarge { tokens: window.len(), limit: self.capacity() });
        }
        let keys = token_keys(window).ok_or(KvCacheError::UnorderedWindow)?;
        Ok(KeyedWindow { tokens: window, keys })
    }

    /// Describes the first difference between the cached tokens of a conversation and its window. The cache must hold
    /// the beginning of the window, token for token, at ascending positions. None where they agree, or another
    /// conversation is cached.
    #[must_use]
    pub fn find_mismatch(&self, conversation: &str, window: &[WindowToken]) -> Option<String> {
        if self.conversation.as_deref() != Some(conversation) || self.mode == KvCacheMode::Recompute {
            return None;
        }
        let keys = token_keys(window)?;
        let cached = &self.main.entries;
        if cached.len() > window.len() {
            return Some(format!(
                "the KV cache has {} tokens, the context window {}",
                cached.len(),
                window.len()
            ));
        }
        let same = |n: usize| cached[n].key == keys[n] && cached[n].token == window[n].id.0.cast_signed();
        if let Some(n) = (0..cached.len()).find(|&n| !same(n)) {
            let (cached, expected) = (cached[n].key, keys[n]);
            return Some(format!(
                "slot {n} holds {cached:?} in the KV cache, {expected:?} in the context window"
            ));
        }
        let ascending = cached.is_sorted_by(|a, b| a.position < b.position);
        (!ascending).then(|| "the positions in the KV cache are not ascending".to_owned())
    }

    /// Decodes one batch of tokens (key, id, chunk start) after the last cached token, in the fork if there is one.
    /// Returns the attention rows that `config` asks for, by slot.
    pub fn decode(
        &mut self,
        tokens: &[(TokenKey, LlamaToken, bool)],
        config: TapConfig,
    ) -> Result<Vec<ReducedAttention>, KvCacheError> {
        let end = i64::from(self.main.next_position()) + tokens.len() as i64;
        if self.fork.is_none() && end > i64::from(self.position_limit) {
            self.compact()?;
        }
        self.apply_k_shift()?;
        let can_shift = self.context.can_shift();
        let table = self.fork.as_mut().unwrap_or(&mut self.main);
        let record_rows = config.rows != TapRows::None;
        // Debug builds verify the whole table at every step.
        let resolve = record_rows && can_shift && (cfg!(debug_assertions) || !table.all_cells_known());
        // Where cells cannot be resolved later, they are recorded from the start.
        let cells = record_rows || !can_shift;
        self.context.tap().configure(TapConfig { visible_cells: resolve, cells, ..config });
        let slots_before = table.entries.len();
        let items: Vec<BatchToken> = (tokens.iter().zip(table.next_position()..))
            .enumerate()
            .map(|(n, (&(_, token, _), position))| BatchToken {
                token,
                position,
                logits: n + 1 == tokens.len(),
            })
            .collect();
        self.context.decode(table.seq, &items)?;
        let batch_cells = self.context.tap().batch_cells().to_vec();
        let cell = |n: usize| batch_cells.get(n).and_then(|&cell| u32::try_from(cell).ok());
        let decoded = items.iter().zip(tokens).enumerate();
        table.entries.extend(decoded.map(|(n, (item, &(key, token, chunk_start)))| CellEntry {
            key,
            token,
            chunk_start,
            position: item.position,
            cell: cell(n),
        }));
        if resolve && !resolve_cells(&mut self.context, table) {
            return Ok(Vec::new());
        }
        let rows = self.context.tap().take_rows();
        debug_assert!(
            !can_shift || rows.iter().all(|row| table.attends_only_own_cells(&row.mean)),
            "attention on a cell of another sequence"
        );
        let unrecorded = tokens.len() - rows.len().min(tokens.len());
        let by_slot = |(n, row): (usize, ReducedAttention)| {
            let slot = slots_before + unrecorded + n;
            let mean = table.by_slot(&row.mean, slot)?;
            let max = if row.max.is_empty() { Vec::new() } else { table.by_slot(&row.max, slot)? };
            Some(ReducedAttention { mean, max })
        };
        Ok(rows.into_iter().enumerate().map_while(by_slot).collect())
    }

    /// Every head of every layer for the last decoded token, by slot: `layers × heads` rows.
    #[must_use]
    pub fn head_attention(&mut self) -> Vec<f32> {
        let heads = self.context.tap().take_heads();
        let table = self.fork.as_ref().unwrap_or(&self.main);
        let Some(last_slot) = table.entries.len().checked_sub(1) else { return Vec::new() };
        let token = heads.iter().map(|h| h.token).max().unwrap_or(0);
        let mut rows = Vec::new();
        for layer in heads.iter().filter(|h| h.token == token) {
            for row in layer.values.chunks(layer.cells.max(1)) {
                rows.extend(table.by_slot(row, last_slot).unwrap_or_default());
            }
        }
        rows
    }

    /// Frees all cells; those that are not archived are saved first.
    pub fn save_and_clear(&mut self) {
        self.drop_fork();
        if self.mode == KvCacheMode::EditCells
            && let Err(error) = self.save_all_cells()
        {
            tracing::warn!("the KV cells of a conversation are not saved: {error}");
        }
        self.discard_cells();
    }

    /// Deletes all cells of a conversation, from the cache and from the archive.
    pub fn forget(&mut self, conversation: &str) {
        if self.conversation.as_deref() == Some(conversation) {
            self.discard_cells();
        }
        self.archive.forget(conversation);
    }

    /// Frees all cells without saving them.
    pub fn discard_cells(&mut self) {
        for seq in [MAIN_SEQ, SCRATCH_SEQ, FORK_SEQ] {
            let _ = self.context.seq_rm(seq, -1, -1);
        }
        self.fork = None;
        self.main.entries.clear();
        self.k_shift_pending = false;
        self.conversation = None;
    }

    /// Makes a conversation the cached one; the cells of another are saved and freed.
    pub(super) fn switch_conversation(&mut self, conversation: &str) {
        if self.conversation.as_deref() != Some(conversation) {
            self.save_and_clear();
            self.conversation = Some(conversation.to_owned());
        }
    }
}

/// Resolves the cells of restored tokens after a decode. A contradiction is a defect of this crate: it is logged, and
/// attention of this batch is dropped, because rows would be attributed to wrong tokens.
fn resolve_cells(context: &mut LlamaContext, table: &mut SequenceTable) -> bool {
    let visible = context.tap().visible_cells().to_vec();
    let positions = context.cell_positions(table.seq, table.entries.len()).unwrap_or_default();
    match table.resolve_cells(&visible, &positions) {
        Ok(()) => true,
        Err(why) => {
            debug_assert!(false, "the cell table is wrong: {why}");
            tracing::error!("the cell table is wrong, so attention is dropped: {why}");
            false
        }
    }
}

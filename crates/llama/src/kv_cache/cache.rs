//! The state of the KV cache, decoding, and switching of conversations.

use super::error::KvCacheError;
use super::lane::{CacheLane, LaneId, lane_count};
use super::window::KeyedWindow;
use crate::attention::{ReducedAttention, TapConfig, TapRows};
use crate::cells::{CellEntry, SequenceTable};
use crate::ffi::{BatchPart, BatchToken, LlamaContext, LlamaError, LlamaPos, LlamaToken, SeqId};
use crate::kv_archive::KvArchive;
use crate::token_key::{TokenKey, token_keys};
use halo_core::model::WindowToken;

/// The sequence through which cells are saved and restored. Empty between operations.
pub(super) const SCRATCH_SEQ: SeqId = SeqId(1);

/// A token that is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputToken {
    pub key: TokenKey,
    pub id: LlamaToken,
    /// Whether it is the first token of a chunk.
    pub chunk_start: bool,
}

impl InputToken {
    /// A token of a window.
    #[must_use]
    pub fn new(key: TokenKey, token: &WindowToken) -> Self {
        Self { key, id: token.id.0.cast_signed(), chunk_start: token.chunk_start }
    }
}

/// The tokens of one lane in a batch.
#[derive(Clone, Debug)]
pub struct LaneBatch<'a> {
    pub lane: LaneId,
    pub tokens: &'a [InputToken],
    pub config: TapConfig,
}

/// What a decode returns for one lane.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedLane {
    /// The attention rows that were asked for, by slot.
    pub rows: Vec<ReducedAttention>,
    /// Every head of every layer for the last token, if asked for.
    pub per_head: Vec<f32>,
    /// Where [`LlamaContext::logits_at`] has the logits of the last token.
    pub logits_index: usize,
}

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

/// The KV cache of one context. Each conversation in it has a lane; one lane is selected, and most functions act on it.
pub struct KvCache {
    pub(super) context: LlamaContext,
    pub(super) archive: KvArchive,
    pub(super) mode: KvCacheMode,
    pub(super) lane: CacheLane,
    pub(super) other_lanes: Vec<CacheLane>,
    /// All positions are below this.
    pub(super) position_limit: LlamaPos,
    /// The most tokens of one window with its answer.
    pub(super) window_limit: usize,
    /// Positions were shifted, but the keys are not rotated yet: llama.cpp does it in the next decode. Cells that are
    /// saved before would have keys that contradict their positions.
    pub(super) k_shift_pending: bool,
    pub(super) table_checks: TableChecks,
    /// Whether an answer that starts can share cells of lanes that are held for theirs.
    pub(super) held_lanes_shared: bool,
}

/// How often the table of a lane was compared with the cells that llama.cpp lets its last token attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableChecks {
    /// Compare after each decode, and not only where cells are unknown.
    pub always: bool,
    pub compared: u64,
    pub wrong: u64,
}

impl KvCache {
    /// An empty cache with as many lanes as the context has sequences for. A model whose cells cannot be edited gets
    /// [`KvCacheMode::Recompute`] in any case.
    #[must_use]
    pub fn new(context: LlamaContext, archive: KvArchive, mode: KvCacheMode) -> Self {
        let mode = if context.can_edit() { mode } else { KvCacheMode::Recompute };
        let position_limit = LlamaPos::try_from(context.weights().trained_context()).unwrap_or(LlamaPos::MAX);
        let window_limit = context.params().tokens as usize;
        let is_hybrid = context.has_recurrent_states();
        let lanes = lane_count(context.params().sequences);
        let mut lanes = (0..lanes).map(|id| CacheLane::new(LaneId(id), is_hybrid));
        let lane = lanes.next().unwrap_or_else(|| CacheLane::new(LaneId(0), is_hybrid));
        let other_lanes = lanes.collect();
        Self {
            context,
            archive,
            mode,
            lane,
            other_lanes,
            position_limit,
            window_limit,
            k_shift_pending: false,
            table_checks: TableChecks::default(),
            held_lanes_shared: false,
        }
    }

    /// Whether the table of each lane of a batch is compared with llama.cpp's cells after each decode. Debug builds compare
    /// in any case where attention is recorded.
    #[must_use]
    pub fn with_table_checks(mut self, always: bool) -> Self {
        self.table_checks.always = always;
        self
    }

    #[must_use]
    pub fn table_checks(&self) -> TableChecks {
        self.table_checks
    }

    /// Limits the tokens of one window with its answer. Without this a conversation may use all cells.
    #[must_use]
    pub fn with_window_limit(mut self, limit: usize) -> Self {
        self.window_limit = limit.min(self.window_limit);
        self
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

    /// The tokens of the selected lane: of its fork, if there is one, else of the conversation.
    #[must_use]
    pub fn sequence(&self) -> &SequenceTable {
        self.lane.active_table()
    }

    /// The most tokens of one window with its answer.
    #[must_use]
    pub fn window_limit(&self) -> usize {
        self.window_limit
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
        if window.len() > self.window_limit {
            return Err(KvCacheError::WindowTooLarge { tokens: window.len(), limit: self.window_limit });
        }
        let keys = token_keys(window).ok_or(KvCacheError::UnorderedWindow)?;
        Ok(KeyedWindow { tokens: window, keys })
    }

    /// Describes the first difference between the cached tokens of a conversation and its window. The cache must hold
    /// the beginning of the window, token for token, at ascending positions; after a sync that was cancelled, tokens between
    /// may be missing. None where they agree, or another conversation is cached.
    #[must_use]
    pub fn find_mismatch(&self, conversation: &str, window: &[WindowToken]) -> Option<String> {
        let lane = self.lanes().find(|lane| lane.holds(conversation))?;
        if self.mode == KvCacheMode::Recompute {
            return None;
        }
        let keys = token_keys(window)?;
        let cached = &lane.main.entries;
        if cached.len() > window.len() {
            return Some(format!(
                "the KV cache has {} tokens, the context window {}",
                cached.len(),
                window.len()
            ));
        }
        let slot_of =
            |n: usize| if lane.is_partial { keys.binary_search(&cached[n].key).ok() } else { Some(n) };
        let same = |n: usize| {
            slot_of(n).is_some_and(|slot| {
                cached[n].key == keys[slot] && cached[n].token == window[slot].id.0.cast_signed()
            })
        };
        if let Some(n) = (0..cached.len()).find(|&n| !same(n)) {
            let (cached, expected) = (cached[n].key, keys[n]);
            return Some(format!(
                "slot {n} holds {cached:?} in the KV cache, {expected:?} in the context window"
            ));
        }
        let ascending = cached.is_sorted_by(|a, b| a.position < b.position);
        (!ascending).then(|| "the positions in the KV cache are not ascending".to_owned())
    }

    /// Decodes one batch of tokens after the last cached token of the selected lane, in the fork if there is one. Returns
    /// the attention rows that `config` asks for, by slot.
    pub fn decode(
        &mut self,
        tokens: &[InputToken],
        config: TapConfig,
    ) -> Result<Vec<ReducedAttention>, KvCacheError> {
        let batch = LaneBatch { lane: self.lane.id, tokens, config };
        Ok(self.decode_lanes(&[batch])?.pop().map(|decoded| decoded.rows).unwrap_or_default())
    }

    /// Decodes one batch with tokens of several lanes, each in the fork of its lane if there is one.
    pub fn decode_lanes(&mut self, batches: &[LaneBatch<'_>]) -> Result<Vec<DecodedLane>, KvCacheError> {
        for batch in batches {
            self.select_lane(batch.lane);
            let end = i64::from(self.lane.main.next_position()) + batch.tokens.len() as i64;
            if self.lane.fork.is_none() && end > i64::from(self.position_limit) {
                self.compact()?;
            }
        }
        self.apply_k_shift()?;
        let can_edit = self.context.can_edit();
        let (mut items, mut configs) = (Vec::new(), Vec::new());
        for batch in batches {
            self.select_lane(batch.lane);
            let table = self.lane.active_table();
            let last = batch.tokens.len().saturating_sub(1);
            let to_item = |(n, (token, position)): (usize, (&InputToken, LlamaPos))| BatchToken {
                token: token.id,
                position,
                logits: n == last,
            };
            let record_rows = batch.config.rows != TapRows::None;
            // Debug builds verify the whole table at every step.
            let unresolved = || record_rows && (cfg!(debug_assertions) || !table.all_cells_known());
            let visible_cells = can_edit && (self.table_checks.always || unresolved());
            // Where cells cannot be resolved later, they are recorded from the start.
            // A step without a row records them where the caller asks for it: a later row is then not preceded by a search
            // for the cells of the whole window.
            let cells = record_rows || !can_edit || self.table_checks.always || batch.config.cells;
            configs.push(TapConfig { visible_cells, cells, ..batch.config.clone() });
            let positions = table.next_position()..;
            items.push((table.seq, batch.tokens.iter().zip(positions).enumerate().map(to_item).collect()));
        }
        let result = self.decode_items(&items, &configs);
        for batch in batches {
            self.select_lane(batch.lane);
            let main_state = self.lane.main_state.as_mut().filter(|_| self.lane.fork.is_none());
            main_state.into_iter().for_each(|state| match result {
                Ok(()) => state.push(batch.tokens.iter().map(|token| (token.key, token.id))),
                Err(LlamaError::CacheFull) => {}
                Err(_) => state.clear(),
            });
        }
        result?;
        let cells = self.context.tap().batch_cells().to_vec();
        let mut start = 0;
        let mut decoded = Vec::with_capacity(batches.len());
        for (part, (batch, (_, items))) in batches.iter().zip(&items).enumerate() {
            self.select_lane(batch.lane);
            let cells = cells.get(start..).unwrap_or_default();
            let resolve = configs[part].visible_cells;
            decoded.push(self.append_decoded(part, batch, items, cells, resolve, start + items.len() - 1));
            start += items.len();
        }
        Ok(decoded)
    }

    fn decode_items(
        &mut self,
        items: &[(SeqId, Vec<BatchToken>)],
        configs: &[TapConfig],
    ) -> Result<(), LlamaError> {
        let mut start = 0;
        let ranges: Vec<_> = items
            .iter()
            .map(|(_, items)| {
                let range = start..start + items.len();
                start = range.end;
                range
            })
            .collect();
        self.context.tap().configure_parts(ranges.into_iter().zip(configs.iter().cloned()));
        let parts: Vec<BatchPart<'_>> =
            items.iter().map(|(seq, tokens)| BatchPart { seq: *seq, tokens }).collect();
        self.context.decode_parts(&parts)
    }

    /// Adds the decoded tokens of one part to the table of the selected lane, and collects their attention.
    fn append_decoded(
        &mut self,
        part: usize,
        batch: &LaneBatch<'_>,
        items: &[BatchToken],
        cells: &[i64],
        resolve: bool,
        logits_index: usize,
    ) -> DecodedLane {
        let can_edit = self.context.can_edit();
        let table = self.lane.active_table_mut();
        let slots_before = table.entries.len();
        let cell = |n: usize| cells.get(n).and_then(|&cell| u32::try_from(cell).ok());
        for (n, (item, token)) in items.iter().zip(batch.tokens).enumerate() {
            table.push_decoded(CellEntry {
                key: token.key,
                token: token.id,
                chunk_start: token.chunk_start,
                position: item.position,
                cell: cell(n),
                prefix: None,
                shared: false,
            });
        }
        let mut decoded = DecodedLane { rows: Vec::new(), per_head: Vec::new(), logits_index };
        if resolve && !resolve_cells(&mut self.context, &mut self.table_checks, part, table) {
            return decoded;
        }
        let rows = self.context.tap().take_rows(part);
        debug_assert!(
            !can_edit || rows.iter().all(|row| table.attends_only_own_cells(&row.mean)),
            "attention on a cell of another sequence"
        );
        let unrecorded = items.len() - rows.len().min(items.len());
        let by_slot = |(n, row): (usize, ReducedAttention)| {
            let slot = slots_before + unrecorded + n;
            let mean = table.by_slot(&row.mean, slot)?;
            let max = if row.max.is_empty() { Vec::new() } else { table.by_slot(&row.max, slot)? };
            Some(ReducedAttention { mean, max })
        };
        decoded.rows = rows.into_iter().enumerate().map_while(by_slot).collect();
        if batch.config.full {
            decoded.per_head = self.head_attention(part);
        }
        decoded
    }

    /// Every head of every layer for the last decoded token of a part, by slot: `layers × heads` rows. The rows of a layer
    /// without attention are 0.
    fn head_attention(&mut self, part: usize) -> Vec<f32> {
        let heads = self.context.tap().take_heads(part);
        let table = self.lane.active_table();
        let Some(last_slot) = table.entries.len().checked_sub(1) else { return Vec::new() };
        let token = heads.iter().map(|h| h.token).max().unwrap_or(0);
        let mut layers: Vec<Vec<f32>> = vec![Vec::new(); self.context.weights().layer_count()];
        for layer in heads.iter().filter(|h| h.token == token) {
            let rows = layer.values.chunks(layer.cells.max(1));
            let rows = rows.flat_map(|row| table.by_slot(row, last_slot).unwrap_or_default());
            if let Some(layer_rows) = layers.get_mut(layer.layer) {
                layer_rows.extend(rows);
            }
        }
        let len = layers.iter().map(Vec::len).max().unwrap_or(0);
        layers.iter_mut().for_each(|rows| rows.resize(len, 0.0));
        layers.concat()
    }

    /// Frees the cells of all lanes; those that are not archived are saved first.
    pub fn save_and_clear(&mut self) {
        for id in self.lane_ids() {
            self.select_lane(id);
            self.evict_lane();
        }
    }

    /// Deletes all cells of a conversation, from the cache and from the archive.
    pub fn forget(&mut self, conversation: &str) {
        if self.select_conversation(conversation) {
            self.clear_lane();
        }
        self.archive.forget(conversation);
    }

    /// Frees the cells of all lanes without saving them.
    pub fn discard_cells(&mut self) {
        for id in self.lane_ids() {
            self.select_lane(id);
            self.clear_lane();
        }
        let _ = self.context.seq_rm(SCRATCH_SEQ, -1, -1);
        self.k_shift_pending = false;
    }
}

/// Resolves the cells of restored tokens after a decode. A contradiction is a defect of this crate: it is logged, and
/// attention of this batch is dropped, because rows would be attributed to wrong tokens.
fn resolve_cells(
    context: &mut LlamaContext,
    checks: &mut TableChecks,
    part: usize,
    table: &mut SequenceTable,
) -> bool {
    checks.compared += 1;
    let visible = context.tap().visible_cells(part).to_vec();
    let positions = context.cell_positions(table.seq, table.entries.len()).unwrap_or_default();
    match table.resolve_cells(&visible, &positions) {
        Ok(()) => true,
        Err(why) => {
            checks.wrong += 1;
            debug_assert!(false, "the cell table is wrong: {why}");
            tracing::error!("the cell table is wrong, so attention is dropped: {why}");
            false
        }
    }
}

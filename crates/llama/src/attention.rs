//! Attention rows, read from llama.cpp's compute graph while it runs, and reduced at once to one number per cell.
//!
//! llama.cpp offers every node of the graph to an evaluation callback. Without flash attention the tap asks for the softmax
//! (`kq_soft_max-N`) of the layers that it needs. If it asks for none, the graph runs in one piece, and the tap costs nothing.
//! With flash attention there is no softmax: the queries are kept, and the rows computed from them after the batch (see
//! [`AttentionSource`](crate::ffi::AttentionSource)).
//!
//! Rows are indexed by *cell*. The tap does not know which token is in a cell:
//! [`SequenceTable`](crate::cells::SequenceTable) does, and learns it from the same graph.

use crate::ffi::LlamaError;
use crate::ffi::node::GraphNode;
use crate::ffi::query_capture::{LayerScores, QueryCapture, RowJob};
use halo_core::attention::LayerReduction;
use std::ops::Range;

/// The tokens of a part of a batch whose attention rows are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapRows {
    None,
    Last,
    All,
}

/// What the tap records of one part of the next batch. A part is a range of tokens, all of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    pub rows: TapRows,
    /// How the rows of all layers become one.
    pub layers: LayerReduction,
    /// Record the largest head of each layer beside the mean of all heads.
    pub max: bool,
    /// Record every head of every layer as well.
    pub full: bool,
    /// Record the cells that the tokens of the batch are written to.
    pub cells: bool,
    /// Record the cells that the mask lets the last token of the part attend to.
    pub visible_cells: bool,
}

impl TapConfig {
    #[must_use]
    pub fn off() -> Self {
        Self {
            rows: TapRows::None,
            layers: LayerReduction::Mean,
            max: false,
            full: false,
            cells: false,
            visible_cells: false,
        }
    }
}

/// The attention row of one token, by cell, or by slot after [`SequenceTable::by_slot`](crate::cells::SequenceTable).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReducedAttention {
    /// The mean over heads, reduced over layers as configured.
    pub mean: Vec<f32>,
    /// The largest head instead of the mean; empty unless [`TapConfig::max`].
    pub max: Vec<f32>,
}

/// All heads of one layer for one token.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerHeads {
    pub layer: usize,
    /// The index of the token in its batch.
    pub token: usize,
    /// The length of a row.
    pub cells: usize,
    /// `heads × cells` numbers, head after head.
    pub values: Vec<f32>,
}

/// Records attention in the evaluation callback of [`LlamaContext`](crate::ffi::LlamaContext).
#[derive(Debug)]
pub struct AttentionTap {
    layers: usize,
    parts: Vec<TapPart>,
    cells: Vec<i64>,
    head_sum: Vec<f32>,
    head_max: Vec<f32>,
    scratch: Vec<f32>,
    /// The layers that attend to all tokens. Others attend to a sliding window of the last tokens only, so that their rows
    /// say nothing about distant text, or have no attention at all. They are no part of the reduced row.
    global: Vec<bool>,
    /// While layers are probed: the number of cells that each layer lets the last token attend to.
    mask_probe: Option<Vec<usize>>,
    /// Whether a layer rotates keys by their positions (RoPE); false until layers are probed.
    rotates_keys: bool,
    /// Keeps queries where flash attention computes no softmax.
    queries: QueryCapture,
    /// Nodes of flash attention of the last batch whose queries should have been kept, or whose layer is not known.
    flash_nodes: usize,
}

/// What is recorded of one part of a batch.
#[derive(Debug)]
struct TapPart {
    /// Where the part is in the batch. The end may be beyond that of the batch.
    tokens: Range<usize>,
    config: TapConfig,
    rows: Vec<ReducedAttention>,
    heads: Vec<LayerHeads>,
    visible: Vec<u32>,
    layers_reduced: usize,
}

impl TapPart {
    fn new(tokens: Range<usize>, config: TapConfig) -> Self {
        Self { tokens, config, rows: Vec::new(), heads: Vec::new(), visible: Vec::new(), layers_reduced: 0 }
    }

    /// The tokens of the part in a batch of `len` tokens.
    fn tokens_in(&self, len: usize) -> Range<usize> {
        self.tokens.start.min(len)..self.tokens.end.min(len)
    }

    /// The tokens whose rows are recorded in a batch of `len` tokens.
    fn recorded_in(&self, len: usize) -> Range<usize> {
        let tokens = self.tokens_in(len);
        match self.config.rows {
            TapRows::None => tokens.end..tokens.end,
            TapRows::Last => tokens.end.saturating_sub(1).max(tokens.start)..tokens.end,
            TapRows::All => tokens,
        }
    }

    /// Whether the row needs every head, not only the mean of all.
    fn needs_heads(&self) -> bool {
        self.config.max || self.config.full || self.config.layers == LayerReduction::Max
    }
}

impl AttentionTap {
    pub(crate) fn new(layers: usize, queries: QueryCapture) -> Self {
        Self {
            layers,
            parts: Vec::new(),
            cells: Vec::new(),
            head_sum: Vec::new(),
            head_max: Vec::new(),
            scratch: Vec::new(),
            global: vec![true; layers],
            mask_probe: None,
            rotates_keys: false,
            queries,
            flash_nodes: 0,
        }
    }

    pub(crate) fn queries(&mut self) -> &mut QueryCapture {
        &mut self.queries
    }

    /// Whether the queries of each node of flash attention in the last batch were kept that a row needs.
    pub(crate) fn kept_all_layers(&self) -> bool {
        self.queries.kept_layers().count() == self.flash_nodes
    }

    /// Keeps queries without interrupting the graph, as is done on GPUs, or with it, as on CPUs. Rows are the same.
    pub fn keep_queries_in_place(&mut self, in_place: bool) {
        self.queries.set_in_place(in_place);
    }

    /// The layers of the last batch whose queries were kept without interrupting the graph.
    #[must_use]
    pub fn queries_in_place(&self) -> usize {
        self.queries.in_place_count()
    }

    /// Counts the cells that each layer lets the last token of the next batch attend to, and finds out whether keys are
    /// rotated.
    pub(crate) fn begin_layer_probe(&mut self) {
        self.configure(TapConfig::off());
        self.mask_probe = Some(vec![0; self.layers]);
    }

    /// The layers that saw fewer cells than others have a sliding window; those that saw none have no attention.
    pub(crate) fn end_layer_probe(&mut self) {
        let counts = self.mask_probe.take().unwrap_or_default();
        let most = counts.iter().copied().max().unwrap_or(0);
        self.global = counts.iter().map(|&count| count == most).collect();
    }

    pub(crate) fn rotates_keys(&self) -> bool {
        self.rotates_keys
    }

    /// Whether a layer attends to all tokens.
    #[must_use]
    pub fn is_global(&self, layer: usize) -> bool {
        self.global.get(layer) == Some(&true)
    }

    /// Drops what was recorded, and sets what is recorded of the next batch, which is one part.
    pub fn configure(&mut self, config: TapConfig) {
        self.configure_parts([(0..usize::MAX, config)]);
    }

    /// Drops what was recorded, and sets what is recorded of each part of the next batch.
    pub fn configure_parts(&mut self, parts: impl IntoIterator<Item = (Range<usize>, TapConfig)>) {
        self.parts.clear();
        self.parts.extend(parts.into_iter().map(|(tokens, config)| TapPart::new(tokens, config)));
        self.cells.clear();
        self.flash_nodes = 0;
        self.queries.begin_batch();
    }

    /// The cells that the last token of a part could attend to, including its own, in ascending order.
    #[must_use]
    pub fn visible_cells(&self, part: usize) -> &[u32] {
        self.parts.get(part).map_or(&[], |part| &part.visible)
    }

    /// The cells that the tokens of the batch were written to, in batch order.
    #[must_use]
    pub fn batch_cells(&self) -> &[i64] {
        &self.cells
    }

    /// The recorded rows of a part, in batch order. Empty for an architecture whose graph has no softmax nodes.
    #[must_use]
    pub fn take_rows(&mut self, part: usize) -> Vec<ReducedAttention> {
        let Some(part) = self.parts.get_mut(part) else { return Vec::new() };
        let layer_count = std::mem::take(&mut part.layers_reduced);
        let mut rows = std::mem::take(&mut part.rows);
        if layer_count == 0 {
            return Vec::new();
        }
        if !matches!(part.config.layers, LayerReduction::Max) {
            let share = 1.0 / layer_count as f32;
            for row in &mut rows {
                row.mean.iter_mut().chain(&mut row.max).for_each(|a| *a *= share);
            }
        }
        rows
    }

    /// The recorded heads of every layer for a part; see [`TapConfig::full`].
    #[must_use]
    pub fn take_heads(&mut self, part: usize) -> Vec<LayerHeads> {
        self.parts.get_mut(part).map(|part| std::mem::take(&mut part.heads)).unwrap_or_default()
    }

    fn wants_layer(&self, layer: usize) -> bool {
        self.parts.iter().any(|part| self.part_wants_layer(part, layer))
    }

    fn part_wants_layer(&self, part: &TapPart, layer: usize) -> bool {
        part.config.rows != TapRows::None && (part.config.full || self.reduces_layer(&part.config, layer))
    }

    /// Whether a layer is part of the reduced row.
    fn reduces_layer(&self, config: &TapConfig, layer: usize) -> bool {
        match &config.layers {
            LayerReduction::Mean | LayerReduction::Max => self.is_global(layer),
            LayerReduction::Last => {
                Some(layer) == (0..self.layers).rev().find(|&layer| self.is_global(layer))
            }
            LayerReduction::Selected(these) => these.contains(&layer),
        }
    }

    pub(crate) fn wants_node(&mut self, node: &GraphNode<'_>) -> bool {
        self.rotates_keys |= self.mask_probe.is_some() && node.is_rope();
        match node_kind(node) {
            GraphNodeKind::Softmax(layer) => {
                self.wants_layer(layer) || self.wants_mask(layer) || self.mask_probe.is_some()
            }
            GraphNodeKind::FlashAttention(layer) => self.wants_flash_attention(layer, node),
            GraphNodeKind::UnknownFlashAttention => {
                self.flash_nodes += 1;
                false
            }
            GraphNodeKind::KeyWrite(layer) => {
                // The cells are an input, so they can be read before the graph runs.
                if self.wants_cells(layer)
                    && let Some(rows) = node.source(1).filter(GraphNode::is_input)
                    && !rows.read_i64(&mut self.cells)
                {
                    self.cells.clear();
                }
                self.wants_cells(layer)
            }
            GraphNodeKind::Other => false,
        }
    }

    /// Whether the graph is interrupted after the flash attention of a layer. Most is done before.
    fn wants_flash_attention(&mut self, layer: usize, node: &GraphNode<'_>) -> bool {
        let Some(tokens) = node.source(0).map(|queries| queries.dims()[1]) else { return false };
        let Some(mask) = node.source(3) else { return false };
        let wants_mask = self.wants_mask(layer) || self.mask_probe.is_some();
        if wants_mask && mask.is_input() {
            self.observe_mask(layer, &mask, tokens);
        }
        let recorded = self.recorded_tokens(layer, tokens);
        self.flash_nodes += usize::from(!recorded.is_empty());
        let copies = !recorded.is_empty() && self.queries.keep_queries(node, layer, &recorded);
        copies || (wants_mask && !mask.is_input())
    }

    /// The tokens of the batch whose rows are recorded; none if no part needs this layer.
    fn recorded_tokens(&self, layer: usize, tokens: usize) -> Vec<usize> {
        if !self.wants_layer(layer) {
            return Vec::new();
        }
        self.parts.iter().flat_map(|part| part.recorded_in(tokens)).collect()
    }

    /// Computes the rows of the last batch from the queries that were kept, if any were.
    pub(crate) fn finish_batch(&mut self, tokens: usize) -> Result<(), LlamaError> {
        let kept: Vec<usize> = self.queries.kept_layers().collect();
        if kept.is_empty() {
            return Ok(());
        }
        let (mut jobs, mut owners) = (Vec::new(), Vec::new());
        for (n, part) in self.parts.iter().enumerate() {
            let layers: Vec<usize> =
                kept.iter().copied().filter(|&layer| self.part_wants_layer(part, layer)).collect();
            for token in part.recorded_in(tokens) {
                jobs.push(RowJob { token, layers: layers.clone(), heads: part.needs_heads() });
                owners.push((n, token));
            }
        }
        let results = self.queries.compute_rows(&jobs)?;
        let mut parts = std::mem::take(&mut self.parts);
        for ((n, token), result) in owners.into_iter().zip(results) {
            let part = &mut parts[n];
            if !result.mean.is_empty() {
                // Already the mean over layers.
                part.rows.push(ReducedAttention { mean: result.mean, max: Vec::new() });
                part.layers_reduced = 1;
            } else if !result.layers.is_empty() {
                self.reduce_heads(part, token, result.layers);
            }
        }
        self.parts = parts;
        Ok(())
    }

    /// Makes one row of the heads of all layers.
    fn reduce_heads(&mut self, part: &mut TapPart, token: usize, layers: Vec<LayerScores>) {
        let mut row = ReducedAttention::default();
        part.layers_reduced = 0;
        for LayerScores { layer, cells, values } in layers {
            let heads = values.chunks(cells.max(1));
            self.begin_heads(cells, part.config.max);
            let head_count = heads.len();
            heads.for_each(|head| self.add_head(head));
            if self.reduces_layer(&part.config, layer) {
                self.add_layer(&mut row, part.config.layers == LayerReduction::Max, head_count);
                part.layers_reduced += 1;
            }
            if part.config.full {
                part.heads.push(LayerHeads { layer, token, cells, values });
            }
        }
        part.rows.push(row);
    }

    /// The mask is the same in every global layer, so one is enough.
    fn wants_mask(&self, layer: usize) -> bool {
        let is_missing = |part: &TapPart| part.config.visible_cells && part.visible.is_empty();
        self.is_global(layer) && self.parts.iter().any(is_missing)
    }

    /// The cells of a token are the same in every global layer, so one is enough.
    fn wants_cells(&self, layer: usize) -> bool {
        self.cells.is_empty() && self.is_global(layer) && self.parts.iter().any(|part| part.config.cells)
    }

    pub(crate) fn observe(&mut self, node: &GraphNode<'_>) {
        match node_kind(node) {
            GraphNodeKind::Softmax(layer) => {
                let [_, tokens, _, _] = node.dims();
                if (self.wants_mask(layer) || self.mask_probe.is_some())
                    && let Some(mask) = node.source(1)
                {
                    self.observe_mask(layer, &mask, tokens);
                }
                let mut parts = std::mem::take(&mut self.parts);
                for part in &mut parts {
                    if self.part_wants_layer(part, layer) {
                        self.observe_softmax(part, layer, node);
                    }
                }
                self.parts = parts;
            }
            GraphNodeKind::FlashAttention(layer) => {
                let Some(tokens) = node.source(0).map(|queries| queries.dims()[1]) else { return };
                if (self.wants_mask(layer) || self.mask_probe.is_some())
                    && let Some(mask) = node.source(3)
                {
                    self.observe_mask(layer, &mask, tokens);
                }
                if self.wants_layer(layer) {
                    self.queries.copy_queries(node, layer);
                }
            }
            GraphNodeKind::KeyWrite(layer) => {
                if self.wants_cells(layer)
                    && let Some(rows) = node.source(1)
                    && !rows.read_i64(&mut self.cells)
                {
                    self.cells.clear();
                }
            }
            GraphNodeKind::UnknownFlashAttention | GraphNodeKind::Other => {}
        }
    }

    /// Reads the cells that tokens can attend to from the mask of a layer.
    fn observe_mask(&mut self, layer: usize, mask: &GraphNode<'_>, tokens: usize) {
        if self.wants_mask(layer) {
            for part in &mut self.parts {
                if part.config.visible_cells && part.visible.is_empty() {
                    let last = part.tokens_in(tokens).end.wrapping_sub(1);
                    part.visible = mask.visible_cells(last, &mut self.scratch);
                }
            }
        }
        if let Some(counts) = &mut self.mask_probe
            && let Some(known) = counts.get_mut(layer)
        {
            *known = mask.visible_cells(tokens.wrapping_sub(1), &mut self.scratch).len();
        }
    }

    fn observe_softmax(&mut self, part: &mut TapPart, layer: usize, node: &GraphNode<'_>) {
        let [cells, tokens, heads, streams] = node.dims();
        let tokens = part.tokens_in(tokens);
        if streams != 1 || tokens.is_empty() || heads == 0 || cells == 0 {
            return;
        }
        let recorded = if part.config.rows == TapRows::All { tokens } else { tokens.end - 1..tokens.end };
        let (reduced, first) = (self.reduces_layer(&part.config, layer), recorded.start);
        if reduced && part.rows.len() != recorded.len() {
            part.rows = vec![ReducedAttention::default(); recorded.len()];
        }
        for token in recorded {
            self.begin_heads(cells, part.config.max);
            let mut all_heads = Vec::new();
            for head in 0..heads {
                let Some(row) = node.f32_row(token, head, &mut self.scratch) else { return };
                if part.config.full {
                    all_heads.extend_from_slice(row);
                }
                self.head_sum.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
                max_into(&mut self.head_max, row);
            }
            if reduced {
                self.add_layer(
                    &mut part.rows[token - first],
                    part.config.layers == LayerReduction::Max,
                    heads,
                );
            }
            if part.config.full {
                part.heads.push(LayerHeads { layer, token, cells, values: all_heads });
            }
        }
        part.layers_reduced += usize::from(reduced);
    }

    fn begin_heads(&mut self, cells: usize, max: bool) {
        self.head_sum.clear();
        self.head_sum.resize(cells, 0.0);
        self.head_max.clear();
        self.head_max.resize(if max { cells } else { 0 }, 0.0);
    }

    fn add_head(&mut self, row: &[f32]) {
        self.head_sum.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
        max_into(&mut self.head_max, row);
    }

    /// Adds the heads of one layer, summed in `head_sum` and `head_max`, to a row.
    fn add_layer(&self, row: &mut ReducedAttention, max_of_layers: bool, heads: usize) {
        let share = 1.0 / heads as f32;
        row.mean.resize(self.head_sum.len(), 0.0);
        row.max.resize(self.head_max.len(), 0.0);
        if max_of_layers {
            row.mean.iter_mut().zip(&self.head_sum).for_each(|(max, a)| *max = max.max(a * share));
            max_into(&mut row.max, &self.head_max);
        } else {
            row.mean.iter_mut().zip(&self.head_sum).for_each(|(sum, a)| *sum += a * share);
            row.max.iter_mut().zip(&self.head_max).for_each(|(sum, a)| *sum += a);
        }
    }
}

fn max_into(into: &mut [f32], row: &[f32]) {
    into.iter_mut().zip(row).for_each(|(max, a)| *max = max.max(*a));
}

enum GraphNodeKind {
    /// The attention probabilities of a layer.
    Softmax(usize),
    /// The flash attention of a layer.
    FlashAttention(usize),
    /// Flash attention that does not tell its layer: its operands were copied to another device.
    UnknownFlashAttention,
    /// Keys of the batch being written to their cells in a layer.
    KeyWrite(usize),
    Other,
}

fn node_kind(node: &GraphNode<'_>) -> GraphNodeKind {
    if node.is_soft_max() {
        let layer = node.name().strip_prefix(b"kq_soft_max-").and_then(leading_number);
        return layer.map_or(GraphNodeKind::Other, GraphNodeKind::Softmax);
    }
    if node.is_flash_attention() {
        let layer = flash_attention_layer(node);
        return layer.map_or(GraphNodeKind::UnknownFlashAttention, GraphNodeKind::FlashAttention);
    }
    if node.is_set_rows()
        && let Some(tensor) = node.view_source()
        && let Some(layer) = tensor.name().strip_prefix(b"cache_k_l").and_then(leading_number)
    {
        return GraphNodeKind::KeyWrite(layer);
    }
    GraphNodeKind::Other
}

/// The layer of a flash attention node, which has no name: that of its queries (`Qcur-N`), or else that of its keys
/// (`cache_k_lN`), which layers may share.
fn flash_attention_layer(node: &GraphNode<'_>) -> Option<usize> {
    let queries = node.source(0)?;
    let keys = node.source(1)?;
    let named = |queries: &GraphNode<'_>| queries.name().strip_prefix(b"Qcur-").and_then(leading_number);
    let of_queries = queries.view_source().map_or_else(|| named(&queries), |base| named(&base));
    let of_keys = || keys.view_source()?.name().strip_prefix(b"cache_k_l").and_then(leading_number);
    of_queries.or_else(of_keys)
}

/// The number that a name begins with.
fn leading_number(name: &[u8]) -> Option<usize> {
    let digits = name.iter().take_while(|c| c.is_ascii_digit()).count();
    str::from_utf8(&name[..digits]).ok()?.parse().ok()
}

//! Attention rows, read from llama.cpp's compute graph while it runs, and reduced at once to one number per cell.
//!
//! llama.cpp offers every node of the graph to an evaluation callback. The tap asks for the softmax (`kq_soft_max-N`) of
//! the layers that it needs. If it asks for none, the graph runs in one piece, and the tap costs nothing.
//!
//! Rows are indexed by *cell*. The tap does not know which token is in a cell:
//! [`SequenceTable`](crate::cells::SequenceTable) does, and learns it from the same graph.

use crate::ffi::node::GraphNode;
use halo_core::attention::LayerReduction;

/// The tokens of a batch whose attention rows are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapRows {
    None,
    Last,
    All,
}

/// What the tap records of the next batch.
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
    /// Record the cells that the mask lets the last token attend to.
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
    config: TapConfig,
    rows: Vec<ReducedAttention>,
    heads: Vec<LayerHeads>,
    cells: Vec<i64>,
    visible: Vec<u32>,
    layers_reduced: usize,
    head_sum: Vec<f32>,
    head_max: Vec<f32>,
    scratch: Vec<f32>,
    /// The layers that attend to a sliding window of the last tokens only. Their rows say nothing about distant text, so
    /// they are no part of the reduced row.
    sliding: Vec<bool>,
    /// While masks are probed: the number of cells that each layer lets the last token attend to.
    mask_probe: Option<Vec<usize>>,
}

impl AttentionTap {
    pub(crate) fn new(layers: usize) -> Self {
        Self {
            layers,
            config: TapConfig::off(),
            rows: Vec::new(),
            heads: Vec::new(),
            cells: Vec::new(),
            visible: Vec::new(),
            layers_reduced: 0,
            head_sum: Vec::new(),
            head_max: Vec::new(),
            scratch: Vec::new(),
            sliding: vec![false; layers],
            mask_probe: None,
        }
    }

    /// Counts the cells that each layer lets the last token of the next batch attend to.
    pub(crate) fn begin_mask_probe(&mut self) {
        self.configure(TapConfig::off());
        self.mask_probe = Some(vec![0; self.layers]);
    }

    /// The layers that saw fewer cells than others have a sliding window.
    pub(crate) fn end_mask_probe(&mut self) {
        let counts = self.mask_probe.take().unwrap_or_default();
        let most = counts.iter().copied().max().unwrap_or(0);
        self.sliding = counts.iter().map(|&count| count > 0 && count < most).collect();
    }

    /// Whether a layer attends to a sliding window of the last tokens only.
    #[must_use]
    pub fn is_sliding(&self, layer: usize) -> bool {
        self.sliding.get(layer) == Some(&true)
    }

    /// Drops what was recorded, and sets what is recorded of the next batch.
    pub fn configure(&mut self, config: TapConfig) {
        self.config = config;
        self.rows.clear();
        self.heads.clear();
        self.cells.clear();
        self.visible.clear();
        self.layers_reduced = 0;
    }

    /// The cells that the last token of the batch could attend to, including its own, in ascending order.
    #[must_use]
    pub fn visible_cells(&self) -> &[u32] {
        &self.visible
    }

    /// The cells that the tokens of the batch were written to, in batch order.
    #[must_use]
    pub fn batch_cells(&self) -> &[i64] {
        &self.cells
    }

    /// The recorded rows, in batch order. Empty for an architecture whose graph has no softmax nodes.
    #[must_use]
    pub fn take_rows(&mut self) -> Vec<ReducedAttention> {
        let layer_count = std::mem::take(&mut self.layers_reduced);
        let mut rows = std::mem::take(&mut self.rows);
        if layer_count == 0 {
            return Vec::new();
        }
        if !matches!(self.config.layers, LayerReduction::Max) {
            let share = 1.0 / layer_count as f32;
            for row in &mut rows {
                row.mean.iter_mut().chain(&mut row.max).for_each(|a| *a *= share);
            }
        }
        rows
    }

    /// The recorded heads of every layer; see [`TapConfig::full`].
    #[must_use]
    pub fn take_heads(&mut self) -> Vec<LayerHeads> {
        std::mem::take(&mut self.heads)
    }

    fn wants_layer(&self, layer: usize) -> bool {
        self.config.rows != TapRows::None && (self.config.full || self.reduces_layer(layer))
    }

    /// Whether a layer is part of the reduced row.
    fn reduces_layer(&self, layer: usize) -> bool {
        match &self.config.layers {
            LayerReduction::Mean | LayerReduction::Max => !self.is_sliding(layer),
            LayerReduction::Last => {
                Some(layer) == (0..self.layers).rev().find(|&layer| !self.is_sliding(layer))
            }
            LayerReduction::Selected(these) => these.contains(&layer),
        }
    }

    pub(crate) fn wants_node(&self, node: &GraphNode<'_>) -> bool {
        match node_kind(node) {
            GraphNodeKind::Softmax(layer) => {
                self.wants_layer(layer) || self.wants_mask(layer) || self.mask_probe.is_some()
            }
            GraphNodeKind::KeyWrite(layer) => self.wants_cells(layer),
            GraphNodeKind::Other => false,
        }
    }

    /// The mask is the same in every global layer, so one is enough.
    fn wants_mask(&self, layer: usize) -> bool {
        self.config.visible_cells && self.visible.is_empty() && !self.is_sliding(layer)
    }

    /// The cells of a token are the same in every global layer, so one is enough.
    fn wants_cells(&self, layer: usize) -> bool {
        self.config.cells && self.cells.is_empty() && !self.is_sliding(layer)
    }

    pub(crate) fn observe(&mut self, node: &GraphNode<'_>) {
        match node_kind(node) {
            GraphNodeKind::Softmax(layer) => {
                if self.wants_mask(layer) {
                    self.visible = self.visible_in(node);
                }
                if self.mask_probe.is_some() {
                    let count = self.visible_in(node).len();
                    let counts = self.mask_probe.as_mut().and_then(|counts| counts.get_mut(layer));
                    counts.into_iter().for_each(|known| *known = count);
                }
                if self.wants_layer(layer) {
                    self.observe_softmax(layer, node);
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
            GraphNodeKind::Other => {}
        }
    }

    /// The cells that the last token can attend to. The mask adds a finite number to the score of such a cell (0, or the
    /// bias of ALiBi), and minus infinity to all others.
    fn visible_in(&mut self, softmax: &GraphNode<'_>) -> Vec<u32> {
        let [_, tokens, _, _] = softmax.dims();
        let Some(mask) = softmax.source(1) else { return Vec::new() };
        let row = mask.f32_row(tokens.wrapping_sub(1), 0, &mut self.scratch).unwrap_or_default();
        let visible = row.iter().enumerate().filter(|(_, bias)| **bias > f32::NEG_INFINITY);
        visible.map(|(cell, _)| cell as u32).collect()
    }

    fn observe_softmax(&mut self, layer: usize, node: &GraphNode<'_>) {
        let [cells, tokens, heads, streams] = node.dims();
        if streams != 1 || tokens == 0 || heads == 0 || cells == 0 {
            return;
        }
        let recorded = if self.config.rows == TapRows::All { 0..tokens } else { tokens - 1..tokens };
        let (reduced, first) = (self.reduces_layer(layer), recorded.start);
        if reduced && self.rows.len() != recorded.len() {
            self.rows = vec![ReducedAttention::default(); recorded.len()];
        }
        for token in recorded {
            self.head_sum.clear();
            self.head_sum.resize(cells, 0.0);
            self.head_max.clear();
            self.head_max.resize(if self.config.max { cells } else { 0 }, 0.0);
            let mut all_heads = Vec::new();
            for head in 0..heads {
                let Some(row) = node.f32_row(token, head, &mut self.scratch) else { return };
                if self.config.full {
                    all_heads.extend_from_slice(row);
                }
                self.head_sum.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
                max_into(&mut self.head_max, row);
            }
            if reduced {
                self.add_layer(token - first, heads);
            }
            if self.config.full {
                self.heads.push(LayerHeads { layer, token, cells, values: all_heads });
            }
        }
        self.layers_reduced += usize::from(reduced);
    }

    /// Adds the heads of one layer, summed in `head_sum` and `head_max`, to the `n`-th row.
    fn add_layer(&mut self, n: usize, heads: usize) {
        let share = 1.0 / heads as f32;
        let row = &mut self.rows[n];
        row.mean.resize(self.head_sum.len(), 0.0);
        row.max.resize(self.head_max.len(), 0.0);
        if self.config.layers == LayerReduction::Max {
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
    /// Keys of the batch being written to their cells in a layer.
    KeyWrite(usize),
    Other,
}

fn node_kind(node: &GraphNode<'_>) -> GraphNodeKind {
    if let Some(layer) = node.name().strip_prefix(b"kq_soft_max-") {
        let layer = str::from_utf8(layer).ok().and_then(|l| l.parse().ok());
        return layer.map_or(GraphNodeKind::Other, GraphNodeKind::Softmax);
    }
    if node.is_set_rows()
        && let Some(tensor) = node.view_source()
        && let Some(layer) = tensor.name().strip_prefix(b"cache_k_l")
    {
        let digits = layer.iter().take_while(|c| c.is_ascii_digit()).count();
        let layer = str::from_utf8(&layer[..digits]).ok().and_then(|l| l.parse().ok());
        return layer.map_or(GraphNodeKind::Other, GraphNodeKind::KeyWrite);
    }
    GraphNodeKind::Other
}

//! What the model looks at, taken from the graph while it is computed, and reduced on the spot to one number a cell.
//!
//! The softmax of every layer passes by as a node. For each it is decided before the graph runs whether it is wanted;
//! with nothing wanted, the graph runs in one piece and this costs nothing. Rows come out by *cell*; what token a cell
//! holds is for the cell table to say, which is kept from the same graph.

use crate::ffi::Node;
use halo_core::attention::Layers;

/// Which rows of a batch are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None: nothing is looked at.
    None,
    /// That of the last token.
    Last,
    /// All.
    All,
}

/// What is wanted of the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Which rows.
    pub rows: Rows,
    /// How layers are made one.
    pub layers: Layers,
    /// Whether the largest head of each layer is wanted beside their mean.
    pub max: bool,
    /// Whether every head of every layer is kept as well.
    pub full: bool,
    /// Whether the cells that the tokens go to are wanted.
    pub cells: bool,
    /// Whether the cells that the last token could see are wanted.
    pub seen: bool,
}

impl Want {
    /// Nothing.
    #[must_use]
    pub fn nothing() -> Self {
        Self { rows: Rows::None, layers: Layers::Mean, max: false, full: false, cells: false, seen: false }
    }
}

/// What one token looked at, by cell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The mean over heads, of the layers as wanted.
    pub mean: Vec<f32>,
    /// The largest head of each layer instead; empty where it was not wanted.
    pub max: Vec<f32>,
}

/// One layer, every head of it: `heads × cells` numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Which layer.
    pub layer: usize,
    /// Which token of the batch.
    pub token: usize,
    /// How many cells a row has.
    pub cells: usize,
    /// Its heads one after the other.
    pub values: Vec<f32>,
}

/// What looks at the graph.
#[derive(Debug)]
pub struct Tap {
    layers: usize,
    want: Want,
    looks: Vec<Row>,
    full: Vec<Heads>,
    cells: Vec<i64>,
    visible: Vec<u32>,
    seen: usize,
    sum: Vec<f32>,
    largest: Vec<f32>,
    scratch: Vec<f32>,
}

impl Tap {
    pub(crate) fn new(layers: usize) -> Self {
        Self {
            layers,
            want: Want::nothing(),
            looks: Vec::new(),
            full: Vec::new(),
            cells: Vec::new(),
            visible: Vec::new(),
            seen: 0,
            sum: Vec::new(),
            largest: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Forgets what was seen, and says what is wanted of the next batch.
    pub fn want(&mut self, want: Want) {
        self.want = want;
        self.looks.clear();
        self.full.clear();
        self.cells.clear();
        self.visible.clear();
        self.seen = 0;
    }

    /// The cells that the last token of the batch could see, its own among them, in order.
    #[must_use]
    pub fn visible(&self) -> &[u32] {
        &self.visible
    }

    /// The cells that the tokens of the batch went to, in order.
    #[must_use]
    pub fn cells(&self) -> &[i64] {
        &self.cells
    }

    /// What the tokens looked at: of the last one, or of all in order, as was wanted. Nothing where the graph did not
    /// show it, as with a kind of model that has no such nodes.
    #[must_use]
    pub fn looks(&mut self) -> Vec<Row> {
        let seen = std::mem::take(&mut self.seen);
        let mut looks = std::mem::take(&mut self.looks);
        if seen == 0 {
            return Vec::new();
        }
        if !matches!(self.want.layers, Layers::Max) {
            let share = 1.0 / seen as f32;
            for look in &mut looks {
                look.mean.iter_mut().chain(&mut look.max).for_each(|a| *a *= share);
            }
        }
        looks
    }

    /// Every head of every layer that was seen.
    #[must_use]
    pub fn full(&mut self) -> Vec<Heads> {
        std::mem::take(&mut self.full)
    }

    fn wants_layer(&self, layer: usize) -> bool {
        self.want.rows != Rows::None && (self.want.full || self.counts(layer))
    }

    /// Whether a layer counts for the row, and is not only kept whole.
    fn counts(&self, layer: usize) -> bool {
        match &self.want.layers {
            Layers::Mean | Layers::Max => true,
            Layers::Last => layer + 1 == self.layers,
            Layers::These(these) => these.contains(&layer),
        }
    }

    pub(crate) fn wants(&self, node: &Node<'_>) -> bool {
        match kind(node) {
            // What can be seen is the same in every layer.
            Kind::Softmax(layer) => self.wants_layer(layer) || (self.want.seen && self.visible.is_empty()),
            // So are the cells of the batch.
            Kind::Keys => self.want.cells && self.cells.is_empty(),
            Kind::Other => false,
        }
    }

    pub(crate) fn see(&mut self, node: &Node<'_>) {
        match kind(node) {
            Kind::Softmax(layer) => {
                if self.want.seen && self.visible.is_empty() {
                    self.see_mask(node);
                }
                if self.wants_layer(layer) {
                    self.see_softmax(layer, node);
                }
            }
            Kind::Keys => {
                if self.cells.is_empty()
                    && let Some(rows) = node.source(1)
                    && !rows.integers(&mut self.cells)
                {
                    self.cells.clear();
                }
            }
            Kind::Other => {}
        }
    }

    /// The mask tells what can be seen: nothing is taken from a cell that can, minus infinity from one that cannot.
    fn see_mask(&mut self, node: &Node<'_>) {
        let [_, tokens, _, _] = node.extent();
        if let Some(mask) = node.source(1)
            && let Some(row) = mask.row(tokens.wrapping_sub(1), 0, &mut self.scratch)
        {
            let open = row.iter().enumerate().filter(|(_, bias)| **bias > f32::NEG_INFINITY);
            self.visible.extend(open.map(|(cell, _)| cell as u32));
        }
    }

    fn see_softmax(&mut self, layer: usize, node: &Node<'_>) {
        let [cells, tokens, heads, streams] = node.extent();
        if streams != 1 || tokens == 0 || heads == 0 || cells == 0 {
            return;
        }
        let wanted = if self.want.rows == Rows::All { 0..tokens } else { tokens - 1..tokens };
        let (counts, first) = (self.counts(layer), wanted.start);
        if counts && self.looks.len() != wanted.len() {
            self.looks = vec![Row::default(); wanted.len()];
        }
        for token in wanted {
            // The heads of this layer, added up; the largest of each cell, if it is wanted; and all of them, if they are.
            self.sum.clear();
            self.sum.resize(cells, 0.0);
            self.largest.clear();
            self.largest.resize(if self.want.max { cells } else { 0 }, 0.0);
            let mut whole = Vec::new();
            for head in 0..heads {
                let Some(row) = node.row(token, head, &mut self.scratch) else { return };
                if self.want.full {
                    whole.extend_from_slice(row);
                }
                self.sum.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
                largest(&mut self.largest, row);
            }
            if counts {
                let share = 1.0 / heads as f32;
                let look = &mut self.looks[token - first];
                look.mean.resize(cells, 0.0);
                look.max.resize(self.largest.len(), 0.0);
                if self.want.layers == Layers::Max {
                    look.mean.iter_mut().zip(&self.sum).for_each(|(most, a)| *most = most.max(a * share));
                    largest(&mut look.max, &self.largest);
                } else {
                    look.mean.iter_mut().zip(&self.sum).for_each(|(mean, a)| *mean += a * share);
                    look.max.iter_mut().zip(&self.largest).for_each(|(sum, a)| *sum += a);
                }
            }
            if self.want.full {
                self.full.push(Heads { layer, token, cells, values: whole });
            }
        }
        self.seen += usize::from(counts);
    }
}

fn largest(into: &mut [f32], row: &[f32]) {
    into.iter_mut().zip(row).for_each(|(most, a)| *most = most.max(*a));
}

enum Kind {
    Softmax(usize),
    Keys,
    Other,
}

fn kind(node: &Node<'_>) -> Kind {
    if let Some(layer) = node.name().strip_prefix(b"kq_soft_max-") {
        let layer = str::from_utf8(layer).ok().and_then(|l| l.parse().ok());
        return layer.map_or(Kind::Other, Kind::Softmax);
    }
    if node.sets_rows() && node.view_of().is_some_and(|table| table.name().starts_with(b"cache_k")) {
        return Kind::Keys;
    }
    Kind::Other
}

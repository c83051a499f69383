//! How many layers of a model are on the GPU.
//!
//! llama.cpp offloads whole layers, from the last one backwards: first the output layer, then the blocks. The KV cells of a
//! block are where the block is. The plan counts the weights, the cells of one window, and a reserve for what llama.cpp
//! computes in; the reserve is what llama.cpp's own tools leave free.

use crate::gguf::GgufHeader;
use std::fmt;

/// Memory of the GPU that stays free for intermediate tensors, the attention rows and other programs.
const RESERVED_BYTES: u64 = 1 << 30;

/// The setting: how many layers are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// All that fit the free memory of the GPU; none without one.
    #[default]
    Auto,
    /// So many, at most all.
    Count(u32),
}

impl GpuLayers {
    /// The number; none for all that fit.
    #[must_use]
    pub fn count(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::Count(count) => Some(count),
        }
    }

    /// So many, or all that fit.
    #[must_use]
    pub fn of_count(count: Option<u32>) -> Self {
        count.map_or(Self::Auto, Self::Count)
    }

    /// Whether layers may be offloaded at all.
    #[must_use]
    pub fn allows_gpu(self) -> bool {
        self != Self::Count(0)
    }
}

/// Where the layers of a loaded model are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuPlacement {
    /// Layers on the GPU, with the output layer.
    pub layers: u32,
    /// All layers, with the output layer.
    pub all: u32,
    /// Weights on the GPU.
    pub weight_bytes: u64,
    /// KV cells on the GPU.
    pub cell_bytes: u64,
    /// What was free there before.
    pub free_bytes: u64,
}

impl fmt::Display for GpuPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let Self { layers, all, weight_bytes, cell_bytes, free_bytes } = *self;
        write!(
            f,
            "{layers} of {all} layers on the GPU: {:.1} GiB of weights and {:.1} GiB of KV cells, {:.1} GiB were free",
            gib(weight_bytes),
            gib(cell_bytes),
            gib(free_bytes),
        )
    }
}

/// What the layers of a model need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSizes {
    /// Bytes of the weights of each block.
    pub blocks: Vec<u64>,
    /// Bytes of the weights of the output layer.
    pub output: u64,
    /// Bytes of one KV cell over all blocks.
    pub cell: u64,
}

impl LayerSizes {
    #[must_use]
    pub fn of(header: &GgufHeader) -> Self {
        let cell = header.cell_bytes();
        Self { blocks: header.block_bytes.clone(), output: header.output_bytes, cell }
    }

    /// The blocks and the output layer.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Bytes of weights and of so many cells on the GPU with so many layers there.
    #[must_use]
    pub fn gpu_bytes(&self, layers: u32, cells: u32) -> (u64, u64) {
        if layers == 0 {
            return (0, 0);
        }
        let blocks = (layers as usize - 1).min(self.blocks.len());
        let weights = self.blocks.iter().rev().take(blocks).sum::<u64>() + self.output;
        let cells = self.cell.saturating_mul(u64::from(cells));
        (weights, cells / (self.blocks.len() as u64).max(1) * blocks as u64)
    }

    /// The most layers that fit so many free bytes together with their part of so many cells.
    #[must_use]
    pub fn most_that_fit(&self, cells: u32, free: u64) -> u32 {
        let room = free.saturating_sub(RESERVED_BYTES);
        let fits = |layers: &u32| {
            let (weights, cells) = self.gpu_bytes(*layers, cells);
            weights.saturating_add(cells) <= room
        };
        (0..=self.count()).rev().find(fits).unwrap_or(0)
    }
}

/// Numbers of layers to try one after the other: loading fails where the memory of the GPU is not enough after all.
pub(crate) fn fallbacks(layers: u32) -> impl Iterator<Item = u32> {
    let mut seen = None;
    [layers, layers - layers / 4, layers / 2, 0].into_iter().filter(move |&n| seen.replace(n) != Some(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Four blocks of 100 MiB, an output layer of 300 MiB; a thousand cells of all blocks take 40 MiB.
    fn sizes() -> LayerSizes {
        LayerSizes { blocks: vec![100 * MIB; 4], output: 300 * MIB, cell: 40 * MIB / 1000 }
    }

    #[test]
    fn gpu_layers_fill_the_free_memory() {
        let sizes = sizes();
        let fit = |free_mib: u64| sizes.most_that_fit(1000, 1024 * MIB + free_mib * MIB);
        assert_eq!(fit(299), 0, "the output layer comes first");
        assert_eq!(fit(300), 1);
        assert_eq!(fit(409), 1, "a block takes its cells with it");
        assert_eq!(fit(410), 2);
        assert_eq!(fit(739), 4);
        assert_eq!(fit(740), 5);
        assert_eq!(fit(1 << 20), 5, "at most all");
        assert_eq!(sizes.most_that_fit(1000, 100 * MIB), 0);
        assert_eq!(sizes.most_that_fit(20_000, 1024 * MIB + 740 * MIB), 2, "more cells leave less room");
    }

    #[test]
    fn gpu_layers_have_their_weights_and_cells() {
        let sizes = sizes();
        assert_eq!(sizes.gpu_bytes(0, 1000), (0, 0));
        assert_eq!(sizes.gpu_bytes(1, 1000), (300 * MIB, 0));
        let (weights, cells) = sizes.gpu_bytes(99, 1000);
        assert_eq!(weights, 700 * MIB);
        assert!(cells.abs_diff(40 * MIB) < 1000, "{cells}");
    }

    #[test]
    fn gpu_layers_fall_back_to_fewer() {
        let tried = |layers| fallbacks(layers).collect::<Vec<_>>();
        assert_eq!(tried(33), [33, 25, 16, 0]);
        assert_eq!(tried(2), [2, 1, 0]);
        assert_eq!(tried(1), [1, 0]);
        assert_eq!(tried(0), [0]);
    }

    #[test]
    fn gpu_placement_is_said_with_figures() {
        let placement = GpuPlacement {
            layers: 33,
            all: 33,
            weight_bytes: 4608 * MIB,
            cell_bytes: 1024 * MIB,
            free_bytes: 24 << 30,
        };
        let text =
            "33 of 33 layers on the GPU: 4.5 GiB of weights and 1.0 GiB of KV cells, 24.0 GiB were free";
        assert_eq!(placement.to_string(), text);
    }
}

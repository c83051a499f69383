//! Exact nearest-neighbour search by dot product.
//!
//! A row is stored twice: as 16-bit integers with one scale, from which its score is computed, and as 4-bit codes
//! (`quantized`), from which an upper bound of its score is computed. A search computes the bounds of all rows and the
//! scores of the few rows that can still be among the best. The result equals that of scoring every row, to the last bit.
//!
//! There is nothing to train or tune. Adding a row costs the same for any size, and growing copies one block at most.
//! Sums are computed in one fixed order, so scores are the same on every machine and with any number of threads.

mod quantized;
#[cfg(test)]
mod tests;

use multiversion::multiversion;
use quantized::{PackedCodes, QuantizedQuery, RowQuantization};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::num::NonZero;
use std::ops::RangeInclusive;

const BLOCK_ROWS: usize = 1024;
/// Rows whose bounds are compared as one group.
const SPAN_ROWS: usize = 64;
/// Fewer rows per thread are not worth starting it.
const MIN_ROWS_PER_THREAD: usize = 16 * BLOCK_ROWS;
/// Parallel sums of a dot product, for SIMD.
const LANES: usize = 16;
/// The allowed range of the largest absolute value of a vector. Within it no product overflows or becomes subnormal.
const MAGNITUDE_RANGE: RangeInclusive<f32> = 1e-15..=1e15;

#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum VectorError {
    #[error("the vector has {got} dimensions, the index {expected}")]
    DimensionMismatch { expected: usize, got: usize },
    /// A value is NaN, infinite or too large, or all are too small but not 0.
    #[error("the largest value of the vector is {largest:e}; it must be 0, or from 1e-15 to 1e15")]
    MagnitudeOutOfRange { largest: f32 },
    #[error("the index has no row {row}")]
    NoSuchRow { row: u32 },
    #[error("the index is full")]
    TooManyRows,
}

/// Vectors of equal dimensions. Rows are numbered in the order in which they are pushed.
#[derive(Debug)]
pub struct VectorIndex {
    dimensions: usize,
    blocks: Vec<VectorBlock>,
    removed: usize,
    threads: usize,
}

impl VectorIndex {
    #[must_use]
    pub fn new(dimensions: NonZero<u16>) -> Self {
        Self { dimensions: dimensions.get().into(), blocks: Vec::new(), removed: 0, threads: 1 }
    }

    /// Sets the most threads of a search; the default is 1. Small indexes use fewer.
    #[must_use]
    pub fn with_threads(self, threads: NonZero<usize>) -> Self {
        Self { threads: threads.get(), ..self }
    }

    #[must_use]
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// The number of rows ever pushed, which is the number of the next row.
    #[must_use]
    pub fn row_count(&self) -> usize {
        self.blocks.last().map_or(0, |last| (self.blocks.len() - 1) * BLOCK_ROWS + last.len())
    }

    /// The number of rows that are not removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.row_count() - self.removed
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.blocks.iter().map(VectorBlock::memory_bytes).sum()
    }

    /// Adds a row and returns its number.
    pub fn push(&mut self, vector: &[f32]) -> Result<u32, VectorError> {
        let largest = self.check_vector(vector)?;
        let row = u32::try_from(self.row_count()).map_err(|_| VectorError::TooManyRows)?;
        if (row as usize).is_multiple_of(BLOCK_ROWS) {
            self.blocks.push(VectorBlock::default());
        }
        // The first block doubles its capacity until it is full, so that a small index takes little memory. Later blocks are
        // allocated at once.
        let capacity =
            if self.blocks.len() > 1 { BLOCK_ROWS } else { (row as usize).clamp(16, BLOCK_ROWS / 2) };
        if let Some(block) = self.blocks.last_mut() {
            block.add_empty_row(capacity, self.dimensions);
            block.set_row(block.len() - 1, vector, largest);
        }
        Ok(row)
    }

    /// Replaces the vector of a row. A removed row can be found again.
    pub fn replace(&mut self, row: u32, vector: &[f32]) -> Result<(), VectorError> {
        let largest = self.check_vector(vector)?;
        let (block, at) = self.locate(row).ok_or(VectorError::NoSuchRow { row })?;
        self.removed -= usize::from(self.blocks[block].quantizations[at].is_removed());
        self.blocks[block].set_row(at, vector, largest);
        Ok(())
    }

    /// Hides a row from searches until it is replaced. Its number is not reused.
    pub fn remove(&mut self, row: u32) -> Result<(), VectorError> {
        let (block, at) = self.locate(row).ok_or(VectorError::NoSuchRow { row })?;
        let quantization = &mut self.blocks[block].quantizations[at];
        self.removed += usize::from(!quantization.is_removed());
        *quantization = RowQuantization::REMOVED;
        Ok(())
    }

    /// The dot product of a row with the query. None if the row is removed or does not exist.
    pub fn score(&self, row: u32, query: &[f32]) -> Result<Option<f32>, VectorError> {
        self.check_vector(query)?;
        Ok(self.locate(row).and_then(|(block, at)| self.blocks[block].score(at, query)))
    }

    /// The vector of a row, with the rounding of its 16-bit values. None if the row is removed or does not exist.
    #[must_use]
    pub fn vector(&self, row: u32) -> Option<Vec<f32>> {
        let (block, at) = self.locate(row)?;
        let block = &self.blocks[block];
        let values = &block.values[at * self.dimensions..][..self.dimensions];
        let scale = block.scales[at];
        (!block.quantizations[at].is_removed())
            .then(|| values.iter().map(|&value| f32::from(value) * scale).collect())
    }

    /// The scores of all rows; −∞ for removed ones.
    pub fn scores(&self, query: &[f32]) -> Result<Vec<f32>, VectorError> {
        self.check_vector(query)?;
        let score = |block: &VectorBlock, at| block.score(at, query).unwrap_or(f32::NEG_INFINITY);
        let scores = self.blocks.iter().flat_map(|block| (0..block.len()).map(move |at| score(block, at)));
        Ok(scores.collect())
    }

    /// The `limit` best rows that `keep` accepts, the best first; of equal scores the lower row is first. `keep` is called
    /// only for rows that can be among them.
    pub fn search(
        &self,
        query: &[f32],
        limit: usize,
        mut keep: impl FnMut(u32) -> bool,
    ) -> Result<Vec<(u32, f32)>, VectorError> {
        self.check_vector(query)?;
        let bounds = self.upper_bounds(&QuantizedQuery::new(query));
        // Spans with the highest bounds come first: good scores raise the threshold early, and other spans are skipped.
        let mut spans: Vec<(f32, usize)> = bounds.chunks(SPAN_ROWS).map(max_bound).zip(0..).collect();
        spans.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let mut best = TopRows::new(limit);
        for (highest, span) in spans {
            if highest < best.threshold {
                break;
            }
            for (row, &bound) in bounds.iter().enumerate().skip(span * SPAN_ROWS).take(SPAN_ROWS) {
                if bound >= best.threshold
                    && keep(row as u32)
                    && let Some(score) = self.blocks[row / BLOCK_ROWS].score(row % BLOCK_ROWS, query)
                {
                    best.push(VectorHit { score, row: row as u32 });
                }
            }
        }
        Ok(best.into_sorted())
    }

    /// An upper bound of the score of each row; NaN for removed ones.
    fn upper_bounds(&self, query: &QuantizedQuery) -> Vec<f32> {
        let compute = |blocks: &[VectorBlock], bounds: &mut [f32]| {
            for (block, bounds) in blocks.iter().zip(bounds.chunks_mut(BLOCK_ROWS)) {
                quantized::upper_bounds(query, &block.codes, &block.quantizations, bounds);
            }
        };
        let mut bounds = vec![0.0; self.row_count()];
        let threads = self.threads.min(bounds.len() / MIN_ROWS_PER_THREAD).max(1);
        let share = self.blocks.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let mut shares = self.blocks.chunks(share).zip(bounds.chunks_mut(share * BLOCK_ROWS));
            let own = shares.next();
            for (blocks, bounds) in shares {
                scope.spawn(move || compute(blocks, bounds));
            }
            if let Some((blocks, bounds)) = own {
                compute(blocks, bounds);
            }
        });
        bounds
    }

    /// Checks a vector; returns its largest absolute value.
    fn check_vector(&self, vector: &[f32]) -> Result<f32, VectorError> {
        let (expected, got) = (self.dimensions, vector.len());
        if got != expected {
            return Err(VectorError::DimensionMismatch { expected, got });
        }
        let largest = max_abs(vector);
        if largest == 0.0 || MAGNITUDE_RANGE.contains(&largest) {
            Ok(largest)
        } else {
            Err(VectorError::MagnitudeOutOfRange { largest })
        }
    }

    /// The block of a row, and its index there.
    fn locate(&self, row: u32) -> Option<(usize, usize)> {
        let row = row as usize;
        (row < self.row_count()).then_some((row / BLOCK_ROWS, row % BLOCK_ROWS))
    }
}

/// Up to [`BLOCK_ROWS`] rows, as a structure of arrays.
#[derive(Debug, Default)]
struct VectorBlock {
    /// The vectors, each value divided by the scale of its row.
    values: Vec<i16>,
    scales: Vec<f32>,
    codes: Vec<PackedCodes>,
    quantizations: Vec<RowQuantization>,
}

impl VectorBlock {
    fn len(&self) -> usize {
        self.quantizations.len()
    }

    fn memory_bytes(&self) -> usize {
        self.values.capacity() * size_of::<i16>()
            + self.scales.capacity() * size_of::<f32>()
            + self.codes.capacity() * size_of::<PackedCodes>()
            + self.quantizations.capacity() * size_of::<RowQuantization>()
    }

    /// Adds a row without values. If the block is full, it reserves `capacity` more rows.
    fn add_empty_row(&mut self, capacity: usize, dimensions: usize) {
        let (rows, groups) = (self.len(), quantized::group_count(dimensions));
        if rows == self.quantizations.capacity() {
            self.values.reserve_exact(capacity * dimensions);
            self.scales.reserve_exact(capacity);
            self.codes.reserve_exact(capacity * groups);
            self.quantizations.reserve_exact(capacity);
        }
        self.values.resize((rows + 1) * dimensions, 0);
        self.scales.push(0.0);
        self.codes.resize((rows + 1) * groups, PackedCodes::ZERO);
        self.quantizations.push(RowQuantization::REMOVED);
    }

    fn set_row(&mut self, at: usize, vector: &[f32], largest: f32) {
        let (dimensions, groups) = (vector.len(), quantized::group_count(vector.len()));
        let values = &mut self.values[at * dimensions..][..dimensions];
        let scale = largest / f32::from(i16::MAX);
        quantize_row(vector, scale, values);
        self.scales[at] = scale;
        self.quantizations[at] =
            quantized::encode_row(values, scale, &mut self.codes[at * groups..][..groups]);
    }

    fn score(&self, at: usize, query: &[f32]) -> Option<f32> {
        let values = &self.values[at * query.len()..][..query.len()];
        // Adding 0 turns −0 into 0; `total_cmp` orders them differently.
        (!self.quantizations[at].is_removed()).then(|| dot(values, query) * self.scales[at] + 0.0)
    }
}

/// The largest absolute value. Bit patterns are compared as integers, so infinity and NaN are the largest.
#[multiversion(targets("x86_64+avx2"))]
fn max_abs(vector: &[f32]) -> f32 {
    let sizes = vector.iter().map(|x| x.abs().to_bits().cast_signed());
    f32::from_bits(sizes.fold(0, i32::max).cast_unsigned())
}

/// Rounds to multiples of `scale`, which is chosen so that all fit into 16 bits.
#[multiversion(targets("x86_64+avx2"))]
fn quantize_row(vector: &[f32], scale: f32, values: &mut [i16]) {
    /// 1.5 · 2²³: adding it rounds to an integer, which is then in the lowest bits.
    const ROUNDING_BIAS: f32 = 12_582_912.0;
    let inverse = if scale > 0.0 { scale.recip() } else { 0.0 };
    for (value, x) in values.iter_mut().zip(vector) {
        *value = (x * inverse + ROUNDING_BIAS).to_bits() as i16;
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn dot(values: &[i16], query: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (values, last_values) = values.as_chunks::<LANES>();
    let (query, last_query) = query.as_chunks::<LANES>();
    for (values, query) in values.iter().zip(query) {
        for lane in 0..LANES {
            sums[lane] += f32::from(values[lane]) * query[lane];
        }
    }
    let last = last_values.iter().zip(last_query).map(|(&value, x)| f32::from(value) * x);
    sums.into_iter().chain(last).sum()
}

fn max_bound(bounds: &[f32]) -> f32 {
    bounds.iter().fold(f32::NEG_INFINITY, |highest, &bound| highest.max(bound))
}

/// A row and its score. The better hit is the greater one.
#[derive(Clone, Copy, Debug)]
struct VectorHit {
    score: f32,
    row: u32,
}

impl Ord for VectorHit {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.row.cmp(&self.row))
    }
}

impl PartialOrd for VectorHit {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for VectorHit {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for VectorHit {}

/// The best hits so far.
struct TopRows {
    limit: usize,
    /// The worst hit is on top.
    hits: BinaryHeap<Reverse<VectorHit>>,
    /// A row with a lower bound than this is not among them.
    threshold: f32,
}

impl TopRows {
    fn new(limit: usize) -> Self {
        let threshold = if limit == 0 { f32::INFINITY } else { f32::NEG_INFINITY };
        Self { limit, hits: BinaryHeap::new(), threshold }
    }

    fn push(&mut self, hit: VectorHit) {
        if self.hits.len() < self.limit {
            self.hits.push(Reverse(hit));
        } else if let Some(mut worst) = self.hits.peek_mut()
            && hit > worst.0
        {
            *worst = Reverse(hit);
        }
        if self.hits.len() == self.limit
            && let Some(worst) = self.hits.peek()
        {
            self.threshold = worst.0.score;
        }
    }

    fn into_sorted(self) -> Vec<(u32, f32)> {
        self.hits.into_sorted_vec().into_iter().map(|Reverse(hit)| (hit.row, hit.score)).collect()
    }
}

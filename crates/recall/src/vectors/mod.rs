//! Rows of numbers, and which of them are nearest to a query: exactly, and fast enough to ask them all.
//!
//! Each row is kept twice: in 16 bits a number with a scale of its own, which is what it scores by, and in four bits
//! (`coarse`), which say the most that it can score. A search looks at the four bits of every row, and at the 16 of
//! those few that could be among the best. So what it finds is what scoring every row would find, to the last bit.
//!
//! There is nothing to train and nothing to tune, a row costs the same to add whatever is there, and growing never
//! moves more than one block of rows. All sums are taken in one order: same rows, same query, same scores, on every
//! machine and any number of threads.

mod coarse;
#[cfg(test)]
mod tests;

use coarse::{Codes, Fit, Question};
use multiversion::multiversion;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::num::NonZero;
use std::ops::RangeInclusive;

/// Rows in a block.
const BLOCK: usize = 1024;
/// Rows that are looked at together.
const SPAN: usize = 64;
/// The fewest rows that are worth a thread.
const SHARE: usize = 16 * BLOCK;
/// Numbers that are summed up side by side.
const LANES: usize = 16;
/// How large the largest number of a vector may be. Within this no product leaves the range of what can be told.
const SIZES: RangeInclusive<f32> = 1e-15..=1e15;

/// A vector or a row that cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    /// It has more numbers than the others, or fewer.
    #[error("a vector of {got} numbers where all others have {wanted}")]
    Dimensions {
        /// As many as all others have.
        wanted: usize,
        /// As many as it has.
        got: usize,
    },
    /// A number is not finite, or too large; or all are too small, and not zero either.
    #[error("a vector whose largest number is {largest:e}: it must be 0, or from 1e-15 to 1e15")]
    Size {
        /// The size of the largest; infinity is larger than all numbers, and what is no number larger still.
        largest: f32,
    },
    /// No such row was ever pushed.
    #[error("there is no row {row}")]
    NoSuchRow {
        /// Which.
        row: u32,
    },
    /// All numbers that a row can have are taken.
    #[error("there can be no more rows")]
    Full,
}

/// Rows of numbers, all of the same dimensions, numbered as they come.
#[derive(Debug)]
pub struct Vectors {
    dimensions: usize,
    blocks: Vec<Block>,
    gone: usize,
    threads: usize,
}

impl Vectors {
    /// No rows yet, of so many dimensions.
    #[must_use]
    pub fn new(dimensions: NonZero<u16>) -> Self {
        Self { dimensions: dimensions.get().into(), blocks: Vec::new(), gone: 0, threads: 1 }
    }

    /// Searches on so many threads, where there are rows enough to pay for them; on one, if nothing is said.
    #[must_use]
    pub fn with_threads(self, threads: NonZero<usize>) -> Self {
        Self { threads: threads.get(), ..self }
    }

    /// How many numbers a row has.
    #[must_use]
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// How many rows were ever pushed; the next gets this number.
    #[must_use]
    pub fn pushed(&self) -> usize {
        self.blocks.last().map_or(0, |last| (self.blocks.len() - 1) * BLOCK + last.len())
    }

    /// How many rows can be found: all but those that were removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pushed() - self.gone
    }

    /// Whether there is nothing to find.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How much memory the rows take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(Block::bytes).sum()
    }

    /// One more row; its number.
    ///
    /// # Errors
    /// When the vector cannot be taken, or there are too many.
    pub fn push(&mut self, vector: &[f32]) -> Result<u32, Refused> {
        let largest = self.check(vector)?;
        let row = u32::try_from(self.pushed()).map_err(|_| Refused::Full)?;
        if (row as usize).is_multiple_of(BLOCK) {
            self.blocks.push(Block::default());
        }
        // The first block doubles until it is full, so that few rows take little. Those after it are made in one go.
        let room = if self.blocks.len() > 1 { BLOCK } else { (row as usize).clamp(16, BLOCK / 2) };
        if let Some(block) = self.blocks.last_mut() {
            block.grow(room, self.dimensions);
            block.set(block.len() - 1, vector, largest);
        }
        Ok(row)
    }

    /// Gives a row another vector, also one that was removed.
    ///
    /// # Errors
    /// When the vector cannot be taken, or there is no such row.
    pub fn replace(&mut self, row: u32, vector: &[f32]) -> Result<(), Refused> {
        let largest = self.check(vector)?;
        let (block, at) = self.place(row).ok_or(Refused::NoSuchRow { row })?;
        self.gone -= usize::from(self.blocks[block].fits[at].is_gone());
        self.blocks[block].set(at, vector, largest);
        Ok(())
    }

    /// Takes a row away: it cannot be found until it is replaced. Its number stays taken.
    ///
    /// # Errors
    /// When there is no such row. To remove one twice is no error.
    pub fn remove(&mut self, row: u32) -> Result<(), Refused> {
        let (block, at) = self.place(row).ok_or(Refused::NoSuchRow { row })?;
        let fit = &mut self.blocks[block].fits[at];
        self.gone += usize::from(!fit.is_gone());
        *fit = Fit::GONE;
        Ok(())
    }

    /// What a row scores: its dot product with the query. None where it was removed, or never pushed.
    ///
    /// # Errors
    /// When the query cannot be taken.
    pub fn score(&self, row: u32, query: &[f32]) -> Result<Option<f32>, Refused> {
        self.check(query)?;
        Ok(self.place(row).and_then(|(block, at)| self.blocks[block].score(at, query)))
    }

    /// The numbers of a row, as it scores by them. None where it was removed, or never pushed.
    #[must_use]
    pub fn vector(&self, row: u32) -> Option<Vec<f32>> {
        let (block, at) = self.place(row)?;
        let block = &self.blocks[block];
        let numbers = &block.numbers[at * self.dimensions..][..self.dimensions];
        let scale = block.scales[at];
        (!block.fits[at].is_gone()).then(|| numbers.iter().map(|&n| f32::from(n) * scale).collect())
    }

    /// What each row scores, by its number; −∞ where it was removed.
    ///
    /// # Errors
    /// When the query cannot be taken.
    pub fn scores(&self, query: &[f32]) -> Result<Vec<f32>, Refused> {
        self.check(query)?;
        let score = |block: &Block, at| block.score(at, query).unwrap_or(f32::NEG_INFINITY);
        let scores = self.blocks.iter().flat_map(|block| (0..block.len()).map(move |at| score(block, at)));
        Ok(scores.collect())
    }

    /// The rows that score best among those that `keep` keeps, at most `most`, the best first. Of equals the lower
    /// row comes first. `keep` is asked only about rows that could be among them.
    ///
    /// # Errors
    /// When the query cannot be taken.
    pub fn search(
        &self,
        query: &[f32],
        most: usize,
        mut keep: impl FnMut(u32) -> bool,
    ) -> Result<Vec<(u32, f32)>, Refused> {
        self.check(query)?;
        let bounds = self.bounds(&Question::new(query));
        // Where the best may be is looked at first: the more is found there, the less is left to look at.
        let mut spans: Vec<(f32, usize)> = bounds.chunks(SPAN).map(highest).zip(0..).collect();
        spans.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let mut best = Best::new(most);
        for (highest, span) in spans {
            if highest < best.least {
                break;
            }
            for (row, &bound) in bounds.iter().enumerate().skip(span * SPAN).take(SPAN) {
                if bound >= best.least
                    && keep(row as u32)
                    && let Some(score) = self.blocks[row / BLOCK].score(row % BLOCK, query)
                {
                    best.offer(Found { score, row: row as u32 });
                }
            }
        }
        Ok(best.in_order())
    }

    /// For each row the most that it can score; no number, where it was removed.
    fn bounds(&self, question: &Question) -> Vec<f32> {
        let ask = |blocks: &[Block], bounds: &mut [f32]| {
            for (block, bounds) in blocks.iter().zip(bounds.chunks_mut(BLOCK)) {
                coarse::bounds(question, &block.codes, &block.fits, bounds);
            }
        };
        let mut bounds = vec![0.0; self.pushed()];
        let threads = self.threads.min(bounds.len() / SHARE).max(1);
        let share = self.blocks.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let mut shares = self.blocks.chunks(share).zip(bounds.chunks_mut(share * BLOCK));
            let own = shares.next();
            for (blocks, bounds) in shares {
                scope.spawn(move || ask(blocks, bounds));
            }
            if let Some((blocks, bounds)) = own {
                ask(blocks, bounds);
            }
        });
        bounds
    }

    /// The size of a vector's largest number, if it can be taken.
    fn check(&self, vector: &[f32]) -> Result<f32, Refused> {
        let (wanted, got) = (self.dimensions, vector.len());
        if got != wanted {
            return Err(Refused::Dimensions { wanted, got });
        }
        let largest = largest(vector);
        if largest == 0.0 || SIZES.contains(&largest) { Ok(largest) } else { Err(Refused::Size { largest }) }
    }

    /// The block of a row, and its place there.
    fn place(&self, row: u32) -> Option<(usize, usize)> {
        let row = row as usize;
        (row < self.pushed()).then_some((row / BLOCK, row % BLOCK))
    }
}

/// Some rows, in columns.
#[derive(Debug, Default)]
struct Block {
    /// These, times the scale of their row, are what it scores by.
    numbers: Vec<i16>,
    scales: Vec<f32>,
    codes: Vec<Codes>,
    fits: Vec<Fit>,
}

impl Block {
    fn len(&self) -> usize {
        self.fits.len()
    }

    fn bytes(&self) -> usize {
        self.numbers.capacity() * size_of::<i16>()
            + self.scales.capacity() * size_of::<f32>()
            + self.codes.capacity() * size_of::<Codes>()
            + self.fits.capacity() * size_of::<Fit>()
    }

    /// One more row, still to be set. Where there is no room left, there will be for so many.
    fn grow(&mut self, room: usize, dimensions: usize) {
        let (rows, groups) = (self.len(), coarse::groups(dimensions));
        if rows == self.fits.capacity() {
            self.numbers.reserve_exact(room * dimensions);
            self.scales.reserve_exact(room);
            self.codes.reserve_exact(room * groups);
            self.fits.reserve_exact(room);
        }
        self.numbers.resize((rows + 1) * dimensions, 0);
        self.scales.push(0.0);
        self.codes.resize((rows + 1) * groups, Codes::ZERO);
        self.fits.push(Fit::GONE);
    }

    fn set(&mut self, at: usize, vector: &[f32], largest: f32) {
        let (dimensions, groups) = (vector.len(), coarse::groups(vector.len()));
        let numbers = &mut self.numbers[at * dimensions..][..dimensions];
        let scale = largest / f32::from(i16::MAX);
        round(vector, scale, numbers);
        self.scales[at] = scale;
        self.fits[at] = coarse::encode(numbers, scale, &mut self.codes[at * groups..][..groups]);
    }

    fn score(&self, at: usize, query: &[f32]) -> Option<f32> {
        let numbers = &self.numbers[at * query.len()..][..query.len()];
        // Zero is added because −0 would not look equal to it.
        (!self.fits[at].is_gone()).then(|| dot(numbers, query) * self.scales[at] + 0.0)
    }
}

/// The size of the largest number. Bits are compared, and so what is infinite or no number comes out too.
#[multiversion(targets("x86_64+avx2"))]
fn largest(vector: &[f32]) -> f32 {
    let sizes = vector.iter().map(|x| x.abs().to_bits().cast_signed());
    f32::from_bits(sizes.fold(0, i32::max).cast_unsigned())
}

/// The nearest multiples of `scale`. None of them is too large.
#[multiversion(targets("x86_64+avx2"))]
fn round(vector: &[f32], scale: f32, numbers: &mut [i16]) {
    /// What is added to this is rounded to a whole number, which then is in the lowest bits.
    const WHOLE: f32 = 12_582_912.0;
    let inverse = if scale > 0.0 { scale.recip() } else { 0.0 };
    for (number, x) in numbers.iter_mut().zip(vector) {
        *number = (x * inverse + WHOLE).to_bits() as i16;
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn dot(numbers: &[i16], query: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (numbers, last_numbers) = numbers.as_chunks::<LANES>();
    let (query, last_query) = query.as_chunks::<LANES>();
    for (numbers, query) in numbers.iter().zip(query) {
        for lane in 0..LANES {
            sums[lane] += f32::from(numbers[lane]) * query[lane];
        }
    }
    let last = last_numbers.iter().zip(last_query).map(|(&number, x)| f32::from(number) * x);
    sums.into_iter().chain(last).sum()
}

fn highest(bounds: &[f32]) -> f32 {
    bounds.iter().fold(f32::NEG_INFINITY, |highest, &bound| highest.max(bound))
}

/// A row that was found. The better one is the greater one.
#[derive(Clone, Copy, Debug)]
struct Found {
    score: f32,
    row: u32,
}

impl Ord for Found {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.row.cmp(&self.row))
    }
}

impl PartialOrd for Found {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Found {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Found {}

/// The best that were found so far.
struct Best {
    most: usize,
    /// The worst of them on top.
    found: BinaryHeap<Reverse<Found>>,
    /// What cannot score this much is not among them.
    least: f32,
}

impl Best {
    fn new(most: usize) -> Self {
        // Where nothing is wanted, nothing is good enough.
        let least = if most == 0 { f32::INFINITY } else { f32::NEG_INFINITY };
        Self { most, found: BinaryHeap::new(), least }
    }

    fn offer(&mut self, found: Found) {
        if self.found.len() < self.most {
            self.found.push(Reverse(found));
        } else if let Some(mut worst) = self.found.peek_mut()
            && found > worst.0
        {
            *worst = Reverse(found);
        }
        if self.found.len() == self.most
            && let Some(worst) = self.found.peek()
        {
            self.least = worst.0.score;
        }
    }

    fn in_order(self) -> Vec<(u32, f32)> {
        self.found.into_sorted_vec().into_iter().map(|Reverse(found)| (found.row, found.score)).collect()
    }
}

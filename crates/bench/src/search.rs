//! Approximate vector search compared with exact search: time and recall.

use crate::kv::median;
use crate::random_changes::BenchRng;
use halo_recall::vector_index::{VectorError, VectorIndex};
use std::num::NonZero;
use std::time::Instant;

#[derive(Clone, Copy, Debug)]
pub struct SearchBenchPlan {
    pub entries: usize,
    /// Dimensions of a vector.
    pub dimensions: NonZero<u16>,
    pub data: VectorDistribution,
    pub queries: usize,
    pub threads: NonZero<usize>,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorDistribution {
    /// Distributed as embeddings of sentences.
    Sentences,
    /// Uniformly random: nothing is near anything, and all distances are almost equal. The hardest case.
    Random,
}

#[derive(Clone, Debug)]
pub struct SearchBenchReport {
    /// Median of the times.
    pub p50_ms: f64,
    /// 99th percentile of the times.
    pub p99_ms: f64,
    /// How many of the ten exact nearest vectors are among the ten that are found.
    pub recall10: f64,
    /// Exact search over the unquantized vectors, in plain code.
    pub brute_force_ms: f64,
    pub build_ms: f64,
    /// Bytes of memory per vector.
    pub bytes_per_entry: f64,
}

impl SearchBenchReport {
    /// How many times faster than exact search.
    #[must_use]
    pub fn speedup(&self) -> f64 {
        self.brute_force_ms / self.p50_ms
    }
}

/// The claim of the founding documents for so many vectors: 40 ms for 100,000.
#[must_use]
pub fn documents_ms(entries: usize) -> f64 {
    entries as f64 * 40.0 / 100_000.0
}

/// Results that are found and compared.
const TOP_K: usize = 10;
/// The maximum number of queries for the exact search, which takes most of the time.
const MAX_COMPARED_QUERIES: usize = 50;

pub fn measure(
    plan: &SearchBenchPlan,
    progress: &mut dyn FnMut(usize),
) -> Result<SearchBenchReport, VectorError> {
    let source = VectorGenerator::new(plan);
    let dimensions = source.dimensions;
    let mut rows = vec![0.0; plan.entries * dimensions];
    for (n, row) in rows.chunks_exact_mut(dimensions).enumerate() {
        source.fill_row(n as u64, row);
        progress(n);
    }
    let begin = Instant::now();
    let mut vectors = VectorIndex::new(plan.dimensions).with_threads(plan.threads);
    for row in rows.chunks_exact(dimensions) {
        vectors.push(row)?;
    }
    let build_ms = elapsed_ms(begin);

    let (mut times, mut brute_times, mut right) = (Vec::new(), Vec::new(), 0);
    let compared = plan.queries.min(MAX_COMPARED_QUERIES);
    for n in 0..plan.queries {
        let query = source.make_query(n as u64, &rows);
        let begin = Instant::now();
        let hits = vectors.search(&query, TOP_K, |_| true)?;
        times.push(elapsed_ms(begin));
        if n < compared {
            let begin = Instant::now();
            let truth = brute_force(&rows, &query);
            brute_times.push(elapsed_ms(begin));
            right += truth.iter().filter(|row| hits.iter().any(|(hits, _)| hits == *row)).count();
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    let all = compared * TOP_K.min(plan.entries);
    Ok(SearchBenchReport {
        p50_ms: median(&mut times),
        p99_ms: times.get(times.len() * 99 / 100).copied().unwrap_or(f64::NAN),
        recall10: right as f64 / all as f64,
        brute_force_ms: median(&mut brute_times),
        build_ms,
        bytes_per_entry: vectors.memory_bytes() as f64 / plan.entries as f64,
    })
}

fn elapsed_ms(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1000.0
}

/// The nearest vectors by exact search.
fn brute_force(rows: &[f32], query: &[f32]) -> Vec<u32> {
    let mut best: Vec<(f32, u32)> = Vec::new();
    for (row, n) in rows.chunks_exact(query.len()).zip(0..) {
        let score = dot(row, query);
        if best.len() < TOP_K || best.last().is_some_and(|last| score > last.0) {
            let at = best.partition_point(|&(other, _)| other >= score);
            best.insert(at, (score, n));
            best.truncate(TOP_K);
        }
    }
    best.into_iter().map(|(_, n)| n).collect()
}

/// Several partial sums: a single one would wait for each addition.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// Vectors from a seed, each computed independently.
///
/// Modelled on all-MiniLM-L6-v2 over 11,712 sentences of chats: two vectors have a cosine of 0.09 ± 0.10, the second
/// nearest to a vector has 0.69, the tenth 0.51, the hundredth 0.36; some directions vary seventy times as much as
/// others. So a vector is the sum of a common part, the part of its topic, the part of its theme, and its own.
struct VectorGenerator {
    dimensions: usize,
    data: VectorDistribution,
    seed: u64,
    topics: u64,
    /// The variance of each direction.
    deviations: Vec<f32>,
}

/// The common part, the parts of topic and theme, and the own part: what each adds to the square of the length.
const VARIANCE_SHARES: [f32; 4] = [0.08, 0.24, 0.3, 0.38];
/// Vectors per topic, and themes per topic.
const ROWS_PER_TOPIC: usize = 1000;
const THEMES_PER_TOPIC: u64 = 64;

impl VectorGenerator {
    fn new(plan: &SearchBenchPlan) -> Self {
        let dimensions = usize::from(plan.dimensions.get());
        let topics = plan.entries.div_ceil(ROWS_PER_TOPIC).max(20) as u64;
        let spread = (0..dimensions).map(|n| (1.0 + n as f32 * 64.0 / dimensions as f32).sqrt().recip());
        Self { dimensions, data: plan.data, seed: plan.seed, topics, deviations: spread.collect() }
    }

    /// Vector `n`. Those after the last have the same distribution and are not in the index.
    fn fill_row(&self, n: u64, row: &mut [f32]) {
        row.fill(0.0);
        let mut dice = self.rng(n);
        match self.data {
            VectorDistribution::Random => row.iter_mut().for_each(|x| *x = gaussian(&mut dice)),
            VectorDistribution::Sentences => {
                let topic = dice.below(self.topics);
                let theme = topic * THEMES_PER_TOPIC + dice.below(THEMES_PER_TOPIC);
                let seeds = [1 << 61, 1 << 62 | topic, 1 << 63 | theme, dice.next_u64()];
                for (seed, share) in seeds.into_iter().zip(VARIANCE_SHARES) {
                    let mut dice = self.rng(seed);
                    let part: Vec<f32> =
                        self.deviations.iter().map(|spread| spread * gaussian(&mut dice)).collect();
                    let weight = (share / dot(&part, &part)).sqrt();
                    row.iter_mut().zip(part).for_each(|(x, part)| *x += weight * part);
                }
                self.rotate(row);
            }
        }
        normalize(row);
    }

    /// Every other query is a modified vector of the index; those between are new.
    fn make_query(&self, n: u64, rows: &[f32]) -> Vec<f32> {
        let mut query = vec![0.0; self.dimensions];
        let entries = (rows.len() / self.dimensions) as u64;
        self.fill_row(entries + n, &mut query);
        if n.is_multiple_of(2) {
            let near = self.rng(!n).below(entries) as usize * self.dimensions;
            query.iter_mut().zip(&rows[near..]).for_each(|(x, near)| *x = 0.7 * *x + near);
            normalize(&mut query);
        }
        query
    }

    fn rng(&self, n: u64) -> BenchRng {
        BenchRng(BenchRng(self.seed ^ n.wrapping_mul(0xA076_1D64_78BD_642F)).next_u64())
    }

    /// Rotates the vectors, so that no direction is that of a single dimension: in real embeddings none is. Twice,
    /// each time all but a part at the end or at the beginning, because a Hadamard matrix needs a power of two.
    fn rotate(&self, row: &mut [f32]) {
        let (len, mut dice) = (row.len(), self.rng(1 << 60));
        let part = 1 << len.ilog2();
        for range in [0..part, len - part..len, 0..part, len - part..len] {
            for x in row.iter_mut() {
                *x = if dice.next_u64() % 2 == 0 { *x } else { -*x };
            }
            hadamard_transform(&mut row[range]);
        }
    }
}

fn hadamard_transform(row: &mut [f32]) {
    let mut half = 1;
    while half < row.len() {
        for part in row.chunks_exact_mut(2 * half) {
            let (front, back) = part.split_at_mut(half);
            for (a, b) in front.iter_mut().zip(back) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let root = (row.len() as f32).sqrt();
    row.iter_mut().for_each(|x| *x /= root);
}

fn normalize(row: &mut [f32]) {
    let length = dot(row, row).sqrt();
    row.iter_mut().for_each(|x| *x /= length);
}

/// An approximately normal number: the sum of four.
fn gaussian(dice: &mut BenchRng) -> f32 {
    let roll = dice.next_u64();
    (0..4).map(|n| (roll >> (16 * n) & 0xFFFF) as f32 / 65_536.0 - 0.5).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search_plan(entries: usize, data: VectorDistribution) -> SearchBenchPlan {
        let (dimensions, threads) = (NonZero::new(384).unwrap(), NonZero::<usize>::MIN);
        SearchBenchPlan { entries, dimensions, data, queries: 20, threads, seed: 1 }
    }

    #[test]
    fn vector_search_recall_is_exact() {
        for data in [VectorDistribution::Sentences, VectorDistribution::Random] {
            let report = measure(&search_plan(3000, data), &mut |_| {}).unwrap();
            assert_eq!(report.recall10, 1.0);
            assert!(report.bytes_per_entry < 1200.0, "{report:?}");
        }
    }

    #[test]
    fn vector_generator_resembles_sentence_embeddings() {
        let source = VectorGenerator::new(&search_plan(6000, VectorDistribution::Sentences));
        let mut rows = vec![0.0; 6000 * 384];
        (0..).zip(rows.chunks_exact_mut(384)).for_each(|(n, row)| source.fill_row(n, row));
        let all: Vec<&[f32]> = rows.chunks_exact(384).collect();
        let pairs: Vec<f32> = all.chunks_exact(2).map(|pair| dot(pair[0], pair[1])).collect();
        let mean = pairs.iter().sum::<f32>() / pairs.len() as f32;
        let spread = (pairs.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / pairs.len() as f32).sqrt();
        assert!((0.05..0.12).contains(&mean), "{mean}");
        assert!((0.07..0.13).contains(&spread), "{spread}");
        let mut tenth: Vec<f64> = Vec::new();
        for query in all.iter().step_by(300) {
            let mut scores: Vec<f32> = all.iter().map(|row| dot(row, query)).collect();
            scores.sort_unstable_by(|a, b| b.total_cmp(a));
            tenth.push(scores[10].into());
        }
        let tenth = median(&mut tenth);
        assert!((0.45..0.7).contains(&tenth), "{tenth}");
    }
}

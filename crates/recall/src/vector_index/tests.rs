//! Property tests against a naive model, and single guarantees.

use super::*;
use proptest::prelude::*;

/// Scores every row and sorts.
fn brute_force_search(
    vectors: &VectorIndex,
    query: &[f32],
    limit: usize,
    keep: impl Fn(u32) -> bool,
) -> Vec<(u32, f32)> {
    let score = |row| vectors.score(row, query).unwrap().map(|score| (row, score));
    let mut all: Vec<_> =
        (0..vectors.row_count() as u32).filter(|&row| keep(row)).filter_map(score).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(limit);
    all
}

fn exact_dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn norm(vector: &[f32]) -> f64 {
    exact_dot(vector, vector).sqrt()
}

fn empty_index(dimensions: u16) -> VectorIndex {
    VectorIndex::new(NonZero::new(dimensions).unwrap())
}

struct VectorRng(fastrand::Rng);

impl VectorRng {
    fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.u64(..1 << 31)
    }

    fn gaussian(&mut self) -> f32 {
        (0..12).map(|_| self.0.f32()).sum::<f32>() - 6.0
    }

    fn unit_vector(&mut self, dimensions: usize) -> Vec<f32> {
        let mut vector: Vec<f32> = (0..dimensions).map(|_| self.gaussian()).collect();
        let norm = norm(&vector) as f32;
        vector.iter_mut().for_each(|x| *x /= norm);
        vector
    }

    /// Vectors of all kinds of edge cases; few different ones, so that many are equal.
    fn edge_case_vector(&mut self, dimensions: usize) -> Vec<f32> {
        let n = self.next() as usize;
        let mut vector = vec![0.0; dimensions];
        match n % 9 {
            0 => {}
            1 => vector[n / 9 % dimensions] = 1.0,
            2 => vector[n / 9 % dimensions] = -1.0,
            3 => vector.fill(0.5),
            4 => vector.iter_mut().step_by(2).for_each(|x| *x = -0.25),
            5 => (vector[0], vector[dimensions - 1]) = (1e14, 1e-14),
            6 => vector.fill(3e-15),
            7 => vector = VectorRng::new(n as u64 / 9 % 3).unit_vector(dimensions),
            _ => vector = self.unit_vector(dimensions),
        }
        vector
    }
}

#[derive(Clone, Debug)]
enum VectorOp {
    Push(u64),
    Replace(u32, u64),
    Remove(u32),
    Search { query: u64, limit: usize, every: u32 },
}

fn vector_ops() -> impl Strategy<Value = Vec<VectorOp>> {
    let limit = prop_oneof![0..4usize, Just(10), Just(1000)];
    let op = prop_oneof![
        6 => any::<u64>().prop_map(VectorOp::Push),
        2 => (0..40u32, any::<u64>()).prop_map(|(row, seed)| VectorOp::Replace(row, seed)),
        2 => (0..40u32).prop_map(VectorOp::Remove),
        3 => (any::<u64>(), limit, 1..4u32).prop_map(|(query, limit, every)| VectorOp::Search { query, limit, every }),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #[test]
    fn vector_index_agrees_with_naive_model(
        dimensions in prop_oneof![1..9u16, Just(127), Just(128), Just(129), Just(384), Just(641)],
        ops in vector_ops(),
    ) {
        let mut vectors = empty_index(dimensions);
        let mut model: Vec<Option<Vec<f32>>> = Vec::new();
        let vector = |seed: u64| VectorRng::new(seed).edge_case_vector(dimensions.into());
        for op in ops {
            match op {
                VectorOp::Push(seed) => {
                    prop_assert_eq!(vectors.push(&vector(seed)), Ok(model.len() as u32));
                    model.push(Some(vector(seed)));
                }
                VectorOp::Replace(row, seed) => {
                    let expected = model.get_mut(row as usize).map(|at| *at = Some(vector(seed)));
                    prop_assert_eq!(vectors.replace(row, &vector(seed)), expected.ok_or(VectorError::NoSuchRow { row }));
                }
                VectorOp::Remove(row) => {
                    let expected = model.get_mut(row as usize).map(|at| *at = None);
                    prop_assert_eq!(vectors.remove(row), expected.ok_or(VectorError::NoSuchRow { row }));
                }
                VectorOp::Search { query, limit, every } => {
                    let (query, keep) = (vector(query), |row: u32| row.is_multiple_of(every));
                    let hits = vectors.search(&query, limit, keep).unwrap();
                    prop_assert_eq!(&hits, &brute_force_search(&vectors, &query, limit, keep));
                    let kept_rows = model.iter().zip(0..).filter(|&(at, row)| at.is_some() && keep(row)).count();
                    prop_assert_eq!(hits.len(), limit.min(kept_rows));
                    let scores = vectors.scores(&query).unwrap();
                    prop_assert_eq!(scores.len(), model.len());
                    for (row, at) in model.iter().enumerate() {
                        let Some(vector) = at else {
                            prop_assert_eq!(scores[row], f32::NEG_INFINITY);
                            prop_assert_eq!(vectors.score(row as u32, &query), Ok(None));
                            continue;
                        };
                        let largest = vector.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
                        let rounding = f64::from(largest) / 32767.0 / 2.0 * f64::from(dimensions).sqrt();
                        let error = f64::from(scores[row]) - exact_dot(vector, &query);
                        let allowed = (rounding + 1e-5 * norm(vector)) * norm(&query);
                        prop_assert!(error.abs() <= allowed, "the error of row {row} is {error:e}");
                    }
                }
            }
            prop_assert_eq!(vectors.row_count(), model.len());
            prop_assert_eq!(vectors.len(), model.iter().flatten().count());
        }
    }

    #[test]
    fn vector_upper_bound_is_never_below_score(
        dimensions in prop_oneof![1..9u16, Just(127), Just(384), Just(1536)],
        seeds in prop::collection::vec(any::<u64>(), 1..20),
        query: u64,
    ) {
        let mut vectors = empty_index(dimensions);
        for &seed in &seeds {
            vectors.push(&VectorRng::new(seed).edge_case_vector(dimensions.into())).unwrap();
        }
        let query = VectorRng::new(query).edge_case_vector(dimensions.into());
        let bounds = vectors.upper_bounds(&QuantizedQuery::new(&query));
        for (bound, score) in bounds.iter().zip(vectors.scores(&query).unwrap()) {
            prop_assert!(*bound >= score, "{bound:e} < {score:e}");
        }
    }
}

/// Clustered rows, enough for several blocks and threads; some are duplicates.
fn clustered_index(rows: usize, dimensions: usize) -> VectorIndex {
    let mut rng = VectorRng::new(5);
    let centers: Vec<Vec<f32>> = (0..50).map(|_| rng.unit_vector(dimensions)).collect();
    let mut vectors = empty_index(dimensions as u16);
    let mut last = rng.unit_vector(dimensions);
    for n in 0..rows {
        if n % 10 != 0 {
            let own = rng.unit_vector(dimensions);
            last = centers[rng.next() as usize % 50]
                .iter()
                .zip(own)
                .map(|(center, own)| center + 0.8 * own)
                .collect();
        }
        vectors.push(&last).unwrap();
    }
    vectors
}

#[test]
fn vector_search_equals_brute_force() {
    let mut vectors = clustered_index(50_000, 24);
    for row in (0..50_000).step_by(7) {
        vectors.remove(row).unwrap();
    }
    let queries: Vec<Vec<f32>> = (0..8).map(|n| VectorRng::new(n).unit_vector(24)).collect();
    for limit in [1, 10, 3000] {
        for query in &queries {
            let expected = brute_force_search(&vectors, query, limit, |row| row % 3 > 0);
            assert_eq!(vectors.search(query, limit, |row| row % 3 > 0).unwrap(), expected);
        }
    }
    let one_thread: Vec<_> = queries.iter().map(|query| vectors.search(query, 10, |_| true)).collect();
    let vectors = vectors.with_threads(NonZero::new(3).unwrap());
    let three_threads: Vec<_> = queries.iter().map(|query| vectors.search(query, 10, |_| true)).collect();
    assert_eq!(one_thread, three_threads);
}

#[test]
fn vector_search_scores_few_rows_exactly() {
    let mut rng = VectorRng::new(9);
    let rows: Vec<Vec<f32>> = (0..4000).map(|_| rng.unit_vector(384)).collect();
    let mut vectors = empty_index(384);
    for row in &rows {
        vectors.push(row).unwrap();
    }
    for expected in [0, 1500, 3999] {
        let query: Vec<f32> =
            rows[expected].iter().zip(rng.unit_vector(384)).map(|(row, noise)| row + noise).collect();
        let mut scored = 0;
        let keep = |_| {
            scored += 1;
            true
        };
        assert_eq!(vectors.search(&query, 1, keep).unwrap()[0].0, expected as u32);
        assert!(scored <= 2 * SPAN_ROWS, "{scored} rows of 4000");
    }
}

#[test]
fn vector_index_memory_stays_proportional() {
    let mut vectors = empty_index(384);
    vectors.push(&[0.1; 384]).unwrap();
    assert!(vectors.memory_bytes() < 20_000, "{}", vectors.memory_bytes());
    for _ in 1..10 * BLOCK_ROWS {
        vectors.push(&[0.1; 384]).unwrap();
    }
    assert!(
        vectors.memory_bytes() <= 10 * BLOCK_ROWS * 1000,
        "{}",
        vectors.memory_bytes() / (10 * BLOCK_ROWS)
    );
}

#[test]
fn vector_index_rejects_invalid_vectors_unchanged() {
    let mut vectors = empty_index(3);
    assert_eq!(vectors.push(&[0.0, 1.0, 0.0]), Ok(0));
    let mismatch = VectorError::DimensionMismatch { expected: 3, got: 2 };
    assert_eq!(vectors.push(&[1.0, 2.0]), Err(mismatch));
    assert_eq!(vectors.replace(0, &[1.0, 2.0]), Err(mismatch));
    assert_eq!(vectors.score(0, &[1.0, 2.0]), Err(mismatch));
    assert_eq!(vectors.scores(&[1.0, 2.0]), Err(mismatch));
    assert_eq!(vectors.search(&[1.0, 2.0], 1, |_| true), Err(mismatch));
    for bad in [f32::INFINITY, f32::NEG_INFINITY, 2e15, -2e15, 1e-16] {
        let largest = bad.abs();
        assert_eq!(
            vectors.push(&[0.0, bad, 0.0]),
            Err(VectorError::MagnitudeOutOfRange { largest }),
            "{bad}"
        );
        assert_eq!(
            vectors.search(&[bad, 0.0, 0.0], 1, |_| true),
            Err(VectorError::MagnitudeOutOfRange { largest }),
            "{bad}"
        );
    }
    // NaN does not equal itself.
    for bad in [f32::NAN, -f32::NAN] {
        assert!(
            matches!(vectors.push(&[1.0, bad, f32::INFINITY]), Err(VectorError::MagnitudeOutOfRange { largest }) if largest.is_nan())
        );
    }
    assert_eq!(vectors.replace(1, &[1.0, 0.0, 0.0]), Err(VectorError::NoSuchRow { row: 1 }));
    assert_eq!(vectors.remove(1), Err(VectorError::NoSuchRow { row: 1 }));
    assert_eq!(vectors.score(1, &[1.0, 0.0, 0.0]), Ok(None));
    assert_eq!(vectors.search(&[0.0, 2.0, 0.0], 5, |_| true), Ok(vec![(0, 2.0)]));
    let message = VectorError::MagnitudeOutOfRange { largest: f32::NAN }.to_string();
    assert_eq!(message, "the largest value of the vector is NaN; it must be 0, or from 1e-15 to 1e15");
}

#[test]
fn vector_index_remove_hides_row_until_replaced() {
    let mut vectors = empty_index(2);
    for vector in [[1.0, 0.0], [1.0, 0.0], [0.0, -1.0]] {
        vectors.push(&vector).unwrap();
    }
    assert_eq!(vectors.search(&[0.0, 0.0], 3, |_| true), Ok(vec![(0, 0.0), (1, 0.0), (2, 0.0)]));
    vectors.remove(0).unwrap();
    vectors.remove(0).unwrap();
    assert_eq!((vectors.len(), vectors.row_count()), (2, 3));
    assert_eq!(vectors.search(&[0.0, 0.0], 3, |_| true), Ok(vec![(1, 0.0), (2, 0.0)]));
    vectors.replace(0, &[0.5, 0.0]).unwrap();
    assert_eq!(vectors.search(&[2.0, 0.0], 3, |_| true), Ok(vec![(1, 2.0), (0, 1.0), (2, 0.0)]));
}

#[test]
fn vector_search_breaks_ties_by_lower_row() {
    // A product so small that it rounds to −0.
    let mut vectors = empty_index(3);
    vectors.push(&[0.0, 1e-15, 3.1e-20]).unwrap();
    vectors.push(&[0.0, 0.0, 0.0]).unwrap();
    assert_eq!(vectors.search(&[1e-15, 0.0, -1e-30], 2, |_| true), Ok(vec![(0, 0.0), (1, 0.0)]));
    // All rows are equal; gaps change the order in which spans are searched.
    let (mut vectors, mut rng) = (empty_index(1), VectorRng::new(3));
    for _ in 0..100 * SPAN_ROWS {
        vectors.push(&[1.0]).unwrap();
    }
    for span in 0..100 {
        if rng.next() % 2 == 0 {
            (span * SPAN_ROWS..(span + 1) * SPAN_ROWS).for_each(|row| vectors.remove(row as u32).unwrap());
        }
    }
    for limit in [1, 10, 100, 1000] {
        let hits = vectors.search(&[0.0], limit, |_| true).unwrap();
        assert_eq!(hits, brute_force_search(&vectors, &[0.0], limit, |_| true));
    }
}

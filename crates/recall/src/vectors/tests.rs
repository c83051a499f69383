//! Random lives against a naive twin, and the promises one by one.

use super::*;
use proptest::prelude::*;

/// What scoring every row finds.
fn all_scored(vectors: &Vectors, query: &[f32], most: usize, keep: impl Fn(u32) -> bool) -> Vec<(u32, f32)> {
    let score = |row| vectors.score(row, query).unwrap().map(|score| (row, score));
    let mut all: Vec<_> = (0..vectors.pushed() as u32).filter(|&row| keep(row)).filter_map(score).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(most);
    all
}

fn exact_dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn length(vector: &[f32]) -> f64 {
    exact_dot(vector, vector).sqrt()
}

fn of(dimensions: u16) -> Vectors {
    Vectors::new(NonZero::new(dimensions).unwrap())
}

/// Numbers by chance, spread like a bell.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn bell(&mut self) -> f32 {
        (0..12).map(|_| self.next() as f32 / (1u64 << 31) as f32).sum::<f32>() - 6.0
    }

    fn unit(&mut self, dimensions: usize) -> Vec<f32> {
        let mut vector: Vec<f32> = (0..dimensions).map(|_| self.bell()).collect();
        let length = length(&vector) as f32;
        vector.iter_mut().for_each(|x| *x /= length);
        vector
    }

    /// Vectors of every kind that could be awkward: few different ones, so that many are equal.
    fn awkward(&mut self, dimensions: usize) -> Vec<f32> {
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
            7 => vector = Dice(n as u64 / 9 % 3).unit(dimensions),
            _ => vector = self.unit(dimensions),
        }
        vector
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(u64),
    Replace(u32, u64),
    Remove(u32),
    Search { query: u64, most: usize, every: u32 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let most = prop_oneof![0..4usize, Just(10), Just(1000)];
    let step = prop_oneof![
        6 => any::<u64>().prop_map(Step::Push),
        2 => (0..40u32, any::<u64>()).prop_map(|(row, seed)| Step::Replace(row, seed)),
        2 => (0..40u32).prop_map(Step::Remove),
        3 => (any::<u64>(), most, 1..4u32).prop_map(|(query, most, every)| Step::Search { query, most, every }),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn vectors_agree_with_their_twin(
        dimensions in prop_oneof![1..9u16, Just(127), Just(128), Just(129), Just(384), Just(641)],
        steps in steps(),
    ) {
        let mut vectors = of(dimensions);
        let mut twin: Vec<Option<Vec<f32>>> = Vec::new();
        let made = |seed: u64| Dice(seed).awkward(dimensions.into());
        for step in steps {
            match step {
                Step::Push(seed) => {
                    prop_assert_eq!(vectors.push(&made(seed)), Ok(twin.len() as u32));
                    twin.push(Some(made(seed)));
                }
                Step::Replace(row, seed) => {
                    let there = twin.get_mut(row as usize).map(|at| *at = Some(made(seed)));
                    prop_assert_eq!(vectors.replace(row, &made(seed)), there.ok_or(Refused::NoSuchRow { row }));
                }
                Step::Remove(row) => {
                    let there = twin.get_mut(row as usize).map(|at| *at = None);
                    prop_assert_eq!(vectors.remove(row), there.ok_or(Refused::NoSuchRow { row }));
                }
                Step::Search { query, most, every } => {
                    let (query, keep) = (made(query), |row: u32| row.is_multiple_of(every));
                    let found = vectors.search(&query, most, keep).unwrap();
                    prop_assert_eq!(&found, &all_scored(&vectors, &query, most, keep));
                    let kept = twin.iter().zip(0..).filter(|&(at, row)| at.is_some() && keep(row)).count();
                    prop_assert_eq!(found.len(), most.min(kept));
                    let scores = vectors.scores(&query).unwrap();
                    prop_assert_eq!(scores.len(), twin.len());
                    for (row, at) in twin.iter().enumerate() {
                        let Some(vector) = at else {
                            prop_assert_eq!(scores[row], f32::NEG_INFINITY);
                            prop_assert_eq!(vectors.score(row as u32, &query), Ok(None));
                            continue;
                        };
                        let largest = vector.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                        let rounded = f64::from(largest) / 32767.0 / 2.0 * f64::from(dimensions).sqrt();
                        let off = f64::from(scores[row]) - exact_dot(vector, &query);
                        let allowed = (rounded + 1e-5 * length(vector)) * length(&query);
                        prop_assert!(off.abs() <= allowed, "row {row} is off by {off:e}");
                    }
                }
            }
            prop_assert_eq!(vectors.pushed(), twin.len());
            prop_assert_eq!(vectors.len(), twin.iter().flatten().count());
        }
    }

    #[test]
    fn no_row_scores_more_than_its_bound(
        dimensions in prop_oneof![1..9u16, Just(127), Just(384), Just(1536)],
        seeds in prop::collection::vec(any::<u64>(), 1..20),
        query: u64,
    ) {
        let mut vectors = of(dimensions);
        for &seed in &seeds {
            vectors.push(&Dice(seed).awkward(dimensions.into())).unwrap();
        }
        let query = Dice(query).awkward(dimensions.into());
        let bounds = vectors.bounds(&Question::new(&query));
        for (bound, score) in bounds.iter().zip(vectors.scores(&query).unwrap()) {
            prop_assert!(*bound >= score, "{bound:e} < {score:e}");
        }
    }
}

/// Rows enough for several blocks and threads, in families, some of them twice.
fn families(rows: usize, dimensions: usize) -> Vectors {
    let mut dice = Dice(5);
    let heads: Vec<Vec<f32>> = (0..50).map(|_| dice.unit(dimensions)).collect();
    let mut vectors = of(dimensions as u16);
    let mut last = dice.unit(dimensions);
    for n in 0..rows {
        if n % 10 != 0 {
            let own = dice.unit(dimensions);
            last = heads[dice.next() as usize % 50]
                .iter()
                .zip(own)
                .map(|(head, own)| head + 0.8 * own)
                .collect();
        }
        vectors.push(&last).unwrap();
    }
    vectors
}

#[test]
fn a_search_finds_what_scoring_every_row_finds() {
    let mut vectors = families(50_000, 24);
    for row in (0..50_000).step_by(7) {
        vectors.remove(row).unwrap();
    }
    let queries: Vec<Vec<f32>> = (0..8).map(|n| Dice(n).unit(24)).collect();
    for most in [1, 10, 3000] {
        for query in &queries {
            let expected = all_scored(&vectors, query, most, |row| row % 3 > 0);
            assert_eq!(vectors.search(query, most, |row| row % 3 > 0).unwrap(), expected);
        }
    }
    let alone: Vec<_> = queries.iter().map(|query| vectors.search(query, 10, |_| true)).collect();
    let vectors = vectors.with_threads(NonZero::new(3).unwrap());
    let together: Vec<_> = queries.iter().map(|query| vectors.search(query, 10, |_| true)).collect();
    assert_eq!(alone, together);
}

#[test]
fn a_search_looks_closely_at_few_rows() {
    let mut dice = Dice(9);
    let rows: Vec<Vec<f32>> = (0..4000).map(|_| dice.unit(384)).collect();
    let mut vectors = of(384);
    for row in &rows {
        vectors.push(row).unwrap();
    }
    for wanted in [0, 1500, 3999] {
        let query: Vec<f32> = rows[wanted].iter().zip(dice.unit(384)).map(|(row, by)| row + by).collect();
        let mut asked = 0;
        let keep = |_| {
            asked += 1;
            true
        };
        assert_eq!(vectors.search(&query, 1, keep).unwrap()[0].0, wanted as u32);
        assert!(asked <= 2 * SPAN, "{asked} rows of 4000");
    }
}

#[test]
fn memory_stays_in_proportion() {
    let mut vectors = of(384);
    vectors.push(&[0.1; 384]).unwrap();
    assert!(vectors.bytes() < 20_000, "{}", vectors.bytes());
    for _ in 1..10 * BLOCK {
        vectors.push(&[0.1; 384]).unwrap();
    }
    assert!(vectors.bytes() <= 10 * BLOCK * 1000, "{}", vectors.bytes() / (10 * BLOCK));
}

#[test]
fn what_is_no_vector_is_refused_and_changes_nothing() {
    let mut vectors = of(3);
    assert_eq!(vectors.push(&[0.0, 1.0, 0.0]), Ok(0));
    let of_two = Refused::Dimensions { wanted: 3, got: 2 };
    assert_eq!(vectors.push(&[1.0, 2.0]), Err(of_two));
    assert_eq!(vectors.replace(0, &[1.0, 2.0]), Err(of_two));
    assert_eq!(vectors.score(0, &[1.0, 2.0]), Err(of_two));
    assert_eq!(vectors.scores(&[1.0, 2.0]), Err(of_two));
    assert_eq!(vectors.search(&[1.0, 2.0], 1, |_| true), Err(of_two));
    for bad in [f32::INFINITY, f32::NEG_INFINITY, 2e15, -2e15, 1e-16] {
        let largest = bad.abs();
        assert_eq!(vectors.push(&[0.0, bad, 0.0]), Err(Refused::Size { largest }), "{bad}");
        assert_eq!(vectors.search(&[bad, 0.0, 0.0], 1, |_| true), Err(Refused::Size { largest }), "{bad}");
    }
    // What is no number does not equal itself.
    for bad in [f32::NAN, -f32::NAN] {
        assert!(
            matches!(vectors.push(&[1.0, bad, f32::INFINITY]), Err(Refused::Size { largest }) if largest.is_nan())
        );
    }
    assert_eq!(vectors.replace(1, &[1.0, 0.0, 0.0]), Err(Refused::NoSuchRow { row: 1 }));
    assert_eq!(vectors.remove(1), Err(Refused::NoSuchRow { row: 1 }));
    assert_eq!(vectors.score(1, &[1.0, 0.0, 0.0]), Ok(None));
    assert_eq!(vectors.search(&[0.0, 2.0, 0.0], 5, |_| true), Ok(vec![(0, 2.0)]));
    let told = Refused::Size { largest: f32::NAN }.to_string();
    assert_eq!(told, "a vector whose largest number is NaN: it must be 0, or from 1e-15 to 1e15");
}

#[test]
fn a_removed_row_is_gone_until_it_is_replaced() {
    let mut vectors = of(2);
    for vector in [[1.0, 0.0], [1.0, 0.0], [0.0, -1.0]] {
        vectors.push(&vector).unwrap();
    }
    assert_eq!(vectors.search(&[0.0, 0.0], 3, |_| true), Ok(vec![(0, 0.0), (1, 0.0), (2, 0.0)]));
    vectors.remove(0).unwrap();
    vectors.remove(0).unwrap();
    assert_eq!((vectors.len(), vectors.pushed()), (2, 3));
    assert_eq!(vectors.search(&[0.0, 0.0], 3, |_| true), Ok(vec![(1, 0.0), (2, 0.0)]));
    vectors.replace(0, &[0.5, 0.0]).unwrap();
    assert_eq!(vectors.search(&[2.0, 0.0], 3, |_| true), Ok(vec![(1, 2.0), (0, 1.0), (2, 0.0)]));
}

#[test]
fn of_equals_the_lower_row_comes_first() {
    // So small that nothing is left of it but its sign, beside zero.
    let mut vectors = of(3);
    vectors.push(&[0.0, 1e-15, 3.1e-20]).unwrap();
    vectors.push(&[0.0, 0.0, 0.0]).unwrap();
    assert_eq!(vectors.search(&[1e-15, 0.0, -1e-30], 2, |_| true), Ok(vec![(0, 0.0), (1, 0.0)]));
    // All of them equal, with gaps that shuffle what is looked at first.
    let (mut vectors, mut dice) = (of(1), Dice(3));
    for _ in 0..100 * SPAN {
        vectors.push(&[1.0]).unwrap();
    }
    for span in 0..100 {
        if dice.next() % 2 == 0 {
            (span * SPAN..(span + 1) * SPAN).for_each(|row| vectors.remove(row as u32).unwrap());
        }
    }
    for most in [1, 10, 100, 1000] {
        let found = vectors.search(&[0.0], most, |_| true).unwrap();
        assert_eq!(found, all_scored(&vectors, &[0.0], most, |_| true));
    }
}

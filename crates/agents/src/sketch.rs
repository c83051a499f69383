//! What is kept of many numbers when the numbers are not: how many, their sum, and their quantiles within one part in a
//! hundred. Sketches can be put together.
//!
//! A number is counted in the bucket of its logarithm, so a bucket is as wide as one part in fifty of what it holds.

use std::collections::BTreeMap;

/// How much wider each bucket is than the one before.
const STEP: f64 = 1.02;

/// Counts and quantiles of numbers that are not negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sketch {
    count: u64,
    sum: f64,
    zeros: u64,
    buckets: BTreeMap<i32, u64>,
}

impl Sketch {
    /// Counts a number. What is no number, or negative, counts as 0.
    pub fn add(&mut self, number: f64) {
        self.count += 1;
        if number.is_finite() && number > f64::MIN_POSITIVE {
            self.sum += number;
            *self.buckets.entry((number.ln() / STEP.ln()).ceil() as i32).or_default() += 1;
        } else {
            self.zeros += 1;
        }
    }

    /// Puts another sketch to this one.
    pub fn merge(&mut self, other: &Sketch) {
        self.count += other.count;
        self.sum += other.sum;
        self.zeros += other.zeros;
        for (bucket, count) in &other.buckets {
            *self.buckets.entry(*bucket).or_default() += count;
        }
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// What they were on average.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// What a share of them was no larger than.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let rank = (share.clamp(0.0, 1.0) * (self.count - 1) as f64).floor() as u64;
        let mut seen = self.zeros;
        if rank < seen {
            return Some(0.0);
        }
        for (bucket, count) in &self.buckets {
            seen += count;
            if rank < seen {
                // The middle of the bucket, as far from its ends by share.
                return Some(2.0 * STEP.powi(*bucket) / (STEP + 1.0));
            }
        }
        None
    }

    /// As one line.
    #[must_use]
    pub fn to_line(&self) -> String {
        let buckets: Vec<String> = self.buckets.iter().map(|(b, n)| format!("{b}:{n}")).collect();
        format!("{} {} {} {}", self.count, self.sum, self.zeros, buckets.join(","))
    }

    /// From its line; none if it is not one.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(4, ' ');
        let mut field = || fields.next();
        let (count, sum) = (field()?.parse().ok()?, field()?.parse().ok()?);
        let (zeros, buckets) = (field()?.parse().ok()?, field()?);
        let bucket = |pair: &str| {
            let (bucket, count) = pair.split_once(':')?;
            Some((bucket.parse().ok()?, count.parse().ok()?))
        };
        let buckets: Option<BTreeMap<i32, u64>> =
            buckets.split(',').filter(|pair| !pair.is_empty()).map(bucket).collect();
        Some(Self { count, sum, zeros, buckets: buckets? })
    }
}
